"""`--tokenizer` and `--chat-template`: what a trainer's own tokenizer makes of the rows is what gets scored."""

import shlex
import shutil

import numpy as np
import pytest
from datasets import Dataset

from reflogp.scoring.data.tokenize import chosen_tokenizer
from reflogp.store import UsageError
from reflogp.trainer import MissingLogpsError, Reference
from tests.trainer_ext.conftest import cached_trainer, config, dataset, policy, trl_trainer  # noqa: F401

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture
def data_file(pairs_file):
    return pairs_file


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def source(reference_folder, tmp_path) -> Reference:
    return Reference(tmp_path / "store", model=str(reference_folder), dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("given", ["template", "tokenizer"])
def test_a_trainer_with_a_template_of_its_own(given, cached_trainer, reference_folder, tokenizer, data_file, tmp_path, reflogp):  # noqa: F811
    template = tmp_path / "own template.jinja"
    template.write_text(TEMPLATE)
    own = chosen_tokenizer(str(reference_folder), None, str(template))
    own.save_pretrained(tmp_path / "tokenizer")
    option = ["--chat-template", template] if given == "template" else ["--tokenizer", tmp_path / "tokenizer"]
    where = ["--store", tmp_path / "store", "--dtype", "float32"]
    score = ["score", reference_folder, data_file, *where]
    assert reflogp(*score)[0] == 0
    with pytest.raises(MissingLogpsError):
        cached_trainer({"processing_class": own})

    status, _, callbacks = reflogp("join", reference_folder, data_file, *where, *option, "-o", tmp_path / "joined.parquet")
    assert status == 3
    command = callbacks.partition("score them: ")[2].replace("\n", " ").strip()
    assert shlex.split(command)[-2:] == [str(word) for word in option]
    assert reflogp(*shlex.split(command)[1:])[0] == 0
    cached_trainer({"processing_class": own}).train()
    assert reflogp("join", reference_folder, data_file, *where, *option, "-o", tmp_path / "joined.parquet")[0] == 0
    joined = Dataset.from_parquet(str(tmp_path / "joined.parquet"))
    trained = cached_trainer({"processing_class": own}, max_length=None).train_dataset
    assert np.abs(np.array(joined["ref_chosen_logps"][:]) - np.array(trained["ref_chosen_logps"][:])).max() <= 1e-3
    assert reflogp("report", reference_folder, data_file, *where, *option, "-o", tmp_path / "report")[0] == 0


def test_join_and_report_name_the_whole_command_where_nothing_was_scored(reference_folder, pairs_file, tmp_path, reflogp):
    own = tmp_path / "own"
    shutil.copytree(reference_folder, own)
    for command, output in (("join", tmp_path / "x.parquet"), ("report", tmp_path / "report")):
        words = [command, reference_folder, pairs_file, "--store", tmp_path / "none", "--dtype", "float32", "-o", output]
        status, _, callbacks = reflogp(*words, "--max-length", "200", "--tokenizer", own, "--trust-remote-code")
        assert status != 0
        flat = " ".join(callbacks.split())
        assert f"reflogp score {reference_folder} {pairs_file} --store" in flat
        assert f"--dtype float32 --max-length 200 --tokenizer {own} --trust-remote-code" in flat


def test_options_that_cannot_be_used(reference_folder, tmp_path):
    (tmp_path / "empty.jinja").write_text(" \n")
    (tmp_path / "bytes.jinja").write_bytes(b"\xff\xfe\x00")
    for file, words in (("none.jinja", "No such file"), ("empty.jinja", "is empty"), ("bytes.jinja", "cannot be read")):
        with pytest.raises(UsageError, match=words):
            chosen_tokenizer(str(reference_folder), None, str(tmp_path / file))
    with pytest.raises(UsageError, match="no such folder"):
        chosen_tokenizer(str(reference_folder), str(tmp_path / "nothing"))
