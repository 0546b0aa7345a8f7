"""Write preference pairs and their log-prob sums as JSON Lines, so that fairseq2 can train without a reference model.

To train without a reference model, set `reference_model: null` in fairseq2's config.

The format is defined by src/fairseq2/datasets/preference.py of facebookresearch/fairseq2, in pull request 958.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from reflogp.cli.exports.joined import JoinedPairs
from reflogp.client.errors import named_rows
from reflogp.store import UsageError
from reflogp.store.files import write_atomically

#: Fields that fairseq2 reads from each line (GenericPreferenceDataset.create_reader).
_FIELDS = ("src", "tgt_chosen", "tgt_rejected")


def write_fairseq2(pairs: JoinedPairs, file: Path) -> Path:
    """Write one line of JSON per row, with the row's columns from the dataset and its two log-prob sums (in nats).

    The sums are in the fields reference_score_chosen and reference_score_rejected.

    A sum of 0 raises an error. fairseq2 would treat it as missing, because its reader tests a batch with `all(scores)`.

    Raises:
        UsageError: the output file's name does not end in .jsonl, the file cannot be written, the pairs lack columns that
            fairseq2 reads, the pairs were joined with a max_length (the sums may then exclude a completion's last tokens), a
            sum is 0, or a row cannot be written as JSON.
    """
    if file.suffix != ".jsonl":
        raise UsageError(f"the name of the output file {file} must end in .jsonl, as fairseq2 expects")
    lacking = [name for name in _FIELDS if name not in pairs.own_columns]
    if lacking:
        kept = (
            "a job's result does not contain the dataset's columns, so use `reflogp join`"
            if not pairs.own_columns
            else "join a dataset that has these columns"
        )
        raise UsageError(f"{pairs.file} lacks columns that fairseq2 reads ({', '.join(lacking)}); {kept}")
    pairs.refuse_truncated("fairseq2", "does not truncate sequences (it drops those that are too long)")
    zero = (pairs.chosen_logps == 0) | (pairs.rejected_logps == 0)
    if zero.any():
        raise UsageError(
            f"{pairs.file} has log-prob sums of 0, which fairseq2 treats as missing ({named_rows(np.flatnonzero(zero))}); "
            "remove every row that has a sum of 0 from the dataset, and join the dataset again"
        )
    scores = zip(pairs.own_rows(), pairs.chosen_logps.tolist(), pairs.rejected_logps.tolist(), strict=True)
    with write_atomically(file) as partial, partial.open("w", encoding="utf-8") as out:
        for number, (row, chosen, rejected) in enumerate(scores):
            line = {**row, "reference_score_chosen": chosen, "reference_score_rejected": rejected}
            try:
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
            except TypeError as error:
                raise UsageError(f"row {number} of {pairs.file} cannot be written as JSON: {error}") from error
    return file
