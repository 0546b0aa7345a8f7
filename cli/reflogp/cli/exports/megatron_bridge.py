"""Write the reference log-probs that Megatron-Bridge reads: ref_logprobs.jsonl and scoring_metadata.json in a folder.

The format is defined in NVIDIA-NeMo/Megatron-Bridge, pull request 6092: scripts/dpo/score_reference_logprobs.py and
data/datasets/preference.py. The caller passes the training run's fingerprint (the metadata that the run expects), because this
module does not read the run's config.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reflogp.cli.exports.joined import JoinedPairs
from reflogp.store import UsageError
from reflogp.store.files import write_atomically
from reflogp.store.texts import counted

LOGPROBS_FILE, METADATA_FILE = "ref_logprobs.jsonl", "scoring_metadata.json"

#: Fields of ScoringFingerprint in preference.py (at commit 0eca073e) that are never null. The other fields can be null.
_REQUIRED = (
    "dataset",
    "tokenizer",
    "max_seq_length",
    "tensor_model_parallel_size",
    "sequence_parallel",
    "tokenization_version",
)


def write_megatron_bridge(pairs: JoinedPairs, folder: Path, fingerprint: Mapping[str, Any]) -> list[Path]:
    """Write ref_logprobs.jsonl and scoring_metadata.json.

    Each record in ref_logprobs.jsonl contains a pair's `pair_id` (the pair's number in the dataset, counted from 0) and, for
    each of the pair's two completions, the log-prob sum (in nats) and the token count.

    scoring_metadata.json contains the fingerprint's fields, num_pairs and, under `reflogp`, the reference and snapshot that the
    values come from. Megatron-Bridge's trainer compares the fingerprint's fields with those of its own run, and ignores the
    other entries. The trainer rejects a folder without scoring_metadata.json. An existing scoring_metadata.json is deleted
    before ref_logprobs.jsonl is replaced, and the new one is written last. Therefore, an interrupted export leaves the previous
    files unchanged or leaves a folder that the trainer rejects.

    Args:
        pairs: preference pairs with their reference log-probs.
        folder: the folder to write both files to.
        fingerprint: the fields that the training run expects, as returned by `expected_scoring_metadata(config)`
            (training/dpo_train.py).

    Raises UsageError if the fingerprint lacks fields or is for a different number of pairs, or if the pairs were joined with a
    max_length (the sums may then exclude a completion's last tokens).
    """
    lacking = [name for name in _REQUIRED if fingerprint.get(name) is None]
    if lacking:
        raise UsageError(
            f"--metadata: the JSON object lacks {', '.join(lacking)}; pass the complete return value of Megatron-Bridge's "
            "expected_scoring_metadata(config)"
        )
    if fingerprint.get("num_pairs", len(pairs)) != len(pairs):
        raise UsageError(
            f"--metadata: num_pairs is {fingerprint['num_pairs']}, but {pairs.file} has {counted(len(pairs), 'pair')}; pass "
            "a metadata file and a joined file of the same dataset"
        )
    pairs.refuse_truncated("Megatron-Bridge", "does not truncate sequences (its loss excludes pairs that are too long)")
    values = {name: getattr(pairs, name) for name in ("reference_id", "reference_dtype", "snapshot")}
    metadata = {**fingerprint, "num_pairs": len(pairs), "reflogp": values}
    logprobs_file, metadata_file = folder / LOGPROBS_FILE, folder / METADATA_FILE
    with write_atomically(metadata_file) as partial_metadata:
        partial_metadata.write_text(json.dumps(metadata, indent=2), encoding="utf-8")
        with write_atomically(logprobs_file) as partial:
            with partial.open("w", encoding="utf-8") as out:
                for pair_id, record in enumerate(_records(pairs)):
                    out.write(json.dumps({"pair_id": pair_id, **record}) + "\n")
            metadata_file.unlink(missing_ok=True)
    return [logprobs_file, metadata_file]


def _records(pairs: JoinedPairs) -> Iterator[dict[str, float | int]]:
    columns = (pairs.chosen_logps, pairs.chosen_tokens, pairs.rejected_logps, pairs.rejected_tokens)
    names = ("ref_chosen_logprob_sum", "ref_chosen_num_tokens", "ref_rejected_logprob_sum", "ref_rejected_num_tokens")
    for values in zip(*(column.tolist() for column in columns), strict=True):
        yield dict(zip(names, values, strict=True))
