"""Read files from dataset repositories on the Hugging Face Hub, push tables there, and pull pushed tables into a store.

A push writes the files of an export. All requests go through huggingface_hub.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from reflogp.store.digests import Progress
from reflogp.store.errors import StoreUnavailableError, UsageError
from reflogp.store.exchange import Imported, import_folder, top_k_of
from reflogp.store.maintenance import DATA_FILES, README_FILE
from reflogp.store.reference import REFERENCE_FILE, Reference
from reflogp.store.snapshot import Snapshot
from reflogp.store.storage import sentence
from reflogp.store.store import Store
from reflogp.store.table import LogprobTable
from reflogp.store.texts import counted

if TYPE_CHECKING:
    from huggingface_hub import HfApi

#: Prefix of every URI of a repository or file on the Hub.
SCHEME = "hf://"
_URI = re.compile(r"hf://datasets/(?P<repository>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?/?$", re.ASCII)
# The Hub converts datasets to Parquet files, which are in the revision refs/convert/parquet. This is the only revision with
# slashes that a file's URI can contain.
_FILE = re.compile(
    r"hf://datasets/(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>refs/convert/parquet|[\w.-]+))?/(?P<path>[^@?%#]+)", re.ASCII
)
_CHANGED = 412  # HTTP status if the parent of the new commit is no longer the latest commit
_ROWS_AT_ONCE = 65_536


@dataclass(frozen=True)
class HubPlace:
    """A dataset repository on the Hub, "organisation/name", at a branch, tag or commit (None: the main branch)."""

    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, uri: str) -> HubPlace:
        """Parse hf://datasets/ORGANISATION/NAME[@REVISION]. Raises UsageError for any other URI."""
        found = _URI.match(uri)
        if found is None:
            raise UsageError(
                f"{uri} is not the URI of a dataset repository on the Hub: use hf://datasets/ORGANISATION/NAME[@REVISION]"
            )
        return cls(found["repository"], found["revision"])

    def __str__(self) -> str:
        return f"hf://datasets/{self.repository}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class HubFile:
    """A file in a dataset repository on the Hub."""

    place: HubPlace
    path: str

    @classmethod
    def parse(cls, uri: str) -> HubFile:
        """Parse hf://datasets/ORGANISATION/NAME[@REVISION]/PATH. Raises UsageError for any other URI."""
        found = _FILE.fullmatch(uri)
        if found is None or not {"", ".", ".."}.isdisjoint(found["path"].split("/")):
            raise UsageError(f"{uri} is not the URI of a file on the Hub: use hf://datasets/ORGANISATION/NAME[@REVISION]/PATH")
        return cls(HubPlace(found["repository"], found["revision"]), found["path"])

    def without_revision(self) -> str:
        """Return the URI of this file on the main branch."""
        return f"{HubPlace(self.place.repository)}/{self.path}"

    def download(self) -> Path:
        """Download the file to huggingface_hub's cache, or resume a download, and return the path there.

        Raises UsageError if the file does not exist or the token has no permission to read it, and StoreUnavailableError.
        """
        api = _api()
        commit, _ = self._found(api)
        with translated(self.place):
            return Path(api.hf_hub_download(self.place.repository, self.path, repo_type="dataset", revision=commit))

    def read(self, chunk: int) -> tuple[int, Iterator[bytes]]:
        """Return the file's size in bytes, and an iterator over its content in chunks of at most `chunk` bytes.

        Each chunk is one request and is not cached. This method and the iterator raise the same errors as `download`.
        """
        from huggingface_hub import HfFileSystem

        api = _api()
        commit, size = self._found(api)
        # The path may contain an `@`, because huggingface_hub takes only the first `@` as the start of the commit.
        name = f"datasets/{self.place.repository}@{commit}/{self.path}"

        def pieces() -> Iterator[bytes]:
            files = HfFileSystem(endpoint=api.endpoint, use_listings_cache=False, skip_instance_cache=True)
            with translated(self.place), files.open(name, "rb", block_size=chunk, cache_type="none", size=size) as source:
                for start in range(0, size, chunk):
                    asked = min(chunk, size - start)
                    piece = source.read(asked)
                    if len(piece) != asked:
                        raise StoreUnavailableError(
                            f"{self.place}: the Hub sent only {len(piece):,} of the {asked:,} bytes requested"
                        )
                    yield piece

        return size, pieces()

    def _found(self, api: HfApi) -> tuple[str, int]:
        """Return the commit that the revision currently refers to, and the file's size in bytes."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError

        url = hf_hub_url(
            self.place.repository, self.path, repo_type="dataset", revision=self.place.revision, endpoint=api.endpoint
        )
        with translated(self.place):
            try:
                about = api.get_hf_file_metadata(url=url)
            except EntryNotFoundError as error:
                raise UsageError(f"{self.place} has no file {self.path}") from error
        if about.commit_hash is None or about.size is None:
            raise StoreUnavailableError(f"{self.place}: the Hub's response lacks the commit id or the size of {self.path}")
        return about.commit_hash, about.size


@dataclass(frozen=True)
class Pushed:
    """The result of a push: the numbers of rows and of Parquet files in the repository, the id of the commit that contains
    them, and whether the push made this commit; if not, the repository already contained the rows.
    """

    reference_id: str
    rows: int
    files: int
    commit: str
    changed: bool


def push_table(
    table: LogprobTable,
    uri: str,
    snapshot: Snapshot | None = None,
    *,
    public: bool = False,
    replace: bool = False,
    progress: Progress | None = None,
) -> Pushed:
    """Publish a snapshot's rows in a dataset repository on the Hub, as one commit.

    Files that an interrupted push already uploaded are not uploaded again. The push replaces the files of an earlier push, and
    keeps all other files, and the dataset card.

    Args:
        uri: hf://datasets/ORGANISATION/NAME, without a revision. The repository is created if it does not exist.
        snapshot: the snapshot to push, or None for the latest.
        public: whether to make the repository public if the push creates it. By default, a new repository is private.
        replace: whether to push even if the repository is damaged or has rows that the snapshot lacks.
        progress: called with (rows exported, total rows).

    Raises:
        UsageError: the repository contains data that reflogp did not push, or log-probs of another reference model. The
            error is also raised if the repository was changed during the push, or if the Hugging Face token has no permission
            to write to it. Unless `replace` is True, the repository must also be undamaged and have no rows that the snapshot
            lacks.
        DamagedStoreError: a shard is damaged.
        StoreUnavailableError: the Hub cannot be reached.
    """
    place = HubPlace.parse(uri)
    if place.revision is not None:
        raise UsageError(f"{uri}: a push always goes to the main branch; leave out @{place.revision}")
    api, snapshot = _api(), snapshot or table.snapshot()
    with translated(place):
        api.create_repo(place.repository, repo_type="dataset", private=not public, exist_ok=True)
        about = api.dataset_info(place.repository)
    before, names = str(about.sha), {entry.rfilename for entry in about.siblings or ()}
    if REFERENCE_FILE in names:
        folder = _downloaded(api, place, before, [REFERENCE_FILE] if replace else [REFERENCE_FILE, DATA_FILES])
        _require_same_reference(place, folder, table.reference)
        if not replace:
            _require_all(place, folder, snapshot)
    elif others := sorted(names - {".gitattributes", README_FILE}):
        raise UsageError(f"{place} contains data that reflogp did not push, such as {others[0]}: push to another repository")
    with tempfile.TemporaryDirectory(prefix="reflogp-push-") as scratch:
        folder = Path(scratch) / "export"
        rows, files = table.export(str(folder), snapshot.number, progress)
        with translated(place):
            done = api.upload_folder(
                repo_id=place.repository,
                repo_type="dataset",
                folder_path=folder,
                ignore_patterns=[README_FILE] if README_FILE in names else None,
                delete_patterns=[DATA_FILES, "contents.json"],  # the latter of versions before 0.2
                commit_message=f"{counted(rows, 'sequence')} of reference {table.reference.reference_id}",
                parent_commit=before,
            )
    return Pushed(table.reference.reference_id, rows, files, str(done.oid), str(done.oid) != before)


def pull(store: Store, uri: str, progress: Progress | None = None) -> Imported:
    """Append the rows of a dataset repository on the Hub, written by `push_table`, to a store; see `import_folder`.

    An interrupted download is resumed.

    Raises:
        UsageError: the repository does not exist, the Hugging Face token has no permission to read it, reflogp did not push it,
            or its files are damaged. In these cases, nothing is written.
        StoreUnavailableError: the Hub cannot be reached.
        StoreError: the store cannot be written to.
    """
    place, api = HubPlace.parse(uri), _api()
    with translated(place):
        about = api.dataset_info(place.repository, revision=place.revision)
    if REFERENCE_FILE not in {entry.rfilename for entry in about.siblings or ()}:
        raise UsageError(f"{place} was not written by `reflogp store push`: it lacks {REFERENCE_FILE}")
    return import_folder(store, str(_downloaded(api, place, str(about.sha), [REFERENCE_FILE, DATA_FILES])), progress)


def _downloaded(api: HfApi, place: HubPlace, commit: str, patterns: list[str]) -> Path:
    with translated(place):
        return Path(api.snapshot_download(place.repository, repo_type="dataset", revision=commit, allow_patterns=patterns))


def _require_same_reference(place: HubPlace, folder: Path, ours: Reference) -> None:
    try:
        there = Reference.from_json((folder / REFERENCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{place} is damaged: {REFERENCE_FILE} cannot be read ({sentence(error)})") from error
    if there.reference_id != ours.reference_id:
        raise UsageError(
            f"{place} contains log-probs of reference {there.reference_id}, not of {ours.reference_id}. A repository can "
            "contain the log-probs of only one reference: push to another repository"
        )


def _require_all(place: HubPlace, folder: Path, snapshot: Snapshot) -> None:
    """Raise UsageError if the repository has values that the snapshot lacks."""
    lacking = 0
    for file in sorted(folder.glob(DATA_FILES)):
        try:
            if (top_k := top_k_of(file)) > snapshot.top_k:
                raise UsageError(
                    f"{place} has the {top_k} most probable tokens of each position, which this push would delete: push with "
                    f"--top-k {top_k} or to another repository, or overwrite the repository's values with --replace"
                )
            for batch in pq.ParquetFile(file).iter_batches(_ROWS_AT_ONCE, columns=["key", "scored_len"]):
                lacking += int((snapshot.stored_lengths(batch["key"]) < batch["scored_len"].to_numpy()).sum())
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(
                f"{place} is damaged: {file.name} cannot be read ({sentence(error)}); to repair it, push again with --replace"
            ) from error
    if lacking:
        raise UsageError(
            f"{place} has values of {counted(lacking, 'sequence')} that snapshot {snapshot.number} of the store lacks: run "
            f"`reflogp store pull {snapshot.store_uri} {place}`, then push the latest snapshot, or overwrite the repository's "
            "values with --replace"
        )


def _api() -> HfApi:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UsageError("hf:// URIs need huggingface_hub: pip install 'reflogp[hub]'") from error
    return HfApi(library_name="reflogp")


@contextmanager
def translated(place: HubPlace) -> Iterator[None]:
    """Convert the errors that huggingface_hub raises in the `with` block into reflogp's errors."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    # the class HTTPError of the HTTP library that the installed version of huggingface_hub uses, such as requests or httpx
    network: type[Exception] = next(parent for parent in HfHubHTTPError.__mro__ if parent.__name__ == "HTTPError")
    try:
        yield
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise UsageError(f"{place} does not exist, or the token has no permission to read it ({_LOG_IN})") from error
    except HFValidationError as error:
        raise UsageError(f"{place}: {sentence(error)}") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise UsageError(f"{place}: the token has no permission for this operation ({_LOG_IN})") from error
        if status == _CHANGED:
            raise UsageError(f"{place} was changed during the push, so nothing was pushed; push again") from error
        raise StoreUnavailableError(f"{place}: {sentence(error)}") from error
    except (network, OSError, RuntimeError, ValueError) as error:
        raise StoreUnavailableError(f"{place}: {sentence(error)}") from error


_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
