"""The folder in which the docs' blocks and the docstrings' examples run."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from reflogp.store import describe_reference
from tests.conftest import write_rows
from tests.docs.workspace import Workspace


@pytest.fixture(scope="module")
def workspace(reference_folder, tokenizer, pair_rows, tmp_path_factory) -> Iterator[Workspace]:
    """The docs' names: ./sft-model (a small model in bfloat16), pairs.jsonl, feedback.jsonl, tokens.jsonl, expected.json."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("docs")
    AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.bfloat16).save_pretrained(folder / "sft-model")
    tokenizer.save_pretrained(folder / "sft-model")
    rows = pair_rows[:32]
    write_rows(folder / "pairs.jsonl", rows)
    write_rows(folder / "feedback.jsonl", [_feedback(row, number) for number, row in enumerate(rows)])
    write_rows(folder / "tokens.jsonl", [_tokens(row, tokenizer) for row in rows[:8]])
    fingerprint = {"dataset": "pairs", "tokenizer": "sft", "max_seq_length": 2048, "tensor_model_parallel_size": 1}
    (folder / "expected.json").write_text(json.dumps({**fingerprint, "sequence_parallel": False, "tokenization_version": 2}))
    before = Path.cwd()
    os.chdir(folder)
    os.environ["REFERENCE_ID"] = describe_reference("./sft-model", "bfloat16").reference_id
    found = Workspace(folder)
    yield found
    found.close()
    del os.environ["REFERENCE_ID"]
    os.chdir(before)


def _feedback(row: dict, number: int) -> dict:
    side = row["chosen"] if number % 2 == 0 else row["rejected"]
    return {"prompt": row["prompt"], "completion": side, "label": number % 2 == 0}


def _tokens(row: dict, tokenizer) -> dict:
    """A row as open-instruct, Megatron-Bridge or fairseq2 would hand it over: its ids, and fairseq2's text."""
    texts = [row["prompt"][-1]["content"], row["chosen"][-1]["content"], row["rejected"][-1]["content"]]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    named = zip(("src", "tgt_chosen", "tgt_rejected"), texts, strict=True)
    return {**dict(named), "prompt_ids": ids[0], "chosen_ids": ids[1], "rejected_ids": ids[2]}
