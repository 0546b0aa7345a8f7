"""Ordinary training runs: TRL's own arguments and callbacks, combined at random so that pairs of choices meet.

A run is one choice on each of the axes below. TRL's trainer with its own reference model makes it first; what it completes,
ours has to complete with the same losses. Used by test_ordinary_runs.py, in its process and in two that train together.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from reflogp.trainer import CachedDPOTrainer, CachedKTOTrainer, ReferenceSource
from tests.trainer_ext.on_cpu import ON_CPU

TRAIN_ROWS, EVAL_ROWS = 14, 4
STEPS = 3
#: max_length that cuts some rows, for runs that keep a sequence's end; their values are scored apart.
KEEP_END = 20

#: Axis -> choice -> arguments of the config. A name that begins with "_" is something else, done by `Run`.
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "evaluation": {
        "none": {},
        "steps": {"eval_strategy": "steps", "eval_steps": 1},
        "epoch": {"eval_strategy": "epoch"},
        "on start": {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2},
        "delayed": {"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 2},
        "two sets": {"eval_strategy": "steps", "eval_steps": 2, "_two_sets": True},
        "in a callback": {"_callback": "evaluate"},
    },
    "saving": {
        "no": {},
        "steps": {"save_strategy": "steps", "save_steps": 2},
        "fraction": {"save_strategy": "steps", "save_steps": 0.5, "save_total_limit": 1},
        "epoch": {"save_strategy": "epoch"},
        "best": {"save_strategy": "best", "metric_for_best_model": "eval_loss", "_needs": "eval_strategy"},
        "weights only": {"save_strategy": "steps", "save_steps": 1, "save_only_model": True},
        "best at end": {
            "save_strategy": "steps",
            "save_steps": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "_needs": "eval_steps=1",
        },
    },
    "logging": {
        "each step": {},
        "first step": {"logging_first_step": True, "logging_steps": 2},
        "fraction": {"logging_steps": 0.5},
        "epoch": {"logging_strategy": "epoch"},
        "no filter": {"logging_nan_inf_filter": False},
        "never": {"logging_strategy": "no"},
    },
    "begin": {
        "once": {},
        "train twice": {"_begin": "twice"},
        "resumed": {"_begin": "resumed", "save_strategy": "steps", "save_steps": 1, "_without": "saving"},
        "resumed by the same trainer": {"_begin": "same", "save_strategy": "steps", "save_steps": 1, "_without": "saving"},
        "resumed without skipping": {
            "_begin": "resumed",
            "ignore_data_skip": True,
            "save_strategy": "steps",
            "save_steps": 1,
            "_without": "saving",
        },
        "trained elsewhere": {"_begin": "changed"},
    },
    "adapter": {
        "none": {},
        "also none": {},
        "LoRA": {"_peft": "lora"},
        "rsLoRA": {"_peft": "rslora"},
        "modules_to_save": {"_peft": "modules_to_save"},
        "DoRA": {"_peft": "dora"},
        "IA3": {"_peft": "ia3"},
        "prompt": {"_peft": "prompt"},
        "PeftModel": {"_peft": "model"},
        "two adapters": {"_peft": "two"},
    },
    "memory": {
        "plain": {"gradient_checkpointing": False},
        "checkpointing": {"gradient_checkpointing": True},
        "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "compiled": {"gradient_checkpointing": False, "torch_compile": True, "torch_compile_backend": "eager"},
    },
    "length": {
        "steps": {"max_steps": STEPS},
        "accumulating": {"max_steps": STEPS, "gradient_accumulation_steps": 2},
        "an epoch": {"num_train_epochs": 1, "max_steps": -1, "per_device_train_batch_size": 5},
        "epochs": {"num_train_epochs": 1.5, "max_steps": -1, "per_device_train_batch_size": 6},
        "accumulating epochs": {
            "num_train_epochs": 2,
            "max_steps": -1,
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 3,
        },
    },
    "loader": {
        "default": {},
        "drop_last": {"dataloader_drop_last": True},
        "worker": {"dataloader_num_workers": 1},
        "by length": {"train_sampling_strategy": "group_by_length", "remove_unused_columns": False, "_tokens": True},
        "sequential": {"train_sampling_strategy": "sequential"},
        "pad_to_multiple_of": {"pad_to_multiple_of": 8, "dataloader_pin_memory": False},
        "padding_free": {"padding_free": True},
        "data_seed": {"data_seed": 3, "eval_accumulation_steps": 1},
    },
    "truncation": {
        "default": {},
        "none": {"max_length": None},
        "cut": {"max_length": 24},
        "keep_end": {"max_length": KEEP_END, "truncation_mode": "keep_end"},
    },
    "optimizer": {
        "adamw": {},
        "sgd": {"optim": "sgd", "learning_rate": 1e-2, "lr_scheduler_type": "constant"},
        "adafactor": {"optim": "adafactor", "weight_decay": 0.01},
        "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 1, "max_grad_norm": 0.5},
        "average": {"neftune_noise_alpha": 1.0, "torch_empty_cache_steps": 1},
    },
    "loss": {
        "sigmoid": {},
        "smoothed": {"label_smoothing": 0.1, "beta": 0.3},
        "hinge": {"loss_type": ["hinge"]},
        "ipo": {"loss_type": ["ipo"], "beta": 0.5},
        "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
        "several": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
        "ld_alpha": {"ld_alpha": 0.4},
        "weighted": {"use_weighting": True},
        "apo_zero": {"loss_type": ["apo_zero"]},
        "divergence": {"f_divergence_type": "js_divergence"},
    },
    "callback": {
        "none": {},
        "all flags": {"_callback": "flags"},
        "stops": {"_callback": "stop"},
        "ends epochs": {"_callback": "epoch"},
        "logs": {"_callback": "log"},
        "quiet": {"_callback": "quiet"},
        "early stopping": {"_callback": "early", "metric_for_best_model": "eval_loss", "_needs": "eval_strategy"},
    },
    "reference": {
        "beside the policy": {"precompute_ref_log_probs": False},
        "precomputed": {"precompute_ref_log_probs": True, "_needs": "full"},
        "dropout kept": {"disable_dropout": False},
        "speed": {"include_num_input_tokens_seen": True, "skip_memory_metrics": False},
    },
    "after": {
        "nothing": {},
        "evaluate": {"_after": "own"},
        "evaluate new rows": {"_after": "new"},
        "evaluate two new sets": {"_after": "two"},
    },
}
#: KTO has these axes in other ways, or not at all.
NOT_OF_KTO = {"loss", "truncation", "loader"}

Choices = dict[str, str]


def short_rows(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As many pairs as a run needs, of few words each, and of different lengths."""

    def cut(messages: list[dict[str, str]], words: int) -> list[dict[str, str]]:
        return [{**message, "content": " ".join(message["content"].split()[:words])} for message in messages]

    rows = []
    for n, row in enumerate(pairs[: TRAIN_ROWS + 2 * EVAL_ROWS]):
        words = {"prompt": 4 + n % 3, "chosen": 3 + n % 5, "rejected": 6 - n % 4}
        rows.append({name: cut(row[name], count) for name, count in words.items()})
    return rows


def combinations(count: int, seed: int, axes: tuple[str, ...] = tuple(AXES)) -> list[Choices]:
    """Draw combinations at random, each the one of some candidates in which most pairs of choices meet for the first time."""
    generator, seen = random.Random(seed), set[Any]()
    found: list[Choices] = []
    while len(found) < count:
        candidates = [drawn for drawn in (_drawn(generator, axes) for _ in range(60)) if is_possible(drawn)]
        best = max(candidates, key=lambda drawn: len(set(_pairs(drawn)) - seen))
        seen.update(_pairs(best))
        found.append(best)
    return found


def pairs_met(runs: list[Choices]) -> int:
    """Pairs of choices of two axes that meet in some run."""
    return len({pair for choices in runs for pair in _pairs(choices)})


def is_possible(choices: Choices) -> bool:
    """Whether TRL takes these arguments together."""
    args = settings(choices)
    given = [choice for axis in choices for choice in [AXES[axis][choices[axis]]]]
    needs = {choice["_needs"] for choice in given if "_needs" in choice}
    if "eval_strategy" in needs and args.get("eval_strategy", "no") == "no":
        return False
    if "eval_strategy" in needs and args.get("_two_sets"):
        return False  # there is no eval_loss then, but one of each set
    if "eval_steps=1" in needs and (args.get("eval_steps") != 1 or args.get("eval_delay") or args.get("_two_sets")):
        return False
    if "full" in needs and ("_peft" in args or args.get("_after") in ("new", "two")):
        return False  # TRL cannot compute a trained policy's reference then
    if any("_without" in choice for choice in given) and choices["saving"] != "no":
        return False
    callbacks = [choice["_callback"] for choice in given if "_callback" in choice]
    if len(callbacks) > 1 or (args.get("_begin") == "resumed" and "flags" in callbacks and args.get("_peft")):
        return False
    # each new shape is traced again, so a compiled run takes seconds
    if args.get("torch_compile") and ("_peft" in args or "_begin" in args or "_after" in args or args.get("_two_sets")):
        return False
    if args.get("_peft") == "prompt" and args.get("gradient_checkpointing"):
        return False
    # TRL runs an adapter's reference on the training model, whose embeddings have NEFTune's noise then
    return not (args.get("neftune_noise_alpha") and "_peft" in args)


def settings(choices: Choices) -> dict[str, Any]:
    """All choices' arguments in one."""
    merged: dict[str, Any] = {}
    for axis, choice in choices.items():
        merged |= AXES[axis][choice]
    return merged


def _drawn(generator: random.Random, axes: tuple[str, ...]) -> Choices:
    return {axis: generator.choice(list(AXES[axis])) if axis in axes else next(iter(AXES[axis])) for axis in AXES}


def _pairs(choices: Choices) -> Iterator[Any]:
    return itertools.combinations(sorted(choices.items()), 2)


@dataclass
class Seen:
    """What came of a run.

    Attributes:
        losses: of each micro-batch, as training_step gives it, and of each evaluation.
        events: what was logged at which step, and the checkpoints that were written.
    """

    losses: list[float] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    verdict: str = ""
    findings: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class World:
    """What every run needs.

    Attributes:
        model: folder of the reference model, from which policies start.
        rows: pairs, all of them scored.
        folder: for output.
    """

    model: Path
    tokenizer: Any
    rows: list[dict[str, Any]]
    store: Path
    folder: Path
    kto: bool = False

    def run(self, choices: Choices, cached: bool, name: str) -> Seen:
        """Train and evaluate as the choices say, with TRL's trainer or with ours."""
        return _Run(self, choices, cached, str(self.folder / name / ("ours" if cached else "trl"))).go()


class _Run:
    def __init__(self, world: World, choices: Choices, cached: bool, output: str) -> None:
        self.world, self.cached, self.output = world, cached, output
        self.args = settings(choices)
        self.seen = Seen()

    def go(self) -> Seen:
        begin = self.args.get("_begin", "once")
        if begin == "resumed":
            self._train(self._trainer(stop_at=1))
        trainer = self._trainer(stop_at=1 if begin == "same" else None)
        if begin == "changed":  # a policy that is not the reference any more when training begins
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    if parameter.requires_grad:
                        parameter.data.mul_(1.02)
        self._train(trainer, resume=begin == "resumed")
        if begin == "twice":
            self._train(trainer)
        if begin == "same":
            for callback in [c for c in trainer.callback_handler.callbacks if isinstance(c, Stops)]:
                trainer.remove_callback(callback)
            self._train(trainer, resume=True)
        new = Dataset.from_list(self._rows()[-EVAL_ROWS:])
        match self.args.get("_after"):
            case "own" if trainer.eval_dataset is not None:
                self.seen.losses += _evaluation_losses(trainer.evaluate())
            case "new":
                self.seen.losses += _evaluation_losses(trainer.evaluate(new))
            case "two":
                self.seen.losses += _evaluation_losses(trainer.evaluate({"a": new, "b": new.select(range(2))}))
        audit = getattr(trainer, "audit", None)
        if audit is not None:
            self.seen.verdict, self.seen.findings = audit.as_dict()["verdict"], audit.findings
        self.seen.events += sorted(path.name for path in Path(self.output).glob("checkpoint-*"))
        return self.seen

    def _train(self, trainer: Any, resume: bool = False) -> None:
        set_seed(7)  # loading a reference model draws random numbers
        trainer.train(resume_from_checkpoint=True if resume else None)
        self.seen.events += [f"{sorted(entry)} at {entry['step']}" for entry in trainer.state.log_history]
        for entry in trainer.state.log_history:
            self.seen.losses += _evaluation_losses(entry)

    def _trainer(self, stop_at: int | None) -> Any:
        world, args = self.world, self.args
        config = KTOConfig if world.kto else DPOConfig
        given = {name: value for name, value in args.items() if not name.startswith("_")}
        chosen = {
            **ON_CPU,
            "output_dir": self.output,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 3,
            "gradient_checkpointing": False,
            **given,
        }
        rows = self._rows()
        options: dict[str, Any] = {"train_dataset": Dataset.from_list(rows[:TRAIN_ROWS]), "processing_class": world.tokenizer}
        if args.get("_tokens"):
            chosen["length_column_name"] = "length"
        kept = Dataset.from_list(rows[TRAIN_ROWS : TRAIN_ROWS + EVAL_ROWS])
        if args.get("_two_sets"):
            options["eval_dataset"] = {"first": kept, "second": kept.select(range(2))}
        elif args.get("eval_strategy") or args.get("_callback") in ("evaluate", "flags") or args.get("_after") == "own":
            options["eval_dataset"] = kept
        set_seed(7)
        model = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
        model, options["peft_config"] = _adapted(model, args.get("_peft"), world)
        callbacks = [Stops(stop_at)] if stop_at else []
        callbacks += [CALLBACKS[args["_callback"]]()] if args.get("_callback") else []
        options["callbacks"] = callbacks
        if self.cached:
            source = ReferenceSource(world.store, model=str(world.model), dtype="float32")
            trainer = (CachedKTOTrainer if world.kto else CachedDPOTrainer)(
                model, args=config(**chosen), reference=source, **options
            )
        else:
            trainer = (KTOTrainer if world.kto else DPOTrainer)(model, args=config(**chosen), **options)
        for callback in callbacks:
            callback.trainer = trainer
        step = trainer.training_step

        def training_step(*given: Any, **named: Any) -> torch.Tensor:
            loss: torch.Tensor = step(*given, **named)
            self.seen.losses.append(float(loss))
            return loss

        trainer.training_step = training_step
        return trainer

    def _rows(self) -> list[dict[str, Any]]:
        if self.args.get("_tokens"):
            return [{**row, "length": len(str(row))} for row in self.world.rows]
        if not self.world.kto:
            return self.world.rows
        sides = [(row, side) for row in self.world.rows for side in ("chosen", "rejected")]
        return [{"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"} for row, side in sides]


def _adapted(model: Any, kind: str | None, world: World) -> tuple[Any, Any]:
    """(policy, peft_config) of a choice; the policy gives the reference model's values with its adapter off, or at first."""
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    match kind:
        case "lora":
            return model, LoraConfig(**lora)
        case "rslora":
            return model, LoraConfig(**lora, use_rslora=True, lora_alpha=8)
        case "modules_to_save":
            return model, LoraConfig(**lora, modules_to_save=["norm"])
        case "dora":
            return model, LoraConfig(**lora, use_dora=True)
        case "ia3":
            return model, IA3Config(
                task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
            )
        case "prompt":
            return model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        case "model":
            return get_peft_model(model, LoraConfig(**lora)), None
        case "two":
            adapted = get_peft_model(model, LoraConfig(**lora))
            adapted.add_adapter("other", LoraConfig(**lora))
            return adapted, None
    return model, None


def _evaluation_losses(metrics: dict[str, Any]) -> list[float]:
    return [value for name, value in sorted(metrics.items()) if name.startswith("eval_") and name.endswith("loss")]


class Own(TrainerCallback):
    """A user's callback that knows its trainer."""

    trainer: Any = None


class Stops(Own):
    def __init__(self, step: int = 2) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.step


class EndsEpochs(Own):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == 1


class SetsFlags(Own):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = control.should_evaluate = control.should_save = True


class Evaluates(Own):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.trainer.evaluate()


class Logs(Own):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.trainer.log({"mine": 1.0})


class Quiet(Own):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = False


class StopsEarly(EarlyStoppingCallback):
    trainer: Any = None

    def __init__(self) -> None:
        super().__init__(early_stopping_patience=1, early_stopping_threshold=10.0)


CALLBACKS: dict[str, Any] = {
    "evaluate": Evaluates,
    "flags": SetsFlags,
    "stop": Stops,
    "epoch": EndsEpochs,
    "log": Logs,
    "quiet": Quiet,
    "early": StopsEarly,
}


def apart(ours: list[float], trls: list[float]) -> float:
    """Largest difference of two runs' losses, relative to those above 1; infinite where one run has more of them."""
    if len(ours) != len(trls):
        return float("inf")
    return max((abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, trls, strict=True)), default=0.0)
