"""Write open-instruct's reference log-prob cache: a .pt file that its DPO trainers load instead of running a reference model.

The format is defined in allenai/open-instruct: TensorCache in open_instruct/model_utils.py, and build_reference_logprobs_cache
in dpo_utils.py. The caller passes the file's name, which is a hash of open-instruct's config.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from reflogp.cli.exports.joined import JoinedPairs
from reflogp.client.errors import named_rows
from reflogp.store import UsageError
from reflogp.store.files import write_atomically

#: open-instruct's losses that use a reference (dpo_utils.py, DPOLossType.needs_reference_model).
LossType = Literal["dpo", "dpo_norm", "wpo"]

#: Pattern of the value returned by compute_reference_cache_hash in dpo_utils.py: the first 16 hex digits of a sha256.
_HASH = re.compile(r"[0-9a-f]{16}")


def write_open_instruct(pairs: JoinedPairs, folder: Path, cache_hash: str, loss_type: LossType) -> Path:
    """Write the float32 tensors "chosen_logps" and "rejected_logps" to the file `<folder>/<cache_hash>.pt`.

    Each tensor has one value per pair, in row order. For the losses dpo and wpo, the values are log-prob sums. For dpo_norm,
    they are means over each completion's tokens. In open-instruct, DPOLossType.is_average_loss says whether a loss needs means.

    Args:
        pairs: preference pairs with their reference log-probs.
        folder: open-instruct's cache folder, which the environment variable REFERENCE_LOGPROBS_CACHE_PATH names.
        cache_hash: hash in the name of the training run's cache file, as it appears in open-instruct's log.
        loss_type: the training run's loss.

    Raises:
        UsageError: the hash is invalid, the pairs were joined with truncation_mode "keep_end", or the loss needs means but a
            completion has no tokens.
        ImportError: torch is not installed.
    """
    import torch

    if not _HASH.fullmatch(cache_hash):
        raise UsageError(
            f"--hash {cache_hash}: open-instruct's hashes have 16 digits (0-9 and a-f); copy the hash from open-instruct's log"
        )
    if pairs.max_length is not None and pairs.truncation_mode != "keep_start":
        raise UsageError(
            f"{pairs.file} was joined with truncation_mode {pairs.truncation_mode}, but open-instruct keeps the start of each "
            "sequence; run `reflogp join` or `reflogp submit` again with --truncation-mode keep_start"
        )
    sides = {"chosen": (pairs.chosen_logps, pairs.chosen_tokens), "rejected": (pairs.rejected_logps, pairs.rejected_tokens)}
    tensors = {
        f"{side}_logps": torch.tensor(_means(pairs, logps, tokens) if loss_type == "dpo_norm" else logps)
        for side, (logps, tokens) in sides.items()
    }
    target = folder / f"{cache_hash}.pt"
    with write_atomically(target) as partial, partial.open("wb") as out:
        torch.save(tensors, out)
    return target


def _means(pairs: JoinedPairs, logps: npt.NDArray[np.float32], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    empty = np.flatnonzero(tokens == 0)
    if len(empty):
        raise UsageError(
            f"{pairs.file} has completions without tokens ({named_rows(empty)}), but --loss-type dpo_norm needs means over "
            "tokens; remove every row with an empty completion from the dataset, and join the dataset again"
        )
    return (logps.astype(np.float64) / tokens).astype(np.float32)
