"""Values found by the tokens of a batch: drawn datasets with labels, against a plain forward pass."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from reflogp.store import UsageError
from reflogp.trainer import MissingLogpsError, ReferenceSource
from reflogp.trainer.batches import BatchReference, LabelledColumns
from reflogp.trainer.batches.options import give_to_processes, read_options, warn_if_untested
from tests.conftest import plain_token_logps

COLUMNS = [("chosen_input_ids", "chosen_labels"), ("rejected_input_ids", "rejected_labels")]
DRAWN = 40


def drawn_row(draw: random.Random) -> dict[str, list[int]]:
    """A pair as a framework tokenizes it: a common prompt, labels with gaps, sometimes no completion or no prompt."""
    prompt = [draw.randrange(5, 900) for _ in range(draw.choice([0, 1, 3, 12]))]
    row = {}
    for ids, labels in COLUMNS:
        completion = [draw.randrange(5, 900) for _ in range(draw.choice([0, 1, 2, 9, 20]) or not prompt)]
        row[ids] = prompt + completion
        gaps = [draw.random() < 0.2 for _ in completion]
        row[labels] = [-100] * len(prompt) + [-100 if gap else token for gap, token in zip(gaps, completion, strict=True)]
    return row


@pytest.fixture(scope="module")
def rows() -> list[dict[str, list[int]]]:
    draw = random.Random(11)
    return [drawn_row(draw) for _ in range(DRAWN)]


@pytest.fixture(scope="module")
def reference(rows, reference_folder, tmp_path_factory):
    from typer.testing import CliRunner

    from reflogp.cli.main import app

    folder = tmp_path_factory.mktemp("batches")
    source = ReferenceSource(folder / "store", model=str(reference_folder), dtype="float32")
    datasets = {"train": LabelledColumns(Dataset.from_list(rows), COLUMNS)}
    with pytest.raises(MissingLogpsError, match=r"rows of train .* \(there is no store at ") as caught:
        BatchReference(source, datasets, folder)
    words = caught.value.command.split()[1:]
    assert CliRunner().invoke(app, words).exit_code == 0
    return BatchReference(source, datasets, folder)


def test_an_error_tells_other_tokens_from_another_model(rows, reference, reference_folder, tmp_path):
    """`reference` has scored the rows; a shifted id stands for another template."""
    shifted = [{name: [token + 1 if token >= 0 else token for token in ids] for name, ids in row.items()} for row in rows[:8]]
    datasets = {"train": LabelledColumns(Dataset.from_list(shifted), COLUMNS)}
    source = ReferenceSource(reference.joins["train"].where.store, model=str(reference_folder), dtype="float32")
    with pytest.raises(MissingLogpsError, match=r"None of the rows was found\. .* the chat template"):
        BatchReference(source, datasets, tmp_path)
    other = ReferenceSource(source.location, model=str(reference_folder), dtype="bfloat16")
    missing = r"\(there are no values of .* in bfloat16: .*; its references: .*\)\. Score them: "
    with pytest.raises(MissingLogpsError, match=missing):
        BatchReference(other, datasets, tmp_path)


def padded(lists: list[list[int]], left: bool, fill: int) -> torch.Tensor:
    longest = max(map(len, lists))
    pads = [[fill] * (longest - len(entries)) for entries in lists]
    return torch.tensor([pad * left + entries + pad * (not left) for pad, entries in zip(pads, lists, strict=True)])


@pytest.mark.parametrize("left", [False, True])
def test_sums_are_those_of_a_plain_forward(left, rows, reference, reference_folder):
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
    draw = random.Random(left)
    for _ in range(8):
        chosen = draw.sample(rows, 5)
        ids = [row[name] for name, _ in COLUMNS for row in chosen]
        labels = [row[name] for _, name in COLUMNS for row in chosen]
        mask = padded([[1] * len(entries) for entries in ids], left, 0)
        sums, tokens = reference.sums(padded(ids, left, 0), mask, padded(labels, left, -100))
        for row, (whole, label) in enumerate(zip(ids, labels, strict=True)):
            logps = plain_token_logps(model, whole[:1], whole[1:]) if len(whole) > 1 else []
            used = [logp for logp, number in zip(logps, label[1:], strict=True) if number != -100]
            assert int(tokens[row]) == len(used)
            assert abs(float(sums[row]) - sum(used)) <= 1e-4 * max(1, len(used))


def test_the_layout_of_nemo_rl_is_one_column_away(rows, reference, reference_folder):
    """NeMo-RL's policy gives the log-prob of token t at place t; its DPO rolls them by -1 and leaves out the last place."""
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
    lists = [row["chosen_input_ids"] for row in rows[:6]]
    mask = padded([[1] * len(ids) for ids in lists], False, 0)
    at_tokens = torch.nn.functional.pad(reference.token_logps(padded(lists, False, 0), mask), (1, 0))
    rolled = torch.roll(at_tokens, -1, dims=-1)[:, :-1]
    assert at_tokens.shape == mask.shape
    for values, row in zip(rolled, rows[:6], strict=True):
        ids, labels = row["chosen_input_ids"], row["chosen_labels"]
        truth = plain_token_logps(model, ids[:1], ids[1:])
        for place, label in enumerate(labels[1:]):
            if label != -100:
                assert abs(float(values[place]) - truth[place]) <= 1e-4


def test_labels_columns_read_any_list_type_and_empty_datasets(rows):
    expected = [[(ids.tolist(), begin) for ids, begin in row] for row in LabelledColumns(Dataset.from_list(rows), COLUMNS)]
    for kind in (pa.list_(pa.int32()), pa.large_list(pa.int64())):
        table = pa.table({name: pa.array([row[name] for row in rows], kind) for pair in COLUMNS for name in pair})
        found = [[(ids.tolist(), begin) for ids, begin in row] for row in LabelledColumns(Dataset(table), COLUMNS)]
        assert found == expected
    assert list(LabelledColumns(Dataset.from_list(rows).select([]), COLUMNS)) == []
    begins = [begin for row in expected for _, begin in row]
    assert max(begins) > 0, begins
    picked = Dataset.from_list(rows).select([7, 3, 3])
    assert [[(ids.tolist(), begin) for ids, begin in row] for row in LabelledColumns(picked, COLUMNS)] == [
        expected[7],
        expected[3],
        expected[3],
    ]


def test_a_dataset_without_the_columns_is_refused(rows):
    with pytest.raises(UsageError, match="no column kl_input_ids"):
        LabelledColumns(Dataset.from_list(rows), [*COLUMNS, ("kl_input_ids", "chosen_labels")])


def test_labels_at_padding_are_refused(rows, reference):
    ids = [rows[0]["chosen_input_ids"], rows[1]["chosen_input_ids"][:1]]
    mask = padded([[1] * len(entries) for entries in ids], False, 0)
    with pytest.raises(UsageError, match="padding has labels"):
        reference.sums(padded(ids, False, 0), mask, padded(ids, False, 0))


def test_it_is_shown_in_a_line(reference):
    assert "BatchReference" in repr(reference) and f"train {DRAWN} rows" in repr(reference)


def test_options_reach_the_processes_of_a_launcher(monkeypatch):
    """In every place among the others, with values that look like other words."""
    own = ["--reflogp.store", "train", "--reflogp.on_miss=run", "--reflogp.policy_starts_elsewhere"]
    others = ["train", "dpo.yaml", "beta=0.2"]
    draw = random.Random(5)
    for _ in range(50):
        pieces = [own[:2], own[2:3], own[3:], *([word] for word in others)]
        order = sorted(range(6), key=lambda _: draw.random())
        places = iter(sorted(place for place, piece in enumerate(order) if piece >= 3))
        placed = {next(places): piece for piece in (3, 4, 5)}
        words = [word for place, piece in enumerate(order) for word in pieces[placed.get(place, piece)]]
        monkeypatch.delenv("REFLOGP_TRAIN_OPTIONS", raising=False)
        options, left, _ = read_options("command", words, "its model", "its dtype")
        assert left == others
        give_to_processes(options)
        given, same, _ = read_options("command", others[1:], "its model", "its dtype")
        assert vars(given) == vars(options)
        assert same == others[1:]


VERSIONS = [
    ("0.9.5", "0.9.5", False),
    ("0.9.50", "0.9.5", True),
    ("0.11.2", "0.11", False),
    ("0.1", "0.11", True),
    ("4.7.0", "4.6.0", True),
]


@pytest.mark.parametrize(("found", "tested", "warns"), VERSIONS)
def test_an_untested_version_of_a_framework_is_a_warning(found, tested, warns, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: found)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warn_if_untested("framework", tested)
    assert len(seen) == warns
    assert all(f"is tested with framework {tested}, not {found}" in str(entry.message) for entry in seen)


def test_a_command_without_a_store_says_so(monkeypatch, capsys):
    monkeypatch.delenv("REFLOGP_TRAIN_OPTIONS", raising=False)
    with pytest.raises(SystemExit):
        read_options("command", ["train", "dpo.yaml"], "its model", "its dtype")
    assert "--reflogp.store is required" in capsys.readouterr().err


@pytest.mark.parametrize(
    "mistyped", [["--reflogp.on-miss", "run"], ["--reflogp.on-miss=run"], ["--reflogp.store", "s", "--reflogp.onmiss"]]
)
def test_a_mistyped_option_is_named(mistyped, monkeypatch, capsys):
    monkeypatch.delenv("REFLOGP_TRAIN_OPTIONS", raising=False)
    with pytest.raises(SystemExit):
        read_options("command", [*mistyped, "train", "dpo.yaml"], "its model", "its dtype")
    assert "unknown option --reflogp.on" in capsys.readouterr().err


def test_numbers_of_a_row_do_not_depend_on_its_neighbours(rows, reference):
    both = [row for row in rows if len(row["chosen_input_ids"]) > 3][:2]
    lists = [row["chosen_input_ids"] for row in both]
    together = reference.token_logps(padded(lists, False, 0), padded([[1] * len(ids) for ids in lists], False, 0))
    alone = reference.token_logps(torch.tensor([lists[0]]), torch.ones(1, len(lists[0]), dtype=torch.int64))
    assert np.array_equal(together[0, : alone.shape[1]].numpy(), alone[0].numpy())
