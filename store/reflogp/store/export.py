"""Export a table as a folder of Parquet files with a README, to share it or to read it with other tools.

An export has one row for each key, in data/part-*.parquet, and a reference.json that describes the reference model.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from reflogp.store.commits import TableLog
from reflogp.store.digests import Progress
from reflogp.store.errors import UsageError
from reflogp.store.maintenance import SHARD_BYTES, merged_rows
from reflogp.store.reference import REFERENCE_FILE, Reference
from reflogp.store.schema import columns_table, schema_of
from reflogp.store.shard import write_shard
from reflogp.store.snapshot import Snapshot
from reflogp.store.storage import sentence

README_FILE, DATA_FILES = "README.md", "data/part-*.parquet"


def export_snapshot(log: TableLog, snapshot: Snapshot, folder: str, progress: Progress | None = None) -> tuple[int, int]:
    """Write a snapshot's rows to a new folder; see `LogprobTable.export`."""
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{folder} exists and is not an empty folder; choose another folder")
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    rows = files = 0
    try:
        (partial / "data").mkdir(parents=True)
        for part in merged_rows(log, snapshot, SHARD_BYTES) if len(snapshot) else [schema_of(log.top_k).empty_table()]:
            write_shard(part, partial / f"data/part-{files:05}.parquet")
            rows, files = rows + len(part), files + 1
            if progress:
                progress(rows, len(snapshot))
        (partial / REFERENCE_FILE).write_text(log.reference.to_json(), encoding="utf-8")
        (partial / README_FILE).write_text(_readme(log.reference, log.top_k), encoding="utf-8")
        if target.exists():
            target.rmdir()
        partial.replace(target)
    except OSError as error:
        raise UsageError(f"the export {folder} cannot be written: {sentence(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return rows, files


def _readme(reference: Reference, top_k: int) -> str:
    """Return the text of an export's README.md, which becomes the dataset card if the export is pushed to the Hub."""
    return f"""---
configs:
- config_name: default
  data_files: data/*.parquet
tags:
- reflogp
---

# Reference log-probs of {reference.name}

| | |
| --- | --- |
| reference model | {reference.name} |
| reference id | `{reference.reference_id}` |
| dtype | {reference.dtypes()} |

The files contain log-probabilities, token counts and hashes of token ids, but none of the dataset's text and no weights.

{columns_table(top_k)}

Read this dataset, or this folder, with `datasets.load_dataset`. To train with these values, add them to a reflogp store:

    reflogp store pull ./logps hf://datasets/ORGANISATION/NAME   # from the Hub
    reflogp store import ./logps FOLDER                          # from a folder

`reference.json` describes the reference model. Values that the store already has are kept.
"""
