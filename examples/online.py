"""Online RL with the reference model in a service: RLOO requests reference log-probs while the policy computes its own.

    python examples/online.py

The example starts `reflogp serve` in a separate process. To use a service that is already running, pass the service's URL,
its name for the reference model, and the same model for the policy:

    python examples/online.py --model ./sft-model --url http://scorer:8311 --reference sft
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import ON_CPU, losses_of, options_of, prepare
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import RLOOConfig

from reflogp.trainer import Reference, RemoteRLOOTrainer


def main() -> None:
    url = {"help": "URL of a running service; if omitted, the example starts a service and stops it at the end"}
    name = {"default": "sft", "help": "the service's name for the reference model (default: %(default)s)"}
    options = options_of(__doc__, url=url, reference=name)
    prepare(options)
    if options.url is not None:
        train(options, options.url)
        return
    with serving(options) as started:
        train(options, started)


def train(options: Any, url: str) -> None:
    pairs = load_dataset("json", data_files=options.data, split="train")
    settings = {name: value for name, value in ON_CPU.items() if name != "max_length"}
    trainer = RemoteRLOOTrainer(
        AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
        reward_funcs=brevity,
        args=RLOOConfig(
            output_dir=str(options.out / "online"),
            max_steps=options.steps,
            num_generations=2,
            max_completion_length=32,
            temperature=0.9,
            beta=0.05,
            **settings,
        ),
        train_dataset=pairs.select_columns("prompt"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reference=Reference(url, model=options.reference),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    where, traffic, gate = trainer.ref_model.where, trainer.ref_model.traffic, trainer.step_zero
    print(
        f"reference {where.reference_id} in {url}: {traffic.sequences} sequences in {traffic.batches} batches\n"
        f"gate: policy and reference differ by at most {gate.max_difference:.2g} nats in each of {gate.sequences} "
        "sequences\n"
        f"losses: {' '.join(f'{loss:.4f}' for loss in losses_of(trainer))}\n"
        f"record: {trainer.args.output_dir}/reflogp.json"
    )


def brevity(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return a reward that needs no model: shorter completions get a higher reward."""
    return [-len(text if isinstance(text, str) else text[0]["content"]) / 100 for text in completions]


@contextmanager
def serving(options: Any) -> Iterator[str]:
    """Run `reflogp serve` on a free port, in float32 like the policy, and yield its URL."""
    settings = Path(options.out) / "serve.toml"
    settings.write_text(
        f'store = "{options.store}"\nstate = "{options.out / "jobs"}"\n'
        f'[references.{options.reference}]\nmodel = "{options.model}"\ndtype = "float32"\n'
    )
    command = [sys.executable, "-c", "from reflogp.cli import main; main()", "serve", "--config", str(settings)]
    log = Path(options.out) / "serve.log"
    with log.open("w") as written:
        process = subprocess.Popen([*command, "--port", "0"], stderr=written)
    try:
        while not (found := re.search(r"running on (http://[0-9.:]+)", log.read_text())):
            if process.poll() is not None:
                sys.exit(f"the service did not start: {log.read_text()}")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
