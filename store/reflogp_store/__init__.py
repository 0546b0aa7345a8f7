"""The cache of reference log-probs: keys, reference ids, Delta tables, snapshots and joins.

Needs numpy, pyarrow and deltalake only. Imports no other reflogp package.
"""

from reflogp_store.checkpoint import read_checkpoint, resolve_model
from reflogp_store.compaction import compact, vacuum
from reflogp_store.errors import (
    CheckpointError,
    DamagedStoreError,
    FileChangedError,
    OtherContentError,
    ReferenceNotFoundError,
    ReflogpError,
    SnapshotNotFoundError,
    StoreDamageWarning,
    StoreError,
    StoreFormatError,
    StoreNotFoundError,
    StoreUnavailableError,
    UsageError,
)
from reflogp_store.exchange import export_table, import_folder
from reflogp_store.joins import Join, join_logps
from reflogp_store.keys import example_hash, sequence_keys
from reflogp_store.reference import Reference, describe_reference
from reflogp_store.repair import repair, verify
from reflogp_store.snapshot import Snapshot
from reflogp_store.store import LogprobStore
from reflogp_store.table import LogprobTable

__all__ = [
    "CheckpointError",
    "DamagedStoreError",
    "FileChangedError",
    "Join",
    "LogprobStore",
    "LogprobTable",
    "OtherContentError",
    "Reference",
    "ReferenceNotFoundError",
    "ReflogpError",
    "Snapshot",
    "SnapshotNotFoundError",
    "StoreDamageWarning",
    "StoreError",
    "StoreFormatError",
    "StoreNotFoundError",
    "StoreUnavailableError",
    "UsageError",
    "compact",
    "describe_reference",
    "example_hash",
    "export_table",
    "import_folder",
    "join_logps",
    "read_checkpoint",
    "repair",
    "resolve_model",
    "sequence_keys",
    "vacuum",
    "verify",
]
