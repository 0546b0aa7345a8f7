"""One run of an online trainer, TRL's own or with a remote reference: in a test's process, or in each that `launch` starts."""

import json
import os
from pathlib import Path
from typing import Any

#: Tokens that end a completion besides the tokenizer's own, so that random weights make completions of all lengths.
ENDS = list(range(100, 140))
#: Of a completion, where a run's settings do not say.
MOST_NEW_TOKENS = 24


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Spread out, and the same for the same text."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [len(set(text)) / 10 + (sum(map(ord, text)) % 7) / 7 for text in texts]


def build(settings: dict[str, Any]) -> Any:
    """A trainer, by: trainer ("rloo", "grpo", "online_dpo"), trl (its own reference instead of a service's), model, dtype,
    source, reference (its name in the service, or None), prompts, out, args (of TRL's config), more (of a remote trainer),
    deadlines (of each process), lora, evaluate (on so many rows), mode (of distributed_run.MODES)."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    from reflogp import trainer as remote
    from reflogp.trainer import Reference
    from tests.trainer_ext.distributed_run import MODES, shard_on_a_cpu
    from tests.trainer_ext.on_cpu import ON_CPU

    two = {"num_generations": 2, "max_completion_length": MOST_NEW_TOKENS}
    pairs = {"max_new_tokens": MOST_NEW_TOKENS, "max_length": 96, "per_device_train_batch_size": 2}
    remote_class, trl_class, config_class, own = {
        "rloo": (remote.RemoteRLOOTrainer, trl.RLOOTrainer, trl.RLOOConfig, two),
        "grpo": (remote.RemoteGRPOTrainer, trl.GRPOTrainer, trl.GRPOConfig, two),
        "online_dpo": (remote.RemoteOnlineDPOTrainer, OnlineDPOTrainer, OnlineDPOConfig, pairs),
    }[settings["trainer"]]
    usual = {"per_device_train_batch_size": 4, "max_steps": 10, "beta": 0.1, "temperature": 0.9, **own}
    mode = MODES[settings.get("mode", "ddp")]
    args = config_class(str(Path(settings["out"]) / "run"), **{**ON_CPU, **usual, **mode, **settings.get("args", {})})
    shard_on_a_cpu(args)
    policy = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=settings.get("dtype", "float32"))
    policy.generation_config.eos_token_id = [policy.config.eos_token_id, *ENDS]
    options: dict[str, Any] = {
        "args": args,
        "train_dataset": Dataset.from_list([{"prompt": prompt} for prompt in settings["prompts"]]),
        "processing_class": AutoTokenizer.from_pretrained(settings["model"]),
        "reward_funcs": reward,
    }
    if "evaluate" in settings:
        options["eval_dataset"] = options["train_dataset"].select(range(settings["evaluate"]))
    if settings.get("lora"):
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    if settings.get("trl"):
        return trl_class(policy, **options)
    more = dict(settings.get("more", {}))
    if "deadlines" in settings:
        more["reference_deadline"] = settings["deadlines"][int(os.environ["RANK"])]
    return remote_class(policy, reference=Reference(settings["source"], settings.get("reference", "ref")), **options, **more)


def train(trainer: Any) -> dict[str, Any]:
    """Train; gives each micro-batch's loss, the logs, the record in the run's folder, and how the policy is wrapped."""
    losses: list[Any] = []
    step = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        losses.append(step(*args, **kwargs))
        return losses[-1]

    trainer.training_step = training_step
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    record = Path(trainer.args.output_dir) / "reflogp.json"
    return {
        "losses": [float(loss) for loss in losses],
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "record": json.loads(record.read_text()) if record.exists() else None,
        "wrapped": type(trainer.model_wrapped).__name__,
        "distributed": trainer.accelerator.distributed_type.value,
    }
