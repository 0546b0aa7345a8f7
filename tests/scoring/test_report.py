"""The report of a scored dataset: its numbers against other ways to get them, its page in a real browser."""

import json
import math
import random
import re
import shutil

import numpy as np
import pytest
from trl.trainer.dpo_trainer import DataCollatorForPreference

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.data.tokenize import load_tokenizer, tokenize_dataset
from reflogp.scoring.reports.collect import shared_starts, similarities, similarity
from reflogp.scoring.reports.measures import robust_z_by_length
from reflogp.scoring.reports.truncation import Lengths, cut, cuts, max_length_for_share
from reflogp.store import Store, describe_reference, sequence_keys
from reflogp.store.keys import list_lengths, token_lists
from tests.conftest import write_rows
from tests.service.test_pages import IMAGE, SCRIPT, chromium, opened  # noqa: F401 (a fixture)

DONE, FAILED, USAGE, MISSES = 0, 1, 2, 3


@pytest.fixture
def run(reflogp, reference_folder, tmp_path):
    """run(command, data, *options) with the reference model in float32 and the store tmp_path/store."""

    def run(command, data, *options, model=reference_folder):
        return reflogp(command, model, data, "--store", tmp_path / "store", "--dtype", "float32", *options)

    return run


@pytest.fixture
def report(run, tmp_path):
    """report(data, *options) -> (exit code, summary, page) of a report in tmp_path/report."""

    def report(data, *options, **more):
        code, out, err = run("report", data, "-o", tmp_path / "report", "--json", *options, **more)
        assert code in (DONE, MISSES), err
        return code, json.loads(out.strip().splitlines()[-1]), (tmp_path / "report" / "index.html").read_text(encoding="utf-8")

    return report


@pytest.fixture
def stored(reference_folder, tmp_path):
    """stored(rows of token ids, values) puts log-probs of their sequences into tmp_path/store, as if they had been scored."""

    def stored(rows, values=None, seed=0):
        numbers = np.random.default_rng(seed)
        table = Store(str(tmp_path / "store")).create_table(describe_reference(str(reference_folder), "float32"))
        for name in [name for name in rows[0] if name.endswith("_ids") and name != "prompt_ids"]:
            made = [(-numbers.exponential(1.0, len(row[name]))).astype(np.float32) for row in rows]
            for at, given in (values or {}).get(name, {}).items():
                made[at] = np.array(given, np.float32)
            prompts, completions = [row["prompt_ids"] for row in rows], [row[name] for row in rows]
            table.add(prompts, completions, made, provenance={"engine": "test"})

    return stored


def random_pairs(count, seed=0, vocabulary=900):
    """Pairs of token ids without anything in common."""
    numbers = random.Random(seed)

    def ids(least, most):
        return [numbers.randrange(5, vocabulary) for _ in range(numbers.randint(least, most))]

    return [{"prompt_ids": ids(8, 40), "chosen_ids": ids(12, 60), "rejected_ids": ids(12, 60)} for _ in range(count)]


# Numbers, against another way to get them


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--max-length", 120), ("--max-length", 120, "--truncation-mode", "keep_end")])
def test_accuracy_and_coverage_are_those_of_the_stored_values(run, report, reference_folder, pairs_file, tmp_path, options):
    assert run("score", pairs_file, *options)[0] == DONE
    code, summary, page = report(pairs_file, *options)
    assert code == DONE
    tokenizer = load_tokenizer(str(reference_folder))
    [rows] = [window.table.to_pylist() for window in tokenize_dataset(RowSource(str(pairs_file)), tokenizer)]
    reference = describe_reference(str(reference_folder), "float32")
    snapshot = Store(tmp_path / "store")[reference].snapshot()
    sums, means, dropped = [], [], 0
    for row in rows:
        whole = [(row["prompt_ids"], row[side]) for side in ("chosen_ids", "rejected_ids")]
        if "keep_end" in options:  # a window that begins in the completion has its first token as context
            ends = [((p + c)[-120:], min(len(c), 120)) for p, c in whole]
            whole = [(end[: max(1, len(end) - kept)], end[max(1, len(end) - kept) :]) for end, kept in ends]
        elif options and len(row["prompt_ids"]) >= 120:
            dropped += 1
            continue
        values = snapshot.token_logps(sequence_keys([p for p, _ in whole], [c for _, c in whole]))
        if options and "keep_end" not in options:
            values = [v[: 120 - len(row["prompt_ids"])] for v in values]
        sums.append([v.astype(float).sum() for v in values])
        means.append([v.astype(float).mean() for v in values])
    assert summary["with_values"] == len(sums) == 40 - dropped
    assert summary["dropped_rows"] == dropped
    assert summary["coverage"] == 1.0
    assert summary["accuracy"] == np.mean([chosen > rejected for chosen, rejected in sums])
    assert summary["accuracy_per_token"] == np.mean([chosen > rejected for chosen, rejected in means])
    margins = [chosen - rejected for chosen, rejected in sums]
    assert f"<dd>{np.median(margins):+.2f}</dd>".replace("-", "−") in page
    assert all(f'id="{chart}-title"' in page for chart in ("logps", "margins", "margins-per-token"))


def collated(rows, max_length, mode):
    """What TRL's collator leaves of pairs: (token ids of each sequence, completion tokens in the loss), both (2, pairs)."""
    batch = DataCollatorForPreference(pad_token_id=0, max_length=max_length, truncation_mode=mode)(rows)
    rest = [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    return (rest[: len(rows)], rest[len(rows) :]), batch["completion_mask"][:, 1:].sum(1).reshape(2, -1).numpy()


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_truncation_is_that_of_trls_collator(mode):
    rows = random_pairs(60, vocabulary=8)
    for row in rows[::3]:
        row["rejected_ids"] = [*row["chosen_ids"][:-1], 99]
    for row in rows[:5]:
        row["prompt_ids"] = []
    prompts, chosen, rejected = (token_lists([row[name] for row in rows]) for name in rows[0])
    completions = [list_lengths(chosen), list_lengths(rejected)]
    lengths = Lengths(list_lengths(prompts), completions, shared_starts(chosen, rejected))
    whole, uncut = collated(rows, None, mode)
    for max_length in range(1, 102):  # completions have 12 to 60 tokens
        kept = np.array([mode == "keep_end" or len(row["prompt_ids"]) < max_length for row in rows])
        rest, used = collated([row for row, is_kept in zip(rows, kept, strict=True) if is_kept], max_length, mode)
        before = [[side[at] for at in np.flatnonzero(kept)] for side in whole]
        touched = [pair != longer for pair, longer in zip(zip(*rest, strict=True), zip(*before, strict=True), strict=True)]
        same = [is_cut and left == right for is_cut, left, right in zip(touched, *rest, strict=True)]
        found = cut(lengths, max_length, mode)
        assert (found.examples, found.dropped, found.touched) == (60, (~kept).sum(), sum(touched))
        assert (found.tokens, found.dropped_tokens) == (uncut.sum(), uncut[:, ~kept].sum())
        assert found.lost == uncut[:, kept].sum() - used.sum()
        assert found.same == (sum(same) if mode == "keep_start" else None)
    assert [one.max_length for one in cuts(lengths, 70, mode)] == [70, 128]
    enough = max_length_for_share(lengths, 0.95)
    assert cut(lengths, enough, mode).touched <= 3 < cut(lengths, enough - 1, mode).touched + 1


def test_similarity_is_the_longest_common_subsequence():
    def by_table(left, right):
        table = np.zeros((len(left) + 1, len(right) + 1), int)
        for i, a in enumerate(left, 1):
            for j, b in enumerate(right, 1):
                table[i, j] = table[i - 1, j - 1] + 1 if a == b else max(table[i - 1, j], table[i, j - 1])
        return 2 * table[-1, -1] / (len(left) + len(right))

    numbers = random.Random(3)
    lists = [[numbers.randrange(4) for _ in range(numbers.randint(1, 90))] for _ in range(60)]
    rights = [list(ids) for ids in lists[:30]] + lists[:30]
    for ids in rights[:30]:
        ids[numbers.randrange(len(ids))] = 7
    rights[4] = []
    for left, right in zip(lists, rights, strict=True):
        assert similarity(left, right) == pytest.approx(by_table(left, right))
    found = similarities(token_lists(lists), token_lists(rights), 0.9)
    truth = [by_table(left, right) for left, right in zip(lists, rights, strict=True)]
    assert found == pytest.approx([value if value >= 0.9 else 0.0 for value in truth])
    assert sum(value > 0 for value in found) > 5
    shared = shared_starts(token_lists(lists), token_lists(rights))
    assert shared.tolist() == [
        next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
        for left, right in zip(lists, rights, strict=True)
    ]
    assert similarity([], []) == 1.0


def test_repeats_swaps_and_pairs_without_a_difference_are_counted(report, stored, tmp_path):
    rows = random_pairs(120)
    swapped = {**rows[3], "chosen_ids": rows[3]["rejected_ids"], "rejected_ids": rows[3]["chosen_ids"]}
    alike = {**rows[9], "rejected_ids": [*rows[9]["chosen_ids"], 11]}
    rows += [rows[4], rows[5], rows[5], swapped, {**rows[8], "rejected_ids": rows[8]["chosen_ids"]}, alike]
    stored(rows)
    _, summary, page = report(write_rows(tmp_path / "d.jsonl", rows))
    assert (summary["exact_duplicates"], summary["contrary"], summary["identical"]) == (3, 2, 1)
    assert summary["alike"] == 1
    assert "3 of 126 pairs (2.4%) repeat an earlier pair token for token" in page
    assert "Row 125" in page


def test_what_stands_out_is_found_and_shown(report, stored, tmp_path):
    rows = random_pairs(400)
    size = {name: [len(row[name]) for row in rows] for name in ("chosen_ids", "rejected_ids")}
    chosen = {17: [-12.0] * size["chosen_ids"][17], 18: [-0.001] * size["chosen_ids"][18]}
    chosen[19] = [-0.1] * (size["chosen_ids"][19] - 1) + [-30.0]
    chosen[20] = [-2.5] * size["chosen_ids"][20]
    rejected = {20: [-0.2] * size["rejected_ids"][20]}
    stored(rows, {"chosen_ids": chosen, "rejected_ids": rejected})
    _, summary, page = report(write_rows(tmp_path / "d.jsonl", rows))
    for kind, row in (
        ("very unlikely completions", 17),
        ("very likely completions", 18),
        ("rejected far above chosen", 20),
        ("one token decides", 19),
    ):
        assert summary["outliers"][kind] >= 1
        section = page.partition(f"<h3>{kind.capitalize()}")[2].partition("<h3>")[0]
        assert f"Row {row} " in section, kind
    assert 'title="−30.00 nats"' in page


def test_short_completions_do_not_hide_long_ones():
    numbers = np.random.default_rng(0)
    tokens = np.array([2] * 300 + [400] * 300)
    means = np.array([-numbers.exponential(1.0, count).mean() for count in tokens])
    means[500] = -1.6
    z = robust_z_by_length(means, tokens)
    assert z.argmin() == 500 and z[500] < -3.5
    assert (robust_z_by_length(means[:3], tokens[:3]) < 3.5).all()


# What has no values, and formats


@pytest.mark.slow
def test_misses_and_bad_rows_are_counted_and_the_command_scores_them(run, report, reflogp, pairs_file, pair_rows, tmp_path):
    code, _, err = run("report", pairs_file, "-o", tmp_path / "report")
    assert code == USAGE and "no store" in err
    assert run("score", pairs_file)[0] == DONE
    rows = [*pair_rows[:41], *pair_rows[200:203]]
    rows[2:2] = [{**pair_rows[5], "chosen": None}]
    data = write_rows(tmp_path / "more.jsonl", rows)
    with data.open("a") as file:
        file.write('{"prompt": \n')
    code, summary, page = report(data)
    assert code == MISSES
    assert (summary["rows"], summary["bad_rows"], summary["bad_row_numbers"]) == (46, 2, [2, 45])
    assert summary["with_values"] + summary["missing"] == summary["examples"] == 44
    assert summary["missing_row_numbers"][-3:] == [42, 43, 44]
    assert summary["coverage"] == summary["with_values"] / 46
    assert "chosen is null or missing" in page and "not JSON" in page
    [command] = [finding["command"] for finding in summary["findings"] if finding["command"]]
    assert command in page.replace("&#39;", "'")
    assert reflogp(*command.split()[1:])[0] == MISSES  # the bad rows stay
    code, summary, _ = report(data)
    assert (code, summary["missing"], summary["bad_rows"]) == (MISSES, 0, 2)


def test_without_any_value_the_truncation_is_shown(report, stored, tmp_path):
    rows = random_pairs(6)
    stored(random_pairs(1, seed=1))
    code, summary, page = report(write_rows(tmp_path / "d.jsonl", [*rows, {**rows[1], "rejected_ids": []}]))
    assert (code, summary["with_values"], summary["accuracy"], summary["bad_row_numbers"]) == (MISSES, 0, None, [6])
    assert 'id="truncation"' in page and 'id="logps-title"' not in page and "a completion is empty" in page


def test_kto_rows_by_label(report, stored, tmp_path):
    rows = [{"prompt_ids": row["prompt_ids"], "completion_ids": row["chosen_ids"]} for row in random_pairs(60)]
    values = {at: [-0.1 - at / 1000] * len(rows[at]["completion_ids"]) for at in range(20)}
    stored(rows, {"completion_ids": values})
    labelled = [{**row, "label": at < 20} for at, row in enumerate(rows)]
    labelled += [{**rows[0], "label": False}, {**rows[1], "label": "True"}, {**rows[2], "label": None}]
    code, summary, page = report(write_rows(tmp_path / "kto.jsonl", labelled))
    assert code == DONE and summary["accuracy"] is None
    assert (summary["exact_duplicates"], summary["contrary"]) == (1, 2)
    said = " ".join(finding["text"] for finding in summary["findings"])
    assert "1 row has no valid label" in said
    assert "Desirable completions: 21. Undesirable completions: 41." in said
    assert f"desirable_weight from {41 / 21:.2f} to {1.33 * 41 / 21:.2f}" in said
    means = {at: -0.1 - at / 1000 for at in range(20)}
    good, bad = [*means.values(), means[1]], [-0.1]  # the undesirable ones but the first lie below all of the desirable
    higher = sum((g > b) + 0.5 * (g == b) for g in good for b in bad) + len(good) * 40
    assert f"In {math.floor(1000 * higher / (21 * 41)) / 10:.1f}% of all combinations" in said
    assert 'id="margins-title"' not in page and ">undesirable</span>" in page


def test_pairs_as_kto_rows_are_two_rows(run, report, pairs_file, tmp_path):
    assert run("score", pairs_file, "--format", "kto")[0] == DONE
    code, summary, _ = report(pairs_file, "--format", "kto")
    assert (code, summary["rows"], summary["examples"], summary["with_values"]) == (DONE, 40, 80, 80)
    said = " ".join(finding["text"] for finding in summary["findings"])
    assert "Desirable completions: 40. Undesirable completions: 40." in said
    code, out, _ = run("join", pairs_file, "--format", "kto", "-o", tmp_path / "kto.parquet", "--json")
    summary = json.loads(out.splitlines()[-1])
    assert (code, summary["rows"], summary["written"], summary["coverage"]) == (DONE, 80, 80, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("dark", 360), ("light", 1200)])
def test_a_hostile_dataset_harms_no_browser(chromium, report, stored, reference_folder, scheme, width, tmp_path):  # noqa: F811
    """Everything that the page has, which stands alone, is opened, and what a dataset could have done is looked for."""
    folder = tmp_path / "hostile"
    shutil.copytree(reference_folder, folder)
    own = load_tokenizer(str(folder))
    own.add_tokens(["W" * 3000, f"</style>{SCRIPT}", "<a href='http://evil.example/'>", "</i></div></details>"])
    own.save_pretrained(folder)
    marked = [f"{SCRIPT}{IMAGE}</style>{SCRIPT}", "\u202eright to left\u2066", "W" * 3000, "\ufdfa" * 40, "\x00\x1b[31m\t"]
    marked += ["<svg onload=alert(3)>", "{{7*7}}{% raw %}", "x" * 4000, "e" + "\u0301" * 300, "]]><!--", "مرحبا بالعالم"]
    texts = [own("\n".join(marked[at::4]), add_special_tokens=False)["input_ids"] for at in range(4)]
    rows = random_pairs(60)
    values = {"chosen_ids": {}}
    for at, ids in enumerate(texts):
        rows[at] = {"prompt_ids": ids, "chosen_ids": [*ids, 999_999], "rejected_ids": [*ids, *ids, 3_000_000_000]}
        values["chosen_ids"][at] = [-25.0] * (len(ids) + 1)
        rows.append({**rows[at], "chosen_ids": [*ids, 3]})
    rows.append({"prompt_ids": [1], "chosen_ids": SCRIPT, "rejected_ids": [2]})
    stored(rows[:-1], values)
    name = f"<img src=x onerror=alert(9)>\u202e{'long' * 40}.jsonl"
    code, summary, source = report(write_rows(tmp_path / name, rows), model=folder)
    assert (code, summary["bad_rows"]) == (MISSES, 1) and summary["outliers"]
    file = tmp_path / "report" / "index.html"
    with opened(chromium, color_scheme=scheme, viewport={"width": width, "height": 740}, has_touch=width < 400) as page:
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true })")
        assert asked == [file.as_uri()]
        made = "script, img, iframe, object, link, a, form, input, base, [onload], [onerror], [style]"
        assert page.locator(made).count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        text = page.locator("main").inner_text()
    for mark in (SCRIPT, IMAGE, "⟨U+202E⟩", "⟨U+001B⟩", "⇥", "↵", "⟨id 999999⟩", "{{7*7}}", "مرحبا", "</style>"):
        assert mark in text, mark
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", text)
    assert source.count("<style>") == source.count("</style>") == 1 and "<script" not in source
    assert not re.search(r"\b(src|href|srcset|style|on[a-z]+)=", re.sub(r">[^<]*<", "><", source))
    assert "url(" not in source and "@import" not in source
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', source)
    assert policy.startswith("default-src &#39;none&#39;; style-src &#39;sha256-") and "unsafe" not in policy
    assert [name.name for name in file.parent.iterdir()] == ["index.html"]


# The folder


def test_only_an_earlier_report_is_replaced(run, report, stored, tmp_path):
    rows, other = random_pairs(12), tmp_path / "site"
    data = write_rows(tmp_path / "d.jsonl", rows)
    stored(rows)
    for _ in range(2):
        report(data)
    other.mkdir()
    (other / "index.html").write_text("<p>mine")
    for place, says in ((other, "is not a report; nothing was changed"), (data, "is not a folder")):
        code, _, err = run("report", data, "-o", place)
        assert code == USAGE and says in err.replace("\n", " ")
    assert (other / "index.html").read_text() == "<p>mine"
