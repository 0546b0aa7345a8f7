"""Build the requests for online scoring, and parse the service's responses, without sending anything."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.client import protocol
from reflogp.client.errors import RequestRefusedError, SequencesRefusedError
from reflogp.store import UsageError
from reflogp.store.keys import token_lists
from reflogp.store.schema import ARROW_STREAM, one_array, stream_bytes
from reflogp.store.texts import counted, short_repr

#: Lists of token ids, with one list for each sequence. They can be Python lists, one-dimensional numpy arrays, the rows of a
#: two-dimensional numpy array, or an Arrow list array.
TokenIds: TypeAlias = "Sequence[Sequence[int]] | Sequence[npt.NDArray[Any]] | npt.NDArray[Any] | pa.Array | pa.ChunkedArray"

#: Seconds to wait for a response if neither a deadline nor a timeout of the client is given. The service may have to load a
#: reference model during this time.
_PATIENCE = 600.0
#: Maximum number of sequences and of tokens in one request: half of a service's default limits. If a service with lower limits
#: responds with 413, smaller requests are sent.
_SEQUENCES_AT_ONCE, _TOKENS_AT_ONCE = 2_048, 2 << 20


@dataclass(frozen=True)
class Scores:
    """The log-probs of n sequences.

    If the sequences were sent in several requests, engine_seconds and queue_seconds are totals over these requests.

    Attributes:
        token_logps: list with one float32 array for each sequence, in the order of the request. Each array has one value per
            completion token, in nats.
        reference_id: id of the reference model that computed the values.
        hits: number of sequences whose values came from the store.
        engine_seconds: seconds from the start of the computation to its last value; 0 if all values came from the store. If the
            service computed other requests together with this one, the time can include work on them.
        queue_seconds: seconds that the request waited before its computation started, including the time to load the model.

    Examples:
        >>> from reflogp.client import Client
        >>> with Client("http://127.0.0.1:8311") as client:
        ...     scores = client.score("sft", [[1, 5, 9], [1, 5, 9]], [[7, 2], [8]])
        >>> [logps.shape for logps in scores.token_logps]
        [(2,), (1,)]
    """

    token_logps: list[npt.NDArray[np.float32]]
    reference_id: str
    hits: int
    engine_seconds: float
    queue_seconds: float

    def __repr__(self) -> str:
        values = sum(map(len, self.token_logps))
        return short_repr(
            "Scores",
            f"{counted(len(self.token_logps), 'sequence')}, {counted(values, 'log-prob')}: {counted(self.hits, 'hit')}",
            f"{self.engine_seconds:.2f} s computing, {self.queue_seconds:.2f} s in the queue",
            f"reference {self.reference_id}",
        )


def sequences(prompts: TokenIds, completions: TokenIds, attention_masks: TokenIds | None = None) -> pa.Table:
    """Return the sequences as the table to send, with the columns prompt_ids, completion_ids and, if masks are given,
    attention_mask.

    Raises UsageError if the arguments are not lists of token ids, or do not all contain the same number of lists.
    """
    columns = {"prompt_ids": _lists(prompts, "prompts"), "completion_ids": _lists(completions, "completions")}
    if len(columns["prompt_ids"]) != len(columns["completion_ids"]):
        raise UsageError(
            f"the number of completions ({len(columns['completion_ids'])}) must equal the number of prompts "
            f"({len(columns['prompt_ids'])})"
        )
    if attention_masks is not None:
        columns["attention_mask"] = _lists(attention_masks, "attention_masks")
        if len(columns["attention_mask"]) != len(columns["prompt_ids"]):
            raise UsageError(
                f"the number of attention masks ({len(columns['attention_mask'])}) must equal the number of prompts "
                f"({len(columns['prompt_ids'])})"
            )
    return pa.table(columns)


def scoring(
    reference: str,
    table: pa.Table,
    temperature: float,
    cache_read: bool,
    cache_write: bool,
    deadline: float | None,
    patience: float | None,
) -> protocol.Plan[Scores]:
    """Score the sequences in `table`, with as many requests as the service's limits require.

    Args:
        deadline: maximum number of seconds for all requests together, or None for no deadline.
        patience: maximum number of seconds to wait for each response, or None for 10 minutes. If `deadline` is given,
            `patience` is not used.

    Raises:
        SequencesRefusedError: some sequences could not be scored. Raised only after all sequences have been sent.
        UsageError: `deadline` is not positive.
    """
    if deadline is not None and not deadline > 0:
        raise UsageError(f"deadline {deadline}: must be more than 0 seconds")
    params = {
        "reference": reference,
        "temperature": temperature,
        "cache_read": str(cache_read).lower(),
        "cache_write": str(cache_write).lower(),
    }
    until = None if deadline is None else time.monotonic() + deadline
    before = _tokens_before(table)
    parts: list[Scores] = []
    problems: dict[int, str] = {}
    at, most = 0, _SEQUENCES_AT_ONCE
    while at < len(table) or not parts:
        stop = int(np.searchsorted(before, before[at] + _TOKENS_AT_ONCE, "right")) - 1
        part = table.slice(at, min(most, max(stop - at, 1)))
        try:
            answer = yield _score_call(params, part, patience, until)
        except RequestRefusedError as error:
            most = protocol.fewer(error, len(part))
            continue
        errors, scores = _scores_of(answer)
        problems |= {at + position: error for position, error in enumerate(errors) if error is not None}
        parts.append(scores)
        at += len(part)
    scores = _joined(parts)
    if problems:
        raise SequencesRefusedError(problems, list(scores.token_logps))
    return scores


def _score_call(params: dict[str, Any], table: pa.Table, patience: float | None, until: float | None) -> protocol.Call:
    return protocol.Call(
        "POST",
        "/v1/score",
        params,
        stream_bytes(table),
        {"content-type": ARROW_STREAM},
        # A retry after a lost connection is safe: the store keeps the values that were first stored for a key. After a timeout,
        # there is no retry, because the service may still be computing and a retry would add to its load.
        again=protocol.DROPPED,
        wait=patience or _PATIENCE,
        until=until,
    )


def _scores_of(response: httpx.Response) -> tuple[list[str | None], Scores]:
    """Read a response: return each sequence's error message (None if the sequence was scored), and the scores."""

    def read(table: pa.Table, about: dict[str, str]) -> tuple[list[str | None], Scores]:
        values = protocol.float_lists(table["token_logps"])
        seconds = float(about["engine_seconds"]), float(about["queue_seconds"])
        scores = Scores(values, about["reference_id"], int(about["hits"]), *seconds)  # type: ignore[arg-type]
        return table["error"].to_pylist(), scores

    return protocol.arrow_answer(response, read)


def _joined(parts: list[Scores]) -> Scores:
    if len(parts) == 1:
        return parts[0]
    return Scores(
        [values for part in parts for values in part.token_logps],
        parts[0].reference_id,
        sum(part.hits for part in parts),
        sum(part.engine_seconds for part in parts),
        sum(part.queue_seconds for part in parts),
    )


def _tokens_before(table: pa.Table) -> npt.NDArray[np.int64]:
    """Return the number of tokens before each of the n sequences, followed by the total number: int64 of shape (n + 1,)."""
    tokens = np.zeros(len(table) + 1, np.int64)
    for name in ("prompt_ids", "completion_ids"):
        tokens[1:] += one_array(table[name]).value_lengths().to_numpy(zero_copy_only=False)
    return np.cumsum(tokens)


def _lists(ids: TokenIds, name: str) -> pa.ListArray:
    """Return lists of token ids as an Arrow list<uint32> array. Raises UsageError if `ids` contains anything else."""
    try:
        return token_lists(list(ids) if isinstance(ids, np.ndarray) else ids, name).cast(pa.list_(pa.uint32()))
    except (pa.ArrowException, TypeError) as error:
        raise UsageError(f"{name}: expected lists of token ids ({str(error).splitlines()[0]})") from error
