"""DPO on pairs with images: TRL's losses without a reference model, wrong images are misses, and what is refused by name."""

import numpy as np
import pytest
import torch
from datasets import Dataset, List
from datasets import Image as ImageFeature
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import DPOConfig, DPOTrainer, KTOConfig
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

from reflogp.scoring import score
from reflogp.store import UsageError
from reflogp.trainer import CachedDPOTrainer, CachedKTOTrainer, MissingLogpsError, Reference
from tests.trainer_ext.conftest import losses
from tests.trainer_ext.distributed_run import launch
from tests.trainer_ext.on_cpu import ON_CPU
from tests.versions import skip_before
from tests.vision_models import LOADABLE, make, pair, picture


def pairs_with_images(count: int) -> Dataset:
    """Of 0 to 3 images of several sizes and modes."""
    counts = [1, 2, 0, 3]
    rows = [
        pair(
            "what is it? " * (n % 3 + 1),
            [picture(10 * n + k, (40 + n, 50 + 7 * k)).convert("L" if n == 5 else "RGB") for k in range(counts[n % 4])],
            chosen="a red square " * (n % 4 + 1),
        )
        for n in range(count)
    ]
    return Dataset.from_list(rows).cast_column("images", List(ImageFeature()))


@pytest.fixture(scope="module")
def dataset():
    return pairs_with_images(12)


@pytest.fixture(scope="module")
def llava(dataset, tmp_path_factory):
    return scored_by("LLaVA", dataset, tmp_path_factory.mktemp("vision"))


def scored_by(family, dataset, folder):
    """(folder of a model, folder of a store that has its values)."""
    make(family, folder / "model")
    summary = score(str(folder / "model"), dataset, folder / "store", dtype="float32", progress=False)
    assert (summary.scored, summary.bad_rows) == (2 * len(dataset), 0)
    return folder / "model", folder / "store"


def trainer(scored, dataset, tmp_path, kind=CachedDPOTrainer, options=None, **changes):
    model, store = scored
    settings = {**ON_CPU, "output_dir": str(tmp_path / kind.__name__), "per_device_train_batch_size": 2, "max_length": None}
    given = {"reference": store} if kind is not DPOTrainer else {}
    given |= {"processing_class": AutoProcessor.from_pretrained(model), **(options or {})}
    policy = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    config = KTOConfig if kind is CachedKTOTrainer else DPOConfig
    return kind(policy, args=config(**{**settings, **changes}), train_dataset=dataset, **given)


@pytest.mark.slow
@pytest.mark.parametrize("family", LOADABLE)
def test_losses_are_those_with_a_reference_model(family, dataset, tmp_path):
    if family == "Idefics 3":
        skip_before("transformers", "5.18", "loads no image processor of Idefics 3 without torchvision")
    scored = scored_by(family, dataset, tmp_path)
    ours = trainer(scored, dataset, tmp_path, max_steps=20, learning_rate=1e-3)
    assert not ours.ref_model and ours.joins["train"].rows == len(dataset)
    ours.train()
    trl = trainer(scored, dataset, tmp_path, DPOTrainer, max_steps=20, learning_rate=1e-3)
    trl.train()
    assert len(losses(ours)) == 20
    np.testing.assert_allclose(losses(ours), losses(trl), rtol=0, atol=1e-5)
    assert ours.step_zero.sequences == 4 and ours.step_zero.max_difference < 1e-3


def test_a_run_on_images(llava, dataset, tmp_path):
    ours = trainer(llava, dataset, tmp_path, max_steps=2, options={"eval_dataset": dataset.select(range(4))})
    ours.train()
    evaluated = ours.evaluate()["eval_loss"]
    assert ours.step_zero.passed and np.isfinite(evaluated)
    assert ours.evaluate(dataset.select(range(4)))["eval_loss"] == pytest.approx(evaluated, abs=1e-6)
    assert ours.train_dataset[0]["images"][0].size == dataset[0]["images"][0].size


def changed(dataset: Dataset, number: int, images: list) -> Dataset:
    rows = [{**row, "images": images} if n == number else row for n, row in enumerate(dataset)]
    return Dataset.from_list(rows).cast_column("images", List(ImageFeature()))


def test_a_changed_pixel_and_swapped_images_are_misses(llava, dataset, tmp_path):
    image = dataset[0]["images"][0].copy()
    image.putpixel((0, 0), tuple(255 - value for value in image.getpixel((0, 0))))
    swapped = dataset[1]["images"][::-1]
    for number, images in ((0, [image]), (1, swapped), (2, [image]), (3, dataset[3]["images"][:2])):
        with pytest.raises(MissingLogpsError, match=rf"1 of 12 rows of train \(rows {number}\)") as caught:
            trainer(llava, changed(dataset, number, images), tmp_path)
        assert " DATA " in caught.value.command, "a file of tokens would lack the images"


def test_rows_that_cannot_be_used_are_named(llava, dataset, tmp_path):
    with pytest.raises(UsageError, match=r"row \d+ of train: max_length=30 would cut off tokens of the row's images"):
        trainer(llava, dataset, tmp_path, max_length=30)
    with pytest.raises(UsageError, match="row 2 of train cannot be used: images is null"):
        trainer(llava, changed(dataset, 2, None), tmp_path)
    rows = [*dataset.select(range(3)), {**dataset[3], "prompt": [{"role": "user", "content": "<image> and its own"}]}]
    with pytest.raises(UsageError, match="row 3 of train"):
        trainer(llava, Dataset.from_list(rows).cast_column("images", List(ImageFeature())), tmp_path)


def test_what_is_refused_with_images(llava, dataset, tmp_path):
    model, store = llava
    kto = dataset.remove_columns(["rejected"]).rename_column("chosen", "completion").add_column("label", [True, False] * 6)
    with pytest.raises(UsageError, match="for KTO, use TRL's own trainer"):
        trainer(llava, kto, tmp_path, CachedKTOTrainer)
    with pytest.raises(UsageError, match="not as a stream"):
        trainer(llava, dataset.to_iterable_dataset(), tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="not supported for vision datasets"):
        trainer(llava, dataset, tmp_path, options={"reference": Reference(store, on_miss="compute")})
    paths = Dataset.from_list([{**pair("?", ["a.png"])}])
    with pytest.raises(UsageError, match=r"cast the column, for example with dataset\.cast_column"):
        trainer(llava, paths, tmp_path)
    text = dataset.remove_columns(["images"])
    with pytest.raises(UsageError, match="the column `images` is missing"):
        trainer(llava, dataset, tmp_path, options={"eval_dataset": text})
    collator = type("Own", (DataCollatorForVisionPreference,), {})(AutoProcessor.from_pretrained(model))
    with pytest.raises(UsageError, match="this run uses the collator Own"):
        trainer(llava, dataset, tmp_path, options={"data_collator": collator})


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "bf16", "allowed"), [("ddp", False, 1e-5), ("zero3", False, 1e-5), ("zero3", True, 0.05)])
def test_two_processes(mode, bf16, allowed, llava, tmp_path):
    model, store = llava
    # Without the rows of text alone, which leave the tower without gradients in TRL.
    pairs_with_images(12).filter(lambda row: len(row["images"]) > 0).save_to_disk(tmp_path / "data")
    settings = {"model": str(model), "source": str(store), "data": str(tmp_path / "data"), "images": True, "mode": mode}
    _, ranks = launch({**settings, "args": {"bf16": bf16}}, tmp_path / "ours")
    _, trl = launch({**settings, "args": {"bf16": bf16}, "trl": True}, tmp_path / "trl")
    for ours, theirs in zip(ranks, trl, strict=True):
        expected = [entry["loss"] for entry in theirs["logs"]]
        assert [entry["loss"] for entry in ours["logs"]] == pytest.approx(expected, abs=allowed)
        assert ours["step_zero"]["passed"] and ours["dtypes_read_by_the_loss"] == ["float32"]
