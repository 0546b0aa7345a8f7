"""In bfloat16 on pairs with images, errors of stored values beside those of TRL's own collator and forward."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

from reflogp.scoring import TorchEngine
from tests.scoring.test_images import PROCESSORS, engine_sequences
from tests.vision_models import FAMILIES, make, pair, picture

#: Models of each family, and pairs for each: some 17,000 tokens. The ratio of the errors of two equally good computations that
#: round apart is then 1 with a standard error below 0.006.
SEEDS, PAIRS = 3, 100
_WORDS = ["a", "red", "square", "blue", "circle", "picture", "image", "what", "colours", "shapes", "describe", "please"]


def some_pairs(seed: int) -> list[dict]:
    """Of 0 to 3 images, none of which is in two rows."""
    random = np.random.default_rng(seed)

    def text(most: int) -> str:
        return " ".join(random.choice(_WORDS, int(random.integers(3, most))))

    def image():
        width, height = (int(side) for side in random.integers(30, 100, 2))
        return picture(int(random.integers(1 << 30)), (width, height))

    return [pair(text(12), [image() for _ in range([1, 2, 0, 3, 1][n % 5])], text(15), text(15)) for n in range(PAIRS)]


@torch.no_grad()
def values_of_trl(folder, data, dtype, batch: int) -> list[np.ndarray]:
    """Of each side, as DPOTrainer computes those of its reference model."""
    from trl.trainer.utils import add_fused_lm_head  # from TRL 1.13 on

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
    add_fused_lm_head(model)
    collator = DataCollatorForVisionPreference(PROCESSORS[folder])
    found = []
    for start in range(0, len(data), batch):
        inputs = collator([dict(row) for row in data[start : start + batch]])
        completions = inputs.pop("completion_mask")
        labels = inputs["input_ids"].masked_fill(completions == 0, -100)
        logps = model(**inputs, labels=labels, use_cache=False, fused_lm_head=True).log_probs
        rows = [row[mask.bool()].float().numpy() for row, mask in zip(logps, completions[:, 1:], strict=True)]
        found += [row for both in zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True) for row in both]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_errors_in_bfloat16_are_no_larger_than_trls(family, tmp_path):
    ours, trls = [], []
    for seed in range(SEEDS):
        folder, data = tmp_path / str(seed), some_pairs(seed)
        PROCESSORS[folder] = make(family, folder, seed)
        exact = np.concatenate(values_of_trl(folder, data, torch.float32, batch=1))
        in_batches = np.concatenate(values_of_trl(folder, data, torch.bfloat16, batch=4))
        engine = TorchEngine(str(folder), "bfloat16", "cpu")
        scored = np.concatenate(engine.score(engine_sequences(folder, data)))
        assert engine.image_check.path == "packed"
        ours.append(np.abs(scored - exact))
        trls.append(np.abs(in_batches - exact))
    assert np.mean(np.concatenate(ours)) <= np.mean(np.concatenate(trls))
