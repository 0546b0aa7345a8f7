"""Run a newly loaded model to decide how to score sequences with it: packed, padded or one at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from reflogp.scoring.errors import PictureError
from reflogp.scoring.torch_engine import forward
from reflogp.scoring.torch_engine.attention import NAME as PACKED
from reflogp.scoring.torch_engine.attention import KernelFailedError, PackLayout, by_branch
from reflogp.scoring.torch_engine.forward import Path, forward_pack, forward_padded, pack_states
from reflogp.scoring.torch_engine.head import Head
from reflogp.scoring.torch_engine.images import ImageFeatures, decoder_calls, layout_of
from reflogp.scoring.torch_engine.load import LoadedModel
from reflogp.scoring.torch_engine.memory import is_out_of_memory
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
_PROMPT, _COMPLETIONS = 40, (23, 31, 17)
#: Maximum number of sequences that the engine passes to `check_images`: the first sequences with images that it scores.
IMAGE_CHECKS = 4


@dataclass(frozen=True)
class SelfCheck:
    """The result of the self-check that runs when a model is loaded.

    Attributes:
        path: how the engine scores: "packed", "padded" or "single" (one sequence at a time).
        difference: root mean square difference between the log-probs of that path and those of separate, unpadded forward
            passes of the same sequences, in nats per token.
        tolerance: largest allowed `difference`, in nats per token.
        rejected: dict from the name of each rejected path or attention kernel to the reason; the name "compiled" stands for
            compiled layers.
        kernels: names of the attention kernels that `path` uses; if `path` is not "packed", only the name of the model's own
            attention implementation.
        compiled: True if the decoder layers and the head's log-sum-exp are compiled.
        refused_kernels: names of attention kernels that no pass may use, because they raised an error, made the difference
            exceed the tolerance, or were refused by the caller.
    """

    path: Path
    difference: float
    tolerance: float
    rejected: dict[str, str]
    kernels: list[str]
    compiled: bool
    refused_kernels: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ImageCheck:
    """The result of the check that scores the first sequences with images to find out whether packing changes their values.

    Attributes:
        path: how sequences with images are scored: "packed" or "padded".
        difference: root mean square difference between the log-probs computed in a pack and the log-probs computed one sequence
            at a time, in nats per token; None if packing was not possible.
        reason: why sequences with images are not packed; empty if they are packed.
        both_ways: True if the tokens of an image attend to each other in both directions.
        refused_kernels: names of attention kernels that no pack with images may use.
    """

    path: Path
    difference: float | None
    reason: str
    both_ways: bool = False
    refused_kernels: tuple[str, ...] = ()


def check_images(
    head: Head,
    loaded: LoadedModel,
    features: ImageFeatures,
    sequences: list[Sequence],
    refused: Collection[str],
    own_attention: str | None,
) -> ImageCheck:
    """Score a few sequences with images to decide whether to pack or pad such sequences; warn if they are padded.

    The sequences are scored both packed and one at a time.

    Sequences with images are packed only if the model passes to its decoder the same positions and mask that a pack would use,
    and if the log-probs computed in a pack agree with the log-probs computed one sequence at a time. Comparing the log-probs
    alone is not enough: in bfloat16, the log-probs of a few tokens may agree by chance.

    Args:
        head: the model's output layer.
        loaded: the model, with packed attention already set.
        features: object that builds the inputs of the model's decoder.
        sequences: at least one sequence, all with images.
        refused: names of attention kernels that must not be used.
        own_attention: name of the attention implementation that the model used before packed attention was set.

    Raises PictureError if an image can no longer be read. Out-of-memory errors, and errors while the sequences are scored one
    at a time, are re-raised.
    """
    model, device = loaded.model, loaded.device
    with forward.attention_of(model, own_attention), decoder_calls(model) as calls:
        plain = np.concatenate([_padded(model, head, [sequence], device) for sequence in sequences])
    difference: float | None = None
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
                return _padded_images(problem)
            [pack] = packs(sequences, sum(map(len, sequences)))
            inputs = features.of_pack(pack, sequences, both_ways)
        values = _until_no_kernel_fails(
            refused, lambda: forward_pack(model, head, pack, device, 1.0, refused, inputs).cpu().numpy()
        )
        by_sequence = {index: values[where] for index, where in pack.members}
        packed = np.concatenate([by_sequence[index] for index in range(len(sequences))])
        difference, problem = _compare(packed, plain, tolerance_of(loaded.product_dtype, plain))
    except PictureError:
        raise
    except Exception as error:  # models fail in many ways; any error means that this path does not work
        if is_out_of_memory(error):
            raise
        problem = first_line(error)
    if problem is not None:
        return _padded_images(problem, difference)
    return ImageCheck("packed", difference, "", both_ways, tuple(refused))


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


def _padded_images(problem: str, difference: float | None = None) -> ImageCheck:
    warnings.warn(
        f"sequences with images are scored on the padded path, which is slower; the packed path was rejected: {problem}",
        stacklevel=3,
    )
    return ImageCheck("padded", difference, problem)


def check(head: Head, loaded: LoadedModel, compile_layers: bool, refused: Collection[str] = ()) -> SelfCheck:
    """Configure the model for the fastest path whose log-probs agree with those of ordinary forward passes.

    Warn if the packed path is rejected.

    Args:
        head: the model's output layer.
        loaded: the model, its device, dtype and limits. Sequences longer than `rope_limit` are scored alone and
            are not part of the check.
        compile_layers: whether to also try compiled layers on the packed path. A warning is issued if the compiled layers fail
            or change the values.
        refused: names of attention kernels that must not be used.

    Out-of-memory errors are re-raised: the check scores so few tokens that no other path would need less memory.
    """
    with loaded.computing():
        return _check(head, loaded, compile_layers, list(refused))


def _check(head: Head, loaded: LoadedModel, compile_layers: bool, refused: list[str]) -> SelfCheck:
    model, device = loaded.model, loaded.device
    limits = [limit for limit in (loaded.max_positions, loaded.rope_limit) if limit is not None]
    own_attention = model.config._attn_implementation
    sequences = _sequences(loaded.vocab_size, min(limits, default=None))
    plain = np.concatenate([_plain(model, sequence, device) for sequence in sequences])
    tolerance = tolerance_of(loaded.product_dtype, plain)
    rejected = dict.fromkeys(refused, "refused by the caller")
    found: tuple[Path, float] = ("single", 0.0)
    kernels = [str(own_attention)]
    while found[0] == "single":
        try:
            values, layout = _packed(model, head, sequences, device, refused)
        except KernelFailedError as error:
            rejected[error.kernel] = error.reason
            if error.kernel not in (by_branch.__name__, *refused):
                refused.append(error.kernel)
                continue
            rejected["packed"] = str(error)
        except Exception as error:  # models fail in many ways; any error means that this path does not work
            if is_out_of_memory(error):
                raise
            rejected["packed"] = first_line(error)
        else:
            rejected |= layout.declined
            difference, problem = _compare(values, plain, tolerance)
            doubted = layout.kernels - {by_branch.__name__, *refused}
            if problem is not None and doubted:  # find out whether by_branch has the same problem
                rejected |= dict.fromkeys(doubted, problem)
                refused.extend(sorted(doubted))
                continue
            if problem is None:
                found, kernels = ("packed", difference), sorted(layout.kernels)
            else:
                rejected["packed"] = problem
        break
    if found[0] == "single":
        model.set_attn_implementation(own_attention)
        try:
            difference, problem = _compare(_padded(model, head, sequences, device), plain, tolerance)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            difference, problem = float("nan"), first_line(error)
        if problem is None:
            found = ("padded", difference)
        else:
            rejected["padded"] = problem
    if found[0] != "packed":
        warnings.warn(
            f"{type(model).__name__} uses the {found[0]} path, which is slower than the packed path; the packed path "
            f"was rejected: {rejected['packed']}",
            stacklevel=2,
        )
    is_compiled = False
    if found[0] == "packed" and compile_layers:
        difference, problem = _try_compiled(model, head, sequences, plain, device, tolerance, refused)
        is_compiled = problem is None
        if problem is None:
            found = ("packed", difference)
        else:
            rejected["compiled"] = problem
            warnings.warn(f"{type(model).__name__} runs without compiled layers, so scoring is slower: {problem}", stacklevel=2)
    return SelfCheck(found[0], found[1], tolerance, rejected, kernels, is_compiled, tuple(refused))


def _compare(values: Any, plain: Any, tolerance: float) -> tuple[float, str | None]:
    """Return (RMS difference between `values` and `plain`, error message if it exceeds the tolerance, otherwise None)."""
    difference = float(np.sqrt(np.mean((values - plain) ** 2)))
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
    sequences: list[Sequence],
    plain: Any,
    device: torch.device,
    tolerance: float,
    refused: list[str],
) -> tuple[float, str | None]:
    """Compile the layers and the head's log-sum-exp. Undo the compilation if it fails or changes the values too much.

    Returns:
        (root mean square difference from `plain`, error message). The difference is NaN if an error occurred. The message is
        None if the compiled layers can be used.
    """
    eager = head.log_sum_exp
    problem: str | None
    difference = float("nan")
    try:
        forward.compile_layers(model)
        head.log_sum_exp = forward.compiled_log_sum_exp()
        difference = float(np.sqrt(np.mean((_packed(model, head, sequences, device, refused)[0] - plain) ** 2)))
        changed = f"differ from those of an ordinary forward pass by {difference:.3g} nats per token (root mean square)"
        problem = None if difference <= tolerance else f"with compiled layers, log-probs {changed}"
    except Exception as error:  # compilers may raise any error
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if problem is not None:
        forward.uncompile_layers(model)
        head.log_sum_exp = eager
    return difference, problem


def _sequences(vocab_size: int, max_positions: int | None) -> list[Sequence]:
    """Return four random sequences, three with the same prompt; all are shortened if the model has too few positions."""
    random = np.random.default_rng(0)
    room = (max_positions or 4096) / (_PROMPT + max(_COMPLETIONS))
    shrink = min(1.0, room)

    def ids(count: int) -> list[int]:
        return [int(i) for i in random.integers(0, vocab_size, max(1, int(count * shrink)))]

    prompt = ids(_PROMPT)
    return [*(Sequence(prompt, ids(n)) for n in _COMPLETIONS), Sequence(ids(_PROMPT // 2), ids(_PROMPT // 2))]


@torch.inference_mode()
def _plain(model: Any, sequence: Sequence, device: torch.device) -> Any:
    """Compute a sequence's log-probs from the logits of an ordinary, unpadded call of the model. `Head` is not used."""
    ids = torch.from_numpy(sequence.ids()).to(device)
    logps = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].float(), -1)
    start = len(sequence.prompt_ids)
    return logps[torch.arange(start - 1, len(ids) - 1, device=device), ids[start:]].cpu().numpy()


def _windowed_layers(config: Any) -> int:
    """Return how many layers do not attend to the whole context, according to the config.

    The self-check compares this number with the number of layers that pass a window to packed attention. Some layers limit
    attention to a window only through the attention mask. Packed attention does not use this mask, so these layers would attend
    to the whole context. Comparing log-probs would not reveal this error, because the sequences of the self-check are shorter
    than most windows. Models with chunked attention (Llama 4) are never packed: the two numbers always differ, because chunked
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
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv1d):
            return str(name)
    states = ("A_log", "dt_bias", "time_decay")
    return next((name for name, _ in model.named_parameters() if name.rsplit(".", 1)[-1] in states), None)


def _packed(
    model: Any, head: Head, sequences: list[Sequence], device: torch.device, refused: list[str]
) -> tuple[Any, PackLayout]:
    """Score the sequences as one pack, and return (log-probs, layout).

    The layout contains a record of the attention calls and of the kernels that they used.
    """
    recurrent = _recurrent_part(model)
    if recurrent:
        raise ValueError(f"{recurrent} carries state from token to token and, in a pack, from one sequence to the next")
    model.set_attn_implementation(PACKED)
    [pack] = packs(sequences, sum(map(len, sequences)), min_shared=4)
    layout = PackLayout(pack, device, refused)
    pack_states(model, layout)
    layers = int(model.config.get_text_config().num_hidden_layers)
    if layout.layers_seen != layers:
        raise ValueError(
            f"the model has {counted(layers, 'layer')}, but it called transformers' attention interface "
            f"{counted(layout.layers_seen, 'time')}"
        )
    if layout.windows_seen != (windows := _windowed_layers(model.config.get_text_config())):
        raise ValueError(
            f"the number of layers that use sliding-window or chunked attention is {windows}, "
            f"but the number that pass a window to the attention function is {layout.windows_seen}"
        )
    values = forward_pack(model, head, pack, device, refused=refused).cpu().numpy()
    by_sequence = {index: values[where] for index, where in pack.members}
    return np.concatenate([by_sequence[index] for index in range(len(sequences))]), layout


def _padded(model: Any, head: Head, sequences: list[Sequence], device: torch.device) -> Any:
    return forward_padded(model, head, sequences, device).cpu().numpy()
