"""Read one file of a dataset repository of the Hugging Face Hub.

A revision is resolved to a commit first, so that all bytes are of one commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reflogp.store.errors import StoreUnavailableError, UsageError
from reflogp.store.hub import HubPlace, told

if TYPE_CHECKING:
    from huggingface_hub import HfApi

#: Start of the URI of every file.
SCHEME = "hf://"
# The Hub keeps a Parquet copy of every public dataset in refs/convert/parquet, the one revision with slashes that is supported.
_FILE = re.compile(
    r"hf://datasets/(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>refs/convert/parquet|[\w.-]+))?/(?P<path>[^@?%#]+)", re.ASCII
)


@dataclass(frozen=True)
class HubFile:
    """A file of a dataset repository.

    Attributes:
        place: repository and revision.
        path: path in the repository.
    """

    place: HubPlace
    path: str

    @classmethod
    def parse(cls, uri: str) -> HubFile:
        """Return the file that hf://datasets/ORGANISATION/NAME[@REVISION]/PATH names. Raises UsageError for any other URI."""
        found = _FILE.fullmatch(uri)
        if found is None or not {"", ".", ".."}.isdisjoint(found["path"].split("/")):
            raise UsageError(f"{uri} is not a file of the Hub: give hf://datasets/ORGANISATION/NAME[@REVISION]/PATH")
        return cls(HubPlace(found["repository"], found["revision"]), found["path"])

    def without_revision(self) -> str:
        """Return the URI of this file on the main branch."""
        return f"{HubPlace(self.place.repository)}/{self.path}"

    def download(self) -> Path:
        """Return the file in huggingface_hub's cache, where an interrupted download goes on.

        Raises:
            UsageError: there is no such file, or the token may not read it.
            StoreUnavailableError: the Hub cannot be reached.
        """
        api = _api()
        commit, _ = self._found(api)
        with told(self.place):
            return Path(api.hf_hub_download(self.place.repository, self.path, repo_type="dataset", revision=commit))

    def read(self, chunk: int) -> tuple[int, Iterator[bytes]]:
        """Return the file's bytes and an iterator over its content, in pieces of at most `chunk` bytes.

        Each piece is a request of its own. Nothing is cached. Raises what `download` raises, also while iterating.
        """
        from huggingface_hub import HfFileSystem

        api = _api()
        commit, size = self._found(api)
        # The path may contain an `@`: huggingface_hub takes the first `@` as the start of the commit.
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
        """Return the commit that the revision names now, and the file's bytes."""
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
            raise StoreUnavailableError(f"{self.place}: the Hub does not report the commit and the size of {self.path}")
        return about.commit_hash, about.size


def _api() -> HfApi:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UsageError("hf:// needs huggingface_hub: pip install 'reflogp[hub]'") from error
    return HfApi(library_name="reflogp")
