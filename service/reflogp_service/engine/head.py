"""From hidden states to log-probs of given tokens, never [tokens, vocab] at once, float32 where it matters.

Knows the output embedding and what a model does to its logits. Does not know attention or batches. Called by the forward
passes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

#: Logits held at once: 2**25 are 64 MiB in bfloat16 and 128 MiB in float32 on top.
_CHUNK_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 28}
#: Rows of logits that are summed at once on a CPU: few enough that their float32 copy stays in cache.
_SUM_ROWS = 16


class Head:
    """A model's output layer.

    A plain linear head is applied here, with each target's logit computed in float32: a rounded bfloat16 logit is the
    largest single error of a log-prob, and one dot product per token removes it. A head that does more (a scale, a soft
    cap) runs through the model's own forward with the hidden states put in, so no architecture needs code here.

    Args:
        model: a causal language model.
        float32: compute the logits in float32 whatever the model's dtype is.
    """

    def __init__(self, model: Any, float32: bool = False) -> None:
        self._model = model
        self._output = model.get_output_embeddings()
        self._weight, self._bias = self._output.weight, getattr(self._output, "bias", None)
        self.linear = self._is_linear()
        self._float32 = float32 and self._weight.dtype != torch.float32

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
        rows = max(1, _CHUNK_LOGITS[states.device.type] // self._weight.shape[0])
        out = torch.empty(len(targets), dtype=torch.float32, device=states.device)
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            out[chunk] = self._chunk(states[at[chunk]], targets[chunk], temperature)
        return out

    def _chunk(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        if not self.linear:
            logits = self._own_logits(hidden).float() / temperature
            return torch.gather(logits, 1, targets[:, None])[:, 0] - torch.logsumexp(logits, 1)
        if self._float32:
            logits = F.linear(hidden.float(), self._weight.float(), None if self._bias is None else self._bias.float())
        else:
            logits = F.linear(hidden, self._weight, self._bias)
        rounded = torch.gather(logits, 1, targets[:, None])[:, 0].float() / temperature
        exact = (hidden.float() * self._weight[targets].float()).sum(1)
        if self._bias is not None:
            exact = exact + self._bias[targets].float()
        exact = exact / temperature
        total = _log_sum_exp(logits, temperature)
        # The exact logit takes the rounded one's place in the sum as well, so that log p never rises above zero:
        # with p = exp(rounded - total), the sum becomes total + log(1 - p + p * exp(exact - rounded)).
        share = torch.exp(rounded - total).clamp(max=1.0)
        others = 1.0 - share
        corrected = torch.log(others + share * torch.exp(exact - rounded)) + total
        logps: torch.Tensor = torch.clamp(exact - corrected, max=0.0)
        return logps

    def _own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits by the model's own forward, its backbone replaced by one that answers `hidden`."""
        name = self._model.base_model_prefix
        backbone = self._model._modules[name]
        self._model._modules[name] = _Answer(hidden[None])
        try:
            position = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            logits: torch.Tensor = self._model(input_ids=position, use_cache=False).logits[0]
            return logits
        finally:
            self._model._modules[name] = backbone

    @torch.inference_mode()
    def _is_linear(self) -> bool:
        """Whether the model's logits are its hidden states times the output embedding, found by trying."""
        weight = self._weight
        if self._bias is not None and self._bias.shape != weight.shape[:1]:
            return False
        generator = torch.Generator(weight.device).manual_seed(0)
        hidden = torch.randn(4, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
        own = self._own_logits(hidden).float()
        plain = F.linear(hidden, weight, self._bias).float()
        return bool(torch.allclose(own, plain, rtol=2e-2, atol=2e-2 * float(plain.abs().max())))


def _log_sum_exp(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """log sum exp of each row in float32, shape (n,)."""
    scale = 1.0 / temperature
    if logits.device.type != "cpu":
        return torch.logsumexp(logits.float() * scale if scale != 1.0 else logits.float(), 1)
    out = torch.empty(len(logits), dtype=torch.float32)
    for start in range(0, len(logits), _SUM_ROWS):
        part = logits[start : start + _SUM_ROWS].float()
        out[start : start + _SUM_ROWS] = torch.logsumexp(part * scale if scale != 1.0 else part, 1)
    return out


class _Answer(torch.nn.Module):
    """Stands where a backbone stands and gives back one tensor of hidden states."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return _HiddenOnly(last_hidden_state=self.hidden)


class _HiddenOnly(BaseModelOutputWithPast):  # type: ignore[misc]
    """A backbone's output without the fields that some architectures add and their heads pass on (cross attentions, …)."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
