"""Draw preference pairs with images and build a small vision-language model for them, without a network."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from reflogp.cli.demo_model import train_tokenizer

COLORS = ("red", "green", "blue", "yellow", "purple", "orange")
SHAPES = ("square", "circle", "triangle")
#: Width and height in pixels of a drawn image, and of one of the model's patches. An image has 16 patches and thus 16 tokens.
IMAGE_SIZE, PATCH_SIZE = 64, 16
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<|eos|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def draw_pairs(file: Path, count: int) -> None:
    """Write pairs as JSON Lines, and a PNG image for each pair to the folder `images` next to the file.

    Args:
        file: the file to write. Each line has prompt, chosen and rejected (messages), and images (a list with one path
            relative to the file).
        count: number of pairs.
    """
    (file.parent / "images").mkdir(parents=True, exist_ok=True)
    choose = random.Random(0)
    lines = []
    for number in range(count):
        name = f"images/{number}.png"
        colors = dict(zip(SHAPES, choose.sample(COLORS, len(SHAPES)), strict=True))
        _drawn(colors).save(file.parent / name)
        asked = choose.choice(SHAPES)
        wrong = choose.choice([color for color in COLORS if color != colors[asked]])
        pair = {
            "prompt": [{"role": "user", "content": f"Which color is the {asked}?"}],
            "chosen": [{"role": "assistant", "content": f"The {asked} is {colors[asked]}."}],
            "rejected": [{"role": "assistant", "content": f"The {asked} is {wrong}."}],
            "images": [name],
        }
        lines.append(json.dumps(pair) + "\n")
    file.write_text("".join(lines), encoding="utf-8")


def _drawn(colors: dict[str, str]) -> Image.Image:
    """Return an image of a square, a circle and a triangle in the given colors."""
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((4, 4, 28, 28), fill=colors["square"])
    draw.ellipse((36, 4, 60, 28), fill=colors["circle"])
    draw.polygon(((32, 36), (18, 60), (46, 60)), fill=colors["triangle"])
    return image


def build_vision_model(folder: Path) -> None:
    """Write a LLaVA model with 1M random parameters and its processor to a folder."""
    tokenizer = _tokenizer()
    hidden = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**hidden, image_size=IMAGE_SIZE, patch_size=PATCH_SIZE),
        text_config=LlamaConfig(
            **hidden,
            num_key_value_heads=2,
            vocab_size=len(tokenizer),
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    image_processor = CLIPImageProcessor(
        size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    )
    LlavaProcessor(
        image_processor,
        tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)


def _tokenizer() -> Any:
    texts = [f"Which color is the {shape}? The {shape} is {color}." for shape in SHAPES for color in COLORS]
    trained = train_tokenizer(texts, vocab_size=400)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained.backend_tokenizer, pad_token="<|pad|>", eos_token="<|eos|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return tokenizer
