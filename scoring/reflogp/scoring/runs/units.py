"""Encode units for workers. In the workers, decode and score the units, and commit the values.

A unit consists of misses (sequences that the store lacks) that one worker scores together. Workers commit the values
themselves, so values are never sent back to the run's main process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from reflogp.scoring.data.images import decoded
from reflogp.scoring.data.shape import RowError
from reflogp.scoring.engines import Engine, EngineChoice
from reflogp.scoring.errors import EngineError
from reflogp.scoring.machine import growing_segments
from reflogp.scoring.runs.pipeline import COMMIT_SECONDS, Committed, Ended, Event, Failed, Miss, Scored, ScoringPipeline
from reflogp.scoring.torch_engine.sequences import Sequence, SequenceImages, TokenCounts, picture_files
from reflogp.scoring.vision import VisionProcessor, load_processor
from reflogp.scoring.wire import SentSequence, decode_sequences, encode_sequences, sent_images
from reflogp.store import (
    Reference,
    ReferenceNotFoundError,
    Store,
    StoreNotFoundError,
    UsageError,
    resolve_model,
)
from reflogp.store.images import pixel_digest
from reflogp.store.top import ValuesTable


@dataclass(frozen=True)
class _SentPicture:
    digest: bytes
    file: bytes

    @property
    def size(self) -> int:
        return len(self.file)

    @property
    def held(self) -> int:
        return len(self.file)

    def load(self) -> Any:
        """Return the decoded image. Raises RowError if its pixels differ from those that the run's main process decoded."""
        image = decoded(self.file)
        if pixel_digest(image) != self.digest:
            raise RowError(
                "a worker decodes an image to different pixels than the run's main process; install the same version of "
                "Pillow on every machine"
            )
        return image

    def encoded(self) -> bytes:
        return self.file


def encode(misses: list[Miss]) -> tuple[bytes, dict[Miss, str]]:
    """Encode misses (sequences that the store lacks) for a worker.

    Returns:
        A tuple: the encoded unit, and a dict of the misses that were left out because an image cannot be read. The dict maps
        each of these misses to the reason.
    """
    files, unreadable = picture_files(miss.sequence for miss in misses)
    problems = {misses[index]: problem for index, problem in unreadable.items()}
    misses = [miss for miss in misses if miss not in problems]
    sequences = [miss.sequence for miss in misses]
    columns = {
        "key": pa.array([miss.key for miss in misses], pa.binary()),
        "completion_len": pa.array([miss.completion_len for miss in misses], pa.int32()),
        "independent": pa.array([None if each.images is None else each.images.independent for each in sequences], pa.bool_()),
    }
    vision = next((sequence.images.vision for sequence in sequences if sequence.images is not None), None)
    note = None if vision is None else [vision.folder, vision.tokens.settings.hex()]
    sent = [SentSequence(each.ids(), len(each.prompt_ids), sent_images(each, files)) for each in sequences]
    return encode_sequences(sent, columns, note), problems


def decode(content: bytes, find_vision: Callable[[str | None, bytes], VisionProcessor]) -> list[Miss]:
    """Decode the bytes that `encode` returned. The only row of each miss is its index in the unit."""
    sent, table, note = decode_sequences(content)
    vision = None if note is None else find_vision(note[0], bytes.fromhex(note[1]))
    columns = (table[name].to_pylist() for name in ("key", "completion_len", "independent"))
    misses = []
    for index, ((ids, prompt_len, of_row), key, completion_len, independent) in enumerate(zip(sent, *columns, strict=True)):
        images = None
        if of_row is not None and vision is not None:
            pictures = tuple(_SentPicture(*image) for image in zip(of_row.digests, of_row.files, strict=True))
            images = SequenceImages(pictures, of_row.counts, vision, independent)
        sequence = Sequence(ids[:prompt_len], ids[prompt_len:], images=images)
        misses.append(Miss(key, sequence, completion_len, [index]))
    return misses


class VisionCache:
    def __init__(self, model: str, trust_remote_code: bool) -> None:
        self._model = model
        self._trust_remote_code = trust_remote_code
        self._loaded: dict[bytes, VisionProcessor] = {}
        self._lock = threading.Lock()

    def find(self, folder: str | None, settings: bytes) -> VisionProcessor:
        with self._lock:
            for place in [folder, self._model]:
                if settings in self._loaded:
                    break
                found = (
                    load_processor(place, self._model, None, self._trust_remote_code)
                    if place and Path(place).is_dir()
                    else None
                )
                if found is not None:
                    self._loaded[found.tokens.settings] = found
            if settings not in self._loaded:
                raise UsageError(
                    "the run's image processor is not on this worker's machine: put the processor's files in the "
                    "model's folder, or in a folder that has the same path on every machine"
                )
            return self._loaded[settings]


#: Maximum number of units that a worker has at the same time: one that it commits, one that it scores, and one that waits.
IN_FLIGHT = 3
#: Maximum number of seconds to wait before checking again whether the engine has room for a unit.
_LOOK_SECONDS = 0.01


class UnitScorer:
    """Scores units. It accepts several units at a time, so that the engine does not wait for the next unit.

    Args:
        engine: engine that scores the units. Its `flow` method is used only in a thread that this object starts.
    """

    def __init__(self, engine: Engine, table: ValuesTable, vision: VisionCache, commit_seconds: float = COMMIT_SECONDS) -> None:
        self._vision = vision
        self.provenance: dict[str, Any] = {"reflogp": version("reflogp"), **engine.provenance()}
        self._engine = engine
        self._table = table
        self._asked: dict[Miss, _Asked] = {}
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._counted = TokenCounts()
        self.scored = 0
        self._computing = ScoringPipeline(engine, table, self.provenance, self._happened, commit_seconds=commit_seconds)

    def score(self, content: bytes, again: bool) -> dict[str, Any]:
        """Score a unit and commit its values.

        To score several units at the same time, call this method in a separate thread for each unit.

        Args:
            again: True if a lost worker may already have committed values of some of the sequences. Sequences whose values are
                in the store are then not scored again.

        Returns:
            A JSON-compatible dict with three entries. "problems" is a list with the index of each sequence that cannot be
            scored and the reason. "snapshot" is the number of a snapshot that contains the values of all other sequences; it is
            None if every sequence has a problem and `again` is False. "token_counts" are the fields of a TokenCounts: the
            engine's token counts since the previous call returned.

        Raises any error of the engine or the store. Raises EngineError if the worker was stopped before it finished the unit;
        the values computed by then are committed.
        """
        unit = decode(content, self._vision.find)
        problems = self._engine.problems([miss.sequence for miss in unit])
        misses = [miss for index, miss in enumerate(unit) if index not in problems]
        snapshot: int | None = None
        if again:
            now = self._table.snapshot()
            snapshot = now.number
            lengths = now.stored_lengths(pa.array([miss.key for miss in misses], pa.binary()))
            needed = [len(miss.sequence.completion_ids) for miss in misses]
            misses = [miss for miss, length, least in zip(misses, lengths, needed, strict=True) if length < least]
        asked = _Asked(problems, snapshot, len(misses))
        with self._changed:
            self._asked.update((miss, asked) for miss in misses)
            while misses and self.error is None and not self._computing.put(misses, at_once=True):
                self._changed.wait(_LOOK_SECONDS)
            self._changed.wait_for(lambda: not asked.left or self.error is not None)
            if asked.left and self.error is not None:
                raise self.error
            so_far = self._engine.token_counts()
            token_counts, self._counted = so_far - self._counted, so_far
        return {"problems": list(asked.problems.items()), "snapshot": asked.snapshot, "token_counts": astuple(token_counts)}

    def stop(self) -> None:
        self._computing.stop()

    def _happened(self, event: Event | Ended) -> None:
        with self._changed:
            match event:
                case Scored(misses):
                    self.scored += len(misses)
                case Failed(miss, problem):
                    asked = self._asked.pop(miss)
                    asked.problems[miss.rows[0]] = problem
                    asked.left -= 1
                case Committed(misses, snapshot):
                    for miss in misses:
                        asked = self._asked.pop(miss)
                        asked.left -= 1
                        asked.snapshot = snapshot
                case Ended(error):
                    self.error = error or EngineError("the worker was stopped")
            self._changed.notify_all()


@dataclass(eq=False)
class _Asked:
    """The progress of a unit.

    Attributes:
        snapshot: number of a snapshot that contains all values of the unit that have been committed so far; None if no values
            have been committed yet and the unit is not retried (see `again` in UnitScorer.score).
    """

    problems: dict[int, str]
    snapshot: int | None
    left: int


@dataclass(eq=False, repr=False)  # Ray would write the fields into its logs
class ScoringWorker:
    """A worker with one engine. The fields below can be pickled, so that the worker can be created in another process.

    Attributes:
        threads: number of torch's CPU threads; used only if the engine uses no GPU (see EngineChoice.gpus).
    """

    model: str
    revision: str | None
    reference: Reference
    choice: EngineChoice
    store: str
    threads: int
    _units: UnitScorer | None = None

    def prepare(self) -> dict[str, Any]:
        """Load the engine and open the store. Return the provenance of the values that the engine will compute.

        Raises:
            UsageError: the model is not found on this machine.
            ContentMismatchError: its weights on this machine differ from those of the reference.
            EngineError: the run's store is not there.
        """
        os.environ.update(growing_segments(os.environ))  # torch reads these variables when it first uses the GPU
        if not self.choice.gpus():
            torch.set_num_threads(self.threads)
        wanted = self.reference
        folder = resolve_model(self.model, self.revision)
        store = Store(self.store)
        try:
            store[wanted]  # the run has created it
        except (StoreNotFoundError, ReferenceNotFoundError) as error:
            raise EngineError(
                f"the store {store.uri} is not shared with this machine: use a folder on a filesystem that all machines share"
            ) from error
        table = store.values_table(wanted, self.choice.top_k)
        vision = VisionCache(str(folder), self.choice.trust_remote_code)
        self._units = units = UnitScorer(self.choice.make(str(folder), wanted), table, vision)
        return units.provenance

    def score(self, content: bytes, again: bool) -> dict[str, Any]:
        assert self._units is not None, "`prepare` is called before `score`"
        return self._units.score(content, again)

    def progress(self) -> int:
        return 0 if self._units is None else self._units.scored

    def stop(self) -> None:
        if self._units is not None:
            self._units.stop()
