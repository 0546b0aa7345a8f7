"""DPO with FSDP2 in two processes, on a CPU with gloo. First score in a single process, then launch the training:

    python examples/fsdp.py --prepare
    python -m torch.distributed.run --nproc_per_node 2 examples/fsdp.py

Each node reads the store once, and all processes train on the same snapshot. If one process finds an error, all processes stop
before the first step. No process holds a reference model or part of one. On GPUs, remove use_cpu, bf16 and shard_on_cpu(), and
score in bfloat16.
"""

import os
import sys
from pathlib import Path
from typing import Any

from common import ON_CPU, options_of, prepare, reflogp, show


def shard_on_cpu() -> None:
    """Make accelerate run FSDP on a CPU. Without this, accelerate accepts the FSDP settings but runs DDP."""
    from accelerate import DistributedType, PartialState

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def train(options: Any) -> None:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import DPOConfig

    from reflogp.trainer import CachedDPOTrainer

    fsdp = {"fsdp": "full_shard", "fsdp_config": {"version": 2}}
    args = DPOConfig(output_dir=str(options.out / "fsdp"), max_steps=options.steps, beta=0.1, **fsdp, **ON_CPU)
    shard_on_cpu()
    trainer = CachedDPOTrainer(
        AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
        args=args,
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reference=options.store,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()

    parameters = list(trainer.model_wrapped.parameters())
    held, whole = sum(p.to_local().numel() for p in parameters), sum(p.numel() for p in parameters)
    if trainer.is_world_process_zero():
        show(trainer)
        print(f"process 0 of {trainer.accelerator.num_processes} holds {held:,} of {whole:,} parameters")
    end_process(trainer)


def end_process(trainer: Any) -> None:
    """Wait for all processes, then exit this process without shutting down the interpreter.

    torch's device meshes keep their process groups, so gloo's threads run until the process ends. A thread that releases a
    tensor while the interpreter shuts down aborts the process (pytorch/pytorch#179291). NCCL has no such threads.
    """
    trainer.accelerator.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    options = options_of(
        __doc__,
        prepare={"action": "store_true", "help": "score the data instead of training; run this before launching training"},
    )
    if options.prepare:
        prepare(options)
        reflogp("score", options.model, options.data, "--store", options.store, "--dtype", "float32")
    elif Path(options.data).is_file():
        train(options)
    else:
        sys.exit(f"{options.data} does not exist: first run `python examples/fsdp.py --prepare` with the same options")


if __name__ == "__main__":
    main()
