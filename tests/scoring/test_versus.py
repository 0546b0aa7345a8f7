"""Two models compared: log-ratios and implicit rewards against plain forwards of both models."""

import json
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from reflogp.scoring import join, report, score
from reflogp.scoring.errors import NotScoredError
from reflogp.store import UsageError
from tests.conftest import plain_token_logps, save_llama, write_rows
from tests.docs.blocks import blocks_of

DONE, FAILED, USAGE, MISSES = 0, 1, 2, 3


@pytest.fixture(scope="module")
def rows(pair_rows):
    sides = ("chosen", "rejected")
    return [
        {"prompt": f"Q{n}:"} | {name: " " + row[name][-1]["content"] for name in sides} for n, row in enumerate(pair_rows[:16])
    ]


@pytest.fixture(scope="module")
def policy(reference_folder):
    return str(reference_folder)


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return str(save_llama(tmp_path_factory.mktemp("base"), tokenizer, **size))


@pytest.fixture(scope="module")
def store(rows, policy, base, tmp_path_factory):
    """A store with the values of both models in float32, and those of the first 12 rows in bfloat16."""
    folder = tmp_path_factory.mktemp("both") / "store"
    for model in (policy, base):
        score(model, rows, folder, dtype="float32")
        score(model, rows[:12], folder, dtype="bfloat16")
    return folder


@pytest.fixture(scope="module")
def plain(policy, base):
    """plain(dtype, prompt, completion) -> log-prob sums of both models, each by an unpadded forward."""
    tokenizer = AutoTokenizer.from_pretrained(policy)

    def sums(dtype, prompt, completion):
        ids = tokenizer(prompt + completion)["input_ids"] + [tokenizer.eos_token_id]
        start = len(tokenizer(prompt)["input_ids"])
        models = (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval() for folder in (policy, base))
        return [sum(plain_token_logps(model, ids[:start], ids[start:])) for model in models]

    return sums


def last_object(stdout):
    return json.loads(stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(("dtype", "count", "error"), [("float32", 16, 1e-3), ("bfloat16", 12, 0.5)])
def test_log_ratios_are_those_of_plain_forwards(dtype, count, error, rows, policy, base, store, plain):
    joined = join(policy, rows[:count], store, dtype=dtype, versus=base)
    expected = np.array(
        [[plain(getattr(torch, dtype), row["prompt"], row[side]) for side in ("chosen", "rejected")] for row in rows[:count]]
    )
    named = {"ref": expected[..., 0], "versus": expected[..., 1]}
    for model, sums in named.items():
        seen = np.array([[row[f"{model}_{side}_logps"] for side in ("chosen", "rejected")] for row in joined])
        assert np.abs(seen - sums).max() < error
    ratios = np.array([[row["log_ratio_chosen"], row["log_ratio_rejected"]] for row in joined])
    assert np.abs(ratios - (named["ref"] - named["versus"])).max() < error
    margins = np.array([row["implicit_reward_margin"] for row in joined])
    assert np.abs(margins - (ratios[:, 0] - ratios[:, 1])).max() < 1e-3
    assert np.abs(margins).min() > 0 and len({np.sign(margin) for margin in margins}) == 2
    backwards = join(base, rows[:count], store, dtype=dtype, versus=policy)
    assert np.allclose([-row["implicit_reward_margin"] for row in backwards], margins)


def test_the_command_writes_what_the_function_returns(reflogp, rows, policy, base, store, tmp_path):
    data, output = write_rows(tmp_path / "pairs.jsonl", rows), tmp_path / "joined.parquet"
    options = ("--store", store, "--dtype", "float32", "--max-length", 100)
    code, out, _ = reflogp("join", policy, data, *options, "--versus", base, "-o", output, "--json")
    written, summary = pq.read_table(output), last_object(out)
    assert (code, summary["written"], summary["versus_missing"]) == (DONE, 16, 0)
    expected = join(policy, rows, store, dtype="float32", max_length=100, versus=base)
    assert {name: written[name].to_pylist() for name in expected[0]} == {
        name: [row[name] for row in expected] for name in expected[0]
    }
    note = json.loads(written.schema.metadata[b"reflogp"])
    assert note["versus"]["reference_id"] == summary["versus_reference_id"] != note["reference_id"] == summary["reference_id"]


def test_rows_with_one_completion(rows, policy, base, plain, reflogp, tmp_path):
    feedback = [{"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2 == 0} for n, row in enumerate(rows[:6])]
    for model in (policy, base):
        score(model, feedback, tmp_path / "store", dtype="float32")
    joined = join(policy, feedback, tmp_path / "store", versus=base)
    expected = [np.subtract(*plain(torch.float32, row["prompt"], row["completion"])) for row in feedback]
    assert np.abs(np.array([row["log_ratio"] for row in joined]) - expected).max() < 2e-3
    assert "implicit_reward_margin" not in joined[0]
    found = report(policy, feedback, tmp_path / "store", tmp_path / "report", versus=base)
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert found.implicit_reward_accuracy is None and 'id="log-ratios-title"' in page and "Rows compared" in page


def test_the_report_shows_margins_accuracy_and_the_lowest_rows(reflogp, rows, policy, base, store, tmp_path):
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    options = ("--store", store, "--dtype", "float32", "-o", tmp_path / "report", "--json")
    code, out, err = reflogp("report", policy, data, *options, "--versus", base)
    summary, page = last_object(out), (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    margins = np.array([row["implicit_reward_margin"] for row in join(policy, rows, store, dtype="float32", versus=base)])
    assert code == DONE, err
    assert summary["implicit_reward_accuracy"] == np.mean(margins > 0)
    section = re.search(r'<section aria-labelledby="versus">.*?</section>', page, re.DOTALL)[0]
    shown = [int(row) for row in re.findall(r"<summary>Row (\d+) ", section)]
    assert shown == np.argsort(margins, kind="stable")[:10].tolist()
    assert f"{margins.min():+.2f} nats".replace("-", "−") in section
    assert f"<dd>{np.median(margins):+.2f}</dd>".replace("-", "−") in section
    assert f"<dd>{summary['versus_reference_id']}</dd>" in page
    counts = re.findall(r'class="bar s0".*?<title>pairs: .*?: (\d+)</title>', section)
    assert sum(map(int, counts)) == 16
    without = last_object(reflogp("report", policy, data, *options)[1])
    assert without["implicit_reward_accuracy"] is None and without["accuracy"] == summary["accuracy"]
    assert 'aria-labelledby="versus"' not in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


def test_rows_that_the_second_model_lacks_and_the_command_that_scores_them(reflogp, rows, policy, base, tmp_path):
    data, store = write_rows(tmp_path / "pairs.jsonl", rows), tmp_path / "store"
    score(policy, rows, store, dtype="float32")
    given = (policy, data, "--store", store, "--versus", base)
    code, _, err = reflogp("join", *given, "-o", tmp_path / "j.parquet")
    assert code == FAILED and "has no values of" in err
    command = re.search(r"Score the data: reflogp (.*)", err)[1]
    score(base, rows[:5], store, dtype="float32")
    code, out, err = reflogp("join", *given, "-o", tmp_path / "j.parquet", "--json")
    summary = last_object(out)
    assert (code, summary["written"], summary["versus_missing"], summary["missing"]) == (MISSES, 5, 11, 0)
    assert f"{base} has no values for 11 rows" in err.replace("\n", "") and f"score them: reflogp {command}" in err
    code, out, err = reflogp("report", *given, "-o", tmp_path / "report", "--json")
    assert (code, last_object(out)["versus_missing"], last_object(out)["with_values"]) == (MISSES, 11, 16)
    assert f"score them: reflogp {command}" in err
    with pytest.raises(NotScoredError, match=r"has no values for 11 rows.*Score them with `reflogp score"):
        join(policy, rows, store, versus=base)
    assert reflogp(*command.split())[0] == DONE
    assert reflogp("join", *given, "-o", tmp_path / "j.parquet")[0] == DONE


def test_two_models_that_tokenize_differently(rows, policy, base, tokenizer, tmp_path):
    """With another end of turn, the first model's tokenizer helps; with another vocabulary, nothing does."""
    store, ends, words = tmp_path / "store", tmp_path / "ends", tmp_path / "words"
    for folder in (ends, words):
        shutil.copytree(base, folder)
    other = AutoTokenizer.from_pretrained(base)
    other.eos_token = "!"
    other.save_pretrained(ends)
    mixed = json.loads(tokenizer.backend_tokenizer.to_str())
    by_number = sorted(mixed["model"]["vocab"], key=mixed["model"]["vocab"].get)
    mixed["model"]["vocab"] = dict(zip(by_number, [*range(300), *range(len(by_number) - 1, 299, -1)], strict=True))
    type(tokenizer.backend_tokenizer).from_str(json.dumps(mixed)).save(str(words / "tokenizer.json"))
    for model in (policy, str(ends)):
        score(model, rows, store, dtype="float32")
    with pytest.raises(
        NotScoredError, match=r"tokenize differently: their chat templates or EOS tokens differ.*--tokenizer "
    ) as caught:
        join(policy, rows, store, versus=str(ends))
    assert f"reflogp score {ends} DATA --store {store} --dtype float32 --tokenizer {policy}" in str(caught.value)
    score(str(ends), rows, store, tokenizer=policy)
    assert len(join(policy, rows, store, versus=str(ends))) == 16
    shutil.rmtree(store)
    for model in (policy, str(words)):
        score(model, rows, store, dtype="float32")
    with pytest.raises(NotScoredError, match=r"different ids in their vocabularies, so their log-probs cannot be compared$"):
        join(policy, rows, store, versus=str(words))


def test_the_recipe_for_instruction_following_difficulty(rows, policy, tmp_path):
    """That of docs/compare.md, against the ratio of two plain forwards of each row."""
    recipe = next(block.text for block in blocks_of("docs/compare.md") if "def ifd" in block.text)
    names = {}
    exec(recipe.partition("\nrows = ")[0], names)
    answers = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows[:6]]
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()

    def ratio(row):
        ids = tokenizer(row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        after = plain_token_logps(model, tokenizer(row["prompt"])["input_ids"], ids)
        return np.mean(after) / np.mean(plain_token_logps(model, ids[:1], ids[1:]))

    assert np.abs(names["ifd"](policy, answers, tmp_path / "store") - [ratio(row) for row in answers]).max() < 1e-5


def test_the_same_model_twice(rows, policy, store, tmp_path):
    for call in (
        lambda: join(policy, rows, store, dtype="float32", versus=policy),
        lambda: report(policy, rows, store, tmp_path / "report", dtype="float32", versus=policy),
    ):
        with pytest.raises(UsageError, match=r"are the same model .*name another model"):
            call()
