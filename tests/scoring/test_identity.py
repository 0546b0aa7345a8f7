"""Whatever is read is what is named: files that change at any moment give the right value or a clear error."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from reflogp.scoring.engines import EngineChoice
from reflogp.scoring.torch_engine import Sequence, load
from reflogp.store import ReflogpError, describe_reference
from tests.conftest import plain_token_logps

SEQUENCE = Sequence([5, 6, 7, 8, 9], [10, 11, 12, 13])
CODE = """
from transformers import LlamaForCausalLM
class Scaled(LlamaForCausalLM):
    def forward(self, *arguments, **options):
        out = super().forward(*arguments, **options)
        out.logits = out.logits * SCALE
        return out
SCALE = 1.0
"""


# Kinds of change. Each leaves `content` at the path of `file`, with the old file's size and modification time where it can.


def _dressed_as(file: Path, old: Path) -> Path:
    os.utime(file, ns=(old.stat().st_atime_ns, old.stat().st_mtime_ns))
    return file


def renamed_over(file: Path, content: bytes) -> None:
    other = file.with_name(".new")
    other.write_bytes(content)
    _dressed_as(other, file).rename(file)


def in_place(file: Path, content: bytes) -> None:
    about = file.stat()
    with file.open("r+b") as opened:
        opened.write(content)
        opened.truncate()
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


def link_swapped(file: Path, content: bytes) -> None:
    """As a deployment does: a link that led to the old file leads to the new one."""
    new = file.resolve().with_name("new-" + file.name)
    new.write_bytes(content)
    link = file.with_name(".link")
    link.symlink_to(_dressed_as(new, file))
    link.rename(file)


KINDS = [renamed_over, in_place, link_swapped]


def into_a_blob(file: Path) -> None:
    """Make the file a link, as the Hub's client does."""
    blob = file.parent.parent / "blobs" / file.name
    blob.parent.mkdir()
    file.rename(blob)
    file.symlink_to(blob)


class At:
    """Changes a file at one moment."""

    def __init__(self, moment: str, change) -> None:
        self.left, self._change = [moment], change

    def __call__(self, now: str) -> None:
        if self.left == [now]:
            self.left.clear()
            self._change()


# Files that decide what a model computes: how to make a checkpoint that has one, and the file's other content.


def _other_weights(file: Path) -> bytes:
    tensors = {name: tensor.flip(0).contiguous() for name, tensor in load_file(file).items()}
    other = file.with_name(".other.safetensors")
    save_file(tensors, other, metadata={"format": "pt"})
    content = other.read_bytes()
    other.unlink()
    assert len(content) == file.stat().st_size
    return content


def _plain(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def _sharded(source: Path, folder: Path) -> Path:
    _plain(source, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, some in halves.items():
        save_file({name: tensors[name] for name in some}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, some in halves.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _with_code(source: Path, folder: Path) -> Path:
    _plain(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "modeling_scaled.Scaled"}}))
    (folder / "modeling_scaled.py").write_text(CODE)
    return folder


def _adapter(source: Path, folder: Path) -> Path:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(folder)
    return folder


def _edited(old: str, new: str):
    def edit(file: Path) -> bytes:
        text = file.read_text()
        assert old in text and len(old) == len(new)
        return text.replace(old, new).encode()

    return edit


FILES = {
    "model.safetensors": (_plain, _other_weights),
    "model-2.safetensors": (_sharded, _other_weights),
    "config.json": (_plain, _edited('"rms_norm_eps": 1e-06', '"rms_norm_eps": 5e-01')),
    "modeling_scaled.py": (_with_code, _edited("SCALE = 1.0", "SCALE = 0.5")),
    "adapter_model.safetensors": (_adapter, _other_weights),
    "adapter_config.json": (_adapter, _edited('"lora_alpha": 16', '"lora_alpha": 99')),
}
MOMENTS = ["before the load", "between hash and load", "while it is loaded", "after the load"]


def plain_values(folder: Path) -> list[float]:
    """Values of SEQUENCE by transformers and peft alone."""
    if (folder / "adapter_config.json").is_file():
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)
    return plain_token_logps(model.eval(), SEQUENCE.prompt_ids, SEQUENCE.completion_ids)


@pytest.fixture(scope="module")
def checkpoints(reference_folder, tmp_path_factory):
    """name -> (folder as it was, values as it was, the file's other content); the other content gives other values."""
    made = {}
    for name, (build, other_content) in FILES.items():
        folder = build(reference_folder, tmp_path_factory.mktemp("checkpoint") / "original")
        changed = Path(shutil.copytree(folder, folder.with_name("changed")))
        content = other_content(folder / name)
        (changed / name).write_bytes(content)
        values = plain_values(folder)
        assert np.abs(np.subtract(values, plain_values(changed))).max() > 0.01, name
        made[name] = folder, values, content
    return made


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_a_model_gives_the_values_of_its_id_or_an_error(checkpoints, name, kind, moment, tmp_path, monkeypatch):
    original, expected, content = checkpoints[name]
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    if kind is link_swapped:
        into_a_blob(folder / name)
    at = At(moment, lambda: kind(folder / name, content))
    model_class = load._model_class

    def with_moments(*arguments):
        at("between hash and load")
        found, parameters = model_class(*arguments)

        class Loader:
            @staticmethod
            def from_pretrained(*args, **options):
                loaded = found.from_pretrained(*args, **options)
                at("while it is loaded")
                return loaded

        return Loader, parameters

    monkeypatch.setattr(load, "_model_class", with_moments)
    reference = describe_reference(str(folder), "float32")
    at("before the load")
    try:
        engine = EngineChoice(device="cpu", trust_remote_code=True).make(str(folder), reference)
    except ReflogpError as error:
        assert moment != "after the load" and not at.left
        assert str(folder) in str(error) and "run again" in str(error)
        return
    at("after the load")
    assert not at.left and moment != "before the load"
    [values] = engine.score([SEQUENCE])
    np.testing.assert_allclose(values, expected, atol=2e-4)
