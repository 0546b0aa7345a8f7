"""One training run, in as many processes as a launcher starts: `launch` below, or `python -m torch.distributed.run`.

Settings come as JSON, what each process saw goes into JSON files. Run by tests and by benchmarks/trainer.py.
"""

import atexit
import json
import os
import resource
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.service.warm_python import WarmPython

ZERO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}}
MODES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"fsdp": "full_shard", "fsdp_config": {"version": 2}},
    "zero2": {"deepspeed": {**ZERO, "zero_optimization": {"stage": 2}}},
    "zero3": {"deepspeed": {**ZERO, "zero_optimization": {"stage": 3}}},
}


def launch(
    settings: dict[str, Any], folder: Path, timeout: float = 240, check: bool = True
) -> tuple[int, list[dict[str, Any]]]:
    """Train in two processes. Returns (exit status, what each process saw). Kills what is not done in time, and fails."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps({**settings, "out": str(folder)}))
    status, output = torchrun(_warm(), [__name__, str(folder / "settings.json")], 2, timeout)
    assert not check or not status, output[-6000:]
    return status, [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]


def losses(ranks: list[dict[str, Any]]) -> np.ndarray:
    return np.array([entry["loss"] for entry in ranks[0]["logs"]])


def torchrun(python: WarmPython, words: list[str], processes: int, timeout: float) -> tuple[int, str]:
    """Run a module in some processes. Returns the exit status, and what they printed."""
    command = [python.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([*command, *words], env=python.environment, timeout=timeout, check=False, **output)
    return done.returncode, done.stdout


@cache
def _warm() -> WarmPython:
    """For all runs of this process, until it ends."""
    modules = ["torch.distributed.fsdp", "deepspeed", "peft", "transformers.models.llama.modeling_llama"]
    modules += ["trl.trainer.dpo_trainer", "trl.trainer.kto_trainer", "trl.experimental.online_dpo"]
    modules += ["reflogp.trainer.cached", "tests.trainer_ext.online_run"]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    warm = WarmPython(modules, environment=environment)
    atexit.register(warm.close)
    return warm


def shard_on_a_cpu(args: Any) -> None:
    """Have accelerate shard by FSDP, of whose settings it makes DDP on a CPU; and DeepSpeed talk through gloo, without a kernel
    for shared memory that it would compile.

    Args:
        args: of a trainer.
    """
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true":
        from accelerate import DistributedType, PartialState

        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if args.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__ = {}


def main(settings: dict[str, Any]) -> dict[str, Any]:
    """Train as the settings say; gives what this process saw. `runs` are several runs of online trainers."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    import reflogp.client.client
    from reflogp.trainer import CachedDPOTrainer, CachedKTOTrainer, Reference
    from tests.trainer_ext import online_run
    from tests.trainer_ext.on_cpu import ON_CPU

    torch.set_num_threads(1)
    if "runs" in settings:
        return {"runs": [online_run.train(online_run.build(run)) for run in settings["runs"]]}
    if "away" in settings:  # seconds after which a service counts as gone; 10 minutes otherwise
        reflogp.client.client._AWAY = settings["away"]
    has_images = bool(settings.get("images"))
    if has_images:
        dataset = Dataset.load_from_disk(settings["data"])
    else:
        rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
        dataset = Dataset.from_list(rows[: settings.get("rows")])
        if settings.get("from_file"):  # TRL's cache file is next to it, where every process finds it
            dataset = Dataset.from_json(settings["data"], cache_dir=str(Path(settings["out"]) / "cache"))
    if settings.get("stream"):
        dataset = dataset.to_iterable_dataset(num_shards=4)
    is_kto = settings.get("trainer") == "kto"
    usual = {**ON_CPU, "output_dir": str(Path(settings["out"]) / "run"), "per_device_train_batch_size": 2, "max_steps": 3}
    mode = MODES[settings.get("mode", "ddp")]  # no arguments where `accelerate launch` says it all
    args = (KTOConfig if is_kto else DPOConfig)(**{**usual, **mode, **settings.get("args", {})})
    shard_on_a_cpu(args)
    model_class = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    policy = model_class.from_pretrained(settings["model"], dtype=settings.get("dtype", "float32"))
    processing_class = (AutoProcessor if has_images else AutoTokenizer).from_pretrained(settings["model"])
    options: dict[str, Any] = {"train_dataset": dataset, "processing_class": processing_class}
    if settings.get("lora"):
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    if settings.get("trl"):
        trainer = (KTOTrainer if is_kto else DPOTrainer)(policy, args=args, **options)
    else:
        source = Reference(settings["source"], **settings.get("reference", {}))
        trainer = (CachedKTOTrainer if is_kto else CachedDPOTrainer)(policy, args=args, reference=source, **options)
    compute_loss, dtypes = trainer.compute_loss, set()

    def seeing(model: Any, inputs: dict[str, Any], *more: Any, **keywords: Any) -> Any:
        dtypes.update(str(values.dtype).removeprefix("torch.") for name, values in inputs.items() if name.startswith("ref_"))
        return compute_loss(model, inputs, *more, **keywords)

    trainer.compute_loss = seeing
    trainer.train()
    step_zero = getattr(trainer, "step_zero", None)
    parameters = list(trainer.model_wrapped.parameters())
    return {
        "dtypes_read_by_the_loss": sorted(dtypes),
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "step_zero": step_zero and {**vars(step_zero), "passed": step_zero.passed},
        "computed": {name: join.computed for name, join in getattr(trainer, "joins", {}).items()},
        "distributed": trainer.accelerator.distributed_type.value,
        "parameters": sum(p.numel() for p in parameters),
        "holds": sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in parameters),
    }


def ranks(settings_file: str) -> None:
    """What each rank calls: trains, and writes a file of what it saw or of its error."""
    given = json.loads(Path(settings_file).read_text())
    place = Path(given["out"]) / f"rank-{os.environ.get('RANK', '0')}.json"
    place.unlink(missing_ok=True)
    try:
        seen = main(given)
    except Exception as error:
        place.write_text(json.dumps({"error": type(error).__name__, "words": str(error)}))
        _wait_for_others(place.parent)  # the launcher ends them when the first one has ended, in the middle of an error's words
        raise
    place.write_text(json.dumps(seen))


def _wait_for_others(folder: Path, seconds: float = 10.0) -> None:
    """Wait until every rank has written what it saw, or for so long."""
    files = [folder / f"rank-{rank}.json" for rank in range(int(os.environ.get("WORLD_SIZE", "1")))]
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(file.exists() for file in files):
        time.sleep(0.05)


if __name__ == "__main__":
    ranks(sys.argv[1])
    # gloo's threads may release a tensor while the interpreter shuts down, which aborts the process (pytorch/pytorch#179291).
    sys.stdout.flush()
    os._exit(0)
