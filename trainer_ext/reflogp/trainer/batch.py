"""Supply trainers of frameworks other than TRL with the reference's sums of log-probs for their padded batches.

Frameworks differ in how they tokenize, truncate and collate. Therefore, each framework's own code tokenizes the datasets.
Before training starts, the sums of all tokenized rows are looked up. During training, a batch row's tokens and labels identify
its sum, so shuffling and evaluation need no special handling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from tqdm.auto import tqdm

from reflogp.store import UsageError
from reflogp.store.windows import TrainerSettings
from reflogp.trainer.errors import MissingLogpsError
from reflogp.trainer.gate import GateMixin, computes_in, warn_of_other_dtype
from reflogp.trainer.join import JoinRecord, Misses, look_up, missing_error
from reflogp.trainer.options import Options
from reflogp.trainer.ranks import on_all_ranks, rank
from reflogp.trainer.reference import Reference

#: Label of a token that the loss ignores. torch's cross_entropy and all frameworks built on transformers use this number.
IGNORED = -100
#: Number of sequences whose values per token are in memory at once.
_AT_ONCE = 65_536

#: A row of a tokenized dataset: for each of its sequences (two for a preference pair), the token ids without padding, and a
#: label for each token, which is -100 if the loss ignores the token.
Row = Sequence[tuple[npt.ArrayLike, npt.ArrayLike]]


class BatchReference:
    """The reference's sums of log-probs for the sequences of some tokenized datasets.

    The constructor looks up every sequence, so that no value can be missing during training. On several processes, call it with
    `on_all_ranks`.

    Args:
        datasets: every tokenized dataset that the trainer will use, by name: {"train": …, "eval": …}.
        rows_of: function that returns the rows of one of the datasets.
        output_dir: folder in which to write sequences without values, as reflogp-missing.parquet.
        model: the model that the framework would load as its reference, used if `reference` names none.

    Raises:
        MissingLogpsError: some rows have no stored values; the error names these rows and the command that scores them.
        UnusableLogpsError: values are damaged, NaN or infinite.
        UsageError: the source cannot be used, such as files from `reflogp join`, which contain only sums.
    """

    def __init__(
        self,
        reference: Reference,
        datasets: Mapping[str, Any],
        rows_of: Callable[[Any], Iterable[Row]],
        output_dir: str | Path,
        model: str | None,
        policy_dtype: str,
    ) -> None:
        if reference.is_file or reference.on_miss == "compute":
            raise UsageError("frameworks other than TRL need a store or a service, and on_miss='error' or 'score'")
        places: dict[bytes, int] = {}  # of each distinct sequence in the following lists
        tokens: list[npt.NDArray[np.uint32]] = []
        counted: list[npt.NDArray[np.bool_]] = []
        of: dict[str, list[list[int]]] = {}
        for name, dataset in datasets.items():
            of[name] = []
            bar = {"total": len(dataset), "desc": f"Tokens of {name}", "unit": "row", "disable": rank() > 0}
            for row in tqdm(rows_of(dataset), **bar):
                of[name].append([])
                for sequence in row:
                    ids, used = _sequence(*sequence)
                    place = places.setdefault(_key(ids, used), len(tokens))
                    if place == len(tokens):
                        tokens.append(ids)
                        counted.append(used)
                    of[name][-1].append(place)
        starts = [int(used.argmax()) if used.any() else len(used) for used in counted]
        prompts = _lists([ids[:start] for ids, start in zip(tokens, starts, strict=True)])
        completions = _lists([ids[start:] for ids, start in zip(tokens, starts, strict=True)])
        table = pa.table({"prompt_ids": prompts, "completion_ids": completions})
        values = reference.open(model, policy_dtype)
        warn_of_other_dtype(values.where.reference_dtype, policy_dtype, values.command("DATA", TrainerSettings(), policy_dtype))
        values, join, scored = look_up(Dataset(table), reference, values, TrainerSettings(), "all datasets' distinct sequences")
        if join.missing.any():
            lacking = table.filter(pa.array(join.missing))
            rows = {name: np.flatnonzero([join.missing[row].any() for row in found]) for name, found in of.items()}
            misses = [Misses(name, some, len(of[name]), None) for name, some in rows.items() if len(some)]
            misses[0] = Misses(misses[0].dataset, misses[0].rows, misses[0].of, lacking)
            raise missing_error(misses, values, TrainerSettings(), Path(output_dir))
        keys, found = join.keys["completion_ids"], []
        for start in range(0, len(keys), _AT_ONCE):
            lists = values.token_lists(keys[start : start + _AT_ONCE])
            for logps, used in zip(lists, counted[start : start + _AT_ONCE], strict=True):
                own = logps.values.to_numpy() if logps.is_valid else np.empty(0, np.float32)
                last = used[len(used) - len(own) :] if len(own) else np.empty(0, bool)
                found.append(float(own[last].sum(dtype=np.float64)))
        self._sums = dict(zip(places, found, strict=True))
        self.joins = {name: JoinRecord(values.where, rows=len(rows), scored=scored) for name, rows in of.items()}

    def sums(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of each row's stored log-probs, and the number of tokens in each sum.

        Args:
            input_ids: token ids, padded on either side, shape (B, L).
            attention_mask: 0 at padding and 1 at all other tokens, shape (B, L).
            labels: -100 at tokens whose log-probs are not added to the sum, shape (B, L). The label of a row's first token is
                ignored, because this token has no log-prob.

        Returns:
            sums in nats (float32) and token counts (int64), each of shape (B,), on the device of `input_ids`.

        Raises:
            MissingLogpsError: a row is not in any of the datasets whose values were looked up.
            UsageError: padding has labels other than -100; no store has log-probs of padding.
        """
        sums, counts = [], []
        batch = (values.cpu().numpy() for values in (input_ids, attention_mask, labels))
        for number, (ids, mask, label) in enumerate(zip(*batch, strict=True)):
            seen = mask != 0
            if (label[~seen] != IGNORED).any():
                raise UsageError("padding has labels other than -100: no store has log-probs of padding")
            whole, used = _sequence(ids[seen], label[seen])
            found = self._sums.get(_key(whole, used))
            if found is None:
                raise MissingLogpsError(
                    f"row {number} of a batch ({len(whole)} tokens, beginning with {whole[:8].tolist()}) is not in any of the "
                    f"datasets whose values were looked up ({', '.join(self.joins)})",
                    {"a batch": [number]},
                    "",
                )
            sums.append(found)
            counts.append(int(used.sum()))
        return torch.tensor(sums, device=input_ids.device), torch.tensor(counts, device=input_ids.device)


class BatchReferenceMixin(GateMixin):
    """Mixin that makes a framework's subclass of transformers' Trainer use stored reference log-probs.

    A trainer class has this mixin and the framework's trainer as base classes, in this order. It calls `use_stored_reference`
    at the end of its constructor, and overrides the method in which the framework runs its reference model.
    """

    ref_model: Any

    def use_stored_reference(self, options: Options, model: str | None, rows_of: Callable[[Any], Iterable[Row]]) -> None:
        """Look up the values for all datasets: `ref_model` becomes a BatchReference."""
        policy = self.accelerator.unwrap_model(self.model)
        evaluated = self.eval_dataset
        datasets = {"train": self.train_dataset}
        datasets |= evaluated if isinstance(evaluated, dict) else {"eval": evaluated}
        datasets = {name: dataset for name, dataset in datasets.items() if dataset is not None}
        if streams := [name for name, dataset in datasets.items() if not hasattr(dataset, "__len__")]:
            raise UsageError(f"the dataset {streams[0]} is a stream, but all rows must be looked up before training")
        dtype = computes_in(policy, self.accelerator)
        asked = options.reference(), datasets, rows_of, self.args.output_dir, model, dtype
        self.ref_model = on_all_ranks("looking up the datasets", lambda: BatchReference(*asked))
        self.joins = self.ref_model.joins
        self.starts_at_reference = not options.policy_starts_elsewhere

    def compare_first_batch(
        self, model: Any, policy: Callable[[], torch.Tensor], reference: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Before the run's first step, compare the policy's sums with the reference's, each of shape (n,). Subclasses call this
        method for every batch.

        Args:
            policy: function that returns the sums that the framework's code for the reference model computes. While it runs,
                the policy (`model`) takes that model's place, without dropout and gradients.
        """

        def sums() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            stored, self.ref_model = self.ref_model, model
            model.eval()
            try:
                with torch.no_grad():
                    return policy(), reference, tokens
            finally:
                model.train()
                self.ref_model = stored

        if self.model.training:
            self.check_first_batch(sums)


def labelled_rows(dataset: Dataset, columns: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """Return the rows of a `datasets.Dataset` that has, for each of a row's sequences, a column of token ids and a column of
    labels: the two names in `columns`."""
    for row in dataset.select_columns([name for pair in columns for name in pair]).with_format("numpy"):
        yield [(row[ids], row[labels]) for ids, labels in columns]


def refuse_media(dataset: Any, columns: Sequence[str]) -> None:
    """Raise UsageError if one of the given columns of a `datasets.Dataset` has images, videos or sounds: the tokens that
    identify a row's values do not include them."""
    for column in set(columns) & set(getattr(dataset, "column_names", None) or ()):
        values = dataset.with_format("arrow")[column]
        values = values if isinstance(values, pa.ChunkedArray | pa.Array) else pa.array(values[:])
        lengths = pc.list_value_length(values) if pa.types.is_list(values.type) else pc.cast(values.is_valid(), pa.int32())
        if pc.sum(lengths).as_py():
            raise UsageError(f"the dataset has {column}: this framework's stored values are supported only for text")


def _sequence(token_ids: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    """Return a sequence's token ids, and a mask of the tokens that its sum counts. The first token has no log-prob."""
    used = np.asarray(labels) != IGNORED
    used[:1] = False
    return np.asarray(token_ids).astype(np.uint32), used


def _key(ids: npt.NDArray[np.uint32], used: npt.NDArray[np.bool_]) -> bytes:
    return hashlib.blake2b(ids.astype("<u4").tobytes() + np.packbits(used).tobytes(), digest_size=16).digest()


def _lists(arrays: list[npt.NDArray[np.uint32]]) -> pa.LargeListArray:
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    return pa.LargeListArray.from_arrays(offsets, pa.array(np.concatenate([np.empty(0, np.uint32), *arrays]), pa.uint32()))
