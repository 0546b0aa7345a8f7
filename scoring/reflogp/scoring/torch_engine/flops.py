"""Count the operations of a forward pass and measure the peak rate of a device, for model FLOPs utilization.

Model FLOPs utilization (PaLM, arxiv.org/abs/2204.02311, appendix B) is the number of useful operations per second divided by
the device's peak rate. Operations are useful if a log-prob depends on them. This module does not take the peak rate from a
data sheet, but measures it with large matrix products.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from reflogp.scoring.torch_engine.packing import Pack
from reflogp.scoring.torch_engine.sequences import Operations, Sequence

Int64s = npt.NDArray[np.int64]

#: Numbers of rows of the square matrices that are multiplied to measure a device's peak rate, by device type.
_SIDES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
#: For each size, the number of warm-up products and the maximum number of products after them. The times of the warm-up
#: products are ignored, because kernels are chosen and clock speeds rise during these products.
_WARM_UP, _REPEATS = 2, 12
#: Time limit for the products of one size, in seconds. A CPU without native instructions for a dtype would need minutes for the
#: larger size.
_PATIENCE = 2.0
#: Transformers' names of layer types. In layers of the types in `_FULL`, a query attends to all earlier tokens. In layers of
#: the types in `_WINDOWED`, a query attends only to a window of the most recent tokens.
_FULL, _WINDOWED = ("full_attention", "attention", "hybrid"), ("sliding_attention", "hybrid_sliding")


class ForwardFlops:
    """Counts the operations of a model's forward passes; each multiply-add counts as two operations.

    Each weight matrix of the decoder is counted once per token (an expert's weights count only for the average share of tokens
    that an expert processes). Attention is counted once per query-key pair, and the output embedding once per predicted token.
    For layers whose attention is neither full, windowed nor chunked (for example linear or sparse), only the weights are
    counted, so the result is never too high.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        output = model.get_output_embeddings().weight
        heads = getattr(config, "num_attention_heads", 0) or 0
        head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        key_size, value_size = (getattr(config, name, None) or head_dim for name in ("qk_head_dim", "v_head_dim"))
        self._per_token = 2.0 * _active_weights(model, config, output)
        self._per_pair = 2.0 * heads * (key_size + value_size)
        self._per_prediction = 2.0 * float(output.numel())
        self._layers = _attention_layers(config)

    def plain(self, sequences: list[Sequence]) -> float:
        """Return the number of operations for scoring each sequence in a separate forward pass."""
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        return self._passed(lengths, np.zeros_like(lengths), sum(len(sequence.completion_ids) for sequence in sequences))

    def packed(self, pack: Pack, sequences: list[Sequence]) -> Operations:
        """Return the operation counts of a pack, without and with sharing of tokens.

        Args:
            pack: a pack of some or all of the sequences.
            sequences: the sequences that the indices in `pack.members` refer to.
        """
        lengths = np.array([len(branch.path) for branch in pack.branches], np.int64)
        shared = np.array([branch.shared for branch in pack.branches], np.int64)
        plain = self.plain([sequences[index] for index, _ in pack.members])
        return Operations(plain, self._passed(lengths, shared, len(pack.predicted)))

    def padded(self, batch: list[Sequence]) -> Operations:
        """Return the operation counts of a padded batch, in which no tokens are shared.

        Tokens that a sequence's attention mask hides are counted too.
        """
        plain = self.plain(batch)
        return Operations(plain, plain)

    def _passed(self, lengths: Int64s, before: Int64s, predictions: int) -> float:
        """Return the number of operations for computing paths.

        Args:
            lengths: number of tokens of each path.
            before: for each path, the number of tokens at its start that are not computed again.
            predictions: number of tokens that need a log-prob.
        """
        pairs = sum(count * float((seen(lengths) - seen(before)).sum()) for count, seen in self._layers)
        return self._per_token * float((lengths - before).sum()) + self._per_pair * pairs + self._per_prediction * predictions


def expert_count(config: Any) -> int | None:
    """Return the number of experts in each mixture-of-experts layer; None for a dense model.

    Different model families store this number in config fields with different names.
    """
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    parts = (config, getattr(config, "ffn_config", None))
    return next((count for part in parts for name in names if (count := getattr(part, name, None))), None)


def _active_weights(model: Any, config: Any, output: torch.Tensor) -> float:
    """Return how many weights of the text decoder's matrices a token uses on average; embedding tables are not counted."""
    experts = expert_count(config)
    chosen = (
        getattr(config, "num_experts_per_tok", None) or getattr(getattr(config, "ffn_config", None), "moe_top_k", None) or 1
    )
    share = (chosen or 1) / experts if experts else 1.0
    decoder = model.get_decoder()
    tables = {id(module.weight) for module in decoder.modules() if isinstance(module, torch.nn.Embedding)} | {id(output)}
    return sum(
        float(weight.numel()) * (share if ".experts." in name or (weight.dim() == 3 and len(weight) == experts) else 1.0)
        for name, weight in decoder.named_parameters()
        if weight.dim() >= 2 and id(weight) not in tables
    )


def _attention_layers(config: Any) -> list[tuple[int, Callable[[Int64s], Int64s]]]:
    """Return a list with one tuple for each type of attention layer: the number of layers of this type, and a function.

    The function counts the query-key pairs in such a layer. It converts an array of sequence lengths to an array with the
    number of pairs in each sequence.

    Only full, windowed and chunked attention is included (see `ForwardFlops`).
    """
    window: Any = getattr(config, "sliding_window", None)
    chunk: Any = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is None:
        is_windowed = window is not None and getattr(config, "use_sliding_window", True)
        kinds = [_WINDOWED[0] if is_windowed else _FULL[0]] * config.num_hidden_layers
    layers: list[tuple[int, Callable[[Int64s], Int64s]]] = []
    for kind, count in Counter(kinds).items():
        if kind in _FULL or (kind in _WINDOWED and window is None):
            layers.append((count, _pairs))
        elif kind in _WINDOWED:
            layers.append((count, lambda n: _pairs(np.minimum(n, window)) + np.maximum(n - window, 0) * window))
        elif kind == "chunked_attention":
            layers.append((count, lambda n: n // chunk * _pairs(chunk) + _pairs(n % chunk)))
    return layers


def _pairs(count: Any) -> Any:
    """Return the number of query-key pairs when each of `count` tokens attends to itself and to all earlier tokens."""
    return count * (count + 1) // 2


@cache
def matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the device's peak rate for multiplying square matrices, in operations per second.

    The matrices are random. If all elements were equal, a GPU would draw less power and run faster than with a model's weights.
    Matrices of two sizes are each multiplied several times. The result is the highest rate, because other work on the machine
    can make a product slower, but never faster. The larger size is skipped if a product of this size would take too long at the
    rate measured for the smaller size.
    """
    best = 0.0
    for side in _SIDES[device.type]:
        flops = 2.0 * side**3
        if best and flops / best > _PATIENCE:
            break
        best = max(best, flops / _product_seconds(device, dtype, side))
    return best


@torch.inference_mode()
def _product_seconds(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Compute the product of two random matrices several times with F.linear; return the shortest time in seconds."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    took: list[float] = []
    while len(took) < _WARM_UP + _REPEATS and (len(took) <= _WARM_UP or sum(took) < _PATIENCE):
        _wait_for(device)
        start = time.perf_counter()
        F.linear(left, right)
        _wait_for(device)
        took.append(time.perf_counter() - start)
    return min(took[_WARM_UP:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
