"""Runs a module as `python -m` does, where there is no GPU: `main(NOTES, MODULE, ARGUMENTS…)`, once per process.

Knows what OpenRLHF and DeepSpeed ask of CUDA by name, and nothing of reflogp. Called by the ranks that tests start in the
environment of `make setup-openrlhf` (tests/trainer_ext/test_openrlhf.py); the flash_attn beside it is on their path.

NOTES/rank-N.json says which models were loaded, what error ended the run, and what TensorBoard was told. What differs from a
run with GPUs: gloo instead of nccl; torch's attention, which masks packed rows by their position ids, instead of flash
attention; torch's Adam instead of DeepSpeed's, which would be compiled; and `--ds.param_dtype fp32`, which OpenRLHF does not
offer, so that two computations of a loss can be compared closely.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

os.environ["DS_ACCELERATOR"] = "cpu"
torch.set_num_threads(1)
torch.cuda.set_device = lambda device: None
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda: None
torch.compile = lambda function: function  # decorates one that DPO does not call, and loads half of torch for it

import datasets  # noqa: E402
import deepspeed.ops  # noqa: E402
import openrlhf.utils.deepspeed.deepspeed as strategies  # noqa: E402
import openrlhf.utils.utils as openrlhf_utils  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

deepspeed.ops.__compatible_ops__ = {}  # else a kernel for shared memory is compiled
loaded: list[str] = []
add_argument, from_pretrained = argparse.ArgumentParser.add_argument, AutoModelForCausalLM.from_pretrained
init_device_mesh, train_config = strategies.init_device_mesh, strategies.get_train_ds_config
to_dtype, map_rows = openrlhf_utils.convert_to_torch_dtype, datasets.Dataset.map


def add_argument_with_fp32(self: Any, *names: str, **options: Any) -> Any:
    if "--ds.param_dtype" in names:
        options["choices"] = [*options["choices"], "fp32"]
    return add_argument(self, *names, **options)


def to_dtype_with_fp32(name: str) -> torch.dtype:
    return torch.float32 if name == "fp32" else to_dtype(name)


def map_in_one_process(self: Any, *args: Any, num_proc: int, **options: Any) -> Any:
    """OpenRLHF starts eight processes for each dataset, which costs seconds where there are two cores."""
    return map_rows(self, *args, **options)


def mesh_of_cpus(device: str, *args: Any, **kwargs: Any) -> Any:
    return init_device_mesh("cpu", *args, **kwargs)


def train_config_with_torch_adam(*args: Any, optim_config: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    if optim_config is not None:
        optim_config["params"]["torch_adam"] = True
    return train_config(*args, optim_config=optim_config, **options)


def load(model: str, *args: Any, **kwargs: Any) -> Any:
    loaded.append(model)
    return from_pretrained(model, *args, **{**kwargs, "attn_implementation": "sdpa"})


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """name -> step -> value, of everything that was written for TensorBoard below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run"))
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


def main(notes_folder: str, module: str, *arguments: str) -> None:
    notes = Path(notes_folder)
    sys.argv = [module, *arguments]
    seen: dict[str, Any] = {"loaded": loaded}
    try:
        with (
            mock.patch.object(argparse.ArgumentParser, "add_argument", add_argument_with_fp32),
            mock.patch.object(openrlhf_utils, "convert_to_torch_dtype", to_dtype_with_fp32),
            mock.patch.object(strategies, "init_device_mesh", mesh_of_cpus),
            mock.patch.object(strategies, "get_train_ds_config", train_config_with_torch_adam),
            mock.patch.object(AutoModelForCausalLM, "from_pretrained", load),
            mock.patch.object(datasets.Dataset, "map", map_in_one_process),
        ):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:
        seen |= {"error": type(error).__name__, "words": str(error)}
        raise
    finally:
        if os.environ["RANK"] == "0" and "error" not in seen:
            seen["scalars"] = scalars(Path(arguments[arguments.index("--logger.tensorboard_dir") + 1]))
        notes.mkdir(parents=True, exist_ok=True)
        (notes / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(seen))
