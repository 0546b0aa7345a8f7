"""From hidden states to log-probs of given tokens, never [tokens, vocab] at once, float32 where it matters.

Knows the output embedding and what a model does to its logits. Does not know attention or batches. Called by the forward
passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

from reflogp.scoring.torch_engine.load import autocasting

#: Logits of whole rows held at once: 2**28 are 512 MiB in bfloat16 and 1 GiB in float32 on top.
_WHOLE_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 28}
#: Rows and columns of logits held at once where a CPU computes them here: few enough to stay in cache until they are summed,
#: enough for the product to be fast (measured: a fifth faster than rows of a whole vocabulary).
_CPU_BLOCK = (1024, 4096)
#: Numbers of the output embedding that are cast at once on CUDA where its dtype is not the product's: 256 MiB in float32.
_CAST_NUMBERS = 1 << 26
#: Rows and columns that one tile of a CUDA product covers; chunks are multiples of it, so that no tile is computed in part.
_TILE = 128
#: Rows of logits that are summed at once on a CPU: few enough that their float32 copy stays in cache.
_SUM_ROWS = 16


@dataclass(frozen=True)
class Logits:
    """What stands between the output embedding's product and the logits: softcap * tanh(scale * product / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, product: torch.Tensor) -> torch.Tensor:
        """Logits of a float32 product."""
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


class Head:
    """A model's output layer.

    A head that is a matrix product, perhaps scaled and soft-capped, is applied here, with each target's logit computed in
    float32: a rounded bfloat16 logit is the largest single error of a log-prob, and one dot product per token removes it. Any
    other head runs through the model's own forward with the hidden states put in, so no architecture needs code here.

    Under autocast the rounded logit stays: such values stand beside those of a run whose own logits are rounded alike (TRL's
    fused head and transformers' logits are in autocast's dtype, the log-sum-exp over them is in float32).

    Args:
        model: a causal language model.
        float32: compute the products in float32 whatever the model's dtype is.
        autocast: the model runs under torch.autocast with this dtype; None where it does not.

    Attributes:
        logits: what the head does to its products, found by trying; None where only the model's own forward knows.
    """

    def __init__(self, model: Any, float32: bool = False, autocast: torch.dtype | None = None) -> None:
        self._model = model
        self._output = model.get_output_embeddings()
        self._weight, self._bias = self._output.weight, getattr(self._output, "bias", None)
        self.logits = self._find_logits()
        self._float32 = float32
        self._rounded = autocast if not float32 else None
        # Cast once: autocast would cast the largest matrix of the model again for every chunk.
        self._factors = self._weight if self._rounded is None or self.logits is None else self._weight.to(self._rounded)
        self.log_sum_exp = log_sum_exp

    @torch.inference_mode()
    def logps(self, states: torch.Tensor, at: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """log p(target) at some positions.

        Args:
            states: last hidden states, (positions, hidden size), in the model's dtype.
            at: which of them predict, int64 (n,).
            targets: token ids that they predict, int64 (n,).
            temperature: logits are divided by it.

        Returns:
            float32 (n,).
        """
        hidden = states[at]
        if self.logits is None:
            return self._logps_by_model(hidden, targets, temperature)
        with autocasting(hidden.device, None):  # every dtype below is chosen, and autocast would choose others
            return self._logps_of_products(hidden, targets, temperature)

    def _logps_by_model(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        hidden = hidden.to(self._weight.dtype)
        out = hidden.new_empty(len(targets), dtype=torch.float32)
        for rows in _slices(len(targets), _rows_at_once(hidden.device, self._weight.shape[0])):
            with autocasting(hidden.device, self._rounded):
                logits = self._own_logits(hidden[rows]).float() / temperature
            out[rows] = torch.gather(logits, 1, targets[rows, None])[:, 0] - torch.logsumexp(logits, 1)
        return out

    def _logps_of_products(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        assert self.logits is not None
        total, rounded = self._sum_and_target(hidden, targets, temperature)
        if self._rounded is not None:
            return torch.clamp(rounded - total, max=0.0)
        exact = torch.empty_like(total)
        for rows in _slices(len(targets), _rows_at_once(hidden.device, self._weight.shape[0])):
            exact[rows] = (hidden[rows].float() * self._weight[targets[rows]].float()).sum(1)
        if self._bias is not None:
            exact = exact + self._bias[targets].float()
        exact = self.logits(exact) / temperature
        # The exact logit takes the rounded one's place in the sum as well, so that log p never rises above zero:
        # with p = exp(rounded - total), the sum becomes total + log(1 - p + p * exp(exact - rounded)).
        share = torch.exp(rounded - total).clamp(max=1.0)
        corrected = total + torch.log(1.0 - share + share * torch.exp(exact - rounded))
        logps: torch.Tensor = torch.clamp(exact - corrected, max=0.0)
        return logps

    def _sum_and_target(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log sum exp of all logits, the target's logit as the product rounds it), both float32 (n,).

        Blocks of the vocabulary are the outer loop: where the weight is not in the product's dtype, a block is cast once.
        """
        assert self.logits is not None
        # Mamba keeps its residual stream, and so these states, in float32.
        dtype = torch.float32 if self._float32 else self._rounded or hidden.dtype
        as_they_are = self._factors.dtype == dtype or _is_widened(hidden, self._factors, dtype)
        blocks = list(_slices(self._weight.shape[0], self._columns_at_once(as_they_are)))
        sums = hidden.new_empty(len(blocks), len(targets), dtype=torch.float32)
        rounded = hidden.new_zeros(len(targets), dtype=dtype)
        for number, block in enumerate(blocks):
            factors = self._factors[block] if as_they_are else self._factors[block].to(dtype)
            bias = None if self._bias is None else self._bias[block].to(dtype)
            for rows in _slices(len(targets), _rows_at_once(hidden.device, len(factors))):
                product = _product(hidden[rows], factors, bias, dtype)
                sums[number, rows] = self.log_sum_exp(product, self.logits, 1.0 / temperature)
                at = targets[rows] - block.start
                inside = (at >= 0) & (at < product.shape[1])
                here = torch.gather(product, 1, at.clamp(0, product.shape[1] - 1)[:, None])[:, 0]
                rounded[rows] = torch.where(inside, here, rounded[rows])
        total = sums[0] if len(blocks) == 1 else torch.logsumexp(sums, 0)
        return total, self.logits(rounded.float()) / temperature

    def _columns_at_once(self, as_they_are: bool) -> int:
        """Columns of logits that are computed at once: on CUDA all, unless the weight must be cast for them."""
        vocabulary, hidden_size = self._weight.shape
        if self._weight.device.type == "cpu":
            return _CPU_BLOCK[1]
        return vocabulary if as_they_are else _in_tiles(_CAST_NUMBERS // hidden_size)

    @torch.inference_mode()
    def _find_logits(self) -> Logits | None:
        """The first of the forms that configs name (trl/trainer/utils.py, add_fused_lm_head, lists them) that agrees with the
        model's own forward; None when none does."""
        weight = self._weight
        if hasattr(self._output, "base_layer") or (self._bias is not None and self._bias.shape != weight.shape[:1]):
            return None  # an adapter on the head shows its base's weight and adds to the product itself
        generator = torch.Generator(weight.device).manual_seed(0)
        hidden = torch.randn(4, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
        with autocasting(weight.device, None):
            own = self._own_logits(hidden).float()
            product = F.linear(hidden, weight, self._bias).float()
        config = self._model.config.get_text_config()
        scales = [1.0]
        for name in ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling"):
            value = getattr(config, name, None)
            scales += [float(value), 1.0 / float(value)] if value else []
        for scale in scales:
            for softcap in dict.fromkeys([getattr(config, "final_logit_softcapping", None), None]):
                form = Logits(scale, softcap)
                if torch.allclose(form(product), own, rtol=2e-2, atol=2e-2 * float(own.abs().max())):
                    return form
        return None

    def _own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits by the model's own forward, its backbone replaced by one that answers `hidden`."""
        name = self._model.base_model_prefix
        backbone = self._model._modules[name]
        self._model._modules[name] = _Answer(hidden[None], backbone)
        try:
            position = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            logits: torch.Tensor = self._model(input_ids=position, use_cache=False).logits[0]
            return logits
        finally:
            self._model._modules[name] = backbone


def _product(hidden: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """hidden @ factors.T + bias in `dtype`, (rows, columns)."""
    if not _is_widened(hidden, factors, dtype):
        return F.linear(hidden.to(dtype), factors, bias)
    product = torch.mm(hidden, factors.T, out_dtype=dtype)
    return product if bias is None else product.add_(bias)


def _is_widened(hidden: torch.Tensor, factors: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether one product reads both sides in 16 bits, and sums and answers in float32: torch has it on CUDA alone (since 2.8).

    Products of two such numbers are exact in float32, so the result is that of float32 factors, at the rate of 16 bits.
    """
    narrow = hidden.dtype == factors.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
    return narrow and dtype == torch.float32 and hidden.device.type == "cuda"


def _rows_at_once(device: torch.device, columns: int) -> int:
    """Rows of so many columns that are computed at once."""
    rows = _WHOLE_LOGITS[device.type] // columns
    return min(_CPU_BLOCK[0], max(1, rows)) if device.type == "cpu" else _in_tiles(rows)


def _in_tiles(count: int) -> int:
    """The largest multiple of a tile up to `count`, one tile at least."""
    return max(1, count // _TILE) * _TILE


def _slices(count: int, size: int) -> Iterator[slice]:
    """0 … count in slices of `size`, the last of what is left."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def log_sum_exp(product: torch.Tensor, logits: Logits, scale: float) -> torch.Tensor:
    """log sum exp of each row's logits times `scale` (one over the temperature), float32 (n,)."""
    if product.device.type != "cpu":
        return torch.logsumexp(logits(product.float()) * scale, 1)
    out = torch.empty(len(product), dtype=torch.float32)
    for start in range(0, len(product), _SUM_ROWS):
        rows = slice(start, start + _SUM_ROWS)
        out[rows] = torch.logsumexp(logits(product[rows].float()) * scale, 1)
    return out


class _Answer(torch.nn.Module):
    """Stands where a backbone stands and gives back one tensor of hidden states; constants are the backbone's own."""

    def __init__(self, hidden: torch.Tensor, backbone: torch.nn.Module) -> None:
        super().__init__()
        self.hidden = hidden
        self._backbone = [backbone]  # in a list, so that it does not become a child

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # OPT's head calls `model.decoder`; others read a multiplier off the backbone.
            return self if name == "decoder" else getattr(self._backbone[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return _HiddenOnly(last_hidden_state=self.hidden)


class _HiddenOnly(BaseModelOutputWithPast):  # type: ignore[misc]
    """A backbone's output without the fields that some architectures add and their heads pass on (cross attentions, …)."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
