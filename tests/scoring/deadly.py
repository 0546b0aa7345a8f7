"""Checkpoints that kill or stop the process that runs them, in reality: by modelling code of their own."""

import json
import shutil
from pathlib import Path

#: A sequence that holds these token ids one after the other kills its worker.
POISON = [5, 6, 7, 8]

_CODE = """
import os, signal, time
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

class DeadlyLlamaModel(LlamaModel):
    def forward(self, input_ids=None, **kwargs):
        flat = input_ids.flatten().tolist()
        if any(flat[i:i + 4] == [5, 6, 7, 8] for i in range(len(flat))):
            if RAISES:
                raise RuntimeError(RAISES)
            if HANGS:
                time.sleep(1e6)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(input_ids=input_ids, **kwargs)

class DeadlyLlamaForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        if ON_LOAD:
            os.kill(os.getpid(), signal.SIGKILL)
        self.model = DeadlyLlamaModel(config)
        self.post_init()
"""


def deadly_model(source: Path, folder: Path, *, on_load: bool = False, raises: str = "", hangs: bool = False) -> Path:
    """A copy of a Llama checkpoint that dies of POISON, or as soon as it is loaded; or it raises an error, or never ends."""
    shutil.copytree(source, folder)
    (folder / "modeling_deadly.py").write_text(f"ON_LOAD, RAISES, HANGS = {on_load}, {raises!r}, {hangs}\n{_CODE}")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_deadly.DeadlyLlamaForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
