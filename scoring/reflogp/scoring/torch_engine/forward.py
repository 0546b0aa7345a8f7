"""Run a model on packed sequences, a padded batch or a single sequence, and return float32 log-probs.

The decoder layers and the head's log-sum-exp can be compiled (see `should_compile`). Without compilation, each operation
between the matrix products (norms, rotary embeddings, gates, the log-sum-exp) reads and writes whole activations several times.
On a CPU, these operations together then take half as much time as the matrix products. torch compiles only one decoder layer of
each kind, and all layers of this kind run the compiled code ("regional compilation").
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import numpy as np
import torch

from reflogp.scoring.torch_engine.attention import PackLayout, packed
from reflogp.scoring.torch_engine.flops import expert_count
from reflogp.scoring.torch_engine.head import Head
from reflogp.scoring.torch_engine.images import DecoderInputs, on_device, pixel_inputs, token_types
from reflogp.scoring.torch_engine.packing import Pack
from reflogp.scoring.torch_engine.sequences import Sequence

#: Minimum number of parameters of a model that is compiled by default. Smaller models are not compiled, because the first
#: compilation takes 10 to 40 s (torch caches the result on disk).
COMPILE_FROM_PARAMETERS = 50_000_000


def should_compile(model: Any, device: torch.device) -> bool:
    """Return True if compiling can save time: the model is large enough, has no experts, and can be compiled on this device.

    Loops over experts depend on the data, so compilation would split them into many small graphs and save no time. Compilation
    for a CPU needs a C++ compiler.
    """
    experts = expert_count(model.config.get_text_config())
    compiler = device.type == "cuda" or shutil.which("g++") or shutil.which("clang++")
    return not experts and compiler is not None and model.num_parameters() >= COMPILE_FROM_PARAMETERS


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """Return the decoder layers.

    These are the modules of the first ModuleList that has `num_hidden_layers` modules. If there is no such ModuleList, the
    result is empty.
    """
    count = model.config.get_text_config().num_hidden_layers
    lists = (m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count)
    return list(next(lists, torch.nn.ModuleList()))


def compile_layers(model: Any) -> None:
    """Compile the decoder layers in place, for any number of tokens."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def uncompile_layers(model: Any) -> None:
    """Undo `compile_layers`."""
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None


@cache
def compiled_log_sum_exp() -> Any:
    """Return a compiled version of `head.log_sum_exp` that reads the logits only once; the original reads them five times."""

    def whole(product: torch.Tensor, logits: Any, scale: float) -> torch.Tensor:
        return torch.logsumexp(logits(product.float()) * scale, 1)

    return torch.compile(whole, dynamic=True)


Path = Literal["packed", "padded", "single"]


@torch.inference_mode()
def forward_pack(
    model: Any,
    head: Head,
    pack: Pack,
    device: torch.device,
    temperature: float = 1.0,
    refused: Collection[str] = (),
    inputs: DecoderInputs | None = None,
) -> torch.Tensor:
    """Return the log-probs of the tokens in `pack.predicted`, as a float32 tensor of shape (predictions,) on the device.

    The model must use packed attention (see attention.py).

    Args:
        refused: names of attention kernels that must not be used.
        inputs: the decoder's inputs for a pack with images; None for a text-only pack.

    Raises:
        UnsupportedAttentionError: a layer does not support packed attention.
        KernelFailedError: an attention kernel raised an error.
    """
    layout = PackLayout(pack, device, refused, both_ways=inputs is not None and inputs.both_ways)
    return head.logps(pack_states(model, layout, inputs), layout.parents, layout.targets, temperature)


@torch.inference_mode()
def pack_states(model: Any, layout: PackLayout, inputs: DecoderInputs | None = None) -> torch.Tensor:
    """Return the last layer's hidden states for a pack's tokens, shape (tokens, hidden size).

    Args:
        inputs: the decoder's inputs for a pack with images; None for a text-only pack.
    """
    with packed(layout):
        if inputs is None:
            made = model.base_model(input_ids=layout.token_ids[None], position_ids=layout.positions[None], use_cache=False)
        else:
            made = model.get_decoder()(**inputs.keywords(layout.positions), use_cache=False)
    states: torch.Tensor = made.last_hidden_state[0]
    return states


@torch.inference_mode()
def forward_padded(
    model: Any, head: Head, batch: list[Sequence], device: torch.device, temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probs of a batch's completion tokens, concatenated in the order of the batch.

    The result is a float32 tensor of shape (completion tokens,) on the device.

    The batch is padded on the right. A sequence with an attention mask already contains padding. This padding stays in place,
    and the mask is passed to the model. The sequences must either all have images or all be text-only.
    """
    lengths = [len(sequence) for sequence in batch]
    width = max(lengths)
    input_ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros(len(batch), width, dtype=torch.long)
    predicts = torch.zeros(len(batch), width, dtype=torch.bool)  # positions whose next token is a completion token
    for row, sequence in enumerate(batch):
        input_ids[row, : lengths[row]] = torch.from_numpy(sequence.model_ids())
        own = sequence.attention_mask
        mask[row, : lengths[row]] = 1 if own is None else torch.from_numpy(np.array(own, np.int64))
        predicts[row, len(sequence.prompt_ids) - 1 : lengths[row] - 1] = True
    targets = torch.roll(input_ids, -1, 1)[predicts].to(device)
    more = {} if bool(mask.all()) else {"attention_mask": mask.to(device)}
    images = [sequence.images for sequence in batch if sequence.images is not None]
    if images:
        pixels, types = pixel_inputs(images)
        more |= on_device(pixels, device)
        more |= {name: torch.from_numpy(token_types(images[0], input_ids.numpy())).to(device) for name in types}
    states = model.base_model(input_ids=input_ids.to(device), use_cache=False, **more).last_hidden_state
    parents = predicts.flatten().nonzero()[:, 0].to(device)
    return head.logps(states.flatten(0, 1), parents, targets, temperature)


@contextmanager
def attention_of(model: Any, implementation: str | None) -> Iterator[None]:
    """Switch the model to another attention implementation while the block runs.

    Args:
        implementation: transformers' name of the attention implementation.
    """
    before = model.config._attn_implementation
    if implementation != before:
        model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        if implementation != before:
            model.set_attn_implementation(before)


def padded_batches(sequences: list[Sequence], token_budget: int) -> Iterator[list[int]]:
    """Yield batches of sequence indices, longest sequences first.

    A batch has at most `token_budget` tokens, including padding. A sequence with more tokens gets its own batch.
    """
    lengths = [len(sequence) for sequence in sequences]
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > token_budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
