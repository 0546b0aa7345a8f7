"""Training runs with unsloth: `python run.py ORDER JOBS.json RESULTS.json`, in an environment of `make setup-frameworks`.

ORDER says what is imported first:

    first    unsloth, its trainers generated as on a GPU
    between  reflogp.trainer, unsloth as in `first`, then the name CachedDPOTrainer
    cpu      unsloth with its backend for CPUs, which generates no trainers

A job has the keys of `GIVEN`. Without a `store`, it trains with a reference model.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

GIVEN = {"kind": "DPO", "policy": "full", "dtype": "float32", "model": None, "data": None, "new": None, "reference": None}
GIVEN |= {"args": None, "max_seq_length": None, "store": None}
ORDER, JOBS, RESULTS = sys.argv[1:]

if ORDER == "between":
    import reflogp.trainer
# Without a GPU, unsloth imports its code for GPUs if this variable is set, and then leaves TRL alone. So it is removed
# after the import, and the function that the import of its models calls is called again.
os.environ |= {} if ORDER == "cpu" else {"UNSLOTH_ALLOW_CPU": "1"}
import unsloth  # noqa: E402

if os.environ.pop("UNSLOTH_ALLOW_CPU", None):
    from unsloth.models.rl import PatchFastRL

    PatchFastRL(FastLanguageModel=unsloth.models.FastLlamaModel)

import torch  # noqa: E402
import trl  # noqa: E402
from datasets import load_dataset  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: E402

import reflogp.trainer  # noqa: E402

torch.set_num_threads(1)
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def policy_of(job: dict[str, Any], dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    full = job["policy"] == "full"
    if ORDER == "cpu":
        options = {"max_seq_length": 512, "dtype": dtype, "load_in_4bit": False, "full_finetuning": full}
        model, _ = unsloth.FastLanguageModel.from_pretrained(job["model"], **options)
        return model if full else unsloth.FastLanguageModel.get_peft_model(model, lora_dropout=0, bias="none", **LORA)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    model = model if full else get_peft_model(model, LoraConfig(**LORA, task_type="CAUSAL_LM"))
    if job["max_seq_length"] is not None:  # as FastLanguageModel sets it
        model.max_seq_length = job["max_seq_length"]
    return model


def trainer_of(job: dict[str, Any]) -> Any:
    kind, dtype = job["kind"], getattr(torch, job["dtype"])
    options = {"train_dataset": load_dataset("json", data_files=job["data"], split="train")}
    options["processing_class"] = AutoTokenizer.from_pretrained(job["model"])
    if job["args"] is not None:
        options["args"] = getattr(trl, f"{kind}Config")(**job["args"])
    if job["store"]:
        reference = reflogp.trainer.Reference(job["store"], job["reference"])
        return getattr(reflogp.trainer, f"Cached{kind}Trainer")(policy_of(job, dtype), reference=reference, **options)
    if job["policy"] == "full":  # with an adapter, the model without it is the reference
        options["ref_model"] = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    return getattr(trl, f"{kind}Trainer")(policy_of(job, dtype), **options)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate; return what was seen."""
    seen: dict[str, Any] = {"module": getattr(trl, f"{job['kind']}Trainer").__module__}
    load = mock.Mock(wraps=PreTrainedModel.from_pretrained.__func__)
    try:
        with mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(lambda *args, **kwargs: load(*args, **kwargs))):
            trainer = trainer_of(job)
        seen |= {"loaded": load.call_count, "output_dir": trainer.args.output_dir, "max_length": trainer.args.max_length}
        seen["trained"] = sum(parameter.requires_grad for parameter in trainer.model.parameters())
        if job["args"] is not None:
            trainer.train()
            seen["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if job["args"] is not None and job["new"] is not None:
            rows = load_dataset("json", data_files=job["new"], split="train")
            seen["losses"].append(trainer.evaluate(rows)["eval_loss"])
    except Exception as error:
        seen |= {"error": type(error).__name__, "words": str(error)}
    return seen


if __name__ == "__main__":
    Path(RESULTS).write_text(json.dumps([run({**GIVEN, **job}) for job in json.loads(Path(JOBS).read_text())]))
