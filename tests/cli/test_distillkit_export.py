"""`reflogp export --as distillkit`, decoded by what DistillKit's config.py and bitpack.py say of the format."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.conftest import last_object, write_rows

K = 5
TEXTS = [{"text": "A teacher says how likely each token is."}, {"text": "So."}]
CHATS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"Hello {'again ' * n}"}]} for n in (1, 2)
]


@pytest.fixture
def joined(reflogp, tmp_path, reference_folder):
    """joined(rows, more options of join) -> the joined file."""

    def run(rows, *options, ends=0):
        file, common = write_rows(tmp_path / "rows.jsonl", rows), ("--store", tmp_path / "store", "--dtype", "float32")
        for command in (("score",), ("join", *options, "-o", tmp_path / "joined.parquet")):
            code, _, err = reflogp(command[0], reference_folder, file, *common, "--top-k", K, *command[1:])
            assert code == ends, err
        return tmp_path / "joined.parquet"

    return run


@pytest.mark.parametrize("rows", [TEXTS, CHATS], ids=["texts", "conversations"])
@torch.inference_mode()
def test_the_decoded_values_are_those_of_plain_forwards(rows, joined, reflogp, tmp_path, reference_folder, tokenizer):
    code, out, err = reflogp("export", joined(rows), "--as", "distillkit", "-o", tmp_path / "kd")
    assert code == 0 and "2 rows written for distillkit" in out, err
    config = yaml.safe_load((tmp_path / "kd" / "compression_config.yaml").read_text())
    assert config["k"] == config["exact_k"] == K and config["exact_dtype"] == "float16" and config["residual_bins"] == []
    assert (config["polynomial_terms"], config["delta_encoding"], config["error_diffusion"]) == (None, False, False)
    bits = int(np.ceil(np.log2(config["d"])))
    table = pq.read_table(tmp_path / "kd" / "data_0.parquet")
    byte_lists = pa.list_(pa.list_(pa.uint8()))
    assert [field.type for field in table.schema] == [pa.list_(pa.uint64()), byte_lists, byte_lists]
    plain = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32).eval()
    for row, given in zip(table.to_pylist(), rows, strict=True):
        messages = given.get("messages")
        ids = tokenizer.apply_chat_template(messages)["input_ids"] if messages else tokenizer(given["text"])["input_ids"]
        assert row["input_ids"][: len(ids)] == ids  # SFTTrainer adds an end of sequence to texts
        right = torch.topk(torch.log_softmax(plain(torch.tensor([row["input_ids"]])).logits[0, :-1], 1), K)
        decoded = [
            [int("".join(f"{byte:08b}" for byte in packed)[at * bits : (at + 1) * bits], 2) for at in range(K)]
            for packed in row["bytepacked_indices"]
        ]
        assert decoded == right.indices.tolist()
        values = np.array([np.frombuffer(bytes(packed), "<f2") for packed in row["compressed_logprobs"]], np.float32)
        assert np.allclose(values, right.values, rtol=2**-10, atol=1e-5)


@pytest.mark.parametrize(("stack", "file"), [("distillkit", "kd/data_0.parquet"), ("axolotl-kd", "kd.parquet")])
def test_rows_without_values_are_left_out_and_counted(stack, file, joined, reflogp, tmp_path):
    rows = joined([CHATS[0], {"messages": "none"}, CHATS[1]], ends=3)
    export = ("export", rows, "--as", stack, "-o", tmp_path / file.split("/")[0])
    code, out, err = reflogp(*export)
    assert code == 3 and f"2 rows written for {stack}" in out and "left out 1 of 3 rows" in err
    assert len(pq.read_table(tmp_path / file)) == 2
    summary = last_object(reflogp(*export, "--json")[1])
    assert (summary["rows"], summary["written"], summary["missing"]) == (3, 2, 1)


@pytest.mark.parametrize(
    ("rows", "options", "why"),
    [
        (
            [{"prompt_ids": [60, 61], "chosen_ids": [7, 30], "rejected_ids": [41]}],
            (),
            "has no whole sequences with most probable tokens",
        ),
        ([{"prompt_ids": [60, 61, 62], "completion_ids": [7, 30]}], (), "row 0 has a prompt without values"),
        (CHATS, ("--max-length", 6), "joined with max_length 6"),
    ],
)
def test_other_rows_are_refused(rows, options, why, joined, reflogp, tmp_path):
    code, _, err = reflogp("export", joined(rows, *options), "--as", "distillkit", "-o", tmp_path / "kd")
    assert code == 2 and why in " ".join(err.split()) and not (tmp_path / "kd").exists()
