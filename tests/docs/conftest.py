"""The folder in which the docs' blocks and the docstrings' examples run."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from reflogp.store import describe_reference
from tests.conftest import save_llama, write_rows
from tests.docs.workspace import Workspace
from tests.vision_models import make, pair, picture


@pytest.fixture(scope="module")
def workspace(reference_folder, tokenizer, pair_rows, tmp_path_factory) -> Iterator[Workspace]:
    """The docs' names: small models (./sft-model, ./dpo-model, ./vision-model) and data (pairs.jsonl, image-pairs.jsonl, …)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    folder = tmp_path_factory.mktemp("docs")
    AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.bfloat16).save_pretrained(folder / "sft-model")
    tokenizer.save_pretrained(folder / "sft-model")
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    save_llama(folder / "dpo-model", tokenizer, **size)
    make("LLaVA", folder / "vision-model")
    AutoModelForImageTextToText.from_pretrained(folder / "vision-model", dtype=torch.bfloat16).save_pretrained(
        folder / "vision-model"
    )
    write_rows(folder / "image-pairs.jsonl", [_with_image(folder, number) for number in range(16)])
    rows = pair_rows[:32]
    write_rows(folder / "pairs.jsonl", rows)
    write_rows(folder / "feedback.jsonl", [_feedback(row, number) for number, row in enumerate(rows)])
    write_rows(folder / "chats.jsonl", [{"messages": row["prompt"] + row["chosen"]} for row in rows[:8]])
    write_rows(folder / "tokens.jsonl", [_tokens(row, tokenizer) for row in rows[:8]])
    before = Path.cwd()
    os.chdir(folder)
    os.environ["REFERENCE_ID"] = describe_reference("./sft-model", "bfloat16").reference_id
    found = Workspace(folder)
    yield found
    found.close()
    del os.environ["REFERENCE_ID"]
    os.chdir(before)


def _with_image(folder: Path, number: int) -> dict:
    (folder / "images").mkdir(exist_ok=True)
    picture(number).save(folder / "images" / f"{number}.png")
    return pair(f"Which colour is square {number}?", [f"images/{number}.png"], "It is red.", "It is blue.")


def _feedback(row: dict, number: int) -> dict:
    side = row["chosen"] if number % 2 == 0 else row["rejected"]
    return {"prompt": row["prompt"], "completion": side, "label": number % 2 == 0}


def _tokens(row: dict, tokenizer) -> dict:
    """A row as open-instruct, Megatron-Bridge or fairseq2 would hand it over: its ids, and fairseq2's text."""
    texts = [row["prompt"][-1]["content"], row["chosen"][-1]["content"], row["rejected"][-1]["content"]]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    named = zip(("src", "tgt_chosen", "tgt_rejected"), texts, strict=True)
    return {**dict(named), "prompt_ids": ids[0], "chosen_ids": ids[1], "rejected_ids": ids[2]}
