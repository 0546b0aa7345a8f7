"""From hidden states to log-probs of given tokens, never [tokens, vocab] at once, float32 where it matters.

Knows the output embedding and what a model does to its logits. Does not know attention or batches. Called by the forward
passes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

#: float32 logits held at once; 2**25 are 128 MiB.
_CHUNK_LOGITS = 1 << 25


class Head:
    """A model's output layer.

    A plain linear head is applied here, with each target's logit computed in float32: a rounded bfloat16 logit is the
    largest single error of a log-prob, and one dot product per token removes it. A head that does more (a scale, a soft
    cap) runs through the model's own forward with the hidden states put in, so no architecture needs code here.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._output = model.get_output_embeddings()
        self.linear = self._is_linear()

    @torch.inference_mode()
    def logps(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """log p(target) at each position.

        Args:
            hidden: last hidden states, (n, hidden size), in the model's dtype.
            targets: token ids, int64 (n,).

        Returns:
            float32 (n,).
        """
        rows = max(1, _CHUNK_LOGITS // self._output.weight.shape[0])
        parts = [
            self._chunk(hidden[start : start + rows], targets[start : start + rows]) for start in range(0, len(targets), rows)
        ]
        return torch.cat(parts) if parts else torch.empty(0, device=hidden.device)

    def _chunk(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not self.linear:
            logits = self._own_logits(hidden).float()
            return torch.gather(logits, 1, targets[:, None])[:, 0] - torch.logsumexp(logits, 1)
        weight, bias = self._output.weight, self._output.bias
        logits = F.linear(hidden, weight, bias).float()
        exact = (hidden.float() * weight[targets].float()).sum(1)
        if bias is not None:
            exact = exact + bias[targets].float()
        # The exact logit takes the rounded one's place in the sum as well, so that log p never rises above zero.
        logits.scatter_(1, targets[:, None], exact[:, None])
        logps: torch.Tensor = exact - torch.logsumexp(logits, 1)
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
        weight = self._output.weight
        if getattr(self._output, "bias", None) is not None and self._output.bias.shape != weight.shape[:1]:
            return False
        generator = torch.Generator(weight.device).manual_seed(0)
        hidden = torch.randn(4, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
        own = self._own_logits(hidden).float()
        plain = F.linear(hidden, weight, getattr(self._output, "bias", None)).float()
        return bool(torch.allclose(own, plain, rtol=2e-2, atol=2e-2 * float(plain.abs().max())))


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
