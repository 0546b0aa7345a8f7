"""Describe datasets as a service does, read files for uploads chunk by chunk, and check output files for downloads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reflogp.client.models import ServicePath, ServiceUri, Uploaded
from reflogp.store import UsageError
from reflogp.store.digests import Progress

_CHUNK_BYTES = 1 << 20
#: Number of digest characters with which an upload's default name starts, and the maximum length of a default name.
_DIGEST_CHARACTERS, _NAME_CHARACTERS = 12, 185

#: Pattern of "ORGANISATION/NAME", the name of a dataset on the Hugging Face Hub. It does not match paths that begin with a
#: dot, such as ./data.
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
#: Suffixes of dataset files that the service accepts.
_KNOWN = re.compile(r"\.((jsonl|ndjson|json|csv)(\.(gz|bz2|zst|lz4))?|parquet|arrow|feather)$", re.IGNORECASE)


@dataclass(frozen=True)
class LocalFile:
    """A file to upload, with the size in bytes and the hexadecimal digest that it had when `local_file` read it."""

    path: Path
    name: str
    size: int
    sha256: str
    progress: Progress | None = None

    def chunks(self) -> Iterator[bytes]:
        """Yield the file's bytes in chunks. Raises UsageError if the file cannot be read or its size is no longer `size`."""
        sent = 0
        try:
            with self.path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    sent += len(chunk)
                    if sent > self.size:
                        break
                    yield chunk
                    if self.progress is not None:
                        self.progress(sent, self.size)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror}") from error
        if sent != self.size:
            raise UsageError(f"{self.path} changed while it was being sent; send it again when it is complete")


def local_file(path: str | Path, name: str | None = None, progress: Progress | None = None) -> LocalFile:
    """Read a whole file to compute its size and digest. Raises UsageError if it is no dataset file that can be read."""
    found = Path(path).expanduser()
    if found.is_dir():
        raise UsageError(
            f"{path} is a folder, but only single files can be uploaded: use the path of a file in the folder,"
            " or a path on the service's machine (ServicePath, --on-service)."
            " For a dataset with this name on the Hugging Face Hub, use hf://datasets/ORGANISATION/NAME (in Python: ServiceUri)"
        )
    if not found.is_file():
        raise UsageError(f"{path}: no such file on this machine")
    if not is_dataset_name(name or found.name):
        raise UsageError(
            f"{name or found.name}: the name of a dataset file must end in .parquet, .arrow, .jsonl, .json or .csv; "
            "the last three can be compressed (such as .csv.gz)"
        )
    try:
        with found.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    return LocalFile(found, name or _upload_name(found.name, digest), size, digest, progress)


def service_uri(dataset: str) -> ServiceUri | None:
    """Return the dataset that the service downloads, for a URI or for "ORGANISATION/NAME" on the Hugging Face Hub; or None.

    Existing files and folders on this machine, and names with a dataset file's suffix, come first, as in `reflogp score`.
    """
    if _URI.match(dataset):
        return ServiceUri(dataset)
    if not _HUB_NAME.fullmatch(dataset) or is_dataset_name(dataset) or Path(dataset).exists():
        return None
    return ServiceUri(f"hf://datasets/{dataset}")


def described(dataset: ServicePath | ServiceUri | Uploaded) -> dict[str, str]:
    """Return the dataset as the body of POST /v1/jobs names it."""
    match dataset:
        case ServicePath(where):
            return {"path": where}
        case ServiceUri(uri, config):
            return {"uri": uri} | ({} if config is None else {"config": config})
        case Uploaded(name):
            return {"upload": name}


def is_dataset_name(name: str) -> bool:
    return _KNOWN.search(name) is not None


def _upload_name(name: str, digest: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    room = _NAME_CHARACTERS - _DIGEST_CHARACTERS - 1
    return f"{digest[:_DIGEST_CHARACTERS]}-{plain[-room:]}"  # a long name is cut at its start, not at its suffix


def check_output(path: str | Path) -> Path:
    output = Path(path).expanduser()
    if output.suffix != ".parquet":
        raise UsageError(f"the output {path} is written as a Parquet file, so its name must end in .parquet")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"the output {path} cannot be written: {output.absolute().parent} is not a folder")
    return output
