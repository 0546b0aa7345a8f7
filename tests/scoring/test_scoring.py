import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.scoring.data.read import RowSource, batched
from reflogp.scoring.data.tokenize import TokenizedDataset, load_tokenizer
from reflogp.scoring.runs.pipeline import EngineScheduler
from reflogp.scoring.runs.score import score_dataset
from reflogp.scoring.torch_engine import Sequence, TorchEngine
from reflogp.store import Store, describe_reference
from reflogp.store.windows import TrainerSettings
from tests.conftest import largest_error, write_rows
from tests.scoring.watching import Watching


@pytest.fixture
def score(reference_folder, tmp_path):
    """score(file, **options) -> summary, into one store."""

    reference, store = describe_reference(str(reference_folder), "float32"), Store(tmp_path / "store")

    def run(file, make_engine=None, commit_sequences=4096, **options):
        engine = make_engine or (lambda: TorchEngine(str(reference_folder), "float32"))
        dataset = TokenizedDataset(RowSource(str(file)), lambda: load_tokenizer(str(reference_folder)))
        scheduler = EngineScheduler(engine, commit_sequences=commit_sequences)
        return score_dataset(dataset, store.values_table(reference), scheduler, **options)

    def stored(sequences):
        return store[reference].get([each.prompt_ids for each in sequences], [each.completion_ids for each in sequences])

    run.stored = stored
    return run


def must_not_load():
    raise AssertionError("a model was loaded though nothing was missing")


def test_a_second_run_scores_nothing_and_loads_no_model(score, pairs_file):
    first = score(pairs_file)
    assert (first.rows, first.sequences, first.hits) == (40, 80, 0)
    assert first.scored + first.duplicates == 80
    second = score(pairs_file, must_not_load)
    assert (second.sequences, second.hits, second.scored, second.duplicates) == (80, 80, 0, 0)
    assert second.snapshot == first.snapshot


def test_more_rows_score_only_what_is_new(score, pairs_file, pair_rows, tmp_path):
    score(pairs_file)
    more = score(write_rows(tmp_path / "more.jsonl", pair_rows[:60]))
    assert more.hits >= 80
    assert 0 < more.scored <= 40


def test_values_equal_a_plain_forward_and_bad_rows_are_named(score, tmp_path, reference_folder):
    good = [{"prompt_ids": [5, 6, 7 + i], "chosen_ids": [10 + i, 11, 12], "rejected_ids": [13, 14 + i]} for i in range(9)]
    bad = [{**good[0], "chosen_ids": []}, {**good[0], "rejected_ids": None}, {**good[0], "chosen_ids": [3, 100_000]}]
    without_prompt = {"prompt_ids": [], "chosen_ids": [1, 2], "rejected_ids": [1, 3]}
    notes = Watching()
    summary = score(write_rows(tmp_path / "t.jsonl", [*good[:1], *bad, without_prompt, *good[1:]]), watcher=notes)
    assert set(notes.bad) == {1, 2, 3} == set(summary.bad_row_numbers)
    assert all(says in notes.bad[row] for row, says in enumerate(("empty", "not a list", "vocabulary"), 1))
    assert len(summary.notes) == 1 and "1 row has no prompt tokens" in summary.notes[0]
    assert (notes.snapshot, notes.rows) == (summary.snapshot, summary.rows)
    assert notes.done == summary.scored + summary.duplicates + summary.failed == summary.sequences and notes.total == 26
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
    sequences = [Sequence(row["prompt_ids"], row[side]) for row in good for side in ("chosen_ids", "rejected_ids")]
    assert largest_error(score.stored([*sequences, Sequence([1], [2])]), model, [*sequences, Sequence([1], [2])]) <= 1e-4


@pytest.mark.parametrize("commit_sequences", [3, 4096])
def test_rows_that_come_again_are_scored_and_counted_once(score, tmp_path, commit_sequences, monkeypatch):
    """Within a window and a commit, and across them; a row that failed, too."""
    monkeypatch.setattr("reflogp.scoring.data.tokenize.batched", lambda source, size, own=batched: own(source, 4))
    rows = [{"prompt_ids": [1, i], "chosen_ids": [2, 3], "rejected_ids": [4]} for i in range(10)]
    others = [{**rows[0], "chosen_ids": [4], "rejected_ids": [5]}, {**rows[0], "rejected_ids": [3, 100_000]}]
    summary = score(
        write_rows(tmp_path / "twice.jsonl", [*rows, *others, *rows * 2, *others]), commit_sequences=commit_sequences
    )
    assert (summary.sequences, summary.hits, summary.duplicates, summary.scored) == (68, 0, 46, 21)
    assert (summary.failed, summary.bad_row_numbers) == (1, [11, 33])


def test_an_early_stop_is_a_hit_for_less_and_a_miss_for_more(score, tmp_path):
    file = write_rows(tmp_path / "t.jsonl", [{"prompt_ids": [1] * 10, "chosen_ids": [2] * 30, "rejected_ids": [3] * 5}])
    assert score(file, settings=TrainerSettings(max_length=20)).scored == 2
    assert score(file, must_not_load, settings=TrainerSettings(max_length=15)).hits == 2
    longer = score(file, settings=TrainerSettings(max_length=25))
    assert (longer.hits, longer.scored) == (1, 1)
    whole = score(file)
    assert (whole.hits, whole.scored) == (1, 1)
    assert score(file, must_not_load, settings=TrainerSettings(max_length=33)).hits == 2


def test_keep_end_scores_the_window_that_is_left(score, tmp_path, reference_folder):
    """The window's own plain forward, also where it begins inside the completion."""
    prompt, chosen, rejected = [1, 2, 3, 4, 5, 6], [7, 8, 9], [20 + i for i in range(15)]
    file = write_rows(tmp_path / "t.jsonl", [{"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}])
    score(file, settings=TrainerSettings(max_length=8, truncation_mode="keep_end"))
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
    windows = [Sequence((prompt + chosen)[-8:-3], chosen), Sequence(rejected[-8:-7], rejected[-7:])]
    assert largest_error(score.stored(windows), model, windows) <= 1e-4


def test_the_sharing_gain_counts_tokens_that_are_shared_once(score, tmp_path):
    """A prompt of 800 tokens with 50 completions: the 800, 25 first tokens and 50 second ones, instead of 50 times 802."""
    prompt = [1 + at % 100 for at in range(800)]
    rows = [{"prompt_ids": prompt, "chosen_ids": [at, 1], "rejected_ids": [at, 2]} for at in range(25)]
    summary = score(write_rows(tmp_path / "t.jsonl", rows))
    assert summary.tokens == 50 * 802 and summary.sharing_gain == 50 * 802 / 875
    assert score(tmp_path / "t.jsonl", must_not_load).sharing_gain is None
    alone = score(write_rows(tmp_path / "u.jsonl", [{"prompt_ids": [7], "chosen_ids": [1, 2], "rejected_ids": [3]}]))
    assert alone.sharing_gain == 1


def test_values_that_are_not_finite_are_reported_and_not_stored(score, tmp_path, reference_folder):
    """Weights that are broken for one token: only sequences that hold it suffer."""
    model = AutoModelForCausalLM.from_pretrained(reference_folder)
    model.get_input_embeddings().weight.data[7] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    rows = [{"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [2, last, 2]} for last in (4, 7)]
    summary = score(write_rows(tmp_path / "t.jsonl", rows), lambda: TorchEngine(str(tmp_path / "broken"), "float32"))
    assert (summary.failed, summary.bad_row_numbers) == (1, [1])
    assert score.stored([Sequence([1], [2, 7, 2])]) == [None]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_dataset(score, tmp_path):
    """Rows and values pass through in a bounded number of windows and commits; what stays is an index entry per sequence."""
    import tracemalloc

    def peak(rows):
        file = write_rows(
            tmp_path / f"{rows}.jsonl",
            [
                {"prompt_ids": [rows % 1000, 1 + i % 900], "chosen_ids": [1 + i // 900] + [3] * 30, "rejected_ids": [4]}
                for i in range(rows)
            ],
        )
        tracemalloc.start()
        assert score(file, commit_sequences=256).scored > 0
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    peak(100)
    growth = (peak(12 * 1024) - peak(6 * 1024)) / (6 * 1024)
    assert growth < 500, f"{growth:.0f} bytes a row; 32 tokens as Python numbers alone would be 1,000"


def test_a_run_of_many_commits_compacts_as_it_goes(score, tmp_path, monkeypatch):
    monkeypatch.setattr("reflogp.store.maintenance.SMALL_SHARDS", 3)
    monkeypatch.setattr("reflogp.store.maintenance._SMALL_SHARDS_SPREAD", 1)
    rows = [{"prompt_ids": [1, i], "chosen_ids": [2, 3], "rejected_ids": [4]} for i in range(10)]
    assert score(write_rows(tmp_path / "t.jsonl", rows), commit_sequences=2).scored == 20
    store = Store(tmp_path / "store")
    at = store[store.references()[0]].snapshot()
    assert len(at) == 20
    assert len(at.rows_of) <= 4
