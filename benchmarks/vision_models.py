"""Make vision-language models with random weights, and their processors, without a network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import transformers as tf
from shapes import sizes_of
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

PATCH, _VOCABULARY = 14, 32_000
_TOWER = {"hidden_size": 256, "intermediate_size": 1024}
_TOWER_OF_CLIP = {**_TOWER, "num_hidden_layers": 6, "num_attention_heads": 4, "patch_size": PATCH}


def random_vision_model(family: str, shape: str, image_side: int, tokenizer: Any) -> tuple[Any, Any, str]:
    """Return a model, its processor, and the text that stands for an image in a prompt.

    Args:
        family: a key of FAMILIES.
        shape: shape of the language model, a key of SHAPES.
        image_side: pixels; an image has (side / PATCH)² tokens, of Qwen2.5-VL about as many.
        tokenizer: gets the family's special tokens.
    """
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {**sizes_of(shape), **ids, "vocab_size": _VOCABULARY, "max_position_embeddings": 8192, "tie_word_embeddings": True}
    return FAMILIES[family](tokenizer, text, image_side)


def _add_tokens(tokenizer: Any, **named: str) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": list(named.values())})
    for name, token in named.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))


def _llava(tokenizer: Any, text: dict[str, Any], side: int) -> tuple[Any, Any, str]:
    _add_tokens(tokenizer, image_token="<image>")
    images = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    processor = tf.LlavaProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**_TOWER_OF_CLIP, image_size=side, projection_dim=64),
        text_config=tf.Qwen2Config(**text),
        image_token_id=tokenizer.image_token_id,
    )
    return tf.LlavaForConditionalGeneration(config), processor, "<image>"


def _gemma3(tokenizer: Any, text: dict[str, Any], side: int) -> tuple[Any, Any, str]:
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    _add_tokens(tokenizer, **named)
    images, count = Gemma3ImageProcessorPil(size={"height": side, "width": side}), (side // PATCH) ** 2
    processor = tf.Gemma3Processor(images, tokenizer, image_seq_length=count)
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    config = tf.Gemma3Config(
        vision_config=tf.SiglipVisionConfig(**_TOWER_OF_CLIP, image_size=side),
        text_config=tf.Gemma3TextConfig(**text, head_dim=head_dim, query_pre_attn_scalar=head_dim),
        mm_tokens_per_image=count,
        image_token_id=tokenizer.image_token_id,
        boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
    )
    return tf.Gemma3ForConditionalGeneration(config), processor, named["boi_token"]


def _qwen2_5_vl(tokenizer: Any, text: dict[str, Any], side: int) -> tuple[Any, Any, str]:
    named = {name: f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
    _add_tokens(tokenizer, image_token=named["image_pad"], video_token=named["video_pad"])
    _add_tokens(tokenizer, start=named["vision_start"], end=named["vision_end"])
    pixels = (2 * side) ** 2  # a token is made of 2 x 2 patches
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": pixels, "longest_edge": pixels}, patch_size=PATCH)
    # The video processor needs torchvision; a placeholder object is enough here.
    with mock.patch.object(ProcessorMixin, "check_argument_for_proper_class", lambda *args: None):
        processor = tf.Qwen2_5_VLProcessor(images, tokenizer, SimpleNamespace(merge_size=2, to_dict=dict))
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    config = tf.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={
            **_TOWER, "depth": 6, "num_heads": 4, "patch_size": PATCH, "out_hidden_size": text["hidden_size"],
            "fullatt_block_indexes": [5],
        },
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(named[name]) for name in ("vision_start", "vision_end")},
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
    )  # fmt: skip
    placeholder = named["vision_start"] + named["image_pad"] + named["vision_end"]
    return tf.Qwen2_5_VLForConditionalGeneration(config), processor, placeholder


FAMILIES = {"llava": _llava, "gemma3": _gemma3, "qwen2.5-vl": _qwen2_5_vl}
