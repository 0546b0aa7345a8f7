"""KTO without a reference model. KTO's KL term needs values for sequences that are not in the dataset.

    python examples/kto.py

For the KL term, TRL pairs each prompt with the completion of another row. The pairing depends on the batch size and the order
of the rows. This example therefore scores twice: first the completions in the dataset, then the sequences for which the trainer
finds no values. If values are missing, the trainer raises MissingLogpsError before training starts and writes the sequences, as
prepared by TRL, to output_dir/reflogp-missing.parquet. The example scores this file and constructs the trainer again, which
then finds all values.

With a loss that has no KL term (KTOConfig(loss_type="apo_zero_unpaired")), you need to score only once.
"""

from typing import Any

from common import ON_CPU, options_of, prepare, reflogp, show
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import KTOConfig

from reflogp.trainer import CachedKTOTrainer, MissingLogpsError


def make_trainer(options: Any) -> CachedKTOTrainer:
    return CachedKTOTrainer(
        AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
        args=KTOConfig(output_dir=str(options.out / "kto"), max_steps=options.steps, beta=0.1, **ON_CPU),
        train_dataset=load_dataset("json", data_files=options.data, split="train"),  # TRL splits each pair into two rows
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reference=options.store,
    )


def main() -> None:
    options = options_of(__doc__)
    prepare(options)
    where = ["--store", options.store, "--dtype", "float32"]

    reflogp("score", options.model, options.data, *where, "--format", "kto")
    try:
        trainer = make_trainer(options)
    except MissingLogpsError as missing:
        print(f"MissingLogpsError: {missing}")
        reflogp("score", options.model, str(options.out / "kto" / "reflogp-missing.parquet"), *where)
        trainer = make_trainer(options)

    trainer.remove_callback(PrinterCallback)
    trainer.train()
    show(trainer)


if __name__ == "__main__":
    main()
