"""A world for random sequences of operations: a real service, its store, references and datasets, all of which can change.

`Library` holds every version of weights, tokenizers and datasets in folders that nobody else touches, and computes what is
right for each: token ids from those files, values from a plain float32 forward. `World` is one service over copies of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import deltalake
import httpx
import numpy as np
import psutil
import pyarrow as pa

from reflogp.store import describe_reference, sequence_keys
from tests.conftest import plain_token_logps, write_rows
from tests.service.serving import Service, command_line, float32, settings_file, token_rows
from tests.service.warm_python import WarmPython

#: Versions of the weights; and tokenizers, each a vocabulary with a chat template.
WEIGHTS = 4
TOKENIZERS = ((0, 0), (0, 1), (1, 0), (1, 1))
#: Rows of the datasets of token ids, and of those of conversations, which come after them.
TOKEN_ROWS, TEXT_ROWS = (5, 40, 150, 20, 60), (6, 12, 8)
DATASETS = len(TOKEN_ROWS) + len(TEXT_ROWS)
#: Largest difference of a value from a plain float32 forward. Versions differ by more than 1 a token.
VALUE_TOLERANCE = 1e-3
#: Bytes of the disk that holds the service's state and the store.
_DISK_BYTES = 32 << 20
#: Seconds within which /healthz must answer, on a machine that does much else.
_HEALTH_SECONDS = 15

#: (prompt, chosen, rejected)
Pair = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Library:
    """Every version of everything, and what is right for it.

    Attributes:
        versions: reference id -> number of the weights.
        ids: the reference id of each.
        sequences: key -> (prompt, completion), of every sequence that was ever made.
    """

    def __init__(self, folder: Path, pair_rows: list[dict]) -> None:
        self._folder = folder
        self._make_tokenizers([message["content"] for row in pair_rows for side in row.values() for message in side])
        for number in range(WEIGHTS):
            self._make_weights(number)
        short = sorted(pair_rows, key=lambda row: len(json.dumps(row)))[: sum(TEXT_ROWS)]
        shared = token_rows(10, seed=1000)
        for number, count in enumerate(TOKEN_ROWS):
            rows = token_rows(count, seed=number, length=12)
            rows[1:3] = shared[number : number + 2]  # some sequences are in two datasets
            write_rows(self.dataset(number), rows)
        for number, count in enumerate(TEXT_ROWS):
            write_rows(self.dataset(len(TOKEN_ROWS) + number), [short.pop() for _ in range(count)])
        self.ids = [describe_reference(str(self.weights(number).parent), "float32").reference_id for number in range(WEIGHTS)]
        self.versions = {reference_id: number for number, reference_id in enumerate(self.ids)}
        self.sequences: dict[bytes, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for dataset in range(DATASETS):
            for kind in TOKENIZERS:
                self.pairs(dataset, kind)

    def weights(self, number: int) -> Path:
        """The weights' file, in a folder with its config."""
        return self._folder / f"weights-{number}" / "model.safetensors"

    def tokenizer(self, kind: tuple[int, int]) -> Path:
        return self._folder / "tokenizer-{}-{}".format(*kind)

    def dataset(self, number: int) -> Path:
        return self._folder / f"dataset-{number}.jsonl"

    def digest(self, number: int) -> str:
        """sha256 of a dataset's file."""
        return hashlib.sha256(self.dataset(number).read_bytes()).hexdigest()

    @cache  # noqa: B019
    def pairs(self, dataset: int, kind: tuple[int, int]) -> list[Pair]:
        """The token ids of a dataset's rows, by a tokenizer."""
        from reflogp.scoring.data.read import RowSource
        from reflogp.scoring.data.tokenize import load_tokenizer, tokenize_dataset

        windows = tokenize_dataset(RowSource(str(self.dataset(dataset))), load_tokenizer(str(self.tokenizer(kind))))
        found = []
        for row in pa.concat_tables([window.table for window in windows]).to_pylist():
            prompt, chosen, rejected = (tuple(row[name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
            found.append((prompt, chosen, rejected))
            self.key(prompt, chosen)
            self.key(prompt, rejected)
        return found

    @cache  # noqa: B019
    def key(self, prompt: tuple[int, ...], completion: tuple[int, ...]) -> bytes:
        """The sequence's key, which stands for it from now on."""
        key = sequence_keys([list(prompt)], [list(completion)])[0].as_py()
        self.sequences[key] = prompt, completion
        return key

    @cache  # noqa: B019
    def values(self, version: int, key: bytes) -> np.ndarray:
        """log p of each completion token by a plain float32 forward of these weights."""
        return np.array(plain_token_logps(self._model(version), *self.sequences[key]))

    @cache  # noqa: B019
    def _model(self, version: int) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.weights(version).parent, dtype=torch.float32).eval()

    def _make_tokenizers(self, texts: list[str]) -> None:
        from reflogp.cli.demo_model import train_tokenizer

        for vocabulary, template in TOKENIZERS:
            tokenizer = train_tokenizer(texts[vocabulary::2], vocab_size=1000)
            if template:
                tokenizer.chat_template = tokenizer.chat_template.replace("message['content'] +", "message['content'] + ' .' +")
            tokenizer.save_pretrained(self.tokenizer((vocabulary, template)))

    def _make_weights(self, number: int) -> None:
        import torch
        from safetensors.torch import save_file
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(number)
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(
            vocab_size=1024, initializer_range=0.4, tie_word_embeddings=True, architectures=["LlamaForCausalLM"], **size
        )
        self.weights(number).parent.mkdir()
        config.to_json_file(self.weights(number).with_name("config.json"))
        tensors = LlamaForCausalLM(config).state_dict()
        del tensors["lm_head.weight"]  # it is the embedding
        save_file(tensors, self.weights(number), metadata={"format": "pt"})


class Disk:
    """A small disk that can be filled: a tmpfs of its own where this process may mount one, else a limit on files' sizes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
        self._mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        self._limited: set[int] = set()

    def fill(self, left: int, processes: list[int]) -> None:
        """Leave so many bytes; without a disk of its own, let these processes make no file longer than that."""
        if self._mounted:
            room = os.statvfs(self.folder)
            with suppress(OSError), (self.folder / "filler").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, room.f_bavail * room.f_frsize - left))
        else:
            for process in processes:
                with suppress(ProcessLookupError):
                    resource.prlimit(process, resource.RLIMIT_FSIZE, (left, resource.RLIM_INFINITY))
                    self._limited.add(process)

    def free(self, processes: list[int]) -> None:
        (self.folder / "filler").unlink(missing_ok=True)
        for process in {*self._limited, *(processes if self._limited else [])}:  # what was started meanwhile inherits it
            with suppress(ProcessLookupError):
                resource.prlimit(process, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self._limited.clear()

    def close(self) -> None:
        if self._mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


class World:
    """A service over two references of which one is loaded at a time, two files below a root, a store and a small disk.

    Attributes:
        weights: reference -> version of its weights on the disk.
        served: reference -> version that the running service describes it by.
        tokenizers: reference -> its tokenizer on the disk.
        files: name below the root -> its dataset.
        orphans: workers whose service was killed; they end by themselves.
        missed: what was wrong with answers of /healthz, which is asked ten times a second while the service lives.
    """

    def __init__(self, folder: Path, library: Library, warm: WarmPython) -> None:
        self.library = library
        self._warm = warm
        self._folder = folder
        self.root = folder / "root"
        self.root.mkdir()
        self.disk = Disk(folder / "disk")
        self.store = self.disk.folder / "store"
        self.weights, self.tokenizers, self.files = {"a": 0, "b": 1}, {}, {}
        for reference, version in self.weights.items():
            shutil.copytree(library.weights(version).parent, self.model(reference))
            self.swap_tokenizer(reference, TOKENIZERS[0])
        for name, dataset in (("one.jsonl", 0), ("two.jsonl", 6)):
            self.swap_dataset(name, dataset, "rename")
        models = {reference: float32(self.model(reference)) for reference in self.weights}
        more = {"token_budget": 160, "commit_seconds": 0.1, "dataset_roots": [str(self.root)]}
        self._settings = settings_file(self.disk.folder, self.store, models, **more)
        self._killed: Service | None = None
        self.orphans: set[psutil.Process] = set()
        self.start()
        self.missed: list[str] = []
        self._end = threading.Event()
        self._pulse = threading.Thread(target=self._ask_health, daemon=True)
        self._pulse.start()

    def model(self, reference: str) -> Path:
        return self._folder / reference

    # processes

    def start(self) -> None:
        """Start the service. Raises AssertionError with its log when it ends at once."""
        served = dict(self.weights)
        self.service = Service("--config", self._settings, warm=self._warm)
        self.served = served

    def pids(self) -> list[int]:
        """The service and its workers."""
        return [pid for pid in (self.service.pid, *(worker.pid for worker in self.service.workers())) if pid]

    def kill_service(self) -> bool:
        """kill -9; whether it was running."""
        if not self.service.pid:
            return False
        self.orphans |= {*self.service.workers(), *self.service.runners()}
        self._killed = self.service
        self.service.kill()
        return True

    def command_line(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `reflogp` with these arguments."""
        command = command_line(*arguments, warm=self._warm)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def _ask_health(self) -> None:
        while not self._end.wait(0.1):
            service, problem = self.service, ""
            if service.process.poll() is not None:
                continue
            try:
                answer = httpx.get(f"{service.url}/healthz", timeout=_HEALTH_SECONDS)
                if answer.status_code != 200:
                    problem = f"{answer.status_code} {answer.text[:200]}"
            except httpx.HTTPError as error:
                problem = repr(error)
            if problem and service is not self._killed and service.process.poll() is None:
                self.missed.append(problem)

    # what lies on the disk

    def swap_weights(self, reference: str, version: int, how: str) -> None:
        """Put other weights in a reference's folder: `rename` a new file over, write `in place`, or make it a `link`."""
        _swap(self.library.weights(version), self.model(reference) / "model.safetensors", how)
        self.weights[reference] = version

    def swap_tokenizer(self, reference: str, kind: tuple[int, int]) -> None:
        """Put another tokenizer in a reference's folder, file by file."""
        for file in sorted(self.library.tokenizer(kind).iterdir()):
            _swap(file, self.model(reference) / file.name, "rename")
        self.tokenizers[reference] = kind

    def swap_dataset(self, name: str, dataset: int, how: str) -> None:
        kept = self.root / f"kept-{dataset}.jsonl"  # a link leads to a file below the root
        if not kept.exists():
            shutil.copyfile(self.library.dataset(dataset), kept)
        _swap(kept, self.root / name, how)
        self.files[name] = dataset

    def lock_ledger(self, seconds: float) -> threading.Timer:
        """Hold the ledger's write lock for so long; the timer ends it."""
        file = self.disk.folder / "state" / "jobs.sqlite"
        other = sqlite3.connect(file, timeout=1, isolation_level=None, check_same_thread=False)
        with suppress(sqlite3.Error):  # the disk is full, or another lock is there
            other.execute("begin immediate")
        timer = threading.Timer(seconds, other.close)
        timer.daemon = True
        timer.start()
        return timer

    # what is in the store

    def wrong_rows(self) -> list[str]:
        """What is wrong with any row of every table in the store, read by delta-rs alone."""
        wrong = []
        for folder in sorted(path.parent for path in self.store.glob("*/logprobs/_delta_log") if any(path.iterdir())):
            reference_id = folder.parent.name
            rows = deltalake.DeltaTable(str(folder)).to_pyarrow_table(columns=["key", "token_logps"]).to_pylist()
            version = self.library.versions.get(reference_id)
            for row in rows:
                key, values = row["key"], np.array(row["token_logps"])
                if version is None or key not in self.library.sequences:
                    wrong.append(f"reference {reference_id}, key {key.hex()}: nobody asked for it")
                elif not 0 < len(values) <= len(self.library.sequences[key][1]):
                    wrong.append(f"reference {reference_id}, key {key.hex()}: {len(values)} values")
                elif np.abs(values - self.library.values(version, key)[: len(values)]).max() > VALUE_TOLERANCE:
                    wrong.append(f"reference {reference_id}, key {key.hex()}: not the values of version {version}")
        return wrong

    def close(self) -> None:
        """End everything, at once."""
        self._end.set()
        self._pulse.join()
        for worker in (*self.service.workers(), *self.orphans):
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        self.kill_service()
        self.disk.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _swap(source: Path, target: Path, how: str) -> None:
    """Give `target` the content of `source`."""
    if how == "in place" and target.is_file() and not target.is_symlink():
        before = target.stat()
        with target.open("r+b") as file:
            file.write(source.read_bytes())
            file.truncate()
        os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
        return
    hidden = target.with_name(f".{target.name}.new")
    if how == "link":
        hidden.symlink_to(source)
    else:
        shutil.copyfile(source, hidden)
    hidden.replace(target)
