"""Runs a module as `python -m` does, in a process of torchrun: `run NOTES MODULE ARGUMENTS…`.

Tests start these processes in the environments of `make setup-frameworks` (tests/trainer_ext/framework_runs.py). The torchaudio
beside this file is on their path. This file knows nothing of reflogp.

NOTES/rank-N.json says which models were loaded, and what error ended the run.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
loaded: list[str] = []
from_pretrained = AutoModelForCausalLM.from_pretrained


def load(*args: Any, **kwargs: Any) -> Any:
    loaded.append(str(args[0] if args else kwargs["pretrained_model_name_or_path"]))
    if isinstance(kwargs.get("device_map"), dict) and not torch.cuda.is_available():
        kwargs["device_map"] = {"": "cpu"}  # axolotl gives a rank the GPU of its number
    return from_pretrained(*args, **kwargs)


def main(notes_folder: str, module: str, *arguments: str) -> None:
    sys.argv = [module, *arguments]
    seen: dict[str, Any] = {"loaded": loaded}
    try:
        with (
            mock.patch.object(AutoModelForCausalLM, "from_pretrained", load),
            mock.patch("transformers.training_args.is_torch_bf16_gpu_available", return_value=True),  # a CPU has it too
        ):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        assert not ended.code, ended.code
    except Exception as error:
        seen |= {"error": type(error).__name__, "words": str(error)}
        raise
    finally:
        notes = Path(notes_folder)
        notes.mkdir(parents=True, exist_ok=True)
        (notes / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
