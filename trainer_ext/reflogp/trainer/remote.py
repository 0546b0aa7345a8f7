"""Get reference log-probs from a service, through an object that replaces a trainer's reference model.

All processes of a distributed run succeed or fail together.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from reflogp.client import (
    DeadlineExceededError,
    RequestRefusedError,
    SequencesRefusedError,
    ServiceBusyError,
    ServiceUnreachableError,
)
from reflogp.store import UsageError
from reflogp.store.texts import short_repr
from reflogp.trainer.construction import ReferenceDuringTraining
from reflogp.trainer.errors import ReferenceChangedError, UnusableLogpsError
from reflogp.trainer.padded import PaddedBatch, Wanted
from reflogp.trainer.ranks import gather, on_all_ranks, outcome_on_all_ranks
from reflogp.trainer.source import ReferenceSource
from reflogp.trainer.tolerances import how_to_compute_in
from reflogp.trainer.values import ServiceValues

logger = logging.getLogger(__name__)

Logps = npt.NDArray[np.float32]

#: Seconds between warnings that a step is waiting for the service.
_WORDS_SECONDS = 30.0
#: Maximum number of sequences per request; a service's default limit is 4,096.
_SEQUENCES_AT_ONCE = 1024


@dataclass
class Traffic:
    """The number of batches, sequences and tokens that a service has scored for this process, and how long this took.

    Attributes:
        batches: number of batches whose values were received.
        sequences: number of sequences that the service scored.
        tokens: total number of prompt and completion tokens in these sequences.
        seconds: time from sending a batch's requests to receiving the batch's values, summed over all batches.
        waited_seconds: the part of `seconds` during which the trainer waited for values and did no other work.
    """

    batches: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return a dict of the attributes and one more number, `hidden_share`.

        `hidden_share` is the fraction of `seconds` during which the trainer did not wait for values, or None if `seconds` is 0.
        """
        hidden = 1 - self.waited_seconds / self.seconds if self.seconds else None
        return {**asdict(self), "hidden_share": hidden}


class RemoteReference(ReferenceDuringTraining):
    """An object that takes the place of a reference model, and requests log-probs from the service that runs the model.

    A RemoteReference cannot be called like a model: a model returns logits for the whole vocabulary, but the service returns
    only one log-prob per token. Call `per_token_logps` to get the log-probs.

    Args:
        source: a ReferenceSource with the URL of a running service and the reference model's name, path or id.
        deadline: maximum number of seconds to wait for one batch's values, including retries and the pauses between retries.
            The service may be slow, unreachable or restarting for this long before an error is raised.
        absolute_positions: whether the reference model has an embedding table for absolute positions (as GPT-2 does), so that
            left padding changes a token's position embedding. If True, rows are scored with their left padding.

    Raises:
        UsageError: the source is not a service, or the deadline is not above 0.
        ReferenceNotFoundError, ServiceError: the service does not have the reference, or is unreachable.
        ReferenceChangedError: the processes of a distributed run got different references from the service.
        RankFailedError: another process could not use the service or the reference.

    Attributes:
        where: the service's URL, the reference's id and dtype, and the snapshot number. If the source names no snapshot, the
            number is that of the latest snapshot.
        traffic: what the service has scored for this process so far, and how long this took.

    Examples:
        >>> import torch
        >>> from reflogp.trainer import ReferenceSource, RemoteReference
        >>> reference = RemoteReference(ReferenceSource("http://127.0.0.1:8311", reference="sft"))
        >>> reference.per_token_logps(torch.tensor([[1, 5, 9, 7, 2]]), completion_tokens=2).shape
        torch.Size([1, 2])
        >>> reference
        RemoteReference(
            reference ... in bfloat16 at http://...
            batches 1, sequences 1, waited ... s
        )
    """

    of_generated_text = True

    def __init__(self, source: ReferenceSource, deadline: float = 600.0, absolute_positions: bool = False) -> None:
        if not source.is_service:
            raise UsageError(
                f"{source.location} is not a service, but only a service can score newly generated text: pass an http:// "
                "address"
            )
        if not deadline > 0:
            raise UsageError(f"deadline={deadline}: must be a number of seconds above 0")
        self.traffic = Traffic()
        self.absolute_positions = absolute_positions
        self._deadline = deadline
        self._pending: _Pending | None = None
        self._values = on_all_ranks("reaching the reference service", lambda: _connected(source))
        self.where = self._values.where
        ids = sorted({where.reference_id for where in gather(self.where)})
        if len(ids) > 1:
            raise ReferenceChangedError(
                f"the service gave the processes of this run different references ({', '.join(ids)}): start the run again"
            )

    def __repr__(self) -> str:
        where, traffic = self.where, self.traffic
        return short_repr(
            "RemoteReference",
            f"reference {where.reference_id} in {where.reference_dtype} at {where.store}",
            f"batches {traffic.batches:,}, sequences {traffic.sequences:,}, waited {traffic.waited_seconds:.1f} s",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "the reference model runs in a service, which does not return logits; call "
            "per_token_logps(input_ids, attention_mask, …)"
        )

    def per_token_logps(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        completion_tokens: int | None = None,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """Return the log-prob of each token given the tokens before it.

        In a distributed run, all processes must call this method together.

        Args:
            input_ids: token ids, padded on either side, shape (rows, width).
            attention_mask: 0 at padding and 1 at all other tokens, shape (rows, width), or None if there is no padding.
            completion_tokens: number of columns at the right of `input_ids` for which to return log-probs, or None for all
                columns except the first.
            temperature: value by which logits are divided.

        Returns:
            a float32 tensor on the device of `input_ids`. Its shape is (rows, completion_tokens), or (rows, width - 1) if
            `completion_tokens` is None. Log-probs are zero at padding and, if `completion_tokens` is None, at the first token
            after left padding.

        Raises:
            UsageError: the shapes do not match, `completion_tokens` is out of range, or the temperature is not above 0.
            UnusableLogpsError: the service cannot score some rows, or returns log-probs that are not finite.
            ReferenceChangedError: the service no longer serves the reference that the run started with.
            ServiceError: the service did not respond before the deadline.
            RankFailedError: another process raised one of these errors.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        width = input_ids.shape[1]
        if mask.shape != input_ids.shape:
            raise UsageError(f"attention_mask has the shape {tuple(mask.shape)}, but input_ids has {tuple(input_ids.shape)}")
        if completion_tokens is not None and not 0 < completion_tokens <= width:
            raise UsageError(
                f"completion_tokens={completion_tokens}: must be 1 to {width} (the width of input_ids), or None for all tokens "
                "except the first"
            )
        if not temperature > 0:
            raise UsageError(f"temperature={temperature}: must be above 0")
        batch = PaddedBatch.of(input_ids, mask, completion_tokens or width, temperature=temperature)
        values = self.collect(batch)
        return torch.from_numpy(values[:, 1:] if completion_tokens is None else values).to(input_ids.device)

    def as_dict(self) -> dict[str, Any]:
        """See ReferenceDuringTraining.as_dict."""
        return {**asdict(self.where), **self.traffic.as_dict()}

    def require_numerics(self, dtype: str, float32_head: bool) -> None:
        """Raise UsageError unless the service computes in the same dtypes as the policy.

        Args:
            dtype: dtype in which the policy computes, as returned by `computes_in`.
            float32_head: whether the policy's logits are computed in float32.
        """
        has = self._values.reference
        head = "float32" if float32_head else dtype
        if (has.dtype, has.lm_head_dtype) == (dtype, head):
            return
        raise UsageError(
            f"{self.where.store} runs {has.name or has.reference_id} in {has.dtype} (output layer: {has.lm_head_dtype}), "
            f"but the policy runs in {dtype} (output layer: {head}): their log-probs would differ even at the first step. "
            f'Set dtype = "{dtype}" and lm_head_dtype = "{head}" for the model in the service\'s settings '
            f"([references.NAME]), change the policy's dtypes to the service's ({how_to_compute_in(has.dtype)}; GRPO's "
            "cast_lm_head_to_fp32=True makes the output layer float32), or pass step_zero_tolerance= to accept the difference"
        )

    def begin(self, batch: PaddedBatch) -> None:
        """Request a batch's values in another thread, so that the caller can do other work before it calls `collect`."""
        self._pending = _Pending(batch, lambda: self._ask(batch))

    def collect(self, batch: PaddedBatch) -> Logps:
        """Return a batch's values as an array of shape (rows, completion tokens). If `begin` has not requested the values yet,
        request them now.

        Raises the errors of `per_token_logps`.
        """
        pending, self._pending = self._pending, None
        if pending is None or not pending.batch.same_as(batch):
            pending = _Pending(batch, lambda: self._ask(batch))
        came = time.monotonic()
        values = outcome_on_all_ranks(
            "asking the service for reference log-probs", pending.future, self._say_that_it_waits(came)
        )
        self.traffic.batches += 1
        self.traffic.seconds += pending.ended - pending.began
        self.traffic.waited_seconds += max(0.0, pending.ended - came)
        return values

    def _say_that_it_waits(self, since: float) -> Callable[[], None]:
        said = -math.inf

        def say() -> None:
            nonlocal said
            now = time.monotonic()
            if now - said >= _WORDS_SECONDS:
                said = now
                waited = f"{now - since:.0f} seconds (deadline: {self._deadline:.0f} seconds)"
                logger.warning(
                    "%s has not returned log-probs for this batch yet; the step has waited for %s", self.where.store, waited
                )

        return say

    def _ask(self, batch: PaddedBatch) -> Logps:
        until = time.monotonic() + self._deadline
        answers: list[tuple[Wanted, Logps]] = []
        for kind in batch.wanted(self.absolute_positions):
            for start in range(0, len(kind), _SEQUENCES_AT_ONCE):
                part = kind[start : start + _SEQUENCES_AT_ONCE]
                answers += zip(part, self._scores(part, batch.temperature, until - time.monotonic()), strict=True)
        return batch.filled(answers)

    def _scores(self, part: list[Wanted], temperature: float, seconds: float) -> list[Logps]:
        masks = [wanted.attention_mask for wanted in part if wanted.attention_mask is not None]
        try:
            scores = self._values.client.score(
                self.where.reference_id,
                [wanted.prompt_ids for wanted in part],
                [wanted.completion_ids for wanted in part],
                temperature=temperature,
                cache_read=False,  # newly generated text is not in the store
                deadline=max(seconds, 0.001),
                attention_masks=masks or None,
            )
        except SequencesRefusedError as error:
            rows = [part[position].row for position in error.problems]
            raise UnusableLogpsError(f"the service could not score rows {rows} of this batch: {error}", rows) from error
        except (ServiceUnreachableError, DeadlineExceededError, ServiceBusyError) as error:
            error.add_note(
                f"The service returned no log-probs within {self._deadline:.0f} seconds (the deadline). "
                "Resume the run from its checkpoint."
            )
            raise
        except RequestRefusedError as error:
            if error.status == 404:
                raise ReferenceChangedError(
                    f"{self.where.store} no longer serves reference {self.where.reference_id}: {error}"
                ) from error
            raise
        if scores.reference_id != self.where.reference_id:
            other = f"{self.where.store} responded with reference {scores.reference_id}"
            raise ReferenceChangedError(f"{other}, but this run started with {self.where.reference_id}")
        bad = [wanted.row for wanted, logps in zip(part, scores.token_logps, strict=True) if not np.isfinite(logps).all()]
        if bad:
            raise UnusableLogpsError(f"the reference's log-probs of rows {bad} of this batch are not finite", bad)
        self.traffic.sequences += len(part)
        self.traffic.tokens += sum(len(wanted.prompt_ids) + len(wanted.completion_ids) for wanted in part)
        return scores.token_logps


class _Pending:
    """A batch whose values have been requested."""

    def __init__(self, batch: PaddedBatch, ask: Callable[[], Logps]) -> None:
        self.batch = batch
        self.began = self.ended = time.monotonic()
        self.future: Future[Logps] = Future()
        self._ask = ask
        # A daemon thread, so that an interrupted run does not wait for a response that is no longer needed.
        threading.Thread(target=self._run, name="reflogp-remote", daemon=True).start()

    def _run(self) -> None:
        try:
            values = self._ask()
        except BaseException as error:  # `collect` raises the error
            self.ended = time.monotonic()
            self.future.set_exception(error)
        else:
            self.ended = time.monotonic()
            self.future.set_result(values)


def _connected(source: ReferenceSource) -> ServiceValues:
    """Return a ServiceValues for the source's service. Raise an error if the service cannot score sequences with the
    reference."""
    values = source.open()
    assert isinstance(values, ServiceValues)
    values.client.score(values.where.reference_id, [], [])
    return values
