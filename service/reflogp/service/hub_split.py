"""Use `datasets` to find the files that belong to a split of a dataset on the Hugging Face Hub.

`datasets` runs in a separate process, which is started with `python -m reflogp.service.hub_split` and reads the
repository's metadata but no data. The process has an empty working folder and empty caches. Therefore, `datasets` cannot
mistake a local folder of the same name, or an older cached copy, for the dataset. The metadata can contain any path or URL.
Paths and URLs that lead outside the repository are rejected before `datasets` looks for the files.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from reflogp.scoring.data.read import SUFFIXES_IN_WORDS, dataset_suffix
from reflogp.scoring.errors import DatasetError
from reflogp.service.confined_paths import MOST_ENTRIES
from reflogp.store import ReflogpError
from reflogp.store.hub import HubFile, HubPlace, translated
from reflogp.store.storage import sentence
from reflogp.store.texts import shortened

#: Names of the files that contain a repository's metadata, and the maximum size of README.md in bytes.
_CARD, _YAML, _MOST_CARD = "README.md", ".huggingface.yaml", 4 << 20
#: Fields of `datasets.BuilderConfig` and its subclasses that a dataset's metadata may set. Other fields are options that change
#: how files are read.
_PLACES = {"name", "version", "data_dir", "data_files", "description", "features"}
#: Limits for the process: seconds of processor time, and bytes of memory in addition to the memory that its libraries use.
_CPU_SECONDS, _MEMORY = 300, 2 << 30
_POLL_SECONDS = 0.1


def files_of_split(place: HubPlace, config: str | None, split: str, check: Callable[[], None]) -> list[HubFile]:
    """Return a split's files at the current commit of a revision, in the order in which `datasets` reads them.

    Args:
        place: the dataset's repository and revision on the Hub.
        config: name of one of the dataset's configs (subsets); None for the default config.
        split: name of the split.
        check: function that is called about ten times a second. It can cancel the search for files by raising an error.

    Raises:
        DatasetError: the dataset, the config or the split does not exist; the Hub cannot be reached; the metadata cannot be
            read within the limits on memory and time; the metadata is not supported; or a file's format is not supported.
    """
    with tempfile.TemporaryDirectory(prefix="reflogp-hub-") as folder:
        caches = {name: f"{folder}/{name}" for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE")}
        empty = Path(folder, "empty")
        empty.mkdir()
        command = [sys.executable, "-P", "-m", "reflogp.service.hub_split"]
        environment = {**os.environ, **caches, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, cwd=empty, env=environment, text=True, **streams) as process:  # type: ignore[call-overload]
            try:
                answer = _answer(process, json.dumps([place.repository, place.revision, config, split]), check)
            finally:
                process.kill()
    if answer is None:
        raise DatasetError(
            f"{place}: the process that read the dataset's metadata exited with status {process.returncode}; it may have used "
            f"too much memory or time: submit one job for each data file ({place}/FILE)"
        )
    if "problem" in answer:
        raise DatasetError(f"{place}: {answer['problem']}")
    return [HubFile(HubPlace(place.repository, answer["commit"]), path) for path in answer["paths"]]


def _answer(process: subprocess.Popen[str], asked: str | None, check: Callable[[], None]) -> dict[str, Any] | None:
    """Send a request to the process and return its answer, or None if the process failed or exited without an answer."""
    while True:
        check()
        try:
            said, _ = process.communicate(asked, timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            asked = None  # the next call of `communicate` continues to send the request
            continue
        lines = said.splitlines()
        return dict(json.loads(lines[-1])) if process.returncode == 0 and lines else None


# In the process


def _main() -> None:
    import resource

    repository, revision, config, split = json.load(sys.stdin)
    place = HubPlace(repository, revision)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    try:
        import datasets  # noqa: F401 (imported now, so that its memory does not count toward the limit)

        _limit_memory()
        commit, names = _commit_and_names(place)
        at = HubPlace(repository, commit)
        if _YAML in names:
            raise DatasetError(f"metadata in {_YAML} is not supported: submit one job for each data file ({at}/FILE)")
        if _CARD in names:
            _check_card(HubFile(at, _CARD))
        answer: dict[str, Any] = {"commit": commit, "paths": _paths(at, config, split)}
    except ReflogpError as error:
        answer = {"problem": str(error).removeprefix(f"{place}: ")}
    print(json.dumps(answer))


def _limit_memory() -> None:
    import resource

    if sys.platform == "linux":
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY, taken + _MEMORY))


def _commit_and_names(place: HubPlace) -> tuple[str, set[str]]:
    """Return the commit that the revision currently points to, and the names of the files at that commit."""
    from huggingface_hub import HfApi

    with translated(place):
        about = HfApi(library_name="reflogp").dataset_info(place.repository, revision=place.revision)
    return str(about.sha), {entry.rfilename for entry in about.siblings or ()}


def _check_card(card: HubFile) -> None:
    """Raise DatasetError if a repository's README.md is too long, cannot be read, or names files outside of the repository."""
    from huggingface_hub import DatasetCard

    size, pieces = card.read(_MOST_CARD)
    if size > _MOST_CARD:
        raise DatasetError(f"{_CARD} is longer than {_MOST_CARD:,} bytes: shorten it, or submit one job for each data file")
    try:  # parsed in the same way as by `datasets`
        configs = DatasetCard(b"".join(pieces).decode()).data.get("configs")
    except Exception as error:  # the YAML parser and the field checks raise many types of exceptions
        raise DatasetError(f"the metadata in {_CARD} cannot be read: {shortened(sentence(error))}") from error
    for config in configs if isinstance(configs, list) else []:
        for text in _texts([config.get("data_files"), config.get("data_dir")] if isinstance(config, dict) else [config]):
            if ":" in text or text.startswith(("/", "~", "\\")) or ".." in re.split(r"[/\\]", text):
                raise DatasetError(f"{_CARD} names files outside of the repository: {shortened(text)}")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for part in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from _texts(part)


def _paths(place: HubPlace, config: str | None, split: str) -> list[str]:
    """Return the paths of a split's files. Raises DatasetError."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(place.repository, config, revision=place.revision)
    except MemoryError:
        raise
    except Exception as error:  # exceptions of many types, which all mean that the dataset cannot be loaded
        text = " ".join(str(error).partition("Example of usage")[0].split())
        raise DatasetError(f"`datasets` cannot load the dataset: {shortened(text)}") from error
    splits = builder.config.data_files or {}
    if not splits:
        raise DatasetError("the dataset has no data files")
    if split not in splits:
        raise DatasetError(f"the dataset has no split {split!r}; choose from {', '.join(map(str, splits))}")
    plain = type(builder.config)()
    names = [field.name for field in fields(plain) if field.name not in _PLACES]
    if options := [name for name in names if getattr(builder.config, name) != getattr(plain, name)]:
        raise DatasetError(
            f"the dataset's metadata sets {', '.join(options)}, but the service does not support options that change how files "
            "are read: score the dataset with `reflogp score`, or upload it to the service as a Parquet file"
        )
    paths = [_path(str(url), place) for url in splits[split]]
    if len(paths) > MOST_ENTRIES:
        raise DatasetError(f"split {split!r} has {len(paths):,} files; at most {MOST_ENTRIES:,} are supported")
    return paths


def _path(url: str, place: HubPlace) -> str:
    """Convert a file's URL to its path in the repository.

    Raises DatasetError if the file is not in the repository or has an unsupported format.
    """
    path = url.removeprefix(f"{place}/")
    if path == url or HubFile.parse(f"{HubPlace(place.repository)}/{path}").path != path:
        raise DatasetError(f"the split contains a file outside of the repository: {shortened(url)}")
    if dataset_suffix(path) is None:
        raise DatasetError(
            f"the split contains a file of an unsupported format: {shortened(path)} does not end in {SUFFIXES_IN_WORDS}"
        )
    return path


if __name__ == "__main__":
    _main()
