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
    "kind", [pa.list_(pa.int32()), pa.list_(pa.int64()), pa.large_list(pa.uint32()), pa.list_(pa.uint16())]
)
def test_the_arrow_type_of_the_lists_does_not_matter(kind):
    prompts, completions = [[1, 2], [3]], [[7], [8, 9]]
    expected = sequence_keys(prompts, completions)
    assert (
        sequence_keys(
            pa.array(prompts, kind), pa.chunked_array([pa.array(completions[:1], kind), pa.array(completions[1:], kind)])
        )
        == expected
    )


def test_a_slice_of_an_array_gives_the_keys_of_its_own_rows():
    prompts, completions = pa.array([[1], [2, 3], [4]]), pa.array([[5], [6], [7, 8]])
    assert sequence_keys(prompts[1:], completions[1:]) == sequence_keys(prompts, completions)[1:]


@pytest.mark.parametrize(
    "prompts, completions",
    [
        (pa.array([[1], None]), pa.array([[1], [2]])),
        (pa.array([[1, None]]), pa.array([[1]])),
        ([[1]], [[-1]]),
        ([[1]], [[2**32]]),
        ([[1], [2]], [[1]]),
        (pa.array([["a"]]), pa.array([[1]])),
    ],
)
def test_what_is_not_token_ids_is_refused(prompts, completions):
    with pytest.raises(UsageError):
        sequence_keys(prompts, completions)


@pytest.mark.parametrize("ids", [[[1.5]], [[1, 2.0]], [[True]], [["1"]], [np.array([1.0])], [np.array([1.0]), np.array([2])]])
def test_what_is_no_token_id_is_refused_not_rounded(ids):
    with pytest.raises(UsageError, match="expected"):
        sequence_keys(ids, [[1]] * len(ids))


def test_an_empty_numpy_array_is_an_empty_list_whatever_its_dtype():
    prompts, empty = [[1], [2]], np.array([])
    assert sequence_keys(prompts, [np.array([7, 8]), empty]) == sequence_keys(prompts, [[7, 8], []])
    assert sequence_keys(prompts, [empty, empty]) == sequence_keys(prompts, [[], []])


def test_integers_of_every_kind_make_the_same_key():
    kinds = [[[1, 2]], [(1, 2)], [range(1, 3)], [np.array([1, 2], np.uint16)]]
    assert len({sequence_keys(ids, [[3]]).to_pylist()[0] for ids in kinds}) == 1
    assert len(sequence_keys([np.array([1], np.uint32), np.array([2], np.int64)], [[], []])) == 2


def test_keys_of_no_rows():
    assert len(sequence_keys([], [])) == 0
    assert sequence_keys(pa.array([], pa.list_(pa.int32())), pa.chunked_array([], pa.list_(pa.int64()))).type.byte_width == 16
