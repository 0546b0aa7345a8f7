"""Compute keys. A key is 16 bytes that identify a sequence by its token ids.

The key does not depend on the text, template, model or files that the token ids come from.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reflogp.store.errors import UsageError
from reflogp.store.schema import one_array
from reflogp.store.texts import counted

KEY_BYTES = 16
#: blake2b's personalization string, which keeps keys distinct from hashes computed for other purposes.
KEY_PERSON = b"reflogp.seq.v1"
KEY_TYPE = pa.binary(KEY_BYTES)

_MAX_TOKEN_ID = 2**32 - 1

TokenLists: TypeAlias = pa.Array | pa.ChunkedArray | Sequence[Sequence[int]]


def token_lists(lists: TokenLists, name: str = "token ids") -> pa.LargeListArray:
    """Return n lists of token ids as one Arrow array of large_list<uint32>, without nulls.

    Args:
        lists: an Arrow list array (any integer type, chunked or not) or Python lists.
        name: what error messages call the lists.

    Raises UsageError if there is anything but integers in [0, 2**32).
    """
    array: Any = one_array(lists) if isinstance(lists, pa.Array | pa.ChunkedArray) else _list_array(lists, name)
    if pa.types.is_null(array.type) and not len(array):  # the null type is Arrow's type for a column without rows
        array = array.cast(pa.list_(pa.uint32()))
    if pa.types.is_null(array.type) or not (
        pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type)
    ):
        raise UsageError(f"{name}: expected lists of integers, got Arrow type {array.type}")
    if array.null_count:
        rows = np.flatnonzero(np.asarray(array.is_null()))
        raise UsageError(f"{name}: the list at index {rows[0]} is null (null lists in total: {len(rows)})")
    flat = array.flatten()
    if flat.null_count:
        raise UsageError(f"{name}: expected integers, got {counted(flat.null_count, 'null token id')}")
    if pa.types.is_null(flat.type):
        flat = flat.cast(pa.uint32())
    if not pa.types.is_integer(flat.type):
        raise UsageError(f"{name}: expected integers, got {flat.type}")
    if flat.type != pa.uint32():
        values = flat.to_numpy(zero_copy_only=False)
        if len(values) and (int(values.min()) < 0 or int(values.max()) > _MAX_TOKEN_ID):
            raise UsageError(f"{name}: a token id is outside [0, 2**32)")
        flat = pa.array(values.astype(np.uint32))
    lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return pa.LargeListArray.from_arrays(offsets, flat)


def _list_array(lists: Sequence[Any], name: str) -> pa.Array:
    """Convert Python lists or numpy arrays to an Arrow list array.

    Arrow gets no value type, because with int64, it would truncate floats without an error.
    """
    array: Any = None
    with suppress(pa.ArrowInvalid, OverflowError):  # raised for ranges, and for some numpy arrays with different dtypes
        array = pa.array(lists)
    if array is None or (pa.types.is_list(array.type) and pa.types.is_floating(array.type.value_type)):
        # The dtype of an empty numpy array is float64 by default.
        arrays = [np.asarray(entry) for entry in lists]
        if strange := [entry.dtype for entry in arrays if entry.size and entry.dtype.kind not in "iu"]:
            raise UsageError(f"{name}: expected lists of integers, got values of type {strange[0]}")
        array = pa.array([entry.astype(np.int64) for entry in arrays], pa.list_(pa.int64()))
    without_values = pa.types.is_null(array.type) or (pa.types.is_list(array.type) and pa.types.is_null(array.type.value_type))
    return array.cast(pa.list_(pa.int64())) if without_values else array


def list_lengths(lists: pa.LargeListArray) -> npt.NDArray[np.int32]:
    offsets: npt.NDArray[np.int64] = lists.offsets.to_numpy()
    return np.diff(offsets).astype(np.int32)


def sequence_keys(prompt_ids: TokenLists, completion_ids: TokenLists) -> pa.FixedSizeBinaryArray:
    """Return the keys of n sequences.

    A key is blake2b(digest_size=16, person=b"reflogp.seq.v1") over uint32-LE(len(prompt)) ‖ prompt as uint32-LE ‖
    completion as uint32-LE. Hashing reads the flat token buffers, without converting lists to Python objects.

    Args:
        prompt_ids: n lists of token ids (Arrow list array or Python lists).
        completion_ids: n lists of token ids.

    Returns:
        fixed_size_binary(16) array of n keys.

    Raises:
        UsageError: the numbers of prompts and completions differ, the arguments are not lists of integers, a list or an id is
            null, or an id does not fit in uint32.

    Examples:
        >>> from reflogp.store import sequence_keys
        >>> keys = sequence_keys([[1, 5, 9], [1, 5, 9]], [[7, 2], [8]])
        >>> keys.type, len(keys)
        (FixedSizeBinaryType(fixed_size_binary[16]), 2)
        >>> keys[0].as_py().hex()
        '755d6e6bcac1c36a5e2286aacf33c5dd'
    """
    prompts, completions = token_lists(prompt_ids, "prompt_ids"), token_lists(completion_ids, "completion_ids")
    if len(prompts) != len(completions):
        raise UsageError(f"{counted(len(prompts), 'prompt')} but {counted(len(completions), 'completion')}")
    prompt_bytes, prompt_at = _little_endian(prompts)
    completion_bytes, completion_at = _little_endian(completions)
    out = bytearray()
    for row in range(len(prompts)):
        start, stop = prompt_at[row], prompt_at[row + 1]
        digest = hashlib.blake2b(struct.pack("<I", (stop - start) // 4), digest_size=KEY_BYTES, person=KEY_PERSON)
        digest.update(prompt_bytes[start:stop])
        digest.update(completion_bytes[completion_at[row] : completion_at[row + 1]])
        out += digest.digest()
    return pa.FixedSizeBinaryArray.from_buffers(KEY_TYPE, len(prompts), [None, pa.py_buffer(bytes(out))])


def keys_as_words(keys: pa.Array | pa.ChunkedArray | Sequence[bytes]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the first and the last 8 bytes of each key, uint64 of shape (n,), as big-endian numbers: pairs sort as keys do."""
    keys = one_array(keys) if isinstance(keys, pa.Array | pa.ChunkedArray) else pa.array(keys, KEY_TYPE)
    fixed = keys if pa.types.is_fixed_size_binary(keys.type) else keys.cast(KEY_TYPE)
    words = np.frombuffer(fixed.buffers()[1] or b"", dtype=">u8")[2 * fixed.offset : 2 * (fixed.offset + len(fixed))]
    pairs = words.reshape(-1, 2).astype(np.uint64)
    return pairs[:, 0], pairs[:, 1]


def _little_endian(lists: pa.LargeListArray) -> tuple[memoryview, list[int]]:
    values = lists.values.to_numpy().astype("<u4", copy=False)
    return memoryview(np.ascontiguousarray(values).data).cast("B"), (lists.offsets.to_numpy() * 4).tolist()
