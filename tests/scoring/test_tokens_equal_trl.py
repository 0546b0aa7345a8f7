"""Token ids row for row against TRL's own preparation, for every data file and for tokenizers that differ where it matters."""

import copy
import gzip
import json
from types import SimpleNamespace

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.tokenize import tokenize_dataset
from reflogp.scoring.errors import TokenizerError
from tests.conftest import wider_data, write_rows

#: Renders the prompt alone differently from the prompt before a completion, as Gemma's and Qwen's thinking templates do.
NOT_PREFIX_PRESERVING = (
    "{{ bos_token }}{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</{{ m['role'] }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not thinking %}<think></think>{% endif %}{% endif %}"
)


def trl_rows(rows: list[dict], tokenizer, tmp_path, trainer=DPOTrainer) -> Dataset:
    """What TRL's own preparation makes of the rows, without a model."""
    config = DPOConfig if trainer is DPOTrainer else KTOConfig
    args = config(output_dir=str(tmp_path), max_length=None, bf16=False, report_to=[])
    itself = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False, desirable_weight=1.0, undesirable_weight=1.0)
    return trainer._prepare_dataset(itself, Dataset.from_list(rows), tokenizer, args, "eval")


def our_columns(file, tokenizer, form=None) -> dict:
    windows = list(tokenize_dataset(RowSource(str(file)), tokenizer, form))
    assert not any(window.problems for window in windows)
    names = [name for name in windows[0].table.column_names if name != "row"]
    return {name: [ids for window in windows for ids in window.table[name].to_pylist()] for name in names}


def assert_equal_to_trl(file, rows, tokenizer, tmp_path, trainer=DPOTrainer, form=None):
    expected, got = trl_rows(rows, tokenizer, tmp_path, trainer), our_columns(file, tokenizer, form)
    for name in got:
        assert got[name] == expected[name], name
    return got


@pytest.fixture
def bos_tokenizer(tokenizer):
    """Adds BOS to plain text, and has a template that is not prefix-preserving."""
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"bos_token": "<|bos|>"})
    other.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", other.bos_token_id)]
    )
    other.chat_template = NOT_PREFIX_PRESERVING
    return other


@pytest.mark.slow
@pytest.mark.parametrize("file", wider_data(), ids=lambda path: path.name.split(".")[0])
@pytest.mark.parametrize("which", ["tokenizer", "bos_tokenizer"])
def test_every_data_file(file, which, request, tmp_path):
    tokenizer = request.getfixturevalue(which)
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    rows = [json.loads(line) for line in text.splitlines()]
    trainer = DPOTrainer if "chosen" in rows[0] else KTOTrainer
    got = assert_equal_to_trl(file, rows, tokenizer, tmp_path, trainer)
    assert len(got["prompt_ids"]) == len(rows)


MESSAGES = [{"role": "user", "content": "What is 2+2?"}]
ANSWERS = ([{"role": "assistant", "content": "4."}], [{"role": "assistant", "content": "5, I think."}])
SHAPES = {
    "plain": [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}, {"prompt": "a ", "chosen": "b<|eos|>", "rejected": ""}],
    "plain, implicit prompt": [
        {"chosen": "Q: 2+2? A: four", "rejected": "Q: 2+2? A: five"},
        {"chosen": "same text", "rejected": "same text and more"},
        {"chosen": "xa", "rejected": "ya"},
        {"chosen": "x ", "rejected": "y "},
    ],
    "conversational, implicit prompt": [{"chosen": MESSAGES + ANSWERS[0], "rejected": MESSAGES + ANSWERS[1]}],
    "multi-turn with a system message": [
        {
            "prompt": [{"role": "system", "content": "Be brief."}, *MESSAGES, *ANSWERS[0], *MESSAGES],
            "chosen": ANSWERS[0],
            "rejected": ANSWERS[1],
        }
    ],
    "tools as objects": [
        {
            "prompt": MESSAGES,
            "chosen": ANSWERS[0],
            "rejected": ANSWERS[1],
            "tools": [{"name": "add", "parameters": {"a": "int"}}],
        }
    ],
    "tools as JSON text": [
        {"prompt": MESSAGES, "chosen": ANSWERS[0], "rejected": ANSWERS[1], "tools": json.dumps([{"name": "add"}])}
    ],
    "chat_template_kwargs": [
        {"prompt": MESSAGES, "chosen": ANSWERS[0], "rejected": ANSWERS[1], "chat_template_kwargs": {"thinking": True}},
        {"prompt": MESSAGES, "chosen": ANSWERS[0], "rejected": ANSWERS[1], "chat_template_kwargs": {"thinking": False}},
    ],
    "Chinese": [{"prompt": "国会的转发", "chosen": "好的。", "rejected": "不。"}],
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("which", ["tokenizer", "bos_tokenizer"])
def test_every_shape(shape, which, request, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", SHAPES[shape])
    assert_equal_to_trl(file, SHAPES[shape], request.getfixturevalue(which), tmp_path)


def test_the_awkward_template_is_awkward(bos_tokenizer, tmp_path):
    """The test above would mean little if both tokenizers cut at the prompt's own end."""
    file = write_rows(tmp_path / "rows.jsonl", SHAPES["conversational, implicit prompt"])
    alone = bos_tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert len(our_columns(file, bos_tokenizer)["prompt_ids"][0]) < len(alone)


def test_pairs_read_as_kto_rows_are_unpaired_as_trl_does(bos_tokenizer, tmp_path):
    rows = SHAPES["multi-turn with a system message"] + SHAPES["conversational, implicit prompt"]
    rows[1] = dict(zip(("prompt", "chosen", "rejected"), (MESSAGES, *ANSWERS), strict=True))
    file = write_rows(tmp_path / "rows.jsonl", rows)
    expected = trl_rows(rows, bos_tokenizer, tmp_path, KTOTrainer)
    got = our_columns(file, bos_tokenizer, "kto")
    pairs = zip(got["prompt_ids"], got["completion_ids"], strict=True)
    assert sorted(pairs) == sorted(zip(expected["prompt_ids"], expected["completion_ids"], strict=True))


def test_a_tokenizer_without_pad_is_fine_and_without_eos_is_fine_for_conversations(tokenizer, tmp_path):
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    file = write_rows(tmp_path / "rows.jsonl", SHAPES["plain"])
    assert our_columns(file, bare) == our_columns(file, tokenizer)
    bare.eos_token = None
    bare.chat_template = NOT_PREFIX_PRESERVING.replace("{{ bos_token }}", "")
    chats = write_rows(tmp_path / "chats.jsonl", SHAPES["conversational, implicit prompt"])
    assert our_columns(chats, bare)["chosen_ids"][0]
    with pytest.raises(TokenizerError, match="EOS"):
        our_columns(file, bare)


def test_conversations_need_a_chat_template(tokenizer, tmp_path):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    file = write_rows(tmp_path / "chats.jsonl", SHAPES["conversational, implicit prompt"])
    with pytest.raises(TokenizerError, match="chat template"):
        our_columns(file, bare)


def test_rows_that_cannot_be_used_are_named_and_the_others_kept(tokenizer, tmp_path):
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    rows = [good, {**good, "chosen": None}, {**good, "prompt": None}, {**good, "prompt": 7}, good]
    rows.append({"prompt": MESSAGES, "chosen": "text", "rejected": ANSWERS[0]})
    [window] = tokenize_dataset(RowSource(str(write_rows(tmp_path / "r.jsonl", rows))), tokenizer)
    assert window.table["row"].to_pylist() == [0, 4]
    assert set(window.problems) == {1, 2, 3, 5}
    assert "chosen is null" in window.problems[1]
    assert "prompt is null" in window.problems[2]


def test_a_template_that_refuses_a_row_is_that_rows_problem(tokenizer, tmp_path):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = (
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    rows = [
        dict(zip(("prompt", "chosen", "rejected"), (p, *ANSWERS), strict=True))
        for p in (MESSAGES, [{"role": "x", "content": ""}])
    ]
    [window] = tokenize_dataset(RowSource(str(write_rows(tmp_path / "r.jsonl", rows))), strict)
    assert window.table["row"].to_pylist() == [0]
    assert "no such role" in window.problems[1]


def test_token_columns_are_taken_as_they_are(tmp_path):
    rows = [
        {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]},
        {"prompt_ids": [1, -2], "chosen_ids": [3], "rejected_ids": []},
    ]
    [window] = tokenize_dataset(RowSource(str(write_rows(tmp_path / "r.jsonl", rows))), None)
    assert window.table.to_pylist() == [{"row": 0, **rows[0]}]
    assert "prompt_ids" in window.problems[1]
