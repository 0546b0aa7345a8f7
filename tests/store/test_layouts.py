"""What a folder's weights are is what `from_pretrained` would load: nine layouts, against transformers' own resolution."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import _get_resolved_checkpoint_files

from reflogp.store import CheckpointError, ReflogpError, checkpoint, describe_reference, read_checkpoint


@pytest.fixture
def model(reference_folder):
    return AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def single(model, folder):
    model.save_pretrained(folder)


def sharded(model, folder):
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


def single_over_sharded(model, folder):
    """save_pretrained deletes the shards and leaves the index."""
    sharded(model, folder)
    index = (folder / "model.safetensors.index.json").read_bytes()
    single(model, folder)
    (folder / "model.safetensors.index.json").write_bytes(index)


def both(model, folder):
    single(model, folder.with_name("single"))
    sharded(model, folder)
    shutil.copy(folder.with_name("single") / "model.safetensors", folder)


def another_variant_beside(model, folder):
    single(model, folder)
    model.save_pretrained(folder, variant="fp16")


def named_in_the_config(model, folder):
    single(model, folder)
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    edit(folder / "config.json", transformers_weights="other.safetensors")


def adapter_beside(model, folder):
    single(model, folder)
    adapted(model, folder)


def adapted(model, folder):
    settings = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model, settings).save_pretrained(folder)


def only_a_variant(model, folder):
    model.save_pretrained(folder, variant="fp16")


def pickled(model, folder):
    single(model, folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


LAYOUTS = [
    single,
    sharded,
    single_over_sharded,
    both,
    another_variant_beside,
    named_in_the_config,
    adapter_beside,
    only_a_variant,
    pickled,
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_the_same_files_as_transformers(model, tmp_path, layout):
    folder = tmp_path / "model"
    layout(model, folder)
    named = getattr(AutoConfig.from_pretrained(folder), "transformers_weights", None)
    try:
        theirs, _ = _get_resolved_checkpoint_files(str(folder), None, None, None, None, False, named)
    except OSError:
        theirs = []
    try:
        ours = read_checkpoint(folder).weight_files
    except CheckpointError:
        ours = ()
    if layout is pickled:
        assert theirs and not ours, "the only layout that is refused though transformers loads it"
        return
    assert sorted(map(str, ours)) == sorted(theirs)


def test_an_adapter_in_the_models_folder_is_applied_as_transformers_does(model, tmp_path, reference_folder):
    from reflogp.scoring.torch_engine.load import load_model

    folder = tmp_path / "model"
    adapter_beside(model, folder)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.adapter is not None and checkpoint.folder == checkpoint.adapter.folder == folder
    assert describe_reference(str(folder), "float32").reference_id != describe_reference(str(reference_folder)).reference_id
    ids = torch.arange(3, 20)[None]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    ours = load_model(str(folder), "float32", "cpu").model(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_an_adapter_without_a_base_model_is_one_sentence(model, tmp_path):
    adapted(model, tmp_path / "adapter")
    for base in ("", ".", None):
        edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=base)
        with pytest.raises(CheckpointError, match=r"adapter_config\.json names no base model"):
            read_checkpoint(tmp_path / "adapter")


CODE = "class A: ...\nclass B: ...\n"


def with_code(model, folder: Path, code: str, files: dict[str, str]) -> str:
    single(model, folder)
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": code})
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return describe_reference(str(folder), "float32").reference_id


def test_modeling_code_belongs_to_the_id_wherever_it_lies(model, tmp_path, monkeypatch):
    """Another class of the same file, a changed file in a subfolder, and code in another repository."""
    other = tmp_path / "repository"
    other.mkdir()
    (other / "modeling.py").write_text(CODE)
    original = checkpoint.resolve_model
    repositories = {"team/code": other, "team/fork": other}
    monkeypatch.setattr(
        checkpoint, "resolve_model", lambda name, *more, **others: repositories.get(name) or original(name, *more, **others)
    )
    here = {"modeling.py": CODE, "parts/layers.py": "WIDTH = 1\n"}
    cases = [("modeling.A", here), ("modeling.B", here), ("modeling.A", {**here, "parts/layers.py": "WIDTH = 2\n"})]
    cases += [("team/fork--modeling.A", {}), ("team/code--modeling.A", {})]
    ids = [with_code(model, tmp_path / str(number), *case) for number, case in enumerate(cases)]
    (other / "modeling.py").write_text(CODE + "# changed\n")
    ids.append(describe_reference(str(tmp_path / "4"), "float32").reference_id)
    assert len(set(ids)) == 6
    assert with_code(model, tmp_path / "again", "modeling.A", here) == ids[0]


def test_code_that_cannot_be_found_is_an_error(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ReflogpError, match="nobody/nothing"):
        with_code(model, tmp_path / "model", "nobody/nothing--modeling.A", {})
