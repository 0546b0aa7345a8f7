"""The command line as a person meets it: what it prints, what it exits with, and that bad input harms nothing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from reflogp.service.registry import with_dtypes
from reflogp.service.settings import read_settings
from reflogp.store import Store, describe_reference
from tests.conftest import last_object, write_rows
from tests.scoring.stored_rows import rows_of, same_rows
from tests.service.serving import wait_until

DONE, FAILED, USAGE, MISSES = 0, 1, 2, 3


@pytest.fixture
def score(reflogp, reference_folder, tmp_path):
    """score(data, *options) with the reference model in float32 into tmp_path/store."""
    return lambda data, *options, model=reference_folder: reflogp(
        "score", model, data, "--store", tmp_path / "store", "--dtype", "float32", *options
    )


def one_sentence(stderr: str) -> str:
    """The error message, and there is no other."""
    lines = [line for line in stderr.strip().splitlines() if line.startswith("reflogp:")]
    assert len(lines) == 1, stderr
    return lines[0]


def test_score_twice_then_join(score, reflogp, reference_folder, pairs_file, tmp_path):
    code, out, _ = score(pairs_file, "--json")
    first = last_object(out)
    assert code == DONE
    assert (first["sequences"], first["hits"]) == (80, 0) and first["scored"] > 0 and first["seconds"] > 0
    assert first["sharing_gain"] > 1 and first["tokens"] > 0 and first["tokens_per_second"] > 0
    code, out, _ = score(pairs_file, "--json")
    assert (code, last_object(out)["scored"], last_object(out)["hits"]) == (DONE, 0, 80)

    output = tmp_path / "joined.parquet"
    code, _, _ = reflogp(
        "join", reference_folder, pairs_file, "--store", tmp_path / "store", "-o", output, "--dtype", "float32"
    )
    joined = pq.read_table(output)
    assert (code, joined.num_rows) == (DONE, 40)
    assert joined["prompt"].to_pylist() == [json.loads(line)["prompt"] for line in pairs_file.read_text().splitlines()]
    assert (joined["ref_chosen_logps"].to_numpy() < 0).all()
    assert (joined["ref_chosen_tokens"].to_numpy() > 0).all()
    assert joined["ref_row"].to_pylist() == list(range(40))
    note = json.loads(joined.schema.metadata[b"reflogp"])
    assert (note["reference_id"], note["snapshot"]) == (first["reference_id"], first["snapshot"])


def test_join_names_what_is_missing_and_the_command_that_scores_it(
    score, reflogp, reference_folder, pairs_file, tmp_path, pair_rows
):
    score(pairs_file)
    more = write_rows(tmp_path / "more.jsonl", pair_rows[:41] + pair_rows[200:203])
    store = ("--store", tmp_path / "store", "--dtype", "float32")
    join = ("join", reference_folder, more, *store, "-o", tmp_path / "j.parquet", "--json")
    code, out, err = reflogp(*join)
    summary = last_object(out)
    assert code == MISSES
    assert summary["missing_row_numbers"][-3:] == [len(pair_rows[:41]) + i for i in range(3)]
    assert summary["written"] == pq.read_table(tmp_path / "j.parquet").num_rows == summary["rows"] - summary["missing"]
    command = next(line for line in err.splitlines() if line.startswith("score them: "))
    assert reflogp(*command.removeprefix("score them: reflogp ").split())[0] == DONE
    assert reflogp(*join)[0] == DONE


def test_store_ls_and_verify(score, reflogp, pairs_file, tmp_path):
    score(pairs_file)
    code, out, _ = reflogp("store", "ls", tmp_path / "store", "--json")
    [reference] = last_object(out)["references"]
    assert code == DONE and reference["sequences"] > 0
    assert reflogp("store", "ls", tmp_path / "store")[1].count(reference["reference_id"]) == 1
    assert reflogp("store", "verify", tmp_path / "store")[0] == DONE
    [shard] = (tmp_path / "store").glob("*/logprobs/shard-*.parquet")
    shard.write_bytes(shard.read_bytes()[:-50])
    code, _, err = reflogp("store", "verify", tmp_path / "store")
    assert code == FAILED and shard.name in err and "--repair" in err
    code, _, err = score(pairs_file)
    assert code == FAILED and f"reflogp store verify {tmp_path}" in one_sentence(err.replace("reflogp: warning:", ""))
    code, out, _ = reflogp("store", "verify", tmp_path / "store", "--repair", "--json")
    assert code == DONE
    assert [damage["repaired"] for damage in last_object(out)["damaged"]] == [True]
    again = last_object(score(pairs_file, "--json")[1])
    assert again["scored"] == reference["sequences"]
    assert reflogp("store", "verify", tmp_path / "store")[0] == DONE


def test_store_drop_removes_rows_by_their_provenance(score, reflogp, pairs_file, tmp_path):
    stored = last_object(score(pairs_file, "--json")[1])["scored"]
    drop = ("store", "drop", tmp_path / "store", "--provenance")
    assert reflogp(*drop, '{"engine": "vllm"}')[1].endswith("0 rows dropped; the snapshot is 1\n")
    [done] = last_object(reflogp(*drop, '{"engine": "torch"}', "--json")[1])["dropped"]
    assert done["rows"] == stored
    assert last_object(score(pairs_file, "--json")[1])["scored"] == stored
    for words in ("engine", "[]", "{}"):
        code, _, err = reflogp(*drop, words)
        assert code == USAGE and "--provenance" in err


def test_store_compact_vacuum_export_import(score, reflogp, pairs_file, reference_folder, tmp_path):
    score(pairs_file, "--commit-sequences", "20")
    store = tmp_path / "store"
    [before] = last_object(reflogp("store", "ls", store, "--json")[1])["references"]
    [done] = last_object(reflogp("store", "compact", store, "--json")[1])["compacted"]
    assert (done["shards_before"], done["shards_after"], done["rows"]) == (before["shards"], 1, before["sequences"])
    vacuum = ("store", "vacuum", store, "--retention-hours", 0)
    assert reflogp(*vacuum)[0] == USAGE
    [would] = last_object(reflogp(*vacuum, "--alone", "--dry-run", "--json")[1])["deleted"]
    assert len(would["files"]) == before["shards"]
    assert f"{before['shards']} files deleted" in reflogp(*vacuum, "--alone")[1]

    join = ["join", reference_folder, pairs_file, "--store", store, "-o", tmp_path / "out.parquet", "--dtype", "float32"]
    for number, says in ((1, "was vacuumed"), (999, "has no snapshot 999")):
        code, _, err = reflogp(*join, "--snapshot", number)
        assert code == FAILED and says in one_sentence(err)
    assert not (tmp_path / "out.parquet").exists()
    assert reflogp(*join)[0] == DONE

    assert reflogp("store", "export", store, tmp_path / "shared")[0] == DONE
    code, _, err = reflogp("store", "export", store, tmp_path / "shared")
    assert code == USAGE and "is not an empty folder" in one_sentence(err)
    assert reflogp("store", "export", store, tmp_path / "x", "--reference", "ffff")[0] == USAGE
    imported = last_object(reflogp("store", "import", tmp_path / "other", tmp_path / "shared", "--json")[1])
    assert imported["written"] == before["sequences"]
    code, out, _ = reflogp("score", reference_folder, pairs_file, "--store", tmp_path / "other", "--dtype", "float32", "--json")
    assert last_object(out)["scored"] == 0


def test_one_broken_reference_does_not_hide_the_others(score, reflogp, pairs_file, tmp_path):
    score(pairs_file)
    store = tmp_path / "store"
    [whole] = store.iterdir()
    shutil.copytree(whole, store / ("ee" * 16))
    (store / ("ee" * 16) / "reference.json").write_text("{")
    (store / ("dd" * 16)).mkdir()
    about = json.loads((whole / "reference.json").read_text()) | {"reference_id": "dd" * 16}
    (store / ("dd" * 16) / "reference.json").write_text(json.dumps(about))
    code, out, err = reflogp("store", "ls", store, "--json")
    assert code == FAILED
    assert [entry["reference_id"] for entry in last_object(out)["references"]] == [whole.name]
    assert "ee" * 16 in err and "dd" * 16 in err
    assert reflogp("store", "verify", store, "--reference", whole.name)[0] == DONE


def test_help_and_version(reflogp):
    for command in ([], ["jobs"], ["store"], ["score"]):
        code, out, _ = reflogp(*command, "--help")
        assert code == DONE and "Usage" in out
    assert reflogp("--version")[1].startswith("reflogp 0")


def test_rows_that_cannot_be_used(score, reflogp, pairs_file, tmp_path, pair_rows):
    score(pairs_file)
    code, _, err = score(write_rows(tmp_path / "w.jsonl", [{"question": "a", "answer": "b"}]))
    assert code == USAGE and "answer, question" in one_sentence(err)
    (tmp_path / "x.jsonl").write_bytes(b"PAR1\x90\n\xff\n")
    code, _, err = score(tmp_path / "x.jsonl")
    assert code == USAGE and "no readable row" in one_sentence(err)
    some = write_rows(tmp_path / "n.jsonl", [pair_rows[50], {**pair_rows[51], "chosen": None}, pair_rows[52]])
    some.write_text(some.read_text() + '{"prompt": \n')
    code, out, err = score(some, "--json")
    assert code == MISSES and "row 1: chosen is null" in err and "row 3: not JSON" in err
    assert (last_object(out)["sequences"], last_object(out)["bad_row_numbers"]) == (4, [1, 3])
    assert reflogp("store", "verify", tmp_path / "store")[0] == DONE
    assert last_object(score(pairs_file, "--json")[1])["hits"] == 80


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        ("score ./nowhere {data} --store {store}", USAGE, "no such folder"),
        ("score {model} nowhere.jsonl --store {store}", USAGE, "no such file"),
        ("score {model} {data} --store {store} --dtype float8", USAGE, "float8"),
        ("score {model} {data} --store {store} --truncation-mode middle", USAGE, "keep_start"),
        ("score {model} {data} --store {store} --max-length x", USAGE, "a valid integer"),
        ("score {model} {data} --store s3:/bucket", USAGE, "two slashes"),
        ("join {model} {data} --store {store} -o {store}.parquet", USAGE, "there is no store"),
        ("store ls {store} --reference x", USAGE, "No such option"),
        ("jobs ls http://127.0.0.1:9", FAILED, "the request to http://127.0.0.1:9 failed"),
    ],
)
def test_an_error_is_one_sentence_and_json_where_that_is_wanted(
    reflogp, reference_folder, pairs_file, tmp_path, monkeypatch, arguments, exit_code, says
):
    monkeypatch.setattr("reflogp.client.protocol.LONGEST_PAUSE", 0.01)
    given = arguments.format(model=reference_folder, data=pairs_file, store=tmp_path / "store").split()
    code, out, err = reflogp(*given)
    assert (code, out) == (exit_code, "")
    assert says in " ".join(err.replace("│", "").split())
    code, out, _ = reflogp(*given, "--json")
    assert code == exit_code
    assert last_object(out).keys() == {"error"} and says in last_object(out)["error"]


def test_an_output_that_would_overwrite_the_data_is_refused(score, reflogp, reference_folder, pairs_file, tmp_path):
    score(pairs_file)
    join = ("join", reference_folder, "--store", tmp_path / "store", "--dtype", "float32")
    data = tmp_path / "d.parquet"
    assert reflogp(*join, pairs_file, "-o", data)[0] == DONE
    before = data.read_bytes()
    code, _, err = reflogp(*join, data, "-o", data)
    assert code == USAGE
    assert "the dataset itself" in one_sentence(err)
    assert data.read_bytes() == before
    assert reflogp(*join, pairs_file, "-o", tmp_path / "out.csv")[0] == USAGE


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_a_service_computes_in_the_dtype_that_score_would(reflogp, reference_folder, pairs_file, tmp_path, dtype):
    given = ("score", reference_folder, pairs_file, "--store", tmp_path / "store", "--device", "cpu")
    references = {"sft": {"model": str(reference_folder)}}
    settings = read_settings(None, store=str(tmp_path / "store"), references=references, devices=["cpu"])
    before = with_dtypes(settings).references["sft"].dtype
    assert reflogp(*given, *(("--dtype", dtype) if dtype else ()))[0] == DONE
    [scored] = Store(tmp_path / "store").references()
    assert with_dtypes(settings).references["sft"].dtype == scored.dtype
    assert before == "float32" and scored.dtype == (dtype or before)


def test_an_error_that_nobody_foresaw_is_json_too(monkeypatch, capsys, tmp_path):
    from reflogp.cli import main, store

    def broken(*_):
        raise ValueError("a defect")

    monkeypatch.setattr(store, "Store", broken)
    monkeypatch.setattr(sys, "argv", ["reflogp", "store", "ls", str(tmp_path), "--json"])
    with pytest.raises(ValueError, match="a defect"):
        main()
    assert last_object(capsys.readouterr().out) == {"error": "ValueError: a defect"}


def test_ctrl_c_exits_with_130_in_every_command(reflogp, monkeypatch, tmp_path):
    from reflogp.cli import store

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "Store", interrupted)
    code, out, err = reflogp("store", "ls", tmp_path, "--json")
    assert code == 130
    assert last_object(out)["error"].startswith("interrupted; committed values are kept")
    assert one_sentence(err).startswith("reflogp: interrupted; committed values are kept")


@pytest.mark.slow
def test_kill_9_in_the_middle_loses_nothing_that_was_committed(reflogp, reference_folder, pair_rows, tmp_path):
    """A real process, killed after its first commits; the second run's values equal an undisturbed run's."""
    data = write_rows(tmp_path / "pairs.jsonl", pair_rows[:100])
    reference_id = describe_reference(str(reference_folder), "float32").reference_id
    killed, whole = tmp_path / "killed", tmp_path / "whole"

    def arguments(store):
        some = ("--token-budget", 400, "--commit-sequences", 10)
        return ("score", reference_folder, data, "--store", store, "--dtype", "float32", "--json", *some)

    command = [Path(sys.executable).with_name("reflogp"), *arguments(killed)]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list(killed.glob("*/logprobs/_delta_log/*.json"))) > 3)
    assert process.poll() is None, "it finished before it could be killed"
    process.kill()
    process.wait()
    committed = len(rows_of(killed, reference_id))
    again, undisturbed = (last_object(reflogp(*arguments(store))[1])["scored"] for store in (killed, whole))
    assert 0 < committed < undisturbed and again == undisturbed - committed
    same_rows(rows_of(killed, reference_id), rows_of(whole, reference_id))
