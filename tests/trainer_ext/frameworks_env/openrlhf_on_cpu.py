"""Importing this module makes OpenRLHF and DeepSpeed run where there is no GPU. It knows nothing of reflogp.

What differs from a run with GPUs: gloo instead of nccl; torch's Adam instead of DeepSpeed's, which would be compiled; no packed
rows; and `--ds.param_dtype fp32`, which OpenRLHF does not offer, so that two computations of a loss can be compared closely.
What is written for TensorBoard goes to a file of JSON lines. The environment needs DS_ACCELERATOR=cpu.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.utils.tensorboard

for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed"):
    sys.modules[name] = mock.MagicMock(__spec__=ModuleSpec(name, None))  # only for packed rows
torch.cuda.set_device = lambda device: None
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda: None
torch.compile = lambda function: function  # decorates one that DPO does not call, and loads half of torch for it

import datasets  # noqa: E402
import deepspeed.ops  # noqa: E402
import openrlhf.utils.deepspeed.deepspeed as strategies  # noqa: E402
import openrlhf.utils.utils as openrlhf_utils  # noqa: E402

deepspeed.ops.__compatible_ops__ = {}  # else a kernel for shared memory is compiled


class Lines:
    def __init__(self, log_dir: str) -> None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        self._file = (Path(log_dir) / "scalars.jsonl").open("w")
        self.close = self._file.close

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._file.write(json.dumps([name, step, value]) + "\n")


def changed(owner: Any, name: str, change: Any) -> None:
    """Have `change(original, *args, **kwargs)` take the place of a function."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def add_argument(original: Any, parser: Any, *names: str, **options: Any) -> Any:
    more = {"choices": [*options["choices"], "fp32"]} if "--ds.param_dtype" in names else {}
    return original(parser, *names, **{**options, **more})


def train_config(original: Any, *args: Any, optim_config: Any = None, **options: Any) -> Any:
    if optim_config is not None:
        optim_config["params"]["torch_adam"] = True
    return original(*args, optim_config=optim_config, **options)


torch.utils.tensorboard.SummaryWriter = Lines
changed(argparse.ArgumentParser, "add_argument", add_argument)
changed(openrlhf_utils, "convert_to_torch_dtype", lambda original, name: torch.float32 if name == "fp32" else original(name))
changed(strategies, "init_device_mesh", lambda original, device, *args, **options: original("cpu", *args, **options))
changed(strategies, "get_train_ds_config", train_config)
changed(datasets.Dataset, "map", lambda original, self, *args, num_proc, **options: original(self, *args, **options))
