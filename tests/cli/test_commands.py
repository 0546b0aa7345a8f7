"""The command line as a person meets it: what it prints, what it exits with, and that bad input harms nothing."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reflogp.service.registry import with_dtypes
from reflogp.service.settings import read_settings
from reflogp.store import Store, describe_reference
from tests.conftest import write_rows

DONE, FAILED, USAGE, MISSES = 0, 1, 2, 3


@pytest.fixture
def score(reflogp, reference_folder, tmp_path):
    """score(data, *options) with the reference model in float32 into tmp_path/store."""
    return lambda data, *options, model=reference_folder: reflogp(
        "score", model, data, "--store", tmp_path / "store", "--dtype", "float32", *options
    )


def last_object(stdout: str) -> dict:
    return json.loads(stdout.strip().splitlines()[-1])


def one_sentence(stderr: str) -> str:
    """The error message; fails on a traceback."""
    assert "Traceback" not in stderr
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
    assert code == DONE
    assert joined.num_rows == 40
    assert joined["prompt"].to_pylist() == [json.loads(line)["prompt"] for line in pairs_file.read_text().splitlines()]
    assert (joined["ref_chosen_logps"].to_numpy() < 0).all()
    assert (joined["ref_chosen_tokens"].to_numpy() > 0).all()
    assert joined["ref_row"].to_pylist() == list(range(40))
    note = json.loads(joined.schema.metadata[b"reflogp"])
    assert note["reference_id"] == first["reference_id"]
    assert note["snapshot"] == first["snapshot"]


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
    assert code == DONE
    assert reference["sequences"] > 0
    assert reflogp("store", "ls", tmp_path / "store")[1].count(reference["reference_id"]) == 1
    assert reflogp("store", "verify", tmp_path / "store")[0] == DONE
    [shard] = (tmp_path / "store").glob("*/logprobs/shard-*.parquet")
    shard.write_bytes(shard.read_bytes()[:-50])
    code, _, err = reflogp("store", "verify", tmp_path / "store")
    assert code == FAILED
    assert shard.name in err
    assert "--repair" in err
    code, _, err = score(pairs_file)
    assert code == FAILED
    assert f"reflogp store verify {tmp_path}" in one_sentence(err.replace("reflogp: warning:", ""))
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
    assert (done["shards_before"], done["shards_after"]) == (before["shards"], 1)
    assert done["rows"] == before["sequences"]
    code, out, _ = reflogp("store", "vacuum", store, "--retention-hours", 0)
    assert code == USAGE
    assert len(
        last_object(reflogp("store", "vacuum", store, "--retention-hours", 0, "--alone", "--dry-run", "--json")[1])["deleted"]
    )
    code, out, _ = reflogp("store", "vacuum", store, "--retention-hours", 0, "--alone")
    assert f"{before['shards']} files deleted" in out
    assert reflogp("store", "export", store, tmp_path / "shared")[0] == DONE
    code, _, err = reflogp("store", "export", store, tmp_path / "shared")
    assert code == USAGE
    assert "is not an empty folder" in one_sentence(err)
    assert reflogp("store", "export", store, tmp_path / "x", "--reference", "ffff")[0] == USAGE
    imported = last_object(reflogp("store", "import", tmp_path / "other", tmp_path / "shared", "--json")[1])
    assert imported["written"] == before["sequences"]
    code, out, _ = reflogp("score", reference_folder, pairs_file, "--store", tmp_path / "other", "--dtype", "float32", "--json")
    assert last_object(out)["scored"] == 0


def test_a_join_at_a_snapshot_that_was_vacuumed_or_never_was(score, reflogp, pairs_file, reference_folder, tmp_path):
    score(pairs_file, "--commit-sequences", "20")
    store = tmp_path / "store"
    reflogp("store", "compact", store)
    reflogp("store", "vacuum", store, "--retention-hours", 0, "--alone")
    join = ["join", reference_folder, pairs_file, "--store", store, "-o", tmp_path / "out.parquet", "--dtype", "float32"]
    for number, says in ((1, "was vacuumed"), (999, "has no snapshot 999"), (-1, "has no snapshot -1")):
        code, _, err = reflogp(*join, "--snapshot", number)
        assert code == FAILED
        assert says in one_sentence(err)
    assert not (tmp_path / "out.parquet").exists()
    assert reflogp(*join)[0] == DONE


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
    assert "ee" * 16 in err
    assert "dd" * 16 in err
    assert reflogp("store", "verify", store, "--reference", whole.name)[0] == DONE


def test_help_and_version(reflogp):
    for command in ([], ["jobs"], ["store"], ["score"]):
        code, out, _ = reflogp(*command, "--help")
        assert code == DONE and "Usage" in out
    assert reflogp("--version")[1].startswith("reflogp 0")


# Bad input: one clear sentence, the exit code of DESIGN.md, nothing committed is harmed.


@pytest.fixture
def intact(score, pairs_file, reflogp, tmp_path):
    """Scores something first; afterwards checks that it is all still there and whole."""
    score(pairs_file)
    yield
    assert reflogp("store", "verify", tmp_path / "store")[0] == DONE
    assert last_object(score(pairs_file, "--json")[1])["hits"] == 80


def with_cut_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])


def without_special_tokens(folder):
    for file in filter(Path.is_file, (folder / "tokenizer_config.json", folder / "special_tokens_map.json")):
        kept = {name: value for name, value in json.loads(file.read_text()).items() if name not in ("pad_token", "eos_token")}
        file.write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (with_cut_weights, "truncated"),
        (without_special_tokens, "EOS"),
    ],
)
def test_a_broken_model(score, reference_folder, tmp_path, intact, damage, says):
    model = Path(shutil.copytree(reference_folder, tmp_path / "broken"))
    damage(model)
    plain = write_rows(tmp_path / "plain.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    code, _, err = score(plain, model=model)
    assert code == FAILED and says in one_sentence(err)


def test_rows_that_cannot_be_used(score, tmp_path, pair_rows, intact):
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


@pytest.mark.parametrize(
    "change, says",
    [
        ({"model": "./nowhere"}, "no such folder"),
        ({"data": "nowhere.jsonl"}, "no such file"),
        ({"options": ["--dtype", "int3"]}, "dtype"),
        ({"options": ["--truncation-mode", "middle"]}, "keep_start"),
        ({"options": ["--token-budget", "many"]}, "token-budget"),
        ({"options": ["--format", "ppo"]}, "--format"),
        ({"options": ["--store", "s3:/bucket"]}, "two slashes"),
    ],
)
def test_bad_usage(reflogp, reference_folder, pairs_file, tmp_path, change, says):
    model, data = change.get("model", reference_folder), change.get("data", pairs_file)
    code, _, err = reflogp("score", model, data, "--store", tmp_path / "s", *change.get("options", []))
    assert code == USAGE
    assert says in " ".join(err.replace("│", "").split()) and "Traceback" not in err


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


def test_an_error_is_json_too(reflogp, reference_folder, pairs_file, tmp_path, monkeypatch):
    score = ("score", reference_folder, pairs_file, "--store", tmp_path / "store", "--json")
    join = ("join", reference_folder, pairs_file, "--store", tmp_path / "none", "-o", tmp_path / "j.parquet", "--json")
    for arguments, exit_code, says in (
        ((*score, "--dtype", "float8"), USAGE, "float8"),
        ((*score, "--max-length", "x"), USAGE, "a valid integer"),
        (join, USAGE, "there is no store"),
        (("store", "ls", tmp_path, "--reference", "x", "--json"), USAGE, "No such option"),
        (("jobs", "ls", "http://127.0.0.1:9", "--json"), FAILED, "the request to http://127.0.0.1:9 failed"),
    ):
        monkeypatch.setattr("reflogp.client.protocol.LONGEST_PAUSE", 0.01)
        code, out, err = reflogp(*arguments)
        assert (code, set(last_object(out))) == (exit_code, {"error"}), (arguments, err)
        assert says in last_object(out)["error"]
        assert says in " ".join(err.replace("│", "").split())
        without = [argument for argument in arguments if argument != "--json"]
        assert reflogp(*without)[:2] == (exit_code, "")


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
    reference = describe_reference(str(reference_folder), "float32")

    def arguments(store):
        some = ("--token-budget", 400, "--commit-sequences", 10)
        return ("score", reference_folder, data, "--store", store, "--dtype", "float32", "--json", *some)

    def rows_in(store):
        try:
            return Store(store)[reference.reference_id].snapshot()
        except Exception:
            return ()

    command = [Path(sys.executable).with_name("reflogp"), *arguments(tmp_path / "killed")]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(rows_in(tmp_path / "killed")) < 20:
        assert process.poll() is None, "it finished before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    committed = len(rows_in(tmp_path / "killed"))
    second, whole = (last_object(reflogp(*arguments(tmp_path / name))[1]) for name in ("killed", "whole"))
    assert 20 <= committed < whole["scored"]
    assert second["scored"] == whole["scored"] - committed

    shards = (tmp_path / "whole").glob("*/logprobs/shard-*.parquet")
    values = {row["key"]: row["token_logps"] for path in shards for row in pq.read_table(path).to_pylist()}
    snapshot = rows_in(tmp_path / "killed")
    assert len(snapshot) == whole["scored"] == len(values)
    stored = snapshot.token_logps(pa.array(list(values), pa.binary()))
    assert max(np.abs(np.array(value) - got).max() for value, got in zip(values.values(), stored, strict=True)) <= 1e-5
