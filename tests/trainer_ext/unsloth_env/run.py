"""Training runs with unsloth: `python run.py ORDER JOBS.json RESULTS.json`, in an environment of `make setup-frameworks`.

ORDER says what is imported first:

    first    unsloth, its trainers generated as on a GPU
    between  reflogp.trainer, unsloth as in `first`, then the name CachedDPOTrainer
    late     the name CachedDPOTrainer, then unsloth as in `first`
    cpu      unsloth with its backend for CPUs, which generates no trainers

Without a GPU, unsloth imports its code for GPUs if UNSLOTH_ALLOW_CPU=1, and then leaves TRL alone. So that variable is removed
after the import, and unsloth's own function that the import of its models calls is called again.

A job has these keys:

    kind            "dpo" or "kto"
    policy          "full" or "lora"
    stored          True: the run reads `store`; False: it has a reference model
    folder          of the model
    data, new       files of rows to train on, and to evaluate on (or None)
    args            of the config; None for the default config, and no training
    max_seq_length  which FastLanguageModel sets on a model, or None
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

ORDER, JOBS, RESULTS = sys.argv[1:]


def import_unsloth() -> None:
    if ORDER == "cpu":
        import unsloth

        return
    os.environ["UNSLOTH_ALLOW_CPU"] = "1"
    import unsloth  # noqa: F401

    del os.environ["UNSLOTH_ALLOW_CPU"]
    from unsloth.models import FastLlamaModel
    from unsloth.models.rl import PatchFastRL

    PatchFastRL(FastLanguageModel=FastLlamaModel)


if ORDER == "between":
    import reflogp.trainer
if ORDER == "late":
    from reflogp.trainer import CachedDPOTrainer  # noqa: F401
import_unsloth()

import torch  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset, load_dataset  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: E402

import reflogp.trainer  # noqa: E402

torch.set_num_threads(1)
loaded: list[str] = []
from_pretrained = PreTrainedModel.from_pretrained.__func__


def load(cls: type, *args: Any, **kwargs: Any) -> Any:
    loaded.append(str(args[0] if args else kwargs["pretrained_model_name_or_path"]))
    return from_pretrained(cls, *args, **kwargs)


def policy_of(job: dict[str, Any]) -> Any:
    folder = job["folder"]
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    torch.manual_seed(3)
    if ORDER == "cpu":
        from unsloth import FastLanguageModel

        options = {"max_seq_length": 512, "dtype": torch.float32, "load_in_4bit": False}
        model, _ = FastLanguageModel.from_pretrained(folder, full_finetuning=job["policy"] == "full", **options)
        return (
            model if job["policy"] == "full" else FastLanguageModel.get_peft_model(model, lora_dropout=0, bias="none", **lora)
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if job["policy"] == "lora":
        model = get_peft_model(model, LoraConfig(**lora, task_type="CAUSAL_LM"))
    if job["max_seq_length"] is not None:
        model.max_seq_length = job["max_seq_length"]
    return model


def rows_of(file: str) -> Dataset:
    return load_dataset("json", data_files=file, split="train")


def trainer_of(job: dict[str, Any]) -> Any:
    kind, folder = job["kind"].upper(), job["folder"]
    options = {"train_dataset": rows_of(job["data"]), "processing_class": AutoTokenizer.from_pretrained(folder)}
    if job["args"] is not None:
        options["args"] = getattr(trl, f"{kind}Config")(**job["args"])
    if job["stored"]:
        source = reflogp.trainer.ReferenceSource(job["store"], model=folder, dtype="float32")
        return getattr(reflogp.trainer, f"Cached{kind}Trainer")(policy_of(job), reference=source, **options)
    if job["policy"] == "full":  # with an adapter, the model without it is the reference
        options["ref_model"] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return getattr(trl, f"{kind}Trainer")(policy_of(job), **options)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate; return what was seen."""
    loaded.clear()
    hashed = mock.Mock(return_value="a hash")
    module = sys.modules[getattr(trl, f"{job['kind'].upper()}Trainer").__module__]
    seen: dict[str, Any] = {"module": module.__name__}
    try:
        with (
            mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(load)),
            mock.patch.object(module, "hash_module", hashed, create=True),
        ):
            trainer = trainer_of(job)
        seen |= {"loaded": [*loaded], "hashed": hashed.call_count, "output_dir": trainer.args.output_dir}
        seen["max_length"] = trainer.args.max_length
        seen["trained"] = sum(parameter.requires_grad for parameter in trainer.model.parameters())
        if job["args"] is None:
            return seen
        trainer.train()
        seen["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if job["new"] is not None:
            with mock.patch.object(trainer, "_prepare_dataset", wraps=trainer._prepare_dataset) as prepared:
                seen["losses"].append(trainer.evaluate(rows_of(job["new"]))["eval_loss"])
            seen["prepared"] = prepared.call_count
    except Exception as error:
        seen |= {"error": type(error).__name__, "words": str(error)}
    return seen


if __name__ == "__main__":
    Path(RESULTS).write_text(json.dumps([run(job) for job in json.loads(Path(JOBS).read_text())]))
