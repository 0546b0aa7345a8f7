"""open-instruct's export, and the recipes of docs/exports.md: what other stacks read there are values of plain forwards."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from reflogp.cli.main import app
from tests.conftest import last_object, plain_token_logps, write_rows
from tests.docs.blocks import blocks_of

DONE, FAILED, USAGE, MISSES = 0, 1, 2, 3
ROWS = 12
HASH = "3f0c9d2b81a4e567"
OPEN_INSTRUCT = ("--as", "open-instruct", "--hash", HASH, "--loss-type")
SIDES = ("chosen", "rejected")


def tensors(folder) -> dict[str, np.ndarray]:
    """side -> values of open-instruct's file, as its model_utils.TensorCache takes them."""
    found = torch.load(folder / f"{HASH}.pt", weights_only=True, map_location="cpu")
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()}
    assert described == {f"{side}_logps": (torch.float32, (ROWS,)) for side in SIDES}
    return {side: found[f"{side}_logps"].numpy() for side in SIDES}


@pytest.fixture(scope="module")
def rows():
    """Token rows as another stack made them, with the text fields that fairseq2 reads."""
    draw = np.random.default_rng(5)
    made = []
    for number in range(ROWS):
        ids = {f"{side}_ids": draw.integers(10, 900, draw.integers(3, 14)).tolist() for side in ("prompt", *SIDES)}
        texts = {"src": f"question {number}", "tgt_chosen": f"„gut“ {number}", "tgt_rejected": f"bad {number}"}
        made.append({"id": number, **ids, **texts})
    return made


@pytest.fixture(scope="module")
def plain(rows, reference_folder):
    """plain(side, most tokens of prompt and completion) -> for each row, log-probs of a plain float32 forward."""
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32).eval()

    def logps(side, most=100):
        sequences = [(row["prompt_ids"], row[f"{side}_ids"]) for row in rows]
        return [plain_token_logps(model, prompt, completion[: most - len(prompt)]) for prompt, completion in sequences]

    return logps


@pytest.fixture(scope="module")
def join(tmp_path_factory, rows, reference_folder):
    """join(data, *options) -> a joined file; what is scored are the rows, once."""
    folder = tmp_path_factory.mktemp("exports")
    store = ["--store", folder / "store", "--dtype", "float32"]

    def run(command, data, *options):
        given = map(str, [command, reference_folder, data, *store, *options])
        return CliRunner().invoke(app, list(given)).exit_code

    assert run("score", write_rows(folder / "tokens.jsonl", rows)) == DONE

    def join(*options, data=folder / "tokens.jsonl", ends=DONE):
        joined = folder / f"joined-{len(list(folder.iterdir()))}.parquet"
        assert run("join", data, "-o", joined, *options) == ends
        return joined

    return join


@pytest.fixture(scope="module")
def joined(join):
    return join()


def test_open_instruct_reads_sums_or_means_of_the_tokens_that_are_summed(reflogp, join, joined, rows, plain, tmp_path):
    code, out, _ = reflogp("export", joined, *OPEN_INSTRUCT, "dpo", "-o", tmp_path / "caches", "--json")
    summary = last_object(out)
    files = [str(tmp_path / "caches" / f"{HASH}.pt")]
    assert (code, summary["written"], summary["missing"], summary["files"]) == (DONE, ROWS, 0, files)
    assert summary["reference_dtype"] == "float32" and summary["reference_id"] and summary["snapshot"]
    for side, sums in tensors(tmp_path / "caches").items():
        assert sums == pytest.approx([sum(logps) for logps in plain(side)], abs=1e-4)
    most = 15  # of prompt and completion; above every prompt, and some completions are cut
    assert any(len(row["prompt_ids"]) + len(row["chosen_ids"]) > most for row in rows)
    for file, kept in ((joined, 100), (join("--max-length", most), most)):
        assert reflogp("export", file, *OPEN_INSTRUCT, "dpo_norm", "-o", tmp_path)[0] == DONE
        for side, means in tensors(tmp_path).items():
            assert means == pytest.approx([np.mean(logps) for logps in plain(side, kept)], abs=1e-5)


@pytest.fixture(scope="module")
def recipes() -> dict:
    """What the Python blocks of docs/exports.md define."""
    found: dict = {}
    for block in blocks_of("docs/exports.md"):
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), found)
    return found


def test_the_documents_recipes_write_the_records_of_their_frameworks(recipes, joined, rows, plain, tmp_path):
    recipes["write_megatron_bridge"](joined, tmp_path, {"tokenizer": "org/model"}, ROWS)
    recipes["write_fairseq2"](joined, tmp_path / "train.jsonl")
    assert json.loads((tmp_path / "scoring_metadata.json").read_text()) == {"tokenizer": "org/model", "num_pairs": ROWS}
    lines = [map(json.loads, (tmp_path / name).read_text().splitlines()) for name in ("ref_logprobs.jsonl", "train.jsonl")]
    sums = {side: [sum(logps) for logps in plain(side)] for side in SIDES}
    for number, (row, record, line) in enumerate(zip(rows, *lines, strict=True)):
        assert record.pop("pair_id") == number
        texts = {name: line.pop(name) for name in ("src", "tgt_chosen", "tgt_rejected")}
        assert texts.items() <= row.items()
        for side in SIDES:
            assert record.pop(f"ref_{side}_logprob_sum") == pytest.approx(sums[side][number], abs=1e-4)
            assert record.pop(f"ref_{side}_num_tokens") == len(row[f"{side}_ids"])
            assert line.pop(f"reference_score_{side}") == pytest.approx(sums[side][number], abs=1e-4)
        assert record == line == {}
    with pytest.raises(ValueError, match="does not have values for every pair"):
        recipes["write_megatron_bridge"](joined, tmp_path / "more", {}, ROWS + 1)


def test_the_documents_token_row_splits_what_a_stack_scores(recipes):
    """The function that docs/exports.md gives, on rows as open-instruct and Megatron-Bridge hold them."""
    token_row = recipes["token_row"]
    chosen, labels = [1, 2, 3, 4, 5], [-100, -100, 3, 4, 5]
    rejected, mask = [1, 2, 9], [False, False, True]
    expected = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [9]}
    assert token_row(chosen, [label != -100 for label in labels], rejected, mask) == expected
    with pytest.raises(ValueError, match="one prompt"):
        token_row(chosen, [False, False, True, True, True], [1, 7, 9], mask)
    with pytest.raises(ValueError, match="scattered tokens"):
        token_row(chosen, [False, False, True, False, True], rejected, mask)


def test_rows_without_values_stop_the_export_and_are_named(reflogp, join, rows, tmp_path):
    """Missing, bad and dropped rows, and rows cut off behind the last that has values."""
    unscored = {**rows[4], "chosen_ids": [11, 12, 13]}
    data = write_rows(tmp_path / "gaps.jsonl", [*rows[:4], unscored, {**rows[5], "prompt_ids": None}, *rows[6:], unscored])
    export = (*OPEN_INSTRUCT, "dpo", "-o", tmp_path / "out")
    code, out, err = reflogp("export", join(data=data, ends=MISSES), *export, "--json")
    assert code == MISSES
    assert "3 of 13 rows have no values" in err and "rows 4, 5, 12." in err
    summary = last_object(out)
    assert (summary["rows"], summary["written"], summary["missing_row_numbers"]) == (13, 0, [4, 5, 12])
    code, _, err = reflogp("export", join("--max-length", 8, data=data, ends=MISSES), *export)
    left_out = [at for at, row in enumerate(rows) if len(row["prompt_ids"]) >= 8 or at in (4, 5)]
    assert code == MISSES
    assert f"rows {', '.join(map(str, [*left_out, 12][:10]))}" in err
    assert not (tmp_path / "out").exists()


def replaced(name, row, value):
    """A change of one value of a joined table."""

    def change(table):
        values = table[name].to_pylist()
        values[row] = value
        return table.set_column(table.column_names.index(name), name, pa.array(values, table.schema.field(name).type))

    return change


def unchanged(table):
    return table


DPO = (*OPEN_INSTRUCT, "dpo", "-o", "caches")


@pytest.mark.parametrize(
    ("change", "settings", "form", "says"),
    [
        (replaced("ref_chosen_logps", 3, float("nan")), {}, DPO, "not finite: row 3"),
        (replaced("ref_chosen_tokens", 2, 0), {}, (*OPEN_INSTRUCT, "dpo_norm", "-o", "caches"), "at least one token): row 2"),
        (lambda table: table.drop_columns(["ref_chosen_tokens"]), {}, DPO, "has no sums of preference pairs"),
        (lambda table: table.take(list(range(ROWS))[::-1]), {}, DPO, "not in dataset order"),
        (unchanged, {"ld_alpha": 0.5}, DPO, "was joined with ld_alpha 0.5"),
        (unchanged, {"max_length": 64, "truncation_mode": "keep_end"}, DPO, "keeps the start of each sequence"),
        (unchanged, {}, ("--as", "open-instruct", "-o", "caches", "--loss-type", "dpo", "--hash", "../secret"), "16 digits"),
        (unchanged, {}, (*OPEN_INSTRUCT, "dpo", "-o", "altered.parquet"), "cannot be written"),
    ],
)
def test_values_that_would_be_wrong_there_are_refused(reflogp, joined, tmp_path, monkeypatch, change, settings, form, says):
    monkeypatch.chdir(tmp_path)
    kept = pq.ParquetFile(joined).metadata.metadata
    note = json.dumps(json.loads(kept[b"reflogp"]) | settings).encode()
    changed = change(pq.read_table(joined)).replace_schema_metadata({**kept, b"reflogp": note})
    pq.write_table(changed, "altered.parquet")
    code, _, err = reflogp("export", "altered.parquet", *form)
    assert code == USAGE and says in err
    assert [file.name for file in tmp_path.iterdir()] == ["altered.parquet"]


def test_what_is_not_a_joined_file_is_refused(reflogp, joined, tmp_path):
    pq.write_table(pa.table({"ref_chosen_logps": [1.0]}), tmp_path / "other.parquet")
    (tmp_path / "cut.parquet").write_bytes(joined.read_bytes()[:-9])
    for name in ("other", "cut", "nowhere"):
        code, _, err = reflogp("export", tmp_path / f"{name}.parquet", *OPEN_INSTRUCT, "dpo", "-o", tmp_path)
        assert code == USAGE and "cannot be read as output of `reflogp join` or `reflogp jobs result`" in err
