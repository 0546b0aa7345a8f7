"""Add the rows of an exported folder to a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from reflogp.store.digests import Progress
from reflogp.store.errors import UsageError
from reflogp.store.maintenance import DATA_FILES
from reflogp.store.reference import REFERENCE_FILE, Reference
from reflogp.store.schema import TOP_COLUMNS, problem_of_rows, schema_of
from reflogp.store.storage import STORAGE_ERRORS, sentence
from reflogp.store.store import Store

_IMPORT_ROWS = 65_536


@dataclass(frozen=True)
class Imported:
    """The result of an import: the number of rows in the export, how many of them were written (the store had no fewer values
    for the others), and the number of a snapshot that contains all of them.
    """

    reference_id: str
    rows: int
    written: int
    snapshot: int


def import_folder(store: Store, folder: str, progress: Progress | None = None) -> Imported:
    """Append an export's rows to a store, which is created if it does not exist. Values that the store already has are kept.

    All rows are checked before the first row is written.

    Args:
        store: the store to import into.
        folder: a folder that `LogprobTable.export` wrote.
        progress: called with (rows done, total rows). Each row counts twice in both numbers, because it is first checked and
            then written.

    Returns:
        An Imported with the number of rows in the export, the number of rows written, and the number of a snapshot that
        contains all the rows.

    Raises:
        UsageError: the folder is not an export, or its files or rows are damaged. Nothing is written.
        StoreError: the store cannot be written to. Rows that were written before the error are kept.

    Examples:
        >>> from reflogp.store import Store, describe_reference, import_folder
        >>> rows, files = Store("./logps")[describe_reference("./sft-model", "bfloat16")].export("./logps-to-move")
        >>> imported = import_folder(Store("./logps-moved"), "./logps-to-move")
        >>> imported.written == rows
        True
    """
    source = Path(folder)
    files = sorted(source.glob(DATA_FILES))
    if not (source / REFERENCE_FILE).is_file() or not files:
        raise UsageError(f"{folder} is not an export: an export contains {REFERENCE_FILE} and {DATA_FILES}")
    table, total, written, done, snapshot = None, 0, 0, 0, 0
    file = source / REFERENCE_FILE
    try:
        reference = Reference.from_json(file.read_text(encoding="utf-8"))
        for file in files:
            total += pq.read_metadata(file).num_rows
        top_k = max(map(top_k_of, files))
        for is_check in (True, False):
            table = None if is_check else store.values_table(reference, top_k)
            for file in files:
                for batch in pq.ParquetFile(file, page_checksum_verification=True).iter_batches(_IMPORT_ROWS):
                    rows = _with_types(pa.table(batch), top_k)
                    if table is None and (problem := problem_of_rows(rows, top_k)):
                        raise UsageError(f"{file}: {problem}; nothing was imported")
                    if table is not None:
                        appended = table.append(rows)
                        written, snapshot = written + appended.written, appended.snapshot
                    done += len(rows)
                    if progress:
                        progress(done, 2 * total)
    except (*STORAGE_ERRORS, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {sentence(error)}; rows imported: {written:,}") from error
    assert table is not None
    return Imported(reference.reference_id, total, written, snapshot or table.snapshot().number)


def top_k_of(file: Path) -> int:
    """Return how many most probable tokens the rows of an export's file have at each position."""
    opened, name = pq.ParquetFile(file), TOP_COLUMNS[0].name
    for batch in opened.iter_batches(_IMPORT_ROWS, columns=[name, "scored_len"]) if name in opened.schema_arrow.names else ():
        for ids, length in zip(batch[name], batch["scored_len"].to_pylist(), strict=True):
            if length:
                return int(len(ids) // length)
    return 0


def _with_types(rows: pa.Table, top_k: int) -> pa.Table:
    schema = schema_of(top_k)
    return rows.cast(pa.schema([field.with_nullable(True) for field in schema])) if rows.schema.names == schema.names else rows
