"""Runs with `top_k`: what is stored, what is a hit, and by which engines, beside plain forwards of the model."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.scoring import join, report, score
from reflogp.scoring.errors import NotScoredError
from reflogp.store import (
    LogprobTable,
    ReferenceNotFoundError,
    Store,
    StoreUnavailableError,
    UsageError,
    import_folder,
    sequence_keys,
)
from reflogp.store.schema import shard_table
from tests.conftest import plain_token_logps, write_rows
from tests.service.serving import token_rows

K = 5


@pytest.fixture(scope="module")
def rows():
    return token_rows(12, seed=4)


@pytest.fixture(scope="module")
def plain(reference_folder):
    return AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32).eval()


def keys_of(rows) -> pa.Array:
    return sequence_keys([row["prompt_ids"] for row in rows], [row["chosen_ids"] for row in rows])


@torch.inference_mode()
def best_after(model, ids, start, k) -> torch.return_types.topk:
    """Of each token from `start` on, the most probable tokens at its place, by a plain forward."""
    return torch.topk(torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1], 1), k)


def best(model, prompt, completion, k) -> torch.return_types.topk:
    return best_after(model, [*prompt, *completion], len(prompt), k)


def require_right(table, rows, model, k=K) -> None:
    """The stored tokens and values are those of plain forwards; float16 keeps 11 bits."""
    stored = table.snapshot().find(keys_of(rows)).top(k)
    for row, (ids, logps) in zip(rows, stored, strict=True):
        right = best(model, row["prompt_ids"], row["chosen_ids"], k)
        assert ids.tolist() == right.indices.tolist()
        assert np.allclose(logps, right.values.numpy(), rtol=2**-10, atol=1e-5)


def test_a_table_scored_for_dpo_gets_only_the_most_probable_tokens_of_which_fewer_are_hits(
    tmp_path, reference_folder, rows, plain
):
    model, store = str(reference_folder), Store(tmp_path / "store")
    assert score(model, rows, store, dtype="float32").scored == 24
    [reference] = store.references()
    before = store[reference].snapshot()
    values = before.token_logps(keys_of(rows))
    found = score(model, rows, store, dtype="float32", top_k=K)
    assert (found.hits, found.scored) == (0, 24)
    assert store[reference].totals()[1] == 24  # no value was added or replaced
    assert all(map(np.array_equal, values, store[reference].snapshot().token_logps(keys_of(rows))))
    require_right(store.top_table(reference, K), rows, plain)
    require_right(store.top_table(reference, 2), rows, plain, 2)
    with pytest.raises(ReferenceNotFoundError, match=r"\(it has: 5\): score with --top-k 9"):
        store.top_table(reference, 9)
    with pytest.raises(UsageError, match="the table has the 5 most probable tokens of each position, not 9"):
        store.top_table(reference, K).snapshot().find(keys_of(rows)).top(9)
    for k, hits in ((K, 24), (2, 24), (0, 24), (K + 1, 0)):
        again = score(model, rows, store, dtype="float32", top_k=k)
        assert (again.hits, again.scored) == (hits, 24 - hits)


def test_a_longer_row_begins_with_the_shorter_one(tmp_path, reference_folder, rows):
    model, store = str(reference_folder), Store(tmp_path / "store")
    longest = max(len(row["prompt_ids"]) + len(row["chosen_ids"]) for row in rows)
    score(model, rows, store, dtype="float32", max_length=longest - 2, top_k=K)
    [reference] = store.references()
    table = store.top_table(reference, K)
    short = table.snapshot().find(keys_of(rows)).top(K)
    score(model, rows, store, dtype="float32", top_k=K)
    whole = table.snapshot().find(keys_of(rows)).top(K)
    assert any(now is not None and was is not None and len(was[0]) < len(now[0]) for was, now in zip(short, whole, strict=True))
    for was, now in zip(short, whole, strict=True):
        if was is not None:
            assert all(np.array_equal(old, new[: len(old)]) for old, new in zip(was, now, strict=True))
    rows_before = len(table.snapshot())
    table.compact()
    assert len(table.snapshot()) < rows_before
    compacted = table.snapshot().find(keys_of(rows)).top(K)
    assert all(np.array_equal(*pair) for was, now in zip(whole, compacted, strict=True) for pair in zip(was, now, strict=True))


def test_what_is_committed_first_stays(tmp_path, reference_folder):
    """Another writer's longer row takes over the values that are there, ids and log-probs of most probable tokens too."""
    store = Store(tmp_path / "store")
    score(str(reference_folder), token_rows(1, seed=1), store, dtype="float32")
    [reference] = store.references()
    table, key = store.create_table(reference, 2), sequence_keys([[1]], [[2, 3]])

    def add(*tokens):
        logps, ids, tops = zip(*tokens, strict=True)
        top = (
            pa.array([[of for one in ids for of in one]], pa.list_(pa.int32())),
            pa.array([[of for one in tops for of in one]]),
        )
        one, two = np.array([1], np.int32), np.array([2], np.int32)
        table.append(shard_table(key, one, two, pa.array([logps], pa.list_(pa.float32())), {"engine": "test"}, top))

    add((-1.0, (5, 6), (-0.5, -1.0)))
    add((-1.25, (7, 5), (-0.25, -1.5)), (-2.0, (8, 9), (-0.125, -3.0)))
    [(ids, logps)] = table.snapshot().find(key).top(2)
    assert ids.tolist() == [[5, 6], [8, 9]] and logps.tolist() == [[-0.5, -1.0], [-0.125, -3.0]]
    assert table.verify() == []


def test_an_export_takes_the_most_probable_tokens_along(tmp_path, reference_folder, rows, plain):
    store, other = Store(tmp_path / "store"), Store(tmp_path / "other")
    score(str(reference_folder), rows, store, dtype="float32", top_k=K)
    [reference] = store.references()
    store.top_table(reference, K).export(str(tmp_path / "export"))
    imported = import_folder(other, str(tmp_path / "export"))
    assert (imported.rows, imported.written) == (24, 24)
    require_right(other.top_table(reference, K), rows, plain)
    score_again = score(str(reference_folder), rows, other, dtype="float32")
    assert score_again.scored == 0  # log-probs for DPO came along


@pytest.mark.slow
def test_the_command_line_and_local_workers(reflogp, tmp_path, reference_folder, rows, plain):
    file = write_rows(tmp_path / "rows.jsonl", rows)
    common = ("score", reference_folder, file, "--store", tmp_path / "store", "--dtype", "float32", "--json")
    code, out, err = reflogp(*common, "--top-k", K, "--devices", "cpu,cpu")
    assert code == 0, err
    assert json.loads(out)["scored"] == 24
    store = Store(tmp_path / "store")
    require_right(store.top_table(store.references()[0], K), rows, plain)
    values = store[store.references()[0]].snapshot().token_logps(keys_of(rows))
    for row, found in zip(rows, values, strict=True):
        assert found == pytest.approx(plain_token_logps(plain, row["prompt_ids"], row["chosen_ids"]), abs=1e-4)


CHATS = [
    {"messages": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": " ".join("123456"[:n])}]}
    for n in range(1, 6)
]


def test_joined_columns_describe_each_token_from_the_second_on(tmp_path, reference_folder, plain, tokenizer):
    model, store = str(reference_folder), tmp_path / "store"
    score(model, CHATS, store, dtype="float32", top_k=K)
    joined = join(model, CHATS, store, top_k=3)
    for row, chat in zip(joined, CHATS, strict=True):
        assert row["messages"] == chat["messages"]
        ids = tokenizer.apply_chat_template(chat["messages"], tokenize=True, return_dict=True)["input_ids"]
        right = best_after(plain, ids, 1, 3)
        assert row["ref_top_ids"] == right.indices.tolist()
        assert np.allclose(row["ref_top_logps"], right.values, rtol=2**-10, atol=1e-5)
    with pytest.raises(ReferenceNotFoundError, match="with the 9 most probable tokens"):
        join(model, CHATS, store, top_k=9)
    with pytest.raises(UsageError, match="leave out the snapshot, or top_k"):
        join(model, CHATS, store, top_k=3, snapshot=1)


def test_pairs_have_columns_of_both_sides_and_rows_without_are_missing(tmp_path, reference_folder, rows, plain):
    model, store = str(reference_folder), tmp_path / "store"
    score(model, rows, store, dtype="float32")
    score(model, rows[:7], store, dtype="float32", top_k=K)
    with pytest.raises(NotScoredError, match=r"no values for 5 rows .* --top-k 5`"):
        join(model, rows, store, top_k=K)
    joined = join(model, rows, store, top_k=K, on_miss="drop")
    assert len(joined) == 7
    for row in joined:
        for side in ("chosen", "rejected"):
            right = best(plain, row["prompt_ids"], row[f"{side}_ids"], K)
            assert row[f"ref_{side}_top_ids"] == right.indices.tolist()
            assert np.shape(row[f"ref_{side}_top_logps"]) == (row[f"ref_{side}_tokens"], K)


def test_an_export_for_axolotls_distillation(reflogp, tmp_path, reference_folder, plain, tokenizer):
    file, common = write_rows(tmp_path / "chats.jsonl", CHATS), ("--store", tmp_path / "store", "--dtype", "float32")
    for command in (
        ("score", reference_folder, file, *common, "--top-k", K),
        ("join", reference_folder, file, *common, "--top-k", K, "-o", tmp_path / "joined.parquet"),
        ("export", tmp_path / "joined.parquet", "--as", "axolotl-kd", "-o", tmp_path / "kd.parquet"),
    ):
        code, _, err = reflogp(*command)
        assert code == 0, err
    rows = pq.read_table(tmp_path / "kd.parquet").to_pylist()
    assert list(rows[0]) == ["messages", "logprobs", "target_token_ids"] and len(rows) == len(CHATS)
    for row, chat in zip(rows, CHATS, strict=True):
        ids = tokenizer.apply_chat_template(chat["messages"], tokenize=True, return_dict=True)["input_ids"]
        right = best_after(plain, ids, 1, K)
        assert row["target_token_ids"] == right.indices.tolist()
        assert np.allclose(row["logprobs"], right.values, rtol=2**-10, atol=1e-5)
    cut = tmp_path / "cut.parquet"
    assert reflogp("join", reference_folder, file, *common, "--top-k", K, "--max-length", 30, "-o", cut)[0] == 0
    code, _, err = reflogp("export", cut, "--as", "axolotl-kd", "-o", tmp_path / "kd.parquet")
    assert code == 2 and "without --max-length" in err


def test_tables_of_several_k_are_read_together(tmp_path, reference_folder, rows, plain):
    """A run that was interrupted with a smaller k hides nothing that a larger one has stored."""
    model, store = str(reference_folder), Store(tmp_path / "store")
    score(model, rows[:8], store, dtype="float32", top_k=K)
    score(model, rows[6:], store, dtype="float32", top_k=3)
    (tmp_path / "store" / store.references()[0].reference_id / "top-99").mkdir()  # left by a creation that was killed
    assert [table.top_k for table in store.tables(store.references()[0])] == [0, 3, K]
    for row in join(model, rows, store, top_k=2):
        for side in ("chosen", "rejected"):
            assert row[f"ref_{side}_top_ids"] == best(plain, row["prompt_ids"], row[f"{side}_ids"], 2).indices.tolist()
    assert score(model, rows, store, dtype="float32", top_k=3).scored == 0


@pytest.mark.parametrize("k", [-1, 257])
def test_a_k_that_cannot_be_makes_no_table(k, tmp_path, reference_folder, rows):
    for call in (score, join):
        with pytest.raises(UsageError, match="must be from 0 to 256"):
            score(str(reference_folder), rows, tmp_path / "store", dtype="float32")
            call(str(reference_folder), rows, tmp_path / "store", dtype="float32", top_k=k)
    assert [path.name for path in (tmp_path / "store").glob("*/*/_delta_log")] == ["_delta_log"]


def test_rows_with_an_empty_completion_are_joined(tmp_path, reference_folder, rows):
    mixed = [*rows[:2], {**rows[2], "rejected_ids": []}]
    score(str(reference_folder), mixed, tmp_path / "store", dtype="float32", top_k=K)
    joined = join(str(reference_folder), mixed, tmp_path / "store", top_k=K, on_miss="drop")
    assert len(joined) == 3 and joined[2]["ref_rejected_top_ids"] == [] and len(joined[2]["ref_chosen_top_ids"]) > 0


def test_a_crash_between_the_two_tables_commits_costs_nothing(tmp_path, reference_folder, rows, plain, monkeypatch):
    model, store = str(reference_folder), Store(tmp_path / "store")
    append = LogprobTable.append

    def fails(self, given):
        if self.top_k:
            raise StoreUnavailableError("the disk is full")
        return append(self, given)

    monkeypatch.setattr(LogprobTable, "append", fails)
    with pytest.raises(StoreUnavailableError):
        score(model, rows, store, dtype="float32", top_k=K)
    monkeypatch.setattr(LogprobTable, "append", append)
    assert score(model, rows, store, dtype="float32", top_k=K).hits == 0
    require_right(store.top_table(store.references()[0], K), rows, plain)


def test_a_report_of_conversations_asks_for_no_labels(tmp_path, reference_folder):
    score(str(reference_folder), CHATS, tmp_path / "store", dtype="float32")
    found = report(str(reference_folder), CHATS, tmp_path / "store", tmp_path / "report")
    assert found.with_values == len(CHATS)
    assert [finding["kind"] for finding in found.findings if "label" in finding["text"]] == ["fact"]


def test_strict_engine_sees_values_of_both_tables(reflogp, tmp_path, reference_folder, rows):
    file, store = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "store"
    score(str(reference_folder), rows[:1], store, dtype="float32")
    table = Store(store)[Store(store).references()[0]]
    ids, length = rows[1], len(rows[1]["chosen_ids"])
    table.add([ids["prompt_ids"]], [ids["chosen_ids"]], [[-1.0] * length], provenance={"engine": "other"})
    command = ("score", reference_folder, file, "--store", store, "--dtype", "float32", "--strict-engine")
    for more in ((), ("--top-k", K)):
        code, _, err = reflogp(*command, *more)
        assert code == 1 and "values from other" in err, err


def test_rows_that_contradict_themselves_are_refused(tmp_path, reference_folder):
    store = Store(tmp_path / "store")
    score(str(reference_folder), token_rows(1, seed=1), store, dtype="float32")
    table = store.create_table(store.references()[0], 2)
    one, value = np.array([1], np.int32), pa.array([[-1.0]], pa.list_(pa.float32()))
    key = sequence_keys([[1]], [[2]])
    ids, logps = pa.array([[5, 6]], pa.list_(pa.int32())), pa.array([[-0.5, -1.0]], pa.list_(pa.float32()))
    for top, problem in (
        ((ids, pa.array([[-0.5]], pa.list_(pa.float32()))), "top_logps does not have 2 entries"),
        ((pa.array([[5]], pa.list_(pa.int32())), logps), "top_ids does not have 2 entries"),
        ((ids, pa.array([[np.nan, -1.0]], pa.list_(pa.float32()))), "non-finite"),
        (None, "columns have wrong names"),
    ):
        with pytest.raises(UsageError, match=problem):
            table.append(shard_table(key, one, one, value, {"engine": "test"}, top))
