"""Run a model on packed sequences, a padded batch or a single sequence, and return float32 log-probs."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch

from reflogp.scoring.torch_engine.attention import PackLayout, packed
from reflogp.scoring.torch_engine.compilation import allow_many_versions
from reflogp.scoring.torch_engine.head import Head, logps_of_logits
from reflogp.scoring.torch_engine.images import DecoderInputs, on_device, pixel_inputs, token_types
from reflogp.scoring.torch_engine.packing import Pack
from reflogp.scoring.torch_engine.sequences import Sequence

#: Number of rows of logits that `forward_single` copies to float32 at once.
_SINGLE_ROWS = 128

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
    """Return the log-probs of the tokens in `pack.predicted`, as `Head.logps` returns them, on the device.

    The model must use packed attention (see attention.py).
    """
    layout = PackLayout(pack, device, refused, both_ways=inputs is not None and inputs.both_ways)
    return forward_layout(model, head, layout, temperature, inputs)


@torch.inference_mode()
def forward_layout(
    model: Any, head: Head, layout: PackLayout, temperature: float = 1.0, inputs: DecoderInputs | None = None
) -> torch.Tensor:
    """Do what `forward_pack` does, with a layout that the caller has made in inference mode and can inspect afterwards."""
    allow_many_versions()
    with packed(layout):
        if inputs is None:
            made = head.backbone(input_ids=layout.token_ids[None], position_ids=layout.positions[None], use_cache=False)
        else:
            made = model.get_decoder()(**inputs.keywords(layout.positions), use_cache=False)
    return head.logps(made.last_hidden_state[0], layout.parents, layout.targets, temperature)


@torch.inference_mode()
def forward_padded(head: Head, batch: list[Sequence], device: torch.device, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probs of a batch's completion tokens, concatenated in the order of the batch.

    The batch is padded on the right. A sequence with an attention mask already contains padding. This padding stays in place,
    and the mask is passed to the model. The sequences must either all have images or all be text-only.
    """
    allow_many_versions()
    inputs, predicts, targets = _padded_inputs(batch, device)
    states = head.backbone(**inputs, use_cache=False).last_hidden_state
    return head.logps(states.flatten(0, 1), predicts.flatten().nonzero()[:, 0].to(device), targets, temperature)


@torch.inference_mode()
def forward_single(
    model: Any, sequence: Sequence, device: torch.device, temperature: float = 1.0, top_k: int = 0
) -> torch.Tensor:
    """Return the log-probs of a sequence's completion tokens, as `Head.logps` does, from the model's own logits.

    This is an ordinary call of the model, with which the self-check compares all other ways of scoring.
    """
    allow_many_versions()
    inputs, _, targets = _padded_inputs([sequence], device)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:  # nearly all models: logits of these positions only
        inputs["logits_to_keep"] = len(targets) + 1
    logits = model(**inputs, use_cache=False).logits[0, -len(targets) - 1 : -1]
    slices = (slice(start, start + _SINGLE_ROWS) for start in range(0, len(targets), _SINGLE_ROWS))
    return torch.cat([logps_of_logits(logits[rows].float() / temperature, targets[rows], top_k) for rows in slices])


def _padded_inputs(batch: list[Sequence], device: torch.device) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Return the model's inputs, the positions that predict a completion token, and the predicted tokens.

    The positions are a bool tensor (sequences, tokens) on the host, and the tokens an int64 tensor on the device.
    """
    lengths = [len(sequence) for sequence in batch]
    width = max(lengths)
    input_ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros(len(batch), width, dtype=torch.long)
    predicts = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, sequence in enumerate(batch):
        input_ids[row, : lengths[row]] = torch.from_numpy(sequence.model_ids())
        own = sequence.attention_mask
        mask[row, : lengths[row]] = 1 if own is None else torch.from_numpy(np.array(own, np.int64))
        predicts[row, len(sequence.prompt_ids) - 1 : lengths[row] - 1] = True
    targets = torch.roll(input_ids, -1, 1)[predicts].to(device)
    inputs: dict[str, Any] = {"input_ids": input_ids.to(device)}
    if not bool(mask.all()):
        inputs["attention_mask"] = mask.to(device)
    images = [sequence.images for sequence in batch if sequence.images is not None]
    if images:
        pixels, types = pixel_inputs(images)
        inputs |= on_device(pixels, device)
        inputs |= {name: torch.from_numpy(token_types(images[0], input_ids.numpy())).to(device) for name in types}
    return inputs, predicts, targets


#: transformers' names of the attention implementations of a model's parts; "" is the model itself.
AttentionNames = dict[str, Any]


def attention_names(config: Any) -> AttentionNames:
    """Return the attention implementations of a model and its parts, as `set_attn_implementation` takes them."""
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    names = {"": config._attn_implementation} | {
        name: attention_names(part) if part.sub_configs else part._attn_implementation for name, part in parts.items()
    }
    return {name: value for name, value in names.items() if value is not None}  # of parts that are built as models


@contextmanager
def attention_of(model: Any, names: AttentionNames) -> Iterator[None]:
    before = attention_names(model.config)
    if names != before:
        model.set_attn_implementation(names)
    try:
        yield
    finally:
        if names != before:
            model.set_attn_implementation(before)


def padded_batches(sequences: list[Sequence], token_budget: int) -> Iterator[list[int]]:
    """Yield batches of sequence indices, longest sequences first."""
    lengths = [len(sequence) for sequence in sequences]
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > token_budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
