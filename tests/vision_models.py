"""Tiny vision-language models with random weights, their processors and pictures, made without a network."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

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


def llava() -> tuple[Any, Any]:
    tokenizer = _tokenizer("<image>")
    size = {"height": 32, "width": 32}
    image_processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size)
    processor = tf.LlavaProcessor(
        image_processor, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**_SIGHT, image_size=32, patch_size=8, projection_dim=32),
        text_config=tf.LlamaConfig(**_text(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    return tf.LlavaForConditionalGeneration(config), processor


def gemma3() -> tuple[Any, Any]:
    tokenizer = _tokenizer(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
    image_processor = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    processor = tf.Gemma3Processor(image_processor, tokenizer, image_seq_length=16)
    config = tf.Gemma3Config(
        vision_config=tf.SiglipVisionConfig(**_SIGHT, image_size=32, patch_size=8),
        text_config=tf.Gemma3TextConfig(
            **_text(
                tokenizer,
                head_dim=16,
                sliding_window=12,
                layer_types=["sliding_attention", "full_attention"] * 2,
                num_hidden_layers=4,
            )
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_id=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_id=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        mm_tokens_per_image=16,
    )
    return tf.Gemma3ForConditionalGeneration(config), processor


def idefics3() -> tuple[Any, Any]:
    tokenizer = _tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    image_processor = Idefics3ImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 64})
    processor = tf.Idefics3Processor(image_processor, tokenizer, image_seq_len=16)
    config = tf.Idefics3Config(
        vision_config={**_SIGHT, "image_size": 64, "patch_size": 8},
        text_config=tf.LlamaConfig(**_text(tokenizer)).to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    return tf.Idefics3ForConditionalGeneration(config), processor


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {"LLaVA": llava, "Gemma 3": gemma3, "Idefics 3": idefics3}


def make(family: str, folder: Path) -> Any:
    """Write a model and its processor into a folder; return the processor."""
    torch.manual_seed(0)
    model, processor = FAMILIES[family]()
    template = _TEMPLATE.replace("IMAGE", processor.image_token)
    processor.chat_template = processor.tokenizer.chat_template = template
    for name, parameter in model.named_parameters():  # large at the connector, so that images matter
        parameter.data.normal_(0, 0.5 if "project" in name or "connector" in name else 0.1)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
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
