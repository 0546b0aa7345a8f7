"""DPO without a reference model: score the pairs once, then train on the stored values.

    python examples/dpo.py

A second run scores nothing, because the store already has the values. To use your own data and model:

    python examples/dpo.py --model ./sft-model --data pairs.jsonl --rows 1000 --steps 100
"""

from common import ON_CPU, options_of, prepare, reflogp, show
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import DPOConfig

from reflogp.trainer import CachedDPOTrainer


def main() -> None:
    options = options_of(__doc__)
    prepare(options)

    reflogp("score", options.model, options.data, "--store", options.store, "--dtype", "float32")

    trainer = CachedDPOTrainer(
        AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
        args=DPOConfig(output_dir=str(options.out / "dpo"), max_steps=options.steps, beta=0.1, **ON_CPU),
        train_dataset=load_dataset("json", data_files=options.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reference=options.store,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    show(trainer)


if __name__ == "__main__":
    main()
