"""Rows of every kind that a file can hold: each has the tokens that TRL trains on, or is a bad row; others are unharmed."""

import json
import math
import tempfile
from itertools import takewhile

import datasets
import pytest
from datasets.utils.json import ujson_loads
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from trl.data_utils import _tokenize

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.shape import reserved_kwargs
from reflogp.scoring.data.tokenize import tokenize_dataset
from reflogp.scoring.errors import DatasetError
from reflogp.store.texts import MOST_CHARACTERS
from tests.conftest import write_rows
from tests.scoring.hostile_rows import obedient, pair, write_raw

GOOD = pair()


def tokenized(file, tokenizer, **options):
    """(row -> its token lists, row -> what is wrong) of a file."""
    tokens, problems = {}, {}
    for window in tokenize_dataset(RowSource(str(file)), tokenizer, **options):
        problems |= window.problems
        for row in window.table.to_pylist():
            tokens[row.pop("row")] = row
    return tokens, problems


def trl_tokens(row: dict, tokenizer) -> dict:
    """What TRL's `tokenize_fn` makes of a conversational pair, by TRL's own functions."""
    tools = row.get("tools")
    kwargs = {"tools": json.loads(tools) if isinstance(tools, str) else tools, **(row.get("chat_template_kwargs") or {})}
    prompt = _tokenize(tokenizer, row["prompt"], add_generation_prompt=True, **kwargs)["input_ids"]
    sides = [_tokenize(tokenizer, row["prompt"] + row[side], **kwargs)["input_ids"] for side in ("chosen", "rejected")]
    cut = min(len(list(takewhile(lambda pair: pair[0] == pair[1], zip(prompt, ids, strict=False)))) for ids in sides)
    return {"prompt_ids": prompt[:cut], "chosen_ids": sides[0][cut:], "rejected_ids": sides[1][cut:]}


def is_readable(line: str) -> bool:
    """Whether a line is an object that JSON and UTF-8 can hold, in numbers of 64 bits."""
    try:
        ujson_loads(line)
        return isinstance(json.loads(json.dumps(json.loads(line), ensure_ascii=False).encode()), dict)
    except (ValueError, RecursionError):
        return False


def trainers_rows(file) -> list[dict] | None:
    """The rows that a trainer gets from the file, or None if `datasets` refuses it."""
    try:
        with tempfile.TemporaryDirectory() as cache:
            return list(datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache))
    except Exception:
        return None


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(max_size=8),
    st.text(st.characters(categories=["Cs", "Cc", "Lu"]), max_size=4),
    st.sampled_from([10**4000, "\ud800", "a\x00b", "\U0001f600", nested(40), nested(600), [], {}, [None], {"role": "user"}]),
    st.recursive(st.integers() | st.text(max_size=3), lambda some: st.lists(some) | st.dictionaries(st.text(max_size=3), some)),
)
_WITHIN_MESSAGES = ((), (0,), (0, "role"), (0, "content"), (0, "tool_calls"), (0, "name"))
PLACES = st.sampled_from(
    [
        *((side, *place) for side in ("prompt", "chosen", "rejected") for place in _WITHIN_MESSAGES),
        *(("chat_template_kwargs", *place) for place in ((), ("thinking",), ("documents",), ("bos_token",))),
        *((column,) for column in ("tools", "label", "note")),
    ]
)


@st.composite
def hostile_rows(draw):
    """A pair of which some places hold anything, or a line that is no pair at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(ANYTHING)
    row = pair(chat_template_kwargs={"thinking": True})
    for place in draw(st.lists(PLACES, min_size=1, max_size=3)):
        within = row
        for step in place[:-1]:
            try:
                within = within[step]
            except (LookupError, TypeError):  # an earlier place put something else there
                within = None
        last = place[-1]
        if isinstance(within, dict) or (isinstance(within, list) and isinstance(last, int) and last < len(within)):
            within[last] = draw(ANYTHING)
    if draw(st.integers(0, 4)) == 0:
        row[draw(st.text(st.characters(), max_size=3))] = draw(ANYTHING)
    return row


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(hostile_rows(), min_size=4, max_size=25))
@example([pair("\ud800"), pair(tools="[\ud800]"), pair(chat_template_kwargs={"thinking": "\udfff"}), pair(**{"\ud9ff": 1})])
@example([pair(nested(900)), pair(math.nan), pair("a\x00b"), pair(10**4000)])
def test_whatever_a_row_holds(tokenizer, tmp_path, rows):
    tokenizer = obedient(tokenizer)
    try:
        lines = [json.dumps(row) for row in rows]
    except RecursionError:
        return
    between = [line for hostile in lines for line in (json.dumps(GOOD), hostile)]
    file = write_raw(tmp_path / "rows.jsonl", between)
    readable = [number for number, line in enumerate(between) if is_readable(line)]
    trainers = trainers_rows(write_raw(tmp_path / "readable.jsonl", [between[number] for number in readable]))
    if trainers is None:  # not rows of one dataset
        with pytest.raises(DatasetError, match=r"rows\.jsonl cannot be read as json"):
            tokenized(file, tokenizer)
        return
    tokens, problems = tokenized(file, tokenizer)
    assert set(tokens) | set(problems) == set(range(len(between))) and not set(tokens) & set(problems)
    assert set(range(0, len(between), 2)) <= set(tokens)
    for at, row in zip(readable, trainers, strict=True):
        if at in tokens:
            assert tokens[at] == trl_tokens(row, tokenizer), between[at]
    assert all(0 < len(problem) <= MOST_CHARACTERS for problem in problems.values())
    json.dumps(problems, ensure_ascii=False).encode()


MEDIA = {
    **{name: {name: value} for name, value in {"image": "a.png", "video": "a.mp4", "audio": {"bytes": "x"}}.items()},
    **{name: {name: ["a"]} for name in ("images", "videos", "audios")},
    "pixel_values": {"pixel_values": [[1.0]]},
}
PARTS = (
    {"type": "image", "image": "a.png"},
    {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
    {"type": "video", "video": "a.mp4"},
    {"type": "input_audio", "input_audio": {"data": "a"}},
    {"image": "a.png"},
)


@pytest.mark.parametrize("form", ["preference", "kto", "tokens"])
def test_rows_with_media_are_bad_rows(form, tokenizer, tmp_path):
    good = {
        "preference": GOOD,
        "kto": {"prompt": GOOD["prompt"], "completion": GOOD["chosen"], "label": True},
        "tokens": {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4]},
    }[form]
    rows = [good, *({**good, **media} for media in MEDIA.values())]
    if form != "tokens":
        content = [[{"type": "text", "text": "Look:"}, part] for part in PARTS]
        rows += [{**good, "prompt": [{"role": "user", "content": parts}]} for parts in content]
        rows += [{**good, "prompt": [*good["prompt"], {"role": "tool", "content": content[0]}]}]
    rows += [{**good, "image": None, "images": [], "video": "", "audio": {"bytes": None, "path": None}, "videos": [None]}]
    tokens, problems = tokenized(write_rows(tmp_path / "rows.jsonl", rows), obedient(tokenizer))
    assert set(tokens) == {0, len(rows) - 1}, "a column that holds nothing is no image"
    assert tokens[0] == tokens[len(rows) - 1]
    assert all("contains more than text" in problem for problem in problems.values())


def test_kwargs_are_variables_of_the_template_or_refused(tokenizer, tmp_path):
    tokenizer = obedient(tokenizer)
    honest = [{"thinking": True}, {"enable_thinking": False}, {"reasoning_effort": "low"}, {"documents": [{"title": "a"}]}]
    honest += [{"date_string": "1 May"}, {"chat_template": None}, {}, {"tools": [{"name": "add"}]}]
    refused = [{name: value} for name in sorted(reserved_kwargs()) for value in ("x", True, 1, "{{ messages }}")]
    rows = [pair(chat_template_kwargs=kwargs) for kwargs in (*honest, *refused)]
    tokens, problems = tokenized(write_rows(tmp_path / "rows.jsonl", rows), tokenizer)
    assert set(tokens) == set(range(len(honest)))
    for at, row in enumerate(rows[: len(honest)]):
        assert tokens[at] == trl_tokens(row, tokenizer)
    assert {"chat_template", "tokenize", "return_dict", "conversation", "add_generation_prompt"} < reserved_kwargs()
    for at, row in enumerate(rows[len(honest) :], len(honest)):
        assert next(iter(row["chat_template_kwargs"])) in problems[at]


def test_rows_of_odd_columns_before_the_first_good_one(tokenizer, tmp_path):
    rows = [{"foo": 1}, {"chosen": GOOD["chosen"]}, GOOD, {"bar": 2}]
    tokens, problems = tokenized(write_rows(tmp_path / "rows.jsonl", rows), obedient(tokenizer))
    assert (set(tokens), set(problems)) == ({2}, {0, 1, 3})
    with pytest.raises(DatasetError, match="foo match no known format"):
        tokenized(write_rows(tmp_path / "none.jsonl", rows[:2]), obedient(tokenizer))
