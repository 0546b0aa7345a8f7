import hashlib
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflogp.store import UsageError, sequence_keys

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=12)


def key_by_hand(prompt: list[int], completion: list[int]) -> bytes:
    data = struct.pack("<I", len(prompt)) + b"".join(struct.pack("<I", i) for i in [*prompt, *completion])
    return hashlib.blake2b(data, digest_size=16, person=b"reflogp.seq.v1").digest()


def test_golden_vector():
    """All existing stores depend on these bytes."""
    keys = sequence_keys([[1, 2, 3], [], [0]], [[4, 5], [4294967295], []])
    assert [key.as_py().hex() for key in keys] == [
        "bc59aa1aa413454b7a0896013712a61f",
        "240a633bd85228b32a8f8610259df5a3",
        "4a1d791b38c6a47769b1c10e3d518705",
    ]


@given(st.lists(st.tuples(token_ids, token_ids), max_size=8))
def test_a_key_is_the_digest_of_length_prompt_and_completion(pairs):
    keys = sequence_keys([p for p, _ in pairs], [c for _, c in pairs])
    assert keys.to_pylist() == [key_by_hand(p, c) for p, c in pairs]


@pytest.mark.parametrize(
    "completions",
    [
        pa.array([[7], [8, 9], []], pa.list_(pa.int32())),
        pa.array([[7], [8, 9], []], pa.large_list(pa.uint32())),
        pa.array([[1], [7], [8, 9], []], pa.list_(pa.uint16()))[1:],
        pa.chunked_array([[[7]], [[8, 9], []]], pa.list_(pa.int64())),
        [(7,), range(8, 10), []],
        [np.array([7], np.uint16), np.array([8, 9], np.int64), np.array([])],  # float64, where it is empty
    ],
    ids=str,
)
def test_the_kind_of_the_lists_does_not_matter(completions):
    prompts = [[1, 2], [3], [4]]
    assert sequence_keys(prompts, completions).to_pylist() == [
        key_by_hand(*pair) for pair in zip(prompts, [[7], [8, 9], []], strict=True)
    ]


def test_keys_of_no_rows():
    assert len(sequence_keys([], [])) == 0
    assert sequence_keys(pa.array([], pa.list_(pa.int32())), pa.chunked_array([], pa.list_(pa.int64()))).type.byte_width == 16


@pytest.mark.parametrize(
    "prompts, says",
    [
        (pa.array([[1], None]), "is null"),
        (pa.array([[1, None]]), "null token id"),
        ([[-1]], "outside"),
        ([[2**32]], "outside"),
        ([[1], [2]], "2 prompts but 1 completion"),
        *(([ids], "expected") for ids in ([1.5], [1, 2.0], [True], ["1"], np.array([1.0]))),  # and none is rounded
        ([np.array([1.0]), np.array([2])], "expected"),
    ],
    ids=str,
)
def test_what_is_no_token_id_is_refused(prompts, says):
    with pytest.raises(UsageError, match=says):
        sequence_keys(prompts, [[1]])
