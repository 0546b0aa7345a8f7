"""Read files from dataset repositories on the Hugging Face Hub, push tables there, and pull pushed tables into a store.

A push writes the files of an export (exchange.py), which contain the log-probs of one reference model. All requests go through
huggingface_hub, which must be installed.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from reflogp.store.digests import Progress
from reflogp.store.errors import StoreUnavailableError, UsageError
from reflogp.store.exchange import (
    CONTENTS_FILE,
    DATA_FILE,
    README_FILE,
    Contents,
    Imported,
    export_table,
    import_folder,
    sha256_of,
)
from reflogp.store.snapshot import Snapshot
from reflogp.store.storage import sentence, split_table_uri
from reflogp.store.store import REFERENCE_FILE, Store
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
    """A dataset repository on the Hub, optionally at a specific revision.

    Attributes:
        repository: id of the repository, "organisation/name".
        revision: a branch, tag or commit, or None for the main branch.
    """

    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, uri: str) -> HubPlace:
        """Parse the URI of a repository: hf://datasets/ORGANISATION/NAME[@REVISION]. Raises UsageError for any other URI."""
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
    """A file in a dataset repository on the Hub.

    Attributes:
        place: the file's repository, optionally at a specific revision.
        path: path of the file in the repository.
    """

    place: HubPlace
    path: str

    @classmethod
    def parse(cls, uri: str) -> HubFile:
        """Parse the URI of a file: hf://datasets/ORGANISATION/NAME[@REVISION]/PATH. Raises UsageError for any other URI."""
        found = _FILE.fullmatch(uri)
        if found is None or not {"", ".", ".."}.isdisjoint(found["path"].split("/")):
            raise UsageError(f"{uri} is not the URI of a file on the Hub: use hf://datasets/ORGANISATION/NAME[@REVISION]/PATH")
        return cls(HubPlace(found["repository"], found["revision"]), found["path"])

    def without_revision(self) -> str:
        """Return the URI of this file on the main branch."""
        return f"{HubPlace(self.place.repository)}/{self.path}"

    def download(self) -> Path:
        """Download the file to huggingface_hub's cache and return the cached file's path. An interrupted download is resumed.

        Raises:
            UsageError: the file does not exist, or the Hugging Face token has no permission to read it.
            StoreUnavailableError: the Hub cannot be reached.
        """
        api = _api()
        commit, _ = self._found(api)
        with told(self.place):
            return Path(api.hf_hub_download(self.place.repository, self.path, repo_type="dataset", revision=commit))

    def read(self, chunk: int) -> tuple[int, Iterator[bytes]]:
        """Return the file's size in bytes, and an iterator over its content in chunks of at most `chunk` bytes.

        Each chunk is read with one request and is not cached. This method and the iterator raise the same errors as `download`.
        """
        from huggingface_hub import HfFileSystem

        api = _api()
        commit, size = self._found(api)
        # The path may contain an `@`, because huggingface_hub takes only the first `@` as the start of the commit.
        name = f"datasets/{self.place.repository}@{commit}/{self.path}"

        def pieces() -> Iterator[bytes]:
            files = HfFileSystem(endpoint=api.endpoint, use_listings_cache=False, skip_instance_cache=True)
            with told(self.place), files.open(name, "rb", block_size=chunk, cache_type="none", size=size) as source:
                for start in range(0, size, chunk):
                    piece = source.read(min(chunk, size - start))
                    if len(piece) != min(chunk, size - start):
                        asked = min(chunk, size - start)
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
        with told(self.place):
            try:
                about = api.get_hf_file_metadata(url=url)
            except EntryNotFoundError as error:
                raise UsageError(f"{self.place} has no file {self.path}") from error
        if about.commit_hash is None or about.size is None:
            raise StoreUnavailableError(f"{self.place}: the Hub's response lacks the commit id or the size of {self.path}")
        return about.commit_hash, about.size


@dataclass(frozen=True)
class Pushed:
    """The result of a push.

    Attributes:
        reference_id: id of the reference model whose log-probs the rows contain.
        rows: number of rows in the repository.
        files: number of Parquet files in the repository.
        commit: id of the repository's commit that contains these rows.
        changed: whether the push uploaded the export; False if the repository already contained it.
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

    The dataset card says how the values were computed. Files that an interrupted push already uploaded are not uploaded again.
    The push replaces the files of an earlier push. It keeps all other files. If somebody has edited the dataset card, the push
    keeps the card too.

    Args:
        table: the table to push.
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
    repository = _Repository(place)
    snapshot = snapshot or table.snapshot()
    if not repository.exists():
        repository.create(public)
    there = repository.contents(replace=replace)  # a new repository is read too: another push may have filled it by now
    if there is not None and there.reference_id != table.reference.reference_id:
        raise UsageError(
            f"{place} contains log-probs of reference {there.reference_id}, not of {table.reference.reference_id}. A "
            "repository can contain the log-probs of only one reference: push to another repository"
        )
    with tempfile.TemporaryDirectory(prefix="reflogp-push-") as scratch:
        folder = Path(scratch) / "export"
        rows, files = export_table(table, str(folder), snapshot, progress)
        ours = Contents.read(folder / CONTENTS_FILE)
        changed = there is None or replace or there.files != ours.files or not repository.has(ours)
        if changed:
            if there is not None and not replace:
                _require_all(repository, there, snapshot, split_table_uri(table.uri)[0])
            repository.upload(folder, ours, there)
    return Pushed(table.reference.reference_id, rows, files, repository.commit, changed)


def pull(store: Store, uri: str, progress: Progress | None = None) -> Imported:
    """Append the rows of a dataset repository on the Hub to a store, which is created if it does not exist.

    Files are downloaded to huggingface_hub's cache; an interrupted download is resumed. The files' digests and all rows are
    checked before the first row is written. Values that the store already has are kept.

    Args:
        store: the store to append to.
        uri: hf://datasets/ORGANISATION/NAME[@REVISION] of a repository that `push_table` wrote.
        progress: called with (rows done, total rows). Each row counts twice in both numbers, because it is first checked and
            then written.

    Raises:
        UsageError: the repository does not exist, the Hugging Face token has no permission to read it, reflogp did not push it,
            or its files are damaged. In these cases, nothing is written.
        StoreUnavailableError: the Hub cannot be reached.
        StoreError: the store cannot be written to.
    """
    repository = _Repository(HubPlace.parse(uri))
    if not repository.exists():
        raise UsageError(f"{repository.place}: there is no such dataset, or the token has no permission to read it ({_LOG_IN})")
    there = repository.contents(read_only=True)
    assert there is not None
    return import_folder(store, str(repository.download(there)), progress)


class _Repository:
    """A dataset repository that is read and written with huggingface_hub.

    Attributes:
        commit: id of the commit that `exists` found or `upload` made, whichever method was called last.
    """

    def __init__(self, place: HubPlace) -> None:
        self._api = _api()
        self.place = place
        self.commit = ""
        self._sha256: dict[str, str | None] = {}  # path of each file -> its sha256, or None if the file is not in Git LFS

    def exists(self) -> bool:
        """Return whether the repository exists. If it does, record the revision's commit and files.

        Raises UsageError if the revision does not exist.
        """
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        with told(self.place):
            try:
                about = self._api.dataset_info(self.place.repository, revision=self.place.revision, files_metadata=True)
            except RevisionNotFoundError as error:
                raise UsageError(f"{self.place}: there is no such revision") from error
            except RepositoryNotFoundError:
                return False
        self.commit = str(about.sha)
        self._sha256 = {entry.rfilename: getattr(entry.lfs, "sha256", None) for entry in about.siblings or ()}
        return True

    def create(self, public: bool) -> None:
        with told(self.place):
            self._api.create_repo(self.place.repository, repo_type="dataset", private=not public, exist_ok=True)
        if not self.exists():
            raise StoreUnavailableError(f"{self.place} was created, but cannot be found; push again")

    def contents(self, read_only: bool = False, replace: bool = False) -> Contents | None:
        """Return the repository's parsed contents.json, or None if the repository is empty or has only a dataset card.

        Args:
            read_only: whether to raise UsageError, instead of returning None, for a repository that is empty or has only a
                dataset card.
            replace: whether to return None, instead of raising UsageError, if contents.json is damaged. The push then writes a
                new one.

        Raises UsageError if the repository contains data that reflogp did not push, or if its contents.json is damaged.
        """
        if {REFERENCE_FILE, CONTENTS_FILE} <= self._sha256.keys():
            try:
                return Contents.read(self._file(CONTENTS_FILE))
            except UsageError:  # perhaps only the cached copy is damaged
                file = self._file(CONTENTS_FILE, force=True)
            try:
                return Contents.read(file)
            except UsageError as error:
                if replace:
                    return None
                raise _damaged(self.place, error) from error
        if read_only:
            raise UsageError(
                f"{self.place} was not written by `reflogp store push`: it lacks {REFERENCE_FILE} or {CONTENTS_FILE}"
            )
        if others := sorted(self._sha256.keys() - {".gitattributes", README_FILE}):
            raise UsageError(
                f"{self.place} contains data that reflogp did not push, such as {others[0]}: push to another repository"
            )
        return None

    def has(self, contents: Contents) -> bool:
        """Return whether the repository has all files of the export that `contents` describes, and whether the sha256 digests
        of the Parquet files are those in `contents`."""
        names = {REFERENCE_FILE, README_FILE, CONTENTS_FILE, *contents.data}
        return names <= self._sha256.keys() and all(self._sha256[name] == contents.files[name] for name in contents.data)

    def download(self, contents: Contents) -> Path:
        """Download the export and return its folder. Raises UsageError if the export is damaged.

        A file with a wrong sha256 is downloaded once more; the error is raised only if the second copy is wrong too.
        """
        folder = self._file(CONTENTS_FILE).parent
        if lacking := sorted(contents.files.keys() - self._sha256.keys()):
            raise _damaged(self.place, f"{lacking[0]} is missing")
        with told(self.place):
            self._api.snapshot_download(
                self.place.repository, repo_type="dataset", revision=self.commit, allow_patterns=list(contents.files)
            )
        for name in contents.damaged(folder):  # perhaps only the cached copy is damaged
            self._file(name, force=True)
        if damaged := contents.damaged(folder):
            raise _damaged(self.place, f"the sha256 of {damaged[0]} is not the one in {CONTENTS_FILE}")
        return folder

    def upload(self, folder: Path, ours: Contents, there: Contents | None) -> None:
        """Upload the export in `folder` as one commit, which also deletes those Parquet files of the previous export that are
        not in the new one."""
        card_is_theirs = README_FILE in self._sha256 and (
            there is None or sha256_of(self._file(README_FILE, force=True)) != there.card
        )
        # If contents.json is damaged, every file that is named like the Parquet files of exports counts as part of the old one.
        before = there.data if there is not None else filter(DATA_FILE.fullmatch, self._sha256)
        with told(self.place):
            done = self._api.upload_folder(
                repo_id=self.place.repository,
                repo_type="dataset",
                folder_path=folder,
                ignore_patterns=[README_FILE] if card_is_theirs else None,
                delete_patterns=sorted((set(before) - set(ours.data)) & self._sha256.keys()) or None,
                commit_message=f"{counted(ours.rows, 'sequence')} of reference {ours.reference_id}",
                parent_commit=self.commit,
            )
        self.commit = str(done.oid)

    def _file(self, name: str, force: bool = False) -> Path:
        # The revision must be a commit id. For a branch, huggingface_hub would return an older copy from its cache if the Hub
        # could not be reached.
        with told(self.place):
            file = self._api.hf_hub_download(
                self.place.repository, name, repo_type="dataset", revision=self.commit, force_download=force
            )
        return Path(file)


def _require_all(repository: _Repository, there: Contents, snapshot: Snapshot, store: str) -> None:
    """Raise UsageError if the snapshot has fewer values than the repository for any of the repository's keys."""
    folder = repository.download(there)
    lacking = 0
    for name in there.data:
        try:
            for batch in pq.ParquetFile(folder / name).iter_batches(_ROWS_AT_ONCE, columns=["key", "scored_len"]):
                lengths = snapshot.stored_lengths(batch["key"])
                lacking += int((lengths < batch["scored_len"].to_numpy()).sum())
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise _damaged(repository.place, f"{name} cannot be read ({sentence(error)})") from error
    if lacking:
        raise UsageError(
            f"{repository.place} has values of {counted(lacking, 'sequence')} that snapshot {snapshot.number} of the store "
            f"lacks: run `reflogp store pull {store} {repository.place}`, then push the latest snapshot, or overwrite the "
            "repository's values with --replace"
        )


def _damaged(place: HubPlace, problem: object) -> UsageError:
    return UsageError(f"{place} is damaged: {problem}; to repair it, push its values again with `reflogp store push --replace`")


def _api() -> HfApi:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UsageError("hf:// URIs need huggingface_hub: pip install 'reflogp[hub]'") from error
    return HfApi(library_name="reflogp")


@contextmanager
def told(place: HubPlace) -> Iterator[None]:
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
