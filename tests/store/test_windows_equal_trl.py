"""What is looked up is what TRL's collator leaves of a row, for any lengths, max_length, mode and ld_alpha."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.dpo_trainer import DataCollatorForPreference

from reflogp.store import Reference, Store, UsageError, join_logps, sequence_keys
from reflogp.store.schema import shard_table
from reflogp.store.windows import windows

row = st.fixed_dictionaries(
    {
        "prompt_ids": st.lists(st.integers(1, 90), max_size=9),
        "chosen_ids": st.lists(st.integers(1, 90), min_size=1, max_size=9),
        "rejected_ids": st.lists(st.integers(1, 90), min_size=1, max_size=9),
    }
)


def value_of(context: list[int], token: int) -> float:
    """A log-prob that depends on the whole context, as a real model's does."""
    return -((sum((i + 1) * t for i, t in enumerate(context)) * 31 + token * 17) % 997) / 100


def trl_sums(rows, max_length, mode, ld_alpha) -> np.ndarray:
    """(2, n): what TRL's loss sums over these rows if a model gave `value_of` (trl/trainer/dpo_trainer.py 1297-1311)."""
    batch = DataCollatorForPreference(pad_token_id=0, max_length=max_length, truncation_mode=mode)(rows)
    mask = batch["completion_mask"][:, 1:]
    logps = torch.zeros(mask.shape, dtype=torch.float64)
    for i, ids in enumerate(batch["input_ids"].tolist()):
        for t in range(1, len(ids)):
            logps[i, t - 1] = value_of(ids[:t], ids[t]) if mask[i, t - 1] else 0.0
    if ld_alpha is None:
        return logps.sum(1).reshape(2, -1).numpy()
    position, lens = mask.cumsum(1), mask.sum(1)
    shared = torch.minimum(*lens.chunk(2)).repeat(2)[:, None]
    front = (logps * ((position > 0) & (position <= shared))).sum(1)
    tail = (logps * (position > shared)).sum(1)
    return (front + ld_alpha * tail).reshape(2, -1).numpy()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(row, min_size=1, max_size=6),
    max_length=st.none() | st.integers(1, 20),
    mode=st.sampled_from(["keep_start", "keep_end"]),
    ld_alpha=st.none() | st.sampled_from([0.0, 0.3, 1.0]),
)
def test_a_join_equals_trls_sums(rows, max_length, mode, ld_alpha, tmp_path_factory):
    if max_length is not None and mode == "keep_start":  # TRL drops the others before
        rows = [r for r in rows if len(r["prompt_ids"]) < max_length]
    if not rows:
        return
    table = Store(tmp_path_factory.mktemp("s")).create_table(Reference("ab" * 16, "m", "float32", "float32", ("0",), {}))
    for side in ("chosen_ids", "rejected_ids"):
        view = windows([r["prompt_ids"] for r in rows], [r[side] for r in rows], max_length, mode)
        prompts, completions = view.prompt_ids.to_pylist(), view.completion_ids.to_pylist()
        values = [
            [value_of(p + c[:t], c[t]) for t in range(need)]
            for p, c, need in zip(prompts, completions, view.needed, strict=True)
        ]
        lens = [np.array([len(ids) for ids in lists], np.int32) for lists in (prompts, completions)]
        logps = pa.array(values, pa.list_(pa.float32()))
        table.append(shard_table(sequence_keys(prompts, completions), *lens, logps, {}))
    join = join_logps(
        pa.Table.from_pylist(rows), table.snapshot(), max_length=max_length, truncation_mode=mode, ld_alpha=ld_alpha
    )
    assert not join.missing.any()
    got = np.stack([join.logps["ref_chosen_logps"], join.logps["ref_rejected_logps"]])
    assert np.allclose(got, trl_sums(rows, max_length, mode, ld_alpha), rtol=1e-5, atol=1e-4)


def test_a_row_that_trl_drops_has_no_sums(tmp_path):
    table = Store(tmp_path).create_table(Reference("ab" * 16, "m", "float32", "float32", ("0",), {}))
    rows = pa.table({"prompt_ids": [[1, 2, 3]], "chosen_ids": [[4, 5]], "rejected_ids": [[6]]})
    join = join_logps(rows, table.snapshot(), max_length=3)
    assert (join.dropped.tolist(), join.missing.tolist(), join.unusable.tolist()) == ([True], [False], [False])
    assert [np.isnan(sums).tolist() for sums in join.logps.values()] == [[True], [True]]


def test_settings_that_no_trainer_knows_are_refused():
    for settings_ in ({"max_length": 0}, {"max_length": 5, "truncation_mode": "middle"}):
        with pytest.raises(UsageError):
            windows([[1]], [[2]], **settings_)
