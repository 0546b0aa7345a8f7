"""DPO on pairs with images, without a reference model: score the pairs once, then train on the stored values.

    python examples/vision_dpo.py

The example draws its own images, and each prompt asks for the color of a shape. To use your own data and model:

    python examples/vision_dpo.py --model ./vision-model --data pairs.jsonl --steps 100
"""

from pathlib import Path

from common import ON_CPU, parsed, parser_of, reflogp, show
from datasets import Image, List, load_dataset
from transformers import AutoModelForImageTextToText, AutoProcessor, PrinterCallback
from trl import DPOConfig
from vision import build_vision_model, draw_pairs

from reflogp.trainer import CachedDPOTrainer


def main() -> None:
    parser = parser_of(__doc__, rows=32, model="a LLaVA with 1M parameters", folder="vision-model")
    parser.add_argument(
        "--data",
        type=Path,
        help="JSON Lines with prompt, chosen, rejected and images (paths relative to the file); all lines are used; "
        "default: OUT/images.jsonl, with --rows pairs that the example draws",
    )
    options = parsed(parser)
    data = options.data or options.out / "images.jsonl"
    if options.data is None:
        draw_pairs(data, options.rows)
    if options.builds_model and not (Path(options.model) / "model.safetensors").is_file():
        print(f"Building a small model in {options.model}", flush=True)
        build_vision_model(Path(options.model))

    reflogp("score", options.model, str(data), "--store", options.store, "--dtype", "float32")

    # `reflogp score` resolves paths relative to the dataset file, but `datasets` resolves them relative to the current folder.
    pairs = load_dataset("json", data_files=str(data), split="train")
    pairs = pairs.map(lambda pair: {"images": [str(data.parent.absolute() / path) for path in pair["images"]]})
    trainer = CachedDPOTrainer(
        AutoModelForImageTextToText.from_pretrained(options.model, dtype="float32"),
        args=DPOConfig(output_dir=str(options.out / "vision_dpo"), max_steps=options.steps, beta=0.1, **ON_CPU),
        train_dataset=pairs.cast_column("images", List(Image())),
        processing_class=AutoProcessor.from_pretrained(options.model),
        reference=options.store,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    show(trainer)


if __name__ == "__main__":
    main()
