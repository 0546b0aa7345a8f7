"""Rows for supervised fine-tuning have the tokens that TRL's SFTTrainer makes of them."""

import copy
import json
from types import SimpleNamespace

import datasets
import pytest
from tokenizers.processors import TemplateProcessing
from trl import SFTConfig, SFTTrainer

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.shape import DatasetError
from reflogp.scoring.data.tokenize import tokenize_dataset
from tests.conftest import write_rows
from tests.versions import skip_before

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
SHAREGPT = [{"from": message["role"], "value": message["content"]} for message in CHAT]
ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m['role'] }}>"
    "{% if mood %}{{ mood }}{% endif %}{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS = {
    "messages": [{"messages": CHAT}, {"messages": CHAT[1:3]}],
    "conversations": [{"conversations": SHAREGPT}],
    "tools and a variable": [{"messages": CHAT, "tools": json.dumps([ADD]), "chat_template_kwargs": {"mood": "Hm. "}}],
    "messages beside other columns": [{"source": "web", "messages": CHAT, "score": 3}],
    "text": [{"text": "Once upon a time."}, {"text": "An end.<|endoftext|>"}],
    "prompt and completion": [{"prompt": CHAT[:2], "completion": CHAT[2:3]}],
    "plain prompt and completion": [{"prompt": "Two and two? ", "completion": "Four."}],
}


@pytest.fixture(scope="module")
def chatty(tokenizer):
    """Adds BOS to plain text, and writes it in conversations too."""
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"bos_token": "<|bos|>", "eos_token": "<|endoftext|>"})
    special = [("<|bos|>", other.bos_token_id)]
    other.backend_tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=special)
    other.chat_template = TEMPLATE
    return other


def trl(rows, tokenizer, folder) -> datasets.Dataset:
    args = SFTConfig(output_dir=str(folder), max_length=None, bf16=False, report_to=[], packing=False)
    parts = SimpleNamespace(
        _tokenizer=tokenizer, chat_template=None, completion_only_loss=True, _is_vlm=False, padding_free=False, args=args
    )
    return SFTTrainer._prepare_dataset(parts, datasets.Dataset.from_list(rows), tokenizer, args, False, None, "train")


@pytest.mark.parametrize("name", ROWS)
def test_rows_have_the_tokens_of_trl(name, chatty, tmp_path):
    if name == "plain prompt and completion":
        skip_before("trl", "1.14", "begins completions where the prompt's own tokens end")
    prepared = trl(copy.deepcopy(ROWS[name]), chatty, tmp_path)
    [window] = tokenize_dataset(RowSource(str(write_rows(tmp_path / "rows.jsonl", ROWS[name]))), chatty)
    assert not window.problems and not window.notes
    for ours, theirs in zip(window.table.to_pylist(), prepared, strict=True):
        assert ours["prompt_ids"] + ours["completion_ids"] == theirs["input_ids"]
        begin = next(at for at, label in enumerate(theirs["labels"]) if label != -100)
        assert len(ours["prompt_ids"]) == max(1, begin)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": None}, "messages is null or missing"),
        ({"messages": "Hi"}, "messages is not a list of messages"),
        ({"messages": [{"content": "Hi"}]}, "messages is not a list of messages that each have a role"),
        ({"text": 7}, "text has type int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "more than text"),
    ],
)
def test_what_is_no_such_row_is_a_bad_row(row, problem, chatty, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [row])
    [window] = tokenize_dataset(RowSource(str(file)), chatty)
    assert problem in window.problems[0]


def test_a_format_that_does_not_fit_says_what_it_found(chatty, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", ROWS["messages"])
    with pytest.raises(DatasetError, match="expected rows in the format 'kto', but the columns messages match 'sft'"):
        list(tokenize_dataset(RowSource(str(file)), chatty, "kto"))
