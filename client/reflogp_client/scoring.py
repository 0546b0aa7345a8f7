"""Online scoring: what is sent, and what comes back.

Knows the columns of question and answer. Does not know how they are sent. Called by `client`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp_client import wire
from reflogp_client.errors import SequencesRefusedError
from reflogp_store import UsageError
from reflogp_store.arrow_stream import ARROW_STREAM, stream_bytes
from reflogp_store.keys import token_lists

#: n lists of token ids: Python lists, numpy arrays (one of two dimensions too) or an Arrow list array.
TokenIds: TypeAlias = "Sequence[Sequence[int]] | Sequence[npt.NDArray[Any]] | npt.NDArray[Any] | pa.Array | pa.ChunkedArray"

#: Seconds to wait for the values where no deadline is given: a reference model may have to be loaded first.
_PATIENCE = 600.0


@dataclass(frozen=True)
class Scores:
    """Values of n sequences.

    Attributes:
        token_logps: float32 arrays in the order of the request, one value per completion token, nats.
        reference_id: which reference model gave them.
        hits: sequences that the store had.
        engine_seconds, queue_seconds: spent computing, and waiting for it.
    """

    token_logps: list[npt.NDArray[np.float32]]
    reference_id: str
    hits: int
    engine_seconds: float
    queue_seconds: float


def score_call(
    reference: str,
    prompts: TokenIds,
    completions: TokenIds,
    temperature: float,
    cache_read: bool,
    cache_write: bool,
    deadline: float | None,
    patience: float | None,
    attention_masks: TokenIds | None = None,
) -> wire.Call:
    if deadline is not None and not deadline > 0:
        raise UsageError(f"deadline {deadline}: give seconds above 0")
    columns = {"prompt_ids": _lists(prompts, "prompts"), "completion_ids": _lists(completions, "completions")}
    if len(columns["prompt_ids"]) != len(columns["completion_ids"]):
        raise UsageError(f"{len(columns['prompt_ids'])} prompts but {len(columns['completion_ids'])} completions")
    if attention_masks is not None:
        columns["attention_mask"] = _lists(attention_masks, "attention_masks")
        if len(columns["attention_mask"]) != len(columns["prompt_ids"]):
            raise UsageError(f"{len(columns['prompt_ids'])} prompts but {len(columns['attention_mask'])} attention masks")
    return wire.Call(
        "POST",
        "/v1/score",
        {
            "reference": reference,
            "temperature": temperature,
            "cache_read": str(cache_read).lower(),
            "cache_write": str(cache_write).lower(),
        },
        stream_bytes(pa.table(columns)),
        {"content-type": ARROW_STREAM},
        # A store keeps the first value of a key, so a repeat changes nothing; but after a timeout the service may still be
        # computing, and a repeat would add to what made it late.
        again=wire.DROPPED,
        wait=patience or _PATIENCE,
        until=None if deadline is None else time.monotonic() + deadline,
    )


def scores_of(response: httpx.Response) -> Scores:
    """Raises SequencesRefusedError where a sequence has no values."""

    def read(table: pa.Table, about: dict[str, str]) -> tuple[pa.Table, Scores]:
        values = wire.float_lists(table["token_logps"])
        seconds = float(about["engine_seconds"]), float(about["queue_seconds"])
        return table["error"], Scores(values, about["reference_id"], int(about["hits"]), *seconds)  # type: ignore[arg-type]

    errors, scores = wire.arrow_answer(response, read)
    if errors.null_count < len(errors):
        problems = {position: error for position, error in enumerate(errors.to_pylist()) if error is not None}
        raise SequencesRefusedError(problems, list(scores.token_logps))
    return scores


def _lists(ids: TokenIds, name: str) -> pa.ListArray:
    """As list<uint32>; raises UsageError for anything else than lists of token ids."""
    try:
        return token_lists(list(ids) if isinstance(ids, np.ndarray) else ids, name).cast(pa.list_(pa.uint32()))
    except (pa.ArrowException, TypeError) as error:
        raise UsageError(f"{name}: expected lists of token ids ({str(error).splitlines()[0]})") from error
