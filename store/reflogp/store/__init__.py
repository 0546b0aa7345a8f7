"""The store of reference log-probs, with its keys, reference ids, Delta tables, snapshots and joins.

This package needs only numpy, pyarrow and deltalake (for the Hugging Face Hub, also huggingface_hub), and imports no other part
of reflogp. deltalake is imported only when a name that needs it is first used, so keys and joins work without deltalake.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reflogp.store.checkpoint import read_checkpoint, resolve_model
from reflogp.store.errors import (
    CheckpointError,
    ContentMismatchError,
    DamagedStoreError,
    FileChangedError,
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
from reflogp.store.joins import Join, join_logps
from reflogp.store.keys import sequence_keys
from reflogp.store.reference import Reference, describe_reference

if TYPE_CHECKING:
    from reflogp.store.exchange import import_folder
    from reflogp.store.snapshot import Snapshot
    from reflogp.store.store import Store
    from reflogp.store.table import LogprobTable

__all__ = [
    "CheckpointError",
    "ContentMismatchError",
    "DamagedStoreError",
    "FileChangedError",
    "Join",
    "LogprobTable",
    "Reference",
    "ReferenceNotFoundError",
    "ReflogpError",
    "Snapshot",
    "SnapshotNotFoundError",
    "Store",
    "StoreDamageWarning",
    "StoreError",
    "StoreFormatError",
    "StoreNotFoundError",
    "StoreUnavailableError",
    "UsageError",
    "describe_reference",
    "import_folder",
    "join_logps",
    "read_checkpoint",
    "resolve_model",
    "sequence_keys",
]

#: Dict from each name that needs deltalake to the module that defines it. A module is imported when one of its names is first
#: used.
_WITH_DELTALAKE = {
    "Store": "store",
    "LogprobTable": "table",
    "Snapshot": "snapshot",
    "import_folder": "exchange",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_DELTALAKE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_WITH_DELTALAKE[name]}"), name)
    globals()[name] = found
    return found
