"""Use `datasets` to find the files that belong to a split of a dataset on the Hugging Face Hub.

A stranger may have written the repository's metadata, so this happens in a process with limits (see runner/limited.py). The
process reads the metadata but no data, and begins no search for files outside the repository.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from multiprocessing.connection import Connection
from typing import Any

from reflogp.scoring.data.read import SUFFIXES_IN_WORDS, dataset_suffix
from reflogp.scoring.errors import DatasetError
from reflogp.service.confined_paths import MOST_ENTRIES
from reflogp.service.runner.limited import ProcessEndedError, messages
from reflogp.store import ReflogpError
from reflogp.store.hub import HubFile, HubPlace, translated
from reflogp.store.storage import sentence
from reflogp.store.texts import shortened

#: Fields of `datasets.BuilderConfig` and its subclasses that a dataset's metadata may set. Other fields are options that change
#: how files are read.
_PLACES = {"name", "version", "data_dir", "data_files", "description", "features"}
#: Limits for the process: seconds of processor time, and bytes of memory in addition to the memory that its libraries use.
_CPU_SECONDS, _MEMORY = 300, 2 << 30


def files_of_split(place: HubPlace, config: str | None, split: str, check: Callable[[], None]) -> list[HubFile]:
    """Return a split's files at the current commit of a revision, in the order in which `datasets` reads them.

    `config` is None for the default config. `check` is called about ten times a second, and can cancel by raising an error.

    Raises DatasetError if there is no such split, the Hub cannot be reached, or the metadata or a file is not supported.
    """
    try:
        with closing(messages(_send_files, place, config, split, memory=_MEMORY, check=check)) as received:
            answer = json.loads(next(received))
    except ProcessEndedError as end:
        raise DatasetError(f"{place}: reading the metadata {end}: submit one job for each data file ({place}/FILE)") from None
    if "problem" in answer:
        raise DatasetError(f"{place}: {answer['problem']}")
    return [HubFile(HubPlace(place.repository, answer["commit"]), path) for path in answer["paths"]]


# In the process


def _send_files(connection: Connection, place: HubPlace, config: str | None, split: str) -> None:
    from huggingface_hub import HfApi, constants

    signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
    try:
        with translated(place):
            about = HfApi(library_name="reflogp").dataset_info(place.repository, revision=place.revision)
        at = HubPlace(place.repository, str(about.sha))
        _check_metadata(at, {entry.rfilename for entry in about.siblings or ()})
        with tempfile.TemporaryDirectory(prefix="reflogp-hub-") as empty:
            os.chdir(empty)  # `datasets` would take a folder of the repository's name for the dataset
            constants.HF_HUB_CACHE = empty  # for README.md
            answer: dict[str, Any] = {"commit": at.revision, "paths": _paths(at, config, split, empty)}
    except ReflogpError as error:
        answer = {"problem": str(error).removeprefix(f"{place}: ")}
    connection.send_bytes(json.dumps(answer).encode())


def _check_metadata(place: HubPlace, names: set[str]) -> None:
    """Raise DatasetError if the metadata names files outside the repository, which `datasets` would look for."""
    from huggingface_hub import DatasetCard

    if ".huggingface.yaml" in names:
        raise DatasetError(f"metadata in .huggingface.yaml is not supported: submit one job for each data file ({place}/FILE)")
    if "README.md" not in names:
        return
    _, pieces = HubFile(place, "README.md").read(1 << 20)
    try:  # parsed in the same way as by `datasets`
        configs = DatasetCard(b"".join(pieces).decode()).data.get("configs") or []
        of_files = [value for config in configs for name, value in config.items() if name in ("data_files", "data_dir")]
        texts = re.findall(r'"((?:[^"\\]|\\.)*)"', json.dumps(of_files, ensure_ascii=False))
    except ReflogpError:
        raise
    except Exception as error:  # the YAML parser and the field checks raise many types of exceptions
        raise DatasetError(f"the metadata in README.md cannot be read: {shortened(sentence(error))}") from error
    for text in texts:
        if ":" in text or text.startswith(("/", "~", "\\")) or ".." in re.split(r"[/\\]", text):
            raise DatasetError(f"README.md names files outside of the repository: {shortened(text)}")


def _paths(place: HubPlace, config: str | None, split: str, cache: str) -> list[str]:
    import datasets

    try:
        builder = datasets.load_dataset_builder(place.repository, config, revision=place.revision, cache_dir=cache)
    except MemoryError:
        raise
    except Exception as error:  # exceptions of many types, which all mean that the dataset cannot be loaded
        text = " ".join(str(error).partition("Example of usage")[0].split())
        raise DatasetError(f"`datasets` cannot load the dataset: {shortened(text)}") from error
    splits = builder.config.data_files or {}
    if split not in splits:
        raise DatasetError(f"the dataset has no split {split!r}; choose from {', '.join(map(str, splits))}")
    plain = type(builder.config)()
    names = [field.name for field in fields(plain) if field.name not in _PLACES]
    if options := [name for name in names if getattr(builder.config, name) != getattr(plain, name)]:
        raise DatasetError(
            f"the dataset's metadata sets {', '.join(options)}, but the service does not support options that change how files "
            "are read: score the dataset with `reflogp score`, or upload it to the service as a Parquet file"
        )
    paths = [str(url).removeprefix(f"{place}/") for url in splits[split]]
    if len(paths) > MOST_ENTRIES:
        raise DatasetError(f"split {split!r} has {len(paths):,} files; at most {MOST_ENTRIES:,} are supported")
    for path in paths:
        if HubFile.parse(f"{place}/{path}").path != path:
            raise DatasetError(f"the split contains a file outside of the repository: {shortened(path)}")
        if dataset_suffix(path) is None:
            raise DatasetError(f"{shortened(path)} does not end in {SUFFIXES_IN_WORDS}")
    return paths
