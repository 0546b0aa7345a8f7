"""Tiny vision-language models with random weights, their processors and pictures, made without a network."""

import io
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers as tf
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from reflogp.cli.demo_model import train_tokenizer

#: Content parts in order, whole conversations, the role of each turn: enough of a real vision model's template.
_PART = "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}" + _PART + "{% endfor %}{% endif %}"
    "{{ '<|eos|>' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_WORDS = [
    "what is in this picture? a red square and a blue circle",
    "describe the image in one sentence, please: colours, shapes",
]
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def _tokenizer(*special: str, **named: str) -> Any:
    trained = train_tokenizer(_WORDS, vocab_size=300)
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, pad_token="<|pad|>", eos_token="<|eos|>", extra_special_tokens=named
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)}, replace_extra_special_tokens=False)
    return tokenizer


def _text(tokenizer: Any, **more: Any) -> dict[str, Any]:
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return {**TEXT, **ids, "vocab_size": len(tokenizer), **more}


def _head() -> int:
    """Return the width of a head of the text decoder."""
    return TEXT["hidden_size"] // TEXT["num_attention_heads"]


def _family(
    kind: str,
    tokenizer: Any,
    images: Any,
    vision: Any,
    text: Any,
    has_videos: bool = False,
    processor_of: str | None = None,
    given: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[Any, Any]:
    """Return a model of the classes whose names begin with `kind`, and its processor.

    Args:
        has_videos: whether something takes the place of a video processor, a part that needs torchvision.
        given: further arguments of the processor.
    """
    videos = [SimpleNamespace(merge_size=2, num_frames=1, fps=1, to_dict=dict)] if has_videos else []
    with mock.patch.object(ProcessorMixin, "check_argument_for_proper_class", lambda *args: None):
        processor = getattr(tf, f"{processor_of or kind}Processor")(images, tokenizer, *videos, **(given or {}))
    ids = {"image_token_id": processor.image_token_id, **config}
    whole = getattr(tf, f"{kind}Config")(vision_config=vision, text_config=text, **ids)
    return getattr(tf, f"{kind}ForConditionalGeneration")(whole), processor


def llava() -> tuple[Any, Any]:
    tokenizer = _tokenizer("<image>")
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    given = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    sight = tf.CLIPVisionConfig(**_SIGHT, image_size=32, patch_size=8, projection_dim=32)
    return _family("Llava", tokenizer, images, sight, tf.LlamaConfig(**_text(tokenizer)), given=given, image_seq_length=16)


def gemma3() -> tuple[Any, Any]:
    tokenizer = _tokenizer(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
    tokenizer.add_tokens(["\n", "\n\n", "\n\n\n", "\n\n\n\n"])  # as Gemma's own
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    sight = tf.SiglipVisionConfig(**_SIGHT, image_size=32, patch_size=8)
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "sliding_window": 12}
    text = tf.Gemma3TextConfig(**_text(tokenizer, head_dim=_head(), **layers))
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("image", "boi", "eoi")}
    return _family("Gemma3", tokenizer, images, sight, text, given={"image_seq_length": 16}, **ids, mm_tokens_per_image=16)


def _idefics3(kind: str, processor: Any, has_videos: bool) -> tuple[Any, Any]:
    tokenizer = _tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    images = processor(size={"longest_edge": 128}, max_image_size={"longest_edge": 64})
    sight, text = {**_SIGHT, "image_size": 64, "patch_size": 8}, tf.LlamaConfig(**_text(tokenizer)).to_dict()
    return _family(kind, tokenizer, images, sight, text, has_videos, given={"image_seq_len": 16}, scale_factor=2)


def _qwen(
    kind: str, sight: dict[str, Any], mrope_interleaved: bool = False, processor_of: str | None = None, **text: Any
) -> tuple[Any, Any]:
    tokenizer = _tokenizer("<|vision_start|>", "<|vision_end|>", image_token="<|image_pad|>", video_token="<|video_pad|>")
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 32 * 32, "longest_edge": 96 * 96}, patch_size=8)
    sections = [_head() // 4, _head() // 8, _head() // 8]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    rope |= {"mrope_interleaved": True} if mrope_interleaved else {}
    names = {"video_token_id": "video_pad", "vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}
    sight = {"depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, **sight}
    return _family(kind, tokenizer, images, sight, _text(tokenizer, rope_parameters=rope, **text), True, processor_of, **ids)


def _tower(**more: Any) -> dict[str, Any]:
    return {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": TEXT["hidden_size"], **more}


def qwen3_5() -> tuple[Any, Any]:
    """Layers of linear attention, and a config that transformers also lists as a causal language model's."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    text = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": _head(), **linear}
    return _qwen("Qwen3_5", _tower(num_position_embeddings=64), True, "Qwen3VL", **text)


def internvl() -> tuple[Any, Any]:
    tokenizer = _tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    images = GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=4)
    sight = {**_SIGHT, "image_size": [32, 32], "patch_size": [8, 8]}
    length, text = {"image_seq_length": 4}, tf.Qwen2Config(**_text(tokenizer)).to_dict()
    return _family("InternVL", tokenizer, images, sight, text, True, given=length, **length)


def llava_onevision() -> tuple[Any, Any]:
    tokenizer = _tokenizer(image_token="<image>", video_token="<video>")
    points = [[32, 32], [32, 64], [64, 32], [64, 64]]
    images = LlavaOnevisionImageProcessorPil(size={"height": 32, "width": 32}, image_grid_pinpoints=points)
    sight = tf.SiglipVisionConfig(**_SIGHT, image_size=32, patch_size=8, vision_use_head=False)
    full = {"vision_feature_select_strategy": "full"}
    layers = {"vision_feature_layer": -1, "image_grid_pinpoints": points, "video_token_id": tokenizer.video_token_id}
    text, given = tf.Qwen2Config(**_text(tokenizer)), {"num_image_tokens": 16, **full}
    return _family("LlavaOnevision", tokenizer, images, sight, text, True, given=given, **full, **layers)


#: Families whose processors can be saved and loaded without torchvision.
LOADABLE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "LLaVA": llava,
    "Gemma 3": gemma3,
    "Idefics 3": lambda: _idefics3("Idefics3", Idefics3ImageProcessorPil, False),
}
FAMILIES = {
    **LOADABLE,
    "SmolVLM": lambda: _idefics3("SmolVLM", SmolVLMImageProcessorPil, True),
    "Qwen2-VL": lambda: _qwen("Qwen2VL", {"embed_dim": 32, "hidden_size": TEXT["hidden_size"], "mlp_ratio": 2}),
    "Qwen2.5-VL": lambda: _qwen("Qwen2_5_VL", _tower(window_size=32, fullatt_block_indexes=[1])),
    "Qwen3-VL": lambda: _qwen(
        "Qwen3VL", _tower(num_position_embeddings=64, deepstack_visual_indexes=[0]), mrope_interleaved=True, head_dim=_head()
    ),
    "InternVL": internvl,
    "LLaVA-OneVision": llava_onevision,
}
#: A family whose sequences are never packed.
PADDED = {"Qwen3.5": qwen3_5}


#: Parts of names of parameters -> standard deviation, so that images and positions matter; 0.1 for others.
_SIZES = {"project": 0.5, "connector": 0.5, "merger": 0.5, "q_proj": 0.2, "k_proj": 0.2}


def make(family: str, folder: Path, seed: int = 0) -> Any:
    """Write a model and its tokenizer, and its processor if it is LOADABLE, into a folder; return the processor."""
    torch.manual_seed(seed)
    model, processor = {**FAMILIES, **PADDED}[family]()
    token = processor.image_token
    around = ("<|vision_start|>", "<|vision_end|>") if token == "<|image_pad|>" else ("", "")
    template = _TEMPLATE.replace("IMAGE", around[0] + token + around[1])
    processor.chat_template = processor.tokenizer.chat_template = template
    for name, parameter in model.named_parameters():
        middle = 1.0 if (parameter == 1).all() else 0.0  # of norms
        parameter.data.normal_(middle, next((size for part, size in _SIZES.items() if part in name), 0.1))
    model.eval().save_pretrained(folder)
    (processor if family in LOADABLE else processor.tokenizer).save_pretrained(folder)
    return processor


def picture(seed: int, size: tuple[int, int] = (48, 40)) -> Image.Image:
    """Return an RGB picture of random blocks."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (8, 8, 3), np.uint8)
    return Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    """Return the bytes of a file of this image."""
    sink = io.BytesIO()
    image.save(sink, form, **options)
    return sink.getvalue()


def pair(prompt: str, images: Any, chosen: str = "a red square", rejected: str = "a blue circle, one") -> dict[str, Any]:
    """Return a conversational pair with these images."""
    sides = {"chosen": chosen, "rejected": rejected}
    return {
        "prompt": [{"role": "user", "content": prompt}],
        **{name: [{"role": "assistant", "content": text}] for name, text in sides.items()},
        "images": images,
    }


def pairs_with_files(folder: Path, count: int = 60) -> list[dict[str, Any]]:
    """Write 30 images to `folder`, and return `count` pairs with none to three of them, some of them shared, as paths."""
    draw = random.Random(3)
    names = [f"{seed}.png" for seed in range(30)]
    for seed, name in enumerate(names):
        (folder / name).write_bytes(encoded(picture(seed, (40 + seed, 60)), "PNG"))
    return [pair(f"what is it? {number % 11}", draw.sample(names, draw.randrange(4))) for number in range(count)]
