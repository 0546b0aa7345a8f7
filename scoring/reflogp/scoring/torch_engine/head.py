"""Compute the log-probs of target tokens from the hidden states that predict them.

Logits are computed in chunks, so the full array of shape (tokens, vocabulary) need not fit in memory. Sums over the vocabulary
are computed in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

from reflogp.scoring.errors import EngineError
from reflogp.scoring.torch_engine.load import autocasting, output_embedding
from reflogp.scoring.torch_engine.log_sum_exp import Logits, LogSumExp, eager
from reflogp.scoring.torch_engine.memory import is_out_of_memory

#: Maximum number of logits in memory at once, by device type. 2**28 logits take 512 MiB in bfloat16, and 1 GiB more for their
#: float32 copy.
_WHOLE_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 28}
#: Rows and columns of a block of logits on a CPU. Such a block is small enough to stay in cache until it is summed, and large
#: enough for a fast product. In a measurement, these blocks were 20% faster than rows that span the whole vocabulary.
_CPU_BLOCK = (1024, 4096)
#: Number of elements of the output embedding that are cast at once on CUDA (256 MiB in float32). A cast is necessary if the
#: product needs a dtype other than that of the output embedding.
_CAST_NUMBERS = 1 << 26
#: Rows and columns of a tile of a CUDA matrix product. Chunk sizes are multiples of this number, so that every tile is computed
#: in full.
_TILE = 128
#: Beside the k most probable tokens by rounded logits, this many tokens and a quarter of k more are compared by exact logits.
_MORE_CANDIDATES = 8
#: Maximum number of elements of the output embedding's rows that are gathered at once to compute exact logits.
_GATHERED_NUMBERS = {"cpu": 1 << 23, "cuda": 1 << 28}
#: Root mean squares of the products on which `_find_logits` compares formulas: a soft cap does nothing to small products, and
#: trained models have logits of tens.
_SMALL_AND_LARGE = (3.0, 100.0)
#: Largest difference between a formula's logits and the model's own, relative to their root mean square, by dtype: of single
#: logits (root mean square), and of their factor. Each of the model's operations rounds single logits; the factor is a mean
#: over at least thousands of logits, so rounding hardly changes it.
_FORMULA_TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (1e-2, 1e-3), torch.float16: (2e-3, 2e-4)}


class Head:
    """A model's output layer.

    If the head consists of a matrix product, optionally with a bias, a scale and a soft cap, this class computes the product
    itself, and computes the logit of each target token in float32. Rounding a target token's logit to bfloat16 would be the
    largest single source of error in a log-prob. One extra dot product per token avoids this error. For any other head, the
    model's own forward computes the logits from the hidden states, so no architecture-specific code is needed.

    Under autocast, the target token's logit is rounded like all other logits, because the log-probs are compared with those of
    a training run that rounds its logits in the same way. (TRL's fused head and transformers compute logits in autocast's
    dtype, and the log-sum-exp over the logits in float32.)

    Args:
        float32: whether to compute the products in float32, whatever the model's dtype is.
        autocast: dtype of torch.autocast if the model runs under autocast; None otherwise.

    Attributes:
        logits: the function that turns the head's matrix product into logits. If no such function was found (see
            `_find_logits`), the attribute is None, and the model's own forward computes the logits.
    """

    def __init__(self, model: Any, float32: bool = False, autocast: torch.dtype | None = None) -> None:
        self._model = model
        self._output = output_embedding(model)
        self._weight, self._bias = self._output.weight, getattr(self._output, "bias", None)
        self._parent, self._name, self.backbone = _backbone_of(model)
        self.logits = self._find_logits()
        self._float32 = float32
        self._rounded = autocast if not float32 else None
        # Cast the output embedding once: it is the model's largest matrix, and autocast would cast it again for each chunk.
        self._factors = self._weight if self._rounded is None or self.logits is None else self._weight.to(self._rounded)
        self.log_sum_exp: LogSumExp = eager
        self.top_k = 0

    @contextlib.contextmanager
    def without_top(self) -> Iterator[None]:
        """Return only log-probs of the targets in the `with` block."""
        top_k, self.top_k = self.top_k, 0
        try:
            yield
        finally:
            self.top_k = top_k

    @torch.inference_mode()
    def logps(self, states: torch.Tensor, at: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Return the log-probs of target tokens, given the hidden states that predict them.

        Args:
            states: the last layer's hidden states, shape (positions, hidden size), in the model's dtype.
            at: indices in `states` of the positions that predict the targets, int64 (n,).
            targets: token ids of the targets, int64 (n,).

        Returns:
            The log-probs, float32 (n,). With `top_k`, float32 (n, 1 + 2 * top_k): the log-prob of the target, those of the most
            probable tokens, and the ids of these tokens (ids below 2**24 are exact in float32), in the order of `in_order`.
        """
        hidden = states[at]
        if self.logits is None:
            return self.logps_by_model(hidden, targets, temperature)
        with autocasting(hidden.device, None):  # the code below sets dtypes explicitly; autocast would change them
            return self._logps_of_products(hidden, targets, temperature)

    @torch.inference_mode()
    def drawn(self, rows: int, size: float = _SMALL_AND_LARGE[1]) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw hidden states, shape (rows, hidden size), and target tokens, int64 (rows,), to check the head on."""
        weight = self._weight
        generator = torch.Generator(weight.device).manual_seed(0)
        hidden = torch.randn(rows, weight.shape[1], generator=generator, device=weight.device)
        typical = float(F.linear(hidden[:4].to(weight.dtype), weight).float().square().mean().sqrt())
        targets = torch.randint(len(weight), (rows,), generator=generator, device=weight.device)
        return (hidden * (size / (typical or 1.0))).to(weight.dtype), targets

    @torch.inference_mode()
    def logps_by_model(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Do what `logps` does for rows of hidden states, from the logits of the model's own head."""
        hidden = hidden.to(self._weight.dtype)
        parts = []
        for rows in _slices(len(targets), _rows_at_once(hidden.device, self._weight.shape[0])):
            with autocasting(hidden.device, self._rounded):
                logits = self._own_logits(hidden[rows]).float() / temperature
            parts.append(logps_of_logits(logits, targets[rows], self.top_k))
        return torch.cat(parts)

    def _logps_of_products(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        candidates = min(self._weight.shape[0], self.top_k + self.top_k // 4 + _MORE_CANDIDATES)
        top = RunningTop(len(targets), candidates, hidden.device) if self.top_k else None
        total, rounded = self._sum_and_target(hidden, targets, temperature, top)
        logps = self._of_targets(hidden, targets, temperature, total, rounded)
        if top is None:
            return logps
        assert self.logits is not None
        rounded, total = self.logits(top.values) / temperature, total[:, None]
        if self._rounded is not None:
            exact = rounded
        else:
            # As in `_of_targets`, the exact logits replace the rounded ones in the log-sum-exp.
            exact = self.logits(self._exact_products(hidden, top.ids)) / temperature
            shares = torch.exp(rounded - total)
            others = (1.0 - shares.sum(1, keepdim=True)).clamp(min=0.0)
            total = total + torch.log(others + (shares * torch.exp(exact - rounded)).sum(1, keepdim=True))
        best, ids = in_order(torch.clamp(exact - total, max=0.0), top.ids, self.top_k)
        return torch.cat([logps[:, None], best, ids.float()], 1)

    def _exact_products(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the products of each row of hidden states with the output embeddings of its tokens, float32 (rows, tokens)."""
        exact = torch.empty(ids.shape, device=hidden.device)
        for rows in _slices(len(ids), max(1, _GATHERED_NUMBERS[hidden.device.type] // (ids.shape[1] * hidden.shape[1]))):
            exact[rows] = torch.einsum("rth,rh->rt", self._weight[ids[rows]].float(), hidden[rows].float())
        return exact if self._bias is None else exact + self._bias[ids].float()

    def _of_targets(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, total: torch.Tensor, rounded: torch.Tensor
    ) -> torch.Tensor:
        assert self.logits is not None
        if self._rounded is not None:
            return torch.clamp(rounded - total, max=0.0)
        exact = torch.empty_like(total)
        for rows in _slices(len(targets), _rows_at_once(hidden.device, self._weight.shape[0])):
            exact[rows] = (hidden[rows].float() * self._weight[targets[rows]].float()).sum(1)
        if self._bias is not None:
            exact = exact + self._bias[targets].float()
        exact = self.logits(exact) / temperature
        # Also replace the target's rounded logit by the exact one in the log-sum-exp. Otherwise, log-probs could be above zero.
        # The target's share of the sum is exp(rounded - total), so the log-sum-exp changes from `total` to
        # total + log(1 - share + share * exp(exact - rounded)).
        share = torch.exp(rounded - total).clamp(max=1.0)
        corrected = total + torch.log(1.0 - share + share * torch.exp(exact - rounded))
        logps: torch.Tensor = torch.clamp(exact - corrected, max=0.0)
        return logps

    def _sum_and_target(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, top: RunningTop | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two float32 tensors (n,): for each position, the log-sum-exp of all logits, and the target's logit.

        The target's logit comes from the same matrix product as all other logits, so it is rounded to the product's dtype. The
        outer loop iterates over blocks of the vocabulary, so that each block of weights is cast to this dtype at most once.
        """
        assert self.logits is not None
        # Mamba keeps its residual stream in float32, so its hidden states are float32 too.
        dtype = torch.float32 if self._float32 else self._rounded or hidden.dtype
        as_they_are = self._factors.dtype == dtype or _is_widened(hidden, self._factors, dtype)
        blocks = list(_slices(self._weight.shape[0], self._columns_at_once(as_they_are)))
        sums = hidden.new_empty(len(blocks), len(targets), dtype=torch.float32)
        rounded = hidden.new_zeros(len(targets), dtype=torch.float32)
        for number, block in enumerate(blocks):
            factors = self._factors[block] if as_they_are else self._factors[block].to(dtype)
            bias = None if self._bias is None else self._bias[block].to(dtype)
            for rows in _slices(len(targets), _rows_at_once(hidden.device, len(factors))):
                product = _product(hidden[rows], factors, bias, dtype)
                at, last = targets[rows] - block.start, product.shape[1] - 1
                found = self.log_sum_exp(product, self.logits, 1.0 / temperature, at.clamp(0, last))
                sums[number, rows] = found[0]
                rounded[rows] = torch.where((at >= 0) & (at <= last), found[1], rounded[rows])
                if top is not None:  # larger products have larger logits
                    top.add(rows, product, block.start)
        return sums[0] if len(blocks) == 1 else torch.logsumexp(sums, 0), rounded

    def _columns_at_once(self, as_they_are: bool) -> int:
        """Return how many columns of logits to compute at once; on CUDA, all columns if the weight need not be cast."""
        vocabulary, hidden_size = self._weight.shape
        if self._weight.device.type == "cpu":
            return _CPU_BLOCK[1]
        return vocabulary if as_they_are else _in_tiles(_CAST_NUMBERS // hidden_size)

    @torch.inference_mode()
    def _find_logits(self) -> Logits | None:
        """Return the combination of scale and soft cap that reproduces the model's own logits; None if there is none.

        The combinations are built from the config fields that `add_fused_lm_head` in trl/trainer/utils.py lists.
        """
        weight = self._weight
        if weight.dtype not in _FORMULA_TOLERANCE:
            return None  # quantized
        if hasattr(self._output, "base_layer") or (self._bias is not None and self._bias.shape != weight.shape[:1]):
            return None  # if the head has an adapter, `weight` is the base layer's weight, without the adapter's changes
        config = self._model.config.get_text_config()
        scales = [1.0]
        for name in ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling"):
            value = getattr(config, name, None)
            scales += [float(value), 1.0 / float(value)] if value else []
        caps = dict.fromkeys([getattr(config, "final_logit_softcapping", None), None])
        forms = [Logits(scale, cap) for scale in scales for cap in caps]
        for size in _SMALL_AND_LARGE:
            hidden, _ = self.drawn(4, size)
            with autocasting(weight.device, None):
                try:
                    own = self._own_logits(hidden).float()
                except Exception as error:  # models that need more of their backbone than hidden states (ProphetNet)
                    if is_out_of_memory(error):
                        raise
                    return None
                product = F.linear(hidden, weight, self._bias).float()
            forms = [form for form in forms if _agree(form(product), own, weight.dtype)]
        return forms[0] if forms else None

    def _own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits that the model's own forward computes if its backbone returns `hidden`."""
        self._parent._modules[self._name] = _Answer(hidden[None], self.backbone)
        try:
            position = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            logits: torch.Tensor = self._model(input_ids=position, use_cache=False).logits[0]
            return logits
        finally:
            self._parent._modules[self._name] = self.backbone


def logps_of_logits(logits: torch.Tensor, targets: torch.Tensor, top_k: int) -> torch.Tensor:
    """Do what `Head.logps` does, for float32 logits of the whole vocabulary, shape (n, vocabulary)."""
    total = torch.logsumexp(logits, 1, keepdim=True)
    own = logits.gather(1, targets[:, None]) - total
    if not top_k:
        return own[:, 0]
    best, ids = top_of(logits, top_k)
    return torch.cat([own, best - total, ids.float()], 1)


def _backbone_of(model: Any) -> tuple[torch.nn.Module, str, torch.nn.Module]:
    """Return the part of a model that computes hidden states, which has the input embedding but not the output embedding.

    Its name is not always the class's `base_model_prefix` (Llama 4), and it may be a part of a part (a vision model that
    contains a causal language model, such as Llama 4 with its vision tower).

    Returns:
        The module of which it is a part, its name there, and the part itself.
    """
    first, last = model.get_input_embeddings(), output_embedding(model)
    inside = model
    while True:
        parts = [(name, part) for name, part in inside.named_children() if _contains(part, first)]
        if not parts:
            raise EngineError(f"{type(model).__name__}: no part of the model has the input embedding")
        name, part = parts[0]
        if part is first or not _contains(part, last):
            return inside, name, part
        inside = part


def _contains(part: torch.nn.Module, wanted: torch.nn.Module) -> bool:
    return any(module is wanted for module in part.modules())


def _agree(logits: torch.Tensor, own: torch.Tensor, dtype: torch.dtype) -> bool:
    if logits.shape != own.shape:
        return False
    size = own.square().mean()
    difference = (logits - own).square().mean().sqrt() / size.sqrt()
    factor = (logits * own).mean() / size
    of_single, of_factor = _FORMULA_TOLERANCE[dtype]
    return bool(difference <= of_single) and bool((factor - 1).abs() <= of_factor)


def _product(hidden: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return hidden @ factors.T + bias in `dtype`, shape (rows, columns)."""
    if not _is_widened(hidden, factors, dtype):
        return F.linear(hidden.to(dtype), factors, bias)
    product = torch.mm(hidden, factors.T, out_dtype=dtype)
    return product if bias is None else product.add_(bias)


def _is_widened(hidden: torch.Tensor, factors: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if `dtype` is float32, the operands are 16-bit, and torch can multiply them without a cast (only on CUDA).

    The product of two 16-bit numbers is exact in float32, so the result is as exact as with float32 operands, at 16-bit speed.
    """
    narrow = hidden.dtype == factors.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
    return narrow and dtype == torch.float32 and hidden.device.type == "cuda"


def _rows_at_once(device: torch.device, columns: int) -> int:
    rows = _WHOLE_LOGITS[device.type] // columns
    return min(_CPU_BLOCK[0], max(1, rows)) if device.type == "cpu" else _in_tiles(rows)


def _in_tiles(count: int) -> int:
    return max(1, count // _TILE) * _TILE


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


class _Answer(torch.nn.Module):
    """Stands in for a backbone: `forward` returns the given hidden states; all other attributes are read from the backbone."""

    def __init__(self, hidden: torch.Tensor, backbone: torch.nn.Module) -> None:
        super().__init__()
        self.hidden = hidden
        self._backbone = [backbone]  # in a list so that torch does not register it as a child module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # OPT calls `model.decoder`; other models read a multiplier for the logits from the backbone.
            return self if name == "decoder" else getattr(self._backbone[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return _HiddenOnly(last_hidden_state=self.hidden)


class _HiddenOnly(BaseModelOutputWithPast):  # type: ignore[misc]
    """A backbone's output with hidden states only; all other fields, which some models' heads read, are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class RunningTop:
    """Keeps the columns with the largest values of each row, while the columns of a matrix arrive in blocks.

    Attributes:
        values, ids: the largest values of each row and their columns, float32 and int64 (rows, k), in any order.
    """

    def __init__(self, count: int, k: int, device: torch.device) -> None:
        self.values = torch.full((count, k), -torch.inf, device=device)
        self.ids = torch.zeros(count, k, dtype=torch.long, device=device)

    def add(self, rows: slice, block: torch.Tensor, first: int) -> None:
        """Add values of some rows, shape (rows, columns); `first` is the number of the block's first column."""
        values, ids = self.values[rows], self.ids[rows]
        if block.device.type == "cpu" and first:
            # a search in the few values above the smallest that is kept; `topk` would look at each value several times
            new_values, new_ids = _above(block, values.amin(1), first)
        else:
            found = torch.topk(block, min(block.shape[1], values.shape[1]), sorted=False)
            new_values, new_ids = found.values.float(), found.indices + first
        if new_values.shape[1]:
            values, ids = torch.cat([values, new_values], 1), torch.cat([ids, new_ids], 1)
            kept = torch.topk(values, self.values.shape[1], sorted=False)
            self.values[rows], self.ids[rows] = kept.values, ids.gather(1, kept.indices)


def _above(block: torch.Tensor, least: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of each row that are larger than `least`, and their columns; shorter rows are filled with -inf."""
    row, column = (block > least[:, None].to(block.dtype)).nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=len(block))
    place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    width = int(counts.max()) if len(counts) else 0
    values, ids = torch.full((len(block), width), -torch.inf), torch.zeros(len(block), width, dtype=torch.long)
    values[row, place], ids[row, place] = block[row, column].float(), column + first
    return values, ids


def in_order(logps: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest log-probs of each row and their token ids, in this order: a more probable token comes first; of
    tokens with the same log-prob, the one with the lower id. If the last of the k tokens is as probable as others, it is not
    defined which of them is among the k."""
    by_id = ids.argsort(dim=1)
    logps, ids = logps.gather(1, by_id), ids.gather(1, by_id)
    order = logps.argsort(dim=1, descending=True, stable=True)[:, :k]
    return logps.gather(1, order), ids.gather(1, order)


def top_of(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest logits or log-probs of rows that span the whole vocabulary, and their token ids."""
    candidates = torch.topk(values, min(values.shape[1], k + 1), sorted=False)
    return in_order(candidates.values, candidates.indices, k)
