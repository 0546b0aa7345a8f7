"""Datasets that hold more than text, and ones that TRL's length filter empties."""

import numpy as np
import pytest
from datasets import Dataset, IterableDataset

from reflogp.store import Store, UsageError, join_logps
from reflogp.trainer import join_reference_logps

LONG = {"prompt": "a b c d e f " * 20, "chosen": "x", "rejected": "y"}
IMAGE = {"type": "image", "image": "a.png"}


def conversation(content) -> dict:
    sides = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    return {"prompt": [{"role": "user", "content": content}], **sides}


def with_media() -> dict[str, list[dict]]:
    text = [{"type": "text", "text": "Look", "image": None}]
    return {
        "image": [{**LONG, "image": "a.png"}],
        "images": [{**LONG, "images": ["a.png"]}],
        "videos": [{**LONG, "videos": []}, {**LONG, "videos": ["a.mp4"]}],
        "content": [conversation(text), conversation([{"type": "image", "text": None, "image": "a.png"}])],
    }


@pytest.mark.parametrize("kind", with_media())
@pytest.mark.parametrize("which", ["train_dataset", "eval_dataset"])
def test_a_trainer_refuses_rows_with_media(kind, which, cached_trainer):
    with pytest.raises(UsageError, match=f"of the {which.split('_')[0]} dataset contains more than text"):
        cached_trainer({which: Dataset.from_list(with_media()[kind])})


@pytest.mark.parametrize("kind", ["image", "content"])
def test_a_stream_of_rows_with_media_is_refused_when_they_come(kind, cached_trainer):
    rows = with_media()[kind][-1:]
    with pytest.raises(UsageError, match="contains more than text"):
        trainer = cached_trainer({"train_dataset": IterableDataset.from_generator(lambda: iter(rows))})
        list(trainer.train_dataset)


def test_kto_refuses_them_too(cached_kto_trainer):
    rows = [{"prompt": "a", "completion": "b", "label": True, "image": "a.png"}] * 4
    with pytest.raises(UsageError, match="row 0 of the train dataset"):
        cached_kto_trainer({"train_dataset": Dataset.from_list(rows)})


def test_an_image_column_without_images_is_named(cached_trainer, dataset):
    with pytest.raises(UsageError, match="remove the column"):
        cached_trainer({"train_dataset": dataset.add_column("images", [[]] * len(dataset))})
    other = dataset.add_column("audio", [None] * len(dataset))
    assert "ref_chosen_logps" in cached_trainer({"train_dataset": other}).train_dataset.column_names


def test_joining_refuses_what_a_processor_made_of_images(source):
    row = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3], "pixel_values": [[0.5]]}
    for rows in (Dataset.from_list([row]), IterableDataset.from_generator(lambda: iter([row]))):
        with pytest.raises(UsageError, match="pixel_values"):
            list(join_reference_logps(rows, source))


def test_a_join_of_no_rows(source):
    empty = Dataset.from_dict({"prompt_ids": [], "chosen_ids": [], "rejected_ids": []})
    joined = join_reference_logps(empty, source)
    assert len(joined) == 0 and {"ref_chosen_logps", "ref_rejected_logps"} <= set(joined.column_names)


def test_a_lookup_of_no_rows(store, source):
    import pyarrow as pa

    nothing = pa.array([], pa.list_(pa.int64()))
    snapshot = Store(store).table(source.reference_id).snapshot()
    for names in (("chosen_ids", "rejected_ids"), ("completion_ids",), ("completion_ids", "KL_completion_ids")):
        table = pa.table(dict.fromkeys(("prompt_ids", *names), nothing))
        for options in ({}, {"max_length": 4}, {"max_length": 4, "truncation_mode": "keep_end"}):
            joined = join_logps(table, snapshot, **options)
            assert len(joined.logps) == len(names) and all(len(values) == 0 for values in joined.logps.values())
            assert len(joined.missing) == len(joined.unusable) == len(joined.dropped) == 0


def test_a_dataset_that_the_length_filter_empties(cached_trainer, trl_trainer, dataset):
    """TRL builds the trainer; only training on it fails, in torch, and evaluating on it gives no loss."""
    emptied = Dataset.from_list([LONG] * 6)
    outcomes = []
    for make, more in ((cached_trainer, {}), (trl_trainer, {"precompute_ref_log_probs": False})):
        trainer = make({"train_dataset": emptied}, max_length=4, **more)
        assert len(trainer.train_dataset) == 0
        with pytest.raises(ValueError, match="num_samples") as caught:
            trainer.train()
        outcomes.append(str(caught.value))
    assert outcomes[0] == outcomes[1]


def test_evaluation_data_that_the_length_filter_empties(cached_trainer, dataset):
    trainer = cached_trainer({"eval_dataset": Dataset.from_list([conversation("a b c d e f " * 200)] * 3)}, max_length=220)
    assert len(trainer.eval_dataset) == 0 and len(trainer.train_dataset)
    assert "eval_loss" not in trainer.evaluate()
    assert np.isfinite(trainer.train().training_loss)


def test_kto_on_a_dataset_that_the_length_filter_empties(cached_kto_trainer):
    trainer = cached_kto_trainer({"train_dataset": Dataset.from_list([LONG] * 6)}, max_length=4)
    assert len(trainer.train_dataset) == 0 and trainer.train().global_step == 0
