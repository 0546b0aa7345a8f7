"""DPO with a LoRA adapter. The reference is the base model, so all runs with the same base model share its values.

    python examples/lora.py

A new adapter does not change the model's outputs, so the gate passes. For every batch, TRL would run the model a
second time with the adapter switched off. Here, a lookup in the store replaces this second pass. To use the trained adapter as
the reference for another round of training, score its folder: reflogp score OUT/lora/adapter pairs.jsonl --store …
"""

from common import ON_CPU, options_of, prepare, reflogp, show
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import DPOConfig

from reflogp.trainer import CachedDPOTrainer


def main() -> None:
    options = options_of(__doc__)
    prepare(options)

    reflogp("score", options.model, options.data, "--store", options.store, "--dtype", "float32")

    trainer = CachedDPOTrainer(
        AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
        args=DPOConfig(output_dir=str(options.out / "lora"), max_steps=options.steps, **{**ON_CPU, "learning_rate": 2e-3}),
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        reference=options.store,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    show(trainer)
    trainable, total = trainer.model.get_nb_trainable_parameters()
    adapter = options.out / "lora" / "adapter"
    trainer.save_model(str(adapter))
    print(f"trained {trainable:,} of {total:,} parameters: {adapter}")


if __name__ == "__main__":
    main()
