"""Train with TRL's GRPO, RLOO and Online DPO trainers while the reference model runs in a service.

These trainers need the reference's log-probs of text that the policy has just generated. They request them for each padded
batch just before TRL runs the policy on it, and collect them where TRL would run the reference model.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer

from reflogp.client import SequencesRefusedError, ServiceError
from reflogp.store import UsageError
from reflogp.trainer.cached import checkpoint_of, no_reference_model
from reflogp.trainer.errors import ReferenceChangedError, UnusableLogpsError
from reflogp.trainer.gate import GateMixin, computes_in, warn_of_other_dtype, write_record
from reflogp.trainer.join import JoinRecord
from reflogp.trainer.ranks import on_all_ranks, outcome_on_all_ranks
from reflogp.trainer.reference import Reference, ServiceValues

logger = logging.getLogger(__name__)

Logps = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
#: An embedding counts as a table of positions if its number of rows is the config's max_position_embeddings, or is larger by at
#: most this number (OPT's is larger by 2).
_SPARE_POSITIONS = 8

#: Maximum number of sequences per request; a service's default limit is 4,096.
_SEQUENCES_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """A batch of prompt and completion tokens, possibly padded on both sides, and which log-probs are needed."""

    input_ids: Ids  # shape (rows, width)
    attention_mask: Ids  # 0 at padding and 1 at all other tokens, shape (rows, width)
    completion: int  # number of columns at the right that need log-probs. If this is the width, a row's first token needs none
    temperature: float = 1.0
    at_padding: bool = False  # whether log-probs are also needed for the completion's padding

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any, completion: int, **more: Any) -> PaddedBatch:
        """Create a batch from tensors on any device, and wait until they are on the host."""
        return cls(_on_host(input_ids), _on_host(attention_mask), completion, **more)

    def same_as(self, other: PaddedBatch) -> bool:
        return (
            (self.completion, self.temperature, self.at_padding) == (other.completion, other.temperature, other.at_padding)
            and np.array_equal(self.input_ids, other.input_ids)
            and np.array_equal(self.attention_mask, other.attention_mask)
        )

    def wanted(self, absolute_positions: bool) -> tuple[list[Wanted], list[Wanted]]:
        """Return the sequences to score, in two lists: sequences without padding, and sequences that keep their padding.

        Rows in which no token needs a log-prob are left out. A row keeps its left padding if the model has absolute positions
        (see `has_absolute_positions`); otherwise, this padding only shifts all positions by the same amount. A row also keeps
        padding between its tokens, padding that is the only context of the completion, and padding whose log-probs are needed.
        """
        plain, padded = [], []
        prompt = self.input_ids.shape[1] - self.completion
        for row, (ids, mask) in enumerate(zip(self.input_ids, self.attention_mask, strict=True)):
            seen = np.flatnonzero(mask)
            if not len(seen) or (seen[-1] < prompt and not self.at_padding):
                continue
            first, behind = int(seen[0]), int(seen[-1]) + 1
            start = prompt if prompt else first + 1
            if start == behind and not self.at_padding:  # the row's only token has no context
                continue
            has_holes = behind - first != len(seen)
            moved = absolute_positions and first > 0
            values_at_padding = self.at_padding and behind < len(ids)
            if first < start and not (has_holes or moved or values_at_padding):
                plain.append(Wanted(row, start, ids[first:start], ids[start:behind]))
                continue
            begin = 0 if absolute_positions or first >= start else first
            end = len(ids) if self.at_padding else behind
            padded.append(Wanted(row, start, ids[begin:start], ids[start:end], mask[begin:end]))
        return plain, padded

    def filled(self, answers: list[tuple[Wanted, npt.NDArray[np.float32]]]) -> npt.NDArray[np.float32]:
        """Arrange the sequences' log-probs as an array of shape (rows, completion tokens), with zeros where none is needed."""
        values: npt.NDArray[np.float32] = np.zeros(self.input_ids.shape, np.float32)
        for wanted, logps in answers:
            values[wanted.row, wanted.start : wanted.start + len(logps)] = logps
        if not self.at_padding:
            values[self.attention_mask == 0] = 0.0
        return values[:, values.shape[1] - self.completion :]


@dataclass(frozen=True, eq=False)
class Wanted:
    """The sequence to score for one row of a batch."""

    row: int
    start: int  # column of the first token to score
    prompt_ids: Ids  # shape (n,)
    completion_ids: Ids  # shape (m,)
    attention_mask: Ids | None = None  # shape (n + m,); None if the sequence contains no padding


@dataclass
class Traffic:
    """What a service has scored for this process: batches, sequences, and tokens of prompts and completions. `seconds` is the
    time from the first request of a batch to its last value, summed over all batches; in `waited_seconds` of it, the trainer
    did nothing but wait."""

    batches: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "hidden_share": 1 - self.waited_seconds / self.seconds if self.seconds else None}


class RemoteReference:
    """Takes the place of a reference model: requests the log-probs of tokens from the service that runs the model.

    Args:
        reference: a service's URL, or a `Reference` with the URL and the model.
        deadline: maximum number of seconds to wait for one batch's values from a slow, unreachable or restarting service.
        absolute_positions: whether the model has an embedding table for absolute positions (as GPT-2 does), so that left
            padding changes its log-probs. If True, rows are scored with their left padding.
        policy: see `Reference.open`.
        policy_dtype: see `Reference.open`.

    Attributes:
        where: the service's URL, and the reference's id and dtype.
        traffic: the `Traffic` so far.

    Raises UsageError, or ReferenceNotFoundError or ServiceError if the service does not serve the model or is unreachable.
    """

    def __init__(
        self,
        reference: Reference | str,
        deadline: float = 600.0,
        absolute_positions: bool = False,
        policy: str | None = None,
        policy_dtype: str = "bfloat16",
    ) -> None:
        source = _service(reference, "RemoteReference")
        if not deadline > 0:
            raise UsageError(f"deadline={deadline}: must be a number of seconds above 0")
        self.traffic = Traffic()
        self._deadline, self._absolute_positions = deadline, absolute_positions
        self._pending: tuple[PaddedBatch, Future[tuple[Logps, float, float]]] | None = None

        def connect() -> ServiceValues:
            values = source.open(policy, policy_dtype)
            assert isinstance(values, ServiceValues)
            values.client.score(values.where.reference_id, [], [])  # fails if the service has the model's values only
            return values

        self._values = on_all_ranks("reaching the reference service", connect)
        self.where, self.served = self._values.where, self._values.reference

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("the reference model runs in a service, which returns no logits: call per_token_logps")

    def per_token_logps(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        completion_tokens: int | None = None,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """Return the log-prob of each token given the tokens before it. All processes of a distributed run call this together.

        Args:
            input_ids: token ids, padded on either side, shape (rows, width).
            attention_mask: 0 at padding and 1 at all other tokens, shape (rows, width); None if there is no padding.
            completion_tokens: number of columns at the right for which to return log-probs; None for all but the first.
            temperature: value by which logits are divided.

        Returns:
            float32 log-probs in nats, shape (rows, completion_tokens) or (rows, width - 1), with zeros at padding.

        Raises UnusableLogpsError if rows cannot be scored or their log-probs are not finite, ReferenceChangedError if the
        service no longer serves the reference, ServiceError after the deadline, or RankFailedError.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        width = input_ids.shape[1]
        completion = width if completion_tokens is None else completion_tokens
        if mask.shape != input_ids.shape or not 0 < completion <= width or not temperature > 0:
            raise UsageError(f"use a mask of input_ids' shape, 1 to {width} completion tokens, and a temperature above 0")
        values = self.collect(PaddedBatch.of(input_ids, mask, completion, temperature=temperature))
        return torch.from_numpy(values[:, 1:] if completion_tokens is None else values).to(input_ids.device)

    def begin(self, batch: PaddedBatch) -> None:
        """Request a batch's values in another thread; `collect` returns them."""
        future: Future[tuple[Logps, float, float]] = Future()
        began = time.monotonic()

        def work() -> None:
            try:
                future.set_result((self._ask(batch, began + self._deadline), began, time.monotonic()))
            except BaseException as error:  # `collect` raises the error
                future.set_exception(error)

        self._pending = batch, future
        # A daemon thread, so that an interrupted run does not wait for a response that is no longer needed.
        threading.Thread(target=work, name="reflogp-online", daemon=True).start()

    def collect(self, batch: PaddedBatch) -> Logps:
        """Return a batch's values, shape (rows, completion tokens), or raise as `per_token_logps` does. Request them unless
        `begin` did."""
        if self._pending is None or not self._pending[0].same_as(batch):
            self.begin(batch)
        assert self._pending is not None
        (_, future), self._pending = self._pending, None
        came, calls = time.monotonic(), count()

        def warn() -> None:
            if next(calls) % 6 == 0:  # called every 5 seconds
                waited = time.monotonic() - came
                logger.warning("waited %.0f of at most %.0f seconds for %s", waited, self._deadline, self.where.store)

        values, began, ended = outcome_on_all_ranks("asking the service for reference log-probs", future, warn)
        self.traffic.batches += 1
        self.traffic.seconds += ended - began
        self.traffic.waited_seconds += max(0.0, ended - came)
        return values

    def _ask(self, batch: PaddedBatch, until: float) -> Logps:
        answers: list[tuple[Wanted, Logps]] = []
        for kind in batch.wanted(self._absolute_positions):
            for start in range(0, len(kind), _SEQUENCES_AT_ONCE):
                part = kind[start : start + _SEQUENCES_AT_ONCE]
                answers += zip(part, self._scores(part, batch.temperature, until), strict=True)
        return batch.filled(answers)

    def _scores(self, part: list[Wanted], temperature: float, until: float) -> list[Logps]:
        reference_id = self.where.reference_id
        try:
            scores = self._values.client.score(
                reference_id,
                [wanted.prompt_ids for wanted in part],
                [wanted.completion_ids for wanted in part],
                temperature=temperature,
                cache_read=False,  # newly generated text is not in the store
                deadline=max(until - time.monotonic(), 0.001),
                attention_masks=[wanted.attention_mask for wanted in part if wanted.attention_mask is not None] or None,
            )
        except SequencesRefusedError as error:
            rows = [part[position].row for position in error.problems]
            raise UnusableLogpsError(f"the service could not score rows {rows} of this batch: {error}", rows) from error
        except ServiceError as error:
            if error.status == 404:
                raise ReferenceChangedError(f"{self.where.store} no longer serves reference {reference_id}: {error}") from error
            error.add_note(f"The deadline is {self._deadline:.0f} seconds. Resume the run from its checkpoint.")
            raise
        bad = [wanted.row for wanted, logps in zip(part, scores.token_logps, strict=True) if not np.isfinite(logps).all()]
        if bad:
            raise UnusableLogpsError(f"the reference's log-probs of rows {bad} of this batch are not finite", bad)
        self.traffic.sequences += len(part)
        self.traffic.tokens += sum(len(wanted.prompt_ids) + len(wanted.completion_ids) for wanted in part)
        return scores.token_logps


class RemoteReferenceMixin(GateMixin):
    """Mixin of the online trainers. In addition to the arguments of TRL's trainer, their constructors take:

    Args:
        reference: a service's URL, or a `Reference` with the URL and the model (None: the checkpoint that the policy was loaded
            from).
        reference_deadline: maximum number of seconds that a step waits for a slow or restarting service.
        policy_starts_at_reference: whether the policy starts from the reference's weights. If True, the policy's log-probs of
            the first batch are compared with the reference's before the first step.

    Raises the errors of `RemoteReference`, and in training StepZeroError if the comparison fails.

    Attributes:
        ref_model: the `RemoteReference`.
        step_zero: the StepZero of the comparison before the first step; None before it, and for runs without one. Both are
            also in `output_dir/reflogp.json`, which is written before the first step and after the last.
    """

    def __init__(
        self,
        *args: Any,
        reference: Reference | str | None = None,
        reference_deadline: float = 600.0,
        policy_starts_at_reference: bool = True,
        **kwargs: Any,
    ) -> None:
        source = _service(reference, type(self).__name__)
        model = args[0] if args else kwargs.get("model")
        online_dpo = sys.modules[OnlineDPOTrainer.__module__]
        with (
            no_reference_model(type(self), policies=int(isinstance(model, str))),
            mock.patch.object(online_dpo, "create_reference_model", lambda model: None),
        ):
            super().__init__(*args, **kwargs)
        if getattr(self, "ref_model", None) is not None:
            raise UsageError(f"{type(self).__name__} needs no reference model, because a service runs it: remove ref_model")
        if not self.args.beta:
            raise UsageError(f"beta={self.args.beta} makes TRL ignore the reference: set it above 0, or use TRL's own trainer")
        if getattr(self.args, "sync_ref_model", False):
            raise UsageError("sync_ref_model=True changes the reference, but a service's model never changes: set it to False")
        if self.args.n_gpu > 1 and isinstance(self, _PerTokenMixin):
            raise UsageError(
                f"{type(self).__name__} does not support DataParallel, but sees {self.args.n_gpu} GPUs: start one process per "
                "GPU (accelerate launch, torchrun), or set CUDA_VISIBLE_DEVICES to a single GPU"
            )
        self.starts_at_reference = policy_starts_at_reference
        policy = self.accelerator.unwrap_model(self.model)
        positions, dtype = has_absolute_positions(policy), computes_in(policy, self.accelerator)
        self.ref_model: Any = RemoteReference(source, reference_deadline, positions, checkpoint_of(policy), dtype)
        self.joins = {"train": JoinRecord(self.ref_model.where)}
        served, head = self.ref_model.served, "float32" if getattr(self.args, "cast_lm_head_to_fp32", False) else dtype
        advice = f'set dtype = "{dtype}" and lm_head_dtype = "{head}" for the model in the service\'s settings'
        warn_of_other_dtype(_dtypes(served.dtype, served.lm_head_dtype), _dtypes(dtype, head), advice)

    def _reference_logps(self, batch: PaddedBatch, policy_logps: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the service's values, shape (rows, completion tokens). `policy_logps` computes those of the policy, and is
        called for the first batch of a run only."""
        values = torch.from_numpy(self.ref_model.collect(batch))

        def sums() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            self.model.eval()
            with torch.no_grad():
                own = policy_logps().cpu()
            self.model.train()
            completion = torch.from_numpy(batch.attention_mask[:, -batch.completion :]) != 0
            policy, reference = (torch.where(completion, logps.double(), 0.0).sum(1) for logps in (own, values))
            return policy, reference, completion.sum(1)

        if self.model.training:
            self.check_first_batch(sums, remote=self.ref_model.traffic.as_dict())
        return values.to(self.accelerator.device)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does, and write the final traffic to `reflogp.json`."""
        result = super().train(*args, **kwargs)
        outcome = self.outcome or "not compared: no batch was trained on"
        write_record(self.args.output_dir, self.joins, outcome, remote=self.ref_model.traffic.as_dict())
        return result


class _PerTokenMixin(RemoteReferenceMixin):
    """RLOO and GRPO call `_get_per_token_logps_and_entropies` for a batch in this order: perhaps for the policy, then for the
    reference (both without gradients), and later for the policy again, for the loss."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        own = super()._get_per_token_logps_and_entropies
        given = (input_ids, attention_mask, logits_to_keep, *args)
        is_reference = model is self.ref_model
        # Only for the loss, which evaluation too computes without gradients, does TRL request entropies.
        if not is_reference and (torch.is_grad_enabled() or kwargs.get("compute_entropy")):
            return own(model, *given, **kwargs)
        _refuse_images(kwargs.get("pixel_values"))
        batch = PaddedBatch.of(input_ids, attention_mask, logits_to_keep, temperature=self.temperature)
        if is_reference:
            return self._reference_logps(batch, lambda: own(self.model, *given, **kwargs)[0]), None, None
        self.ref_model.begin(batch)
        return own(model, *given, **kwargs)


class RemoteGRPOTrainer(_PerTokenMixin, GRPOTrainer):
    """TRL's GRPO trainer without a local reference model. The constructor takes the arguments of `RemoteReferenceMixin` and of
    TRL's trainer; beta must be above 0.

    TRL runs the policy before it needs the reference's values if gradient_accumulation_steps is not a multiple of
    steps_per_generation * num_iterations, or if TRL uses vLLM with importance sampling. In all other cases, including TRL's
    defaults, the trainer waits for the full duration of each request.

    Examples:
        >>> from datasets import Dataset
        >>> from transformers import AutoModelForCausalLM
        >>> from trl import GRPOConfig
        >>> from reflogp.trainer import RemoteGRPOTrainer
        >>> trainer = RemoteGRPOTrainer(
        ...     AutoModelForCausalLM.from_pretrained("./sft-model", dtype="bfloat16"),
        ...     reward_funcs=lambda completions, **kwargs: [-float(len(text)) for text in completions],
        ...     args=GRPOConfig(output_dir="run-grpo", beta=0.05, num_generations=2, per_device_train_batch_size=4),
        ...     train_dataset=Dataset.from_dict({"prompt": ["The sky is", "Two and two are"]}),
        ...     reference="http://127.0.0.1:8311",
        ... )
        >>> trainer.train()
        TrainOutput(global_step=...)
    """


class RemoteRLOOTrainer(_PerTokenMixin, RLOOTrainer):
    """TRL's RLOO trainer without a local reference model, constructed like `RemoteGRPOTrainer`."""


class RemoteOnlineDPOTrainer(RemoteReferenceMixin, OnlineDPOTrainer):
    """TRL's Online DPO trainer without a local reference model, constructed like `RemoteGRPOTrainer`.

    Some of TRL's metrics (objective/kl, objective/non_score_reward and objective/rlhf_reward) also include log-probs of the
    padding after a completion, so these log-probs are requested too. The loss and the metrics rewards/* do not include them.
    """

    def _forward(
        self,
        model: Any,
        prompt_ids: Any,
        prompt_mask: Any,
        completion_ids: Any,
        completion_mask: Any,
        vision_inputs: Any = None,
    ) -> Any:
        _refuse_images(vision_inputs)
        given = (prompt_ids, prompt_mask, completion_ids, completion_mask)
        ids, mask = torch.cat((prompt_ids, completion_ids), 1), torch.cat((prompt_mask, completion_mask), 1)
        cut = max(ids.size(1) - self.max_length, 0)  # TRL removes so many columns of a batch on the left
        batch = PaddedBatch.of(ids[:, cut:], mask[:, cut:], completion_ids.size(1), at_padding=True)
        own = super()._forward
        if model is self.ref_model:
            return self._reference_logps(batch, lambda: own(self.model_wrapped, *given))
        self.ref_model.begin(batch)
        return own(model, *given)


def _service(reference: Reference | str | None, user: str) -> Reference:
    source = Reference.of(reference, user)
    if not source.is_service:
        raise UsageError(f"{source.location} is not a service, which alone can score newly generated text: pass an http:// URL")
    return source


def _refuse_images(images: Any) -> None:
    if images is not None:
        raise UsageError("the service scores only text, but this batch has images: use TRL's own trainer")


def _dtypes(dtype: str, lm_head_dtype: str) -> str:
    return dtype if lm_head_dtype == dtype else f"{dtype} (output layer: {lm_head_dtype})"


def has_absolute_positions(model: torch.nn.Module) -> bool:
    """Return True if an unwrapped model has an embedding table for absolute positions, so that left padding changes a token's
    position embedding."""
    config: Any = model.config
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    tokens = model.get_input_embeddings()  # type: ignore[operator]
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding) and module is not tokens]
    return positions > 0 and any(0 <= table.num_embeddings - positions <= _SPARE_POSITIONS for table in tables)


def _on_host(values: Any) -> Ids:
    ids: Ids = values.detach().cpu().numpy().astype(np.int64)
    return ids
