"""Run a newly loaded model to decide how to score sequences with it: packed, padded or one at a time."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from reflogp.scoring.errors import EngineError, PictureError
from reflogp.scoring.torch_engine import compilation, forward
from reflogp.scoring.torch_engine.attention import NAME as PACKED
from reflogp.scoring.torch_engine.attention import KernelFailedError, PackLayout, by_branch
from reflogp.scoring.torch_engine.compilation import allow_many_versions, or_fail
from reflogp.scoring.torch_engine.forward import (
    AttentionNames,
    Path,
    attention_names,
    forward_layout,
    forward_pack,
    forward_padded,
    forward_single,
)
from reflogp.scoring.torch_engine.head import Head
from reflogp.scoring.torch_engine.images import ImageFeatures, decoder_calls, layout_of
from reflogp.scoring.torch_engine.load import LoadedModel
from reflogp.scoring.torch_engine.log_sum_exp import LogSumExp, eager
from reflogp.scoring.torch_engine.log_sum_exp import compiled as compiled_log_sum_exp
from reflogp.scoring.torch_engine.memory import auto_token_budget, is_out_of_memory
from reflogp.scoring.torch_engine.packing import packs
from reflogp.scoring.torch_engine.sequences import Sequence
from reflogp.store.texts import counted, first_line

#: Maximum root mean square difference between the log-probs of a path ("packed" or "padded") and those of ordinary, unpadded
#: passes of the same model in the same dtype, in nats per token. Because of rounding, the log-probs of different kernels differ
#: by 1e-6 in float32 and by 0.002 to 0.03 in bfloat16 (more in deeper models). If a token attends to another sequence or has a
#: wrong position, log-probs change by tenths of a nat.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
#: Rounding errors grow with the logits. If the root mean square of the log-probs is above this value, the tolerance grows in
#: proportion.
_TYPICAL_LOGP = 5.0
_PROMPT, _COMPLETIONS = 40, (31, 17)
#: Number of tokens of the long prompt, and the largest number that it may have so that it exceeds the model's sliding window.
#: On a CPU, a model with a larger window is not worth the wait: a 7B model reads about 50 tokens a second there.
_LONG_PROMPT, _LONGEST_PROMPT = 640, {"cpu": 1_100, "cuda": 4_200}
#: Root mean square difference, in nats per token, above which a model's log-probs depend on later tokens. Those of causal
#: models do not change at all on a CPU, and with 8-bit weights, whose outliers are columns of the whole pass, by 0.01. Those of
#: BERT and of PaliGemma without a mask change by more than half a nat.
_LEAK = 0.3
#: Number of rows on which the head is checked: several tiles, and one row more.
_HEAD_ROWS = 257
#: Maximum number of sequences that the engine passes to `check_images`: the first sequences with images that it scores.
IMAGE_CHECKS = 4


@dataclass(frozen=True)
class SelfCheck:
    """The result of the self-check that runs when a model is loaded.

    Attributes:
        path: how the engine scores: "packed", "padded" or "single" (one sequence at a time).
        difference: root mean square difference between the log-probs of that path and those of the model's own, unpadded
            forward passes of the same sequences, in nats per token; on the packed path, the larger one of two packs.
        tolerance: largest allowed `difference`, in nats per token.
        rejected: dict from the name of each rejected path or attention kernel to the reason. The name "compiled" stands for
            compiled layers, "head" for the head's own products, "top_k" for the most probable tokens by these products, and
            "log_sum_exp NAME" for a log-sum-exp.
        kernels: names of the attention kernels that `path` uses; if `path` is not "packed", only the name of the model's own
            attention implementation.
        log_sum_exp: how the head's log-sum-exp is computed: "triton", "compiled" or "eager" (see log_sum_exp.py).
        refused_kernels: names of attention kernels that no pass may use, because they raised an error, made the difference
            exceed the tolerance, or were refused by the caller.
    """

    path: Path
    difference: float
    tolerance: float
    rejected: dict[str, str]
    kernels: list[str]
    compiled: bool
    log_sum_exp: str
    refused_kernels: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"refused_kernels": list(self.refused_kernels)}  # as JSON gives it back


@dataclass(frozen=True)
class ImageCheck:
    """The result of the check that scores the first sequences with images to find out whether packing changes their values."""

    path: Path
    both_ways: bool = False
    refused_kernels: tuple[str, ...] = ()


def require_causal(loaded: LoadedModel) -> None:
    """Raise EngineError if the model's own forward cannot score a text, or if a token's log-prob depends on later tokens.

    Without padding, the attention that a model uses by default may ignore that the model is causal (PaliGemma under SDPA). Such
    a model is switched to transformers' eager attention.
    """
    model, sequence = loaded.model, _samples(loaded)[0][0]
    kept = len(sequence.completion_ids) // 2
    later = [(token + 1) % loaded.vocab_size for token in sequence.completion_ids[kept:]]
    others = [*sequence.completion_ids[:kept], *later]
    difference = 0.0
    for implementation in (None, "eager"):
        if implementation is not None:
            model.set_attn_implementation(implementation)
        try:
            values = _plain(model, sequence, loaded.device)[:kept]
            changed = _plain(model, Sequence(sequence.prompt_ids, others), loaded.device)[:kept]
        except Exception as error:  # models that need images, for example
            if is_out_of_memory(error):
                raise
            name = type(model).__name__
            raise EngineError(f"{name} cannot score a text of {len(sequence)} tokens: {_reason(error)}") from error
        difference, _ = _compare([changed], [values], _LEAK)
        if not difference > _LEAK:  # nan too, which is an error of each sequence
            return
    raise EngineError(
        f"{type(model).__name__} is not a causal language model: the log-probs of tokens change by {difference:.3g} nats (root "
        "mean square) if later tokens change"
    )


def check_images(
    head: Head,
    loaded: LoadedModel,
    features: ImageFeatures,
    sequences: list[Sequence],
    refused: Collection[str],
    own_attention: AttentionNames,
) -> ImageCheck:
    """Score a few sequences with images to decide whether to pack such sequences; warn if they are not packed."""
    model, device = loaded.model, loaded.device
    with forward.attention_of(model, own_attention), decoder_calls(model) as calls:
        plain = np.concatenate([_plain(model, sequence, device) for sequence in sequences])
    tolerance = tolerance_of(loaded.product_dtype, plain)

    def not_packed(reason: str) -> ImageCheck:
        def padded() -> list[Any]:
            with forward.attention_of(model, own_attention):
                return [np.concatenate([_padded(head, [sequence], device) for sequence in sequences])]

        path: Path = "padded" if _attempt(padded, [plain], tolerance)[1] is None else "single"
        warnings.warn(
            f"sequences with images are scored on the {path} path, which is slower; the packed path was rejected: {reason}",
            stacklevel=3,
        )
        return ImageCheck(path)

    refused = list(refused)
    try:
        with forward.attention_of(model, own_attention):
            layouts = [
                layout_of(model.get_decoder().config, sequence, given, features.positions_of(sequence))
                for sequence, given in zip(sequences, calls, strict=True)
            ]
            both_ways = any(found for found, _ in layouts)
            problem = next((problem for _, problem in layouts if problem is not None), None)
            if problem is not None:
                return not_packed(problem)
            [pack] = packs(sequences, sum(map(len, sequences)))
            inputs = features.of_pack(pack, sequences, both_ways)
        values = _until_no_kernel_fails(
            refused, lambda: forward_pack(model, head, pack, device, 1.0, refused, inputs).cpu().numpy()
        )
        by_sequence = {index: values[where] for index, where in pack.members}
        packed = np.concatenate([by_sequence[index] for index in range(len(sequences))])
        _, problem = _compare([packed], [plain], tolerance)
    except PictureError:
        raise
    except Exception as error:  # models fail in many ways; any error means that this path does not work
        if is_out_of_memory(error):
            raise
        problem = first_line(error)
    if problem is not None:
        return not_packed(problem)
    return ImageCheck("packed", both_ways, tuple(refused))


def _until_no_kernel_fails(refused: list[str], compute: Callable[[], Any]) -> Any:
    """Call `compute` and return its result. If a kernel fails, add it to `refused` and call `compute` again.

    If `by_branch` fails, the error is re-raised, because there is no further kernel to try.
    """
    while True:
        try:
            return compute()
        except KernelFailedError as error:
            if error.kernel in (by_branch.__name__, *refused):
                raise
            refused.append(error.kernel)


def check(head: Head, loaded: LoadedModel, compile_layers: bool, refused: Collection[str] = ()) -> SelfCheck:
    """Configure the model and its head for the fastest way of scoring that agrees with the model's own forward passes.

    Compared are the head on large hidden states, packs with at most and with more than 128 tokens (with compiled layers, too),
    a long shared prefix that exceeds the sliding window, and a padded batch. Warn if the packed path is rejected.

    Args:
        loaded: the model, its device, dtype and limits. Sequences longer than `rope_limit` are scored alone and
            are not part of the check.

    Out-of-memory errors are re-raised: the check scores no more tokens at once than a pass has.
    """
    model, device, refused = loaded.model, loaded.device, list(refused)
    own_attention = attention_names(model.config)
    own_kernel = str(model.config.get_text_config()._attn_implementation)
    samples, plain = _samples(loaded), []
    for sample in samples:
        try:
            plain.append(np.concatenate([_plain(model, sequence, device) for sequence in sample]))
        except Exception as error:  # models fail in many ways on sequences that are too long for them
            if not plain or is_out_of_memory(error):
                raise
    samples = samples[: len(plain)]
    tolerance = tolerance_of(loaded.product_dtype, np.concatenate(plain))
    rejected = dict.fromkeys(refused, "refused by the caller")
    log_sum_exp = _check_head(head, loaded, compile_layers, rejected)
    padded, problem = _attempt(lambda: [_padded(head, samples[0], device)], plain[:1], tolerance)
    if problem is not None:
        rejected["padded"] = problem
    packed, kernels = _check_packed(head, loaded, samples, plain, tolerance, refused, rejected)
    is_compiled = False
    if "packed" in rejected:
        model.set_attn_implementation(own_attention)
        path: Path = "single" if "padded" in rejected else "padded"
        difference, kernels = (0.0 if path == "single" else padded), [own_kernel]
        warnings.warn(
            f"{type(model).__name__} uses the {path} path, which is slower than the packed path; the packed path "
            f"was rejected: {rejected['packed']}",
            stacklevel=2,
        )
    else:
        path, difference = "packed", packed
        if compile_layers:
            compiled, problem = _try_compiled(model, head, samples, plain, device, tolerance, refused)
            is_compiled = problem is None
            if problem is None:
                difference = compiled
            else:
                rejected["compiled"] = problem
                name = type(model).__name__
                warnings.warn(f"{name} runs without compiled layers, so scoring is slower: {problem}", stacklevel=2)
    return SelfCheck(path, difference, tolerance, rejected, kernels, is_compiled, log_sum_exp, tuple(refused))


def _check_packed(
    head: Head,
    loaded: LoadedModel,
    samples: list[list[Sequence]],
    plain: list[Any],
    tolerance: float,
    refused: list[str],
    rejected: dict[str, str],
) -> tuple[float, list[str]]:
    """Find attention kernels with which packs agree with ordinary forward passes.

    Kernels that fail, or with which packs disagree, are added to `refused` and `rejected`. If packs disagree with `by_branch`
    too, "packed" is added to `rejected`.

    Returns:
        The difference (see `SelfCheck`), and the names of the kernels that are used.
    """
    while True:
        layouts: list[PackLayout] = []
        try:
            values = _packed(loaded.model, head, samples, loaded.device, refused, layouts)
        except KernelFailedError as error:
            rejected[error.kernel] = error.reason
            if error.kernel not in (by_branch.__name__, *refused):
                refused.append(error.kernel)
                continue
            rejected["packed"] = str(error)
            return float("nan"), []
        except Exception as error:  # models fail in many ways; any error means that this path does not work
            if is_out_of_memory(error):
                raise
            rejected["packed"] = first_line(error)
            return float("nan"), []
        kernels = set[str]().union(*(layout.kernels for layout in layouts))
        for layout in layouts:
            rejected |= layout.declined
        difference, problem = _compare(values, plain, tolerance)
        doubted = kernels - {by_branch.__name__, *refused}
        if problem is None or not doubted:
            if problem is not None:
                rejected["packed"] = problem
            return difference, sorted(kernels)
        rejected |= dict.fromkeys(doubted, problem)  # find out whether by_branch has the same problem
        refused.extend(sorted(doubted))


def _check_head(head: Head, loaded: LoadedModel, compile_layers: bool, rejected: dict[str, str]) -> str:
    """Compare the head with the model's own logits on large hidden states; return the name of the log-sum-exp that it uses.

    What is wrong is not used: the model's own logits take the place of the head's products, and `log_sum_exp.eager` that of a
    faster log-sum-exp. `rejected` then has the reason.
    """
    if head.logits is None:
        return eager.__name__
    states, targets = head.drawn(_HEAD_ROWS)
    at = torch.arange(len(targets), device=loaded.device)
    own = head.logps_by_model(states, targets)
    found = head.logps(states, at, targets)
    problem = _compare([found.cpu().numpy()], [own.cpu().numpy()], tolerance_of(loaded.product_dtype, own.cpu().numpy()))[1]
    if problem is not None:
        head.logits = None
        rejected["head"] = problem
        return eager.__name__
    expected = torch.cat([found, head.logps(states, at[:1], targets[:1])])  # a product of one row may round differently
    for name, load in _log_sum_exps(loaded.device, compile_layers):
        problem = None
        try:
            head.log_sum_exp = load()
            allow_many_versions()
            with or_fail():
                faster = torch.cat([head.logps(states, at, targets), head.logps(states, at[:1], targets[:1])])
            if not torch.allclose(faster, expected, rtol=1e-5, atol=1e-3):
                difference = float((faster - expected).abs().max())
                problem = f"its values differ from those of {eager.__name__} by {difference:.3g}"
        except Exception as error:  # compilers may raise any error
            if is_out_of_memory(error):
                raise
            problem = _reason(error)
        if problem is None:
            return name
        rejected[f"log_sum_exp {name}"] = problem
        head.log_sum_exp = eager
    return eager.__name__


def check_top(head: Head, loaded: LoadedModel) -> str | None:
    """Compare the log-probs of the most probable tokens with those of the model's own logits, on large hidden states.

    If they differ, the model's own logits take the place of the head's products. Return what is wrong, or None.
    """
    if head.logits is None or not head.top_k:
        return None
    states, targets = head.drawn(_HEAD_ROWS)
    places = slice(1, 1 + head.top_k)
    own = head.logps_by_model(states, targets)[:, places].cpu().numpy()
    found = head.logps(states, torch.arange(len(targets), device=loaded.device), targets)[:, places].cpu().numpy()
    problem = _compare([found], [own], tolerance_of(loaded.product_dtype, own))[1]
    if problem is not None:
        head.logits = None
    return problem


def _log_sum_exps(device: torch.device, compile_layers: bool) -> list[tuple[str, Callable[[], LogSumExp]]]:
    def by_triton() -> LogSumExp:
        from reflogp.scoring.torch_engine import triton_log_sum_exp  # Triton is there only with CUDA

        return triton_log_sum_exp.reduce

    found: list[tuple[str, Callable[[], LogSumExp]]] = [("triton", by_triton)] if device.type == "cuda" else []
    return [*found, ("compiled", compiled_log_sum_exp)] if compile_layers else found


def _attempt(compute: Callable[[], list[Any]], plain: list[Any], tolerance: float) -> tuple[float, str | None]:
    """Do what `_compare` does with what `compute` returns; an error that it raises is the problem."""
    try:
        return _compare(compute(), plain, tolerance)
    except Exception as error:  # models and compilers fail in many ways; any error means that this way does not work
        if is_out_of_memory(error):
            raise
        return float("nan"), _reason(error)


def _reason(error: Exception) -> str:
    """Return an error's type and first line; also the last line if the first one only says where the error is (compilers)."""
    first, *others = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {first}" + (f" {others[-1].strip()}" if others and first.endswith(":") else "")


def _compare(values: list[Any], plain: list[Any], tolerance: float) -> tuple[float, str | None]:
    """Return (difference, error message if it exceeds the tolerance, otherwise None).

    The difference is the largest RMS difference between arrays of `values` and of `plain`.
    """
    difference = max(float(np.sqrt(np.mean((ours - own) ** 2))) for ours, own in zip(values, plain, strict=True))
    if difference <= tolerance:
        return difference, None
    return difference, (
        f"its log-probs differ from those of an ordinary forward pass by {difference:.3g} nats per token (root mean square)"
    )


def tolerance_of(dtype: torch.dtype, logps: Any) -> float:
    """Return the largest allowed RMS difference between `logps` and another computation of them, in nats per token."""
    return TOLERANCE[dtype] * max(1.0, float(np.sqrt(np.mean(logps**2))) / _TYPICAL_LOGP)


def _try_compiled(
    model: Any,
    head: Head,
    samples: list[list[Sequence]],
    plain: list[Any],
    device: torch.device,
    tolerance: float,
    refused: list[str],
) -> tuple[float, str | None]:
    compilation.compile_layers(model)
    with or_fail():
        difference, problem = _attempt(lambda: _packed(model, head, samples, device, refused, []), plain, tolerance)
    if problem is not None:
        compilation.uncompile_layers(model)
        problem = f"with compiled layers, {problem}"
    return difference, problem


def _samples(loaded: LoadedModel) -> list[list[Sequence]]:
    """Return two lists of random sequences, each for one pack; all are shortened if the model has too few positions.

    The first pack has at most 128 tokens, which is one block of FlexAttention. In the second, two sequences share a prompt of
    `_LONG_PROMPT` tokens or, if this does not take too long, of more than the model's sliding window. If the free memory is
    scarce, the second pack is shorter.
    """
    random = np.random.default_rng(0)
    tables = (part for name, part in loaded.model.get_decoder().named_modules() if "pos" in name.lower())
    learned = [table.num_embeddings - 2 for table in tables if isinstance(table, torch.nn.Embedding)]  # RoBERTa's begin at 2
    limits = [loaded.max_positions, loaded.rope_limit, *learned]
    room = min((limit for limit in limits if limit is not None), default=sys.maxsize)
    window = getattr(loaded.model.config.get_text_config(), "sliding_window", None)
    wanted = window + _PROMPT if isinstance(window, int) else 0
    wanted = max(_LONG_PROMPT, wanted if wanted <= _LONGEST_PROMPT[loaded.device.type] else 0)
    budget = auto_token_budget(loaded.model, loaded.device, loaded.dtype)
    long = max(1, min(wanted, min(room, budget) - max(_COMPLETIONS)))
    shrink = min(1.0, room / (_PROMPT + max(_COMPLETIONS)))

    def ids(count: int) -> list[int]:
        return [int(i) for i in random.integers(0, loaded.vocab_size, max(1, count))]

    def pair(prompt: int) -> list[Sequence]:
        shared = ids(prompt)
        return [Sequence(shared, ids(int(count * shrink))) for count in _COMPLETIONS]

    other = int(_PROMPT // 2 * shrink)
    return [pair(int(_PROMPT * shrink)), [*pair(long), Sequence(ids(other), ids(other))]]


def _plain(model: Any, sequence: Sequence, device: torch.device) -> Any:
    return forward_single(model, sequence, device).cpu().numpy()


def _windowed_layers(config: Any) -> int:
    """Return how many layers do not attend to the whole context, according to the config.

    The self-check compares this number with the number of layers that pass a window to packed attention. Some layers limit
    attention to a window only through the attention mask. Packed attention does not use this mask, so these layers would attend
    to the whole context. Comparing log-probs would not reveal this error if the window is larger than the sequences of the
    self-check. Models with chunked attention (Llama 4) are never packed: the two numbers always differ, because chunked
    layers pass no window.
    """
    types = getattr(config, "layer_types", None)
    if types:
        return sum(kind in ("sliding_attention", "chunked_attention") for kind in types)
    used = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return int(config.num_hidden_layers) if used else 0


def _recurrent_part(model: Any) -> str | None:
    """Return the name of a module or parameter that carries state from token to token, or None.

    In a pack, such state would leak from one sequence into the next. This function inspects the model's structure instead of
    comparing log-probs, because in bfloat16 the effect of a small leak is lost in rounding. Each state-space, linear-attention
    or RWKV block contains a convolution over time or one of the parameters in `states`.
    """
    decoder = model.get_decoder()  # audio encoders have convolutions too
    for name, module in decoder.named_modules():
        if isinstance(module, torch.nn.Conv1d):
            return str(name)
    states = ("A_log", "dt_bias", "time_decay")
    return next((name for name, _ in decoder.named_parameters() if name.rsplit(".", 1)[-1] in states), None)


@torch.inference_mode()
def _packed(
    model: Any,
    head: Head,
    samples: list[list[Sequence]],
    device: torch.device,
    refused: list[str],
    layouts: list[PackLayout],
) -> list[Any]:
    """Score each list of sequences as one pack; return the log-probs of each list."""
    recurrent = _recurrent_part(model)
    if recurrent:
        raise ValueError(f"{recurrent} carries state from token to token and, in a pack, from one sequence to the next")
    model.set_attn_implementation(PACKED)
    config = model.config.get_text_config()
    layers, windows = int(config.num_hidden_layers), _windowed_layers(config)
    found = []
    for sample in samples:
        [pack] = packs(sample, sum(map(len, sample)), min_shared=4)
        layout = PackLayout(pack, device, refused)
        layouts.append(layout)
        values = forward_layout(model, head, layout).cpu().numpy()
        if layout.layers_seen != layers:
            raise ValueError(
                f"the model has {counted(layers, 'layer')}, but it called transformers' attention interface "
                f"{counted(layout.layers_seen, 'time')}"
            )
        if layout.windows_seen != windows:
            raise ValueError(
                f"the number of layers that use sliding-window or chunked attention is {windows}, "
                f"but the number that pass a window to the attention function is {layout.windows_seen}"
            )
        by_sequence = {index: values[where] for index, where in pack.members}
        found.append(np.concatenate([by_sequence[index] for index in range(len(sample))]))
    return found


def _padded(head: Head, sequences: list[Sequence], device: torch.device) -> Any:
    return forward_padded(head, sequences, device).cpu().numpy()
