"""Compare the step times of online trainers whose reference model is in a service or, as in TRL, in the trainer's process.

    python benchmarks/online.py [--shape tiny] [--steps 12] [--rounds 3] [--out benchmarks/results]

Each side trains in its own process, in turns, on the shipped prompts: float32, random weights, the same seeds. On a CPU the
trainer and the service get one thread each, so that a reference pass computes at the same speed in both. `step_seconds` is the
median over all steps after the first. `hidden` is the share of the requests' time in which the trainer did something else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import cpu_and_cores, write_results
from shapes import SHAPES
from sides import make_model, make_tokenizer, read_pairs

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from tests.service.serving import running  # noqa: E402

PAIRS = REPOSITORY / "examples" / "data" / "gsm8k_pairs.jsonl"
TRAINERS = ("rloo", "grpo", "online_dpo")


def main() -> None:
    options = parse()
    if options.side:
        print(json.dumps(run(options)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_tokenizer(read_pairs(PAIRS, 1_000)).save_pretrained(folder / "model")
        parameters = make_model(folder / "model", options.shape)
        results: dict[str, Any] = {
            "machine": machine(),
            "model": f"Qwen2 shape, {parameters / 1e6:.1f}M parameters, random weights, float32",
            "batch": f"{options.batch} completions of up to {options.tokens} tokens",
            "steps": options.steps,
        }
        settings = folder / "serve.toml"
        settings.write_text(
            f'store = "{folder / "store"}"\npinned = "ref"\n[references.ref]\nmodel = "{folder / "model"}"\ndtype = "float32"\n'
        )
        os.environ["OMP_NUM_THREADS"] = "1"
        with running("--config", settings) as service:
            service.worker_ready()
            for trainer in TRAINERS:
                sides: dict[str, list[dict[str, Any]]] = {"trl": [], "remote": []}
                for _ in range(options.rounds):
                    for side, seen in sides.items():
                        seen.append(measure(side, trainer, service.url, folder, options))
                results[trainer] = {
                    side: {name: round(statistics.median(one[name] for one in seen), 4) for name in seen[0]}
                    for side, seen in sides.items()
                }
                step = {side: seen["step_seconds"] for side, seen in results[trainer].items()}
                results[trainer]["remote_over_trl"] = round(step["remote"] / step["trl"], 3)
                print(json.dumps({trainer: results[trainer]}), flush=True)
    write_results(options.out, "online", results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--batch", type=int, default=8, help="completions of a micro-batch")
    parser.add_argument("--tokens", type=int, default=64, help="the longest completion")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="benchmarks/results")
    for name in ("side", "trainer", "url", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser.parse_args()


def machine() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_and_cores()


def measure(side: str, trainer: str, url: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--side", side, "--trainer", trainer, "--url", url, "--folder", str(folder)]
    command += ["--batch", str(options.batch), "--tokens", str(options.tokens), "--steps", str(options.steps)]
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seen: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return seen


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train one side. This function runs in its own process."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    from reflogp.trainer import Reference, RemoteGRPOTrainer, RemoteOnlineDPOTrainer, RemoteRLOOTrainer

    generation = {"num_generations": 2, "max_completion_length": options.tokens, "per_device_train_batch_size": options.batch}
    classes: dict[str, Any] = {
        "rloo": (RLOOTrainer, RemoteRLOOTrainer, RLOOConfig, generation),
        "grpo": (GRPOTrainer, RemoteGRPOTrainer, GRPOConfig, {**generation, "num_iterations": 2}),
        "online_dpo": (
            OnlineDPOTrainer,
            RemoteOnlineDPOTrainer,
            OnlineDPOConfig,
            {"max_new_tokens": options.tokens, "per_device_train_batch_size": options.batch // 2},
        ),
    }
    trl_class, remote_class, config_class, own = classes[options.trainer]
    model = str(Path(options.folder) / "model")
    on_cpu = not torch.cuda.is_available()
    args = config_class(
        output_dir=str(Path(options.folder) / "run"), max_steps=options.steps, beta=0.1, learning_rate=1e-5, bf16=False,
        use_cpu=on_cpu, save_strategy="no", report_to=[], disable_tqdm=True, **own,
    )  # fmt: skip
    prompts = [row["prompt"] for row in read_pairs(PAIRS, 200)]
    texts = [prompt if isinstance(prompt, str) else prompt[0]["content"] for prompt in prompts]
    given: dict[str, Any] = {
        "args": args,
        "reward_funcs": lambda completions, **kwargs: [len(set(text)) / 10 for text in completions],
        "train_dataset": Dataset.from_list([{"prompt": text} for text in texts]),
        "processing_class": AutoTokenizer.from_pretrained(model),
    }
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if options.side == "trl":
        trainer = trl_class(policy, **given)
    else:
        trainer = remote_class(policy, reference=Reference(options.url, model="ref"), **given)
    seconds: list[float] = []
    step = trainer.training_step

    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        loss = step(*arguments, **named)
        seconds.append(time.perf_counter() - began)
        return loss

    trainer.training_step = timed
    trainer.train()
    found = {"step_seconds": statistics.median(seconds[1:])}
    if options.side == "remote":
        asked = trainer.ref_model.traffic.as_dict()
        found |= {"hidden": asked["hidden_share"], "request_seconds": asked["seconds"] / asked["batches"]}
        found["waited_seconds"] = asked["waited_seconds"] / asked["batches"]
    return found


if __name__ == "__main__":
    main()
