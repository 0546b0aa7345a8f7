"""Serve the part of the Hugging Face Hub's HTTP API that huggingface_hub uses for datasets, on a port of this machine.

Repositories are in memory. The server checks what the Hub checks: the token, a commit's parent, an upload's sha256, and that a
commit's large files were uploaded. Tests can let the server fail: see `HubFaults`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import uvicorn
import yaml
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

TOKEN = "hf_tester"
_LARGE = (".parquet",)


@dataclass
class HubFaults:
    """The failures of the server.

    Attributes:
        downloads_left: number of downloads that succeed before every later download is cut off, or None if all succeed.
        most_bytes: number of bytes after which a response to a download is cut off, or None for no limit.
        commits_between: whether another commit arrives just before a client's commit.
        status: HTTP status of every response, or 0 for normal responses.
    """

    downloads_left: int | None = None
    most_bytes: int | None = None
    commits_between: bool = False
    status: int = 0


class _Refusal(Exception):
    """The arguments are a response's status, its error code, and its words."""


@dataclass
class _Repository:
    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def commit(self, files: dict[str, bytes]) -> str:
        content = "".join(f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in sorted(files.items()))
        oid = hashlib.sha1(f"{len(self.commits)} {content}".encode()).hexdigest()
        self.commits.append((oid, files))
        return oid

    def at(self, revision: str) -> tuple[str, dict[str, bytes]]:
        """Return a commit's id and files."""
        for oid, files in reversed(self.commits):
            if revision in ("main", oid):
                return oid, files
        raise _Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")


class Hub:
    """A running server.

    Attributes:
        url: URL of the server, for HF_ENDPOINT.
        repositories: repositories by id.
        uploaded, downloaded: sha256 of each uploaded file, and path of each downloaded file, in order.
        faults: see HubFaults.
    """

    def __init__(self) -> None:
        self.url = ""
        self.repositories: dict[str, _Repository] = {}
        self.uploaded: list[str] = []
        self.downloaded: list[str] = []
        self.faults = HubFaults()
        self._blobs: dict[str, bytes] = {}
        self.app = FastAPI()
        self._routes()

    def make(self, repository: str, files: dict[str, bytes]) -> str:
        """Commit files to a repository, which is created if it does not exist; return the commit."""
        return self.repositories.setdefault(repository, _Repository(True)).commit(files)

    def files(self, repository: str) -> dict[str, bytes]:
        return self.repositories[repository].commits[-1][1]

    def _repository(self, owner: str, name: str) -> _Repository:
        if f"{owner}/{name}" not in self.repositories:
            raise _Refusal(404, "RepoNotFound", "Repository not found")
        return self.repositories[f"{owner}/{name}"]

    def _routes(self) -> None:
        app = self.app

        @app.exception_handler(_Refusal)
        async def refuse(request: Request, refusal: _Refusal) -> Response:
            status, code, words = refusal.args
            return JSONResponse({"error": words}, status, {"X-Error-Code": code, "X-Error-Message": words})

        @app.middleware("http")
        async def check(request: Request, call_next: Any) -> Response:
            if self.faults.status:
                return await refuse(request, _Refusal(self.faults.status, "Fault", "out of order"))
            if request.headers.get("authorization") != f"Bearer {TOKEN}" and not request.url.path.startswith("/lfs/"):
                return await refuse(request, _Refusal(401, "RepoNotFound", "Invalid credentials"))
            return await call_next(request)

        @app.post("/api/validate-yaml")
        async def validate(request: Request) -> Any:
            card = (await request.json())["content"]
            assert yaml.safe_load(card.split("---")[1])["tags"] == ["reflogp"]
            return {"errors": [], "warnings": []}

        @app.post("/api/repos/create")
        async def create(request: Request) -> Any:
            about = await request.json()
            name = f"{about['organization']}/{about['name']}"
            assert about["type"] == "dataset"
            if name in self.repositories:
                words = "You already created this dataset repo"
                return JSONResponse({"error": words, "url": f"{self.url}/datasets/{name}"}, 409)
            private = about.get("private", about.get("visibility") == "private")
            self.repositories[name] = _Repository(bool(private))
            self.repositories[name].commit({".gitattributes": b"*.parquet filter=lfs\n"})
            return {"url": f"{self.url}/datasets/{name}"}

        @app.get("/api/datasets/{owner}/{name}")
        @app.get("/api/datasets/{owner}/{name}/revision/{revision}")
        async def about(owner: str, name: str, revision: str = "main") -> Any:
            repository = self._repository(owner, name)
            oid, files = repository.at(revision)
            siblings = [_described(path, data) for path, data in files.items()]
            return {"id": f"{owner}/{name}", "sha": oid, "private": repository.private, "tags": [], "siblings": siblings}

        @app.get("/api/datasets/{owner}/{name}/tree/{revision}")
        @app.get("/api/datasets/{owner}/{name}/tree/{revision}/{folder:path}")
        async def tree(owner: str, name: str, revision: str, folder: str = "", recursive: bool = False) -> Any:
            _, files = self._repository(owner, name).at(revision)
            listed = _listed(files, f"{folder}/" if folder else "", recursive)
            if folder and not listed:
                raise _Refusal(404, "EntryNotFound", f"{folder} does not exist")
            return listed

        @app.post("/api/datasets/{owner}/{name}/paths-info/{revision}")
        async def paths(owner: str, name: str, revision: str, request: Request) -> Any:
            _, files = self._repository(owner, name).at(revision)
            asked = parse_qs((await request.body()).decode())["paths"]
            return [entry for entry in _listed(files, "", True) if entry["path"] in asked]

        @app.post("/api/datasets/{owner}/{name}/preupload/{revision}")
        async def preupload(request: Request) -> Any:
            there = self.files("/".join(request.path_params[name] for name in ("owner", "name")))
            entries = []
            for file in (await request.json())["files"]:
                path = file["path"]
                entry = {"path": path, "uploadMode": "lfs" if path.endswith(_LARGE) else "regular", "shouldIgnore": False}
                about = _described(path, there[path]) if path in there else {}
                entries.append(entry | ({"oid": about.get("lfs", about)["oid"]} if about else {}))
            return {"files": entries}

        @app.post("/datasets/{owner}/{name}.git/info/lfs/objects/batch")
        async def batch(request: Request) -> Any:
            objects = []
            for entry in (await request.json())["objects"]:
                there = entry["oid"] in self._blobs
                action = {"upload": {"href": f"{self.url}/lfs/{entry['oid']}"}}
                objects.append({**entry, "authenticated": True} | ({} if there else {"actions": action}))
            return JSONResponse({"transfer": "basic", "objects": objects}, media_type="application/vnd.git-lfs+json")

        @app.put("/lfs/{oid}")
        async def upload(oid: str, request: Request) -> Any:
            data = await request.body()
            assert hashlib.sha256(data).hexdigest() == oid
            self._blobs[oid] = data
            self.uploaded.append(oid)
            return Response()

        @app.post("/api/datasets/{owner}/{name}/commit/{revision}")
        async def commit(owner: str, name: str, request: Request) -> Any:
            repository = self.repositories[f"{owner}/{name}"]
            operations = [json.loads(line) for line in (await request.body()).splitlines() if line]
            if self.faults.commits_between:
                repository.commit({**repository.commits[-1][1], "note.txt": b"between"})
            newest, before = repository.commits[-1]
            files = dict(before)
            for operation in operations:
                value = operation["value"]
                match operation["key"]:
                    case "header":
                        if value.get("parentCommit", newest) != newest:
                            raise _Refusal(412, "PreconditionFailed", "A commit has happened since.")
                    case "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    case "lfsFile":
                        if value["oid"] not in self._blobs:
                            raise _Refusal(400, "BadRequest", "LFS pointer points to a file that does not exist")
                        files[value["path"]] = self._blobs[value["oid"]]
                    case "deletedFile":
                        del files[value["path"]]
                    case other:
                        raise AssertionError(other)
            oid = repository.commit(files)
            return {"commitUrl": f"{self.url}/datasets/{owner}/{name}/commit/{oid}", "commitOid": oid, "hookOutput": ""}

        @app.api_route("/datasets/{owner}/{name}/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
        async def resolve(owner: str, name: str, revision: str, path: str, request: Request) -> Any:
            oid, files = self._repository(owner, name).at(revision)
            if path not in files:
                raise _Refusal(404, "EntryNotFound", "Entry not found")
            data = files[path]
            headers = {"X-Repo-Commit": oid, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
            if request.method == "HEAD":
                return Response(headers={**headers, "Content-Length": str(len(data))})
            if self.faults.downloads_left is not None:
                if self.faults.downloads_left == 0:
                    return Response("broken off", 400)
                self.faults.downloads_left -= 1
            self.downloaded.append(path)
            start, end = request.headers.get("range", "bytes=0-").removeprefix("bytes=").split("-")
            part = data[int(start) : int(end) + 1 if end else None]
            return Response(part[: self.faults.most_bytes], 206 if "range" in request.headers else 200, headers)


def _listed(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """Return the files and folders in a folder, as the API lists them."""
    inside = {path: data for path, data in files.items() if path.startswith(folder)}
    cuts = [(path, at) for path in inside for at in range(len(folder), len(path)) if path[at] == "/"]
    folders = dict.fromkeys(path[:at] for path, at in cuts if recursive or "/" not in path[len(folder) : at])
    about = [{"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()} for path in folders]
    return about + [_described(path, data) for path, data in inside.items() if recursive or "/" not in path[len(folder) :]]


def _described(path: str, data: bytes) -> dict[str, Any]:
    """Return a file as the API describes it, in the list of a folder and in the description of a repository. Its id is git's;
    that of a large file is in `lfs`.
    """
    oid, sha256 = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), hashlib.sha256(data).hexdigest()
    about = {"type": "file", "path": path, "rfilename": path, "size": len(data), "oid": oid, "blobId": oid}
    lfs = {"oid": sha256, "sha256": sha256, "size": len(data), "pointerSize": 130}
    return about | ({"lfs": lfs} if path.endswith(_LARGE) else {})


@contextmanager
def hub() -> Iterator[Hub]:
    """Start a server."""
    found = Hub()
    server = uvicorn.Server(uvicorn.Config(found.app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    found.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield found
    server.should_exit = True
    thread.join()
