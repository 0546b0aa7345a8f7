"""From hidden states to log-probs of given tokens, never [tokens, vocab] at once, float32 where it matters.

Knows the output embedding and what a model does to its logits. Does not know attention or batches. Called by the forward
passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

from reflogp_service.engine.load import autocasting

#: Logits of whole rows held at once: 2**28 are 512 MiB in bfloat16 and 1 GiB in float32 on top.
_WHOLE_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 28}
#: Rows and columns of logits held at once where a CPU computes them here: few enough to stay in cache until they are summed,
#: enough for the product to be fast (measured: a fifth faster than rows of a whole vocabulary).
_CPU_BLOCK = (1024, 4096)
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
        in_blocks = states.device.type == "cpu" and self.logits is not None
        rows = _CPU_BLOCK[0] if in_blocks else max(1, _WHOLE_LOGITS[states.device.type] // self._weight.shape[0])
        out = torch.empty(len(targets), dtype=torch.float32, device=states.device)
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            out[chunk] = self._chunk(states[at[chunk]], targets[chunk], temperature)
        return out

    def _chunk(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        if self.logits is None:
            hidden = hidden.to(self._weight.dtype)
            with autocasting(hidden.device, self._rounded):
                logits = self._own_logits(hidden).float() / temperature
            return torch.gather(logits, 1, targets[:, None])[:, 0] - torch.logsumexp(logits, 1)
        with autocasting(hidden.device, None):  # every dtype below is chosen, and autocast would choose others
            return self._logps_of_products(hidden, targets, temperature)

    def _logps_of_products(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        assert self.logits is not None
        total, rounded = self._sum_and_target(hidden, targets, temperature)
        if self._rounded is not None:
            return torch.clamp(rounded - total, max=0.0)
        exact = (hidden.float() * self._weight[targets].float()).sum(1)
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
        """(log sum exp of all logits, the target's logit as the product rounds it), both float32 (n,)."""
        assert self.logits is not None
        # Mamba keeps its residual stream, and so these states, in float32.
        dtype = torch.float32 if self._float32 else self._rounded or hidden.dtype
        vocabulary = self._weight.shape[0]
        columns = _CPU_BLOCK[1] if hidden.device.type == "cpu" else vocabulary
        sums, rounded = [], torch.zeros(len(targets), dtype=dtype, device=hidden.device)
        for start in range(0, vocabulary, columns):
            block = slice(start, start + columns)
            bias = None if self._bias is None else self._bias[block].to(dtype)
            product = F.linear(hidden.to(dtype), self._factors[block].to(dtype), bias)
            sums.append(self.log_sum_exp(product, self.logits, 1.0 / temperature))
            at = targets - start
            inside = (at >= 0) & (at < product.shape[1])
            here = torch.gather(product, 1, at.clamp(0, product.shape[1] - 1)[:, None])[:, 0]
            rounded = torch.where(inside, here, rounded)
        total = sums[0] if len(sums) == 1 else torch.logsumexp(torch.stack(sums), 0)
        return total, self.logits(rounded.float()) / temperature

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
