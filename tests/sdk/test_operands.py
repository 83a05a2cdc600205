"""Arrays on the wire and views of remote tensors, against NumPy's own idea of both."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from matmuld_client import InvalidOperands, RemoteTensor, TensorView
from matmuld_client._channel import Channel
from matmuld_client._payloads import AUX_DTYPES, Array, byte_view, describe, to_array
from numpy.lib.stride_tricks import as_strided

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.uint8]


def there_and_back(array: Array) -> Array:
    tensor, block = describe(array, "aux", AUX_DTYPES)
    received = memoryview(bytearray(byte_view(block)))
    return to_array({**tensor, "payload": 0}, [received])


@given(st.data(), st.sampled_from(DTYPES))
def test_an_array_of_any_layout_comes_back_equal(data: st.DataObject, dtype: Any) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    array = array.transpose(data.draw(st.permutations(range(array.ndim))))
    array = array[data.draw(hnp.basic_indices(array.shape, allow_newaxis=True))]
    again = there_and_back(np.asarray(array))
    assert again.dtype == dtype
    assert again.flags.writeable
    np.testing.assert_array_equal(again, array)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_a_dense_array_is_sent_without_a_copy(order: tuple[int, ...]) -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(order)
    tensor, block = describe(array, "x")
    assert np.shares_memory(block, array)
    assert tensor.get("strides", [stride // 4 for stride in array.strides]) == [
        stride // 4 for stride in array.strides
    ]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4)[:, :2],
        np.arange(12.0)[::-1],
        np.broadcast_to(np.arange(3.0), (2, 3)),
        np.arange(12.0).astype(">f8"),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)).astype(">f8"),
    ],
    ids=["slice", "backwards", "broadcast", "big-endian", "big-endian transposed"],
)
def test_what_is_not_dense_or_little_endian_is_sent_as_a_copy(array: Array) -> None:
    tensor, block = describe(array, "x")
    assert tensor["dtype"] == "float64"
    assert not np.shares_memory(block, array)
    np.testing.assert_array_equal(there_and_back(array), array)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "complex64", "<U3", "object"])
def test_a_dtype_that_cannot_travel_is_refused_by_name(dtype: str) -> None:
    says = f"weight: expected one of float64, float32, .*, float8_e5m2, got {dtype}$"
    with pytest.raises(InvalidOperands, match=says) as caught:
        describe(np.zeros(3, dtype), "weight")
    assert caught.value.operand == "weight"


def test_a_result_is_a_view_of_what_was_received() -> None:
    received = np.zeros(64, np.uint8).data
    array = to_array({"dtype": "float32", "shape": [4, 4], "payload": 0}, [received])
    array[0, 0] = 1
    assert bytes(received[:4]) == np.float32(1).tobytes()


def test_a_result_that_would_stand_unaligned_is_copied_into_place() -> None:
    received = np.arange(65, dtype=np.uint8).data[1:]
    tensor = {"dtype": "float64", "shape": [4, 2], "strides": [1, 4], "payload": 0}
    array = to_array(tensor, [received])
    assert array.flags.aligned
    assert array.strides == (8, 32)
    assert array.tobytes("A") == bytes(received)


def remote(shape: tuple[int, ...]) -> RemoteTensor:
    tensor = {"tensor": "handle", "dtype": "float64", "shape": list(shape)}
    return RemoteTensor(Channel("unix:/nowhere", 1.0), tensor, owned=False)


def elements(view: TensorView, memory: Array) -> Array:
    """What the view shows of `memory`, the contents of its tensor."""
    if 0 in view.shape:
        return np.empty(view.shape)
    strides = [stride * 8 for stride in view.strides]
    return as_strided(memory.reshape(-1)[view.offset :], view.shape, strides)


SHAPES = hnp.array_shapes(max_dims=4, max_side=5)


@given(st.data())
def test_a_slice_shows_what_numpy_shows(data: st.DataObject) -> None:
    array = np.arange(float(np.prod(shape := data.draw(SHAPES)))).reshape(shape)
    indices = hnp.basic_indices(shape).filter(runs_forwards)
    view, expected = remote(shape)[()], array
    for _ in range(2):
        key = data.draw(indices)
        view, expected = view[key], expected[key]
        indices = hnp.basic_indices(view.shape).filter(runs_forwards)
    assert view.shape == np.shape(expected)
    np.testing.assert_array_equal(elements(view, array), expected)


def runs_forwards(key: Any) -> bool:
    parts = key if isinstance(key, tuple) else (key,)
    return all(not isinstance(part, slice) or (part.step or 1) > 0 for part in parts)


def test_transposes_show_what_numpy_shows() -> None:
    array = np.arange(24.0).reshape(2, 3, 4)
    tensor = remote(array.shape)
    np.testing.assert_array_equal(elements(tensor.T, array), array.T)
    np.testing.assert_array_equal(elements(tensor.mT, array), np.swapaxes(array, 1, 2))
    np.testing.assert_array_equal(elements(tensor[1].T, array), array[1].T)


@pytest.mark.parametrize("key", [4, -5, (0, 0, 0), slice(None, None, -1), (0, slice(3, 0, -1))])
def test_what_no_view_can_show_is_an_index_error(key: Any) -> None:
    with pytest.raises(IndexError):
        remote((4, 3))[key]


MANY = np.array([0, 1])


@pytest.mark.parametrize(
    "key", [True, np.True_, 1.5, None, [0, 1], MANY, "a", (0, True), (..., ...)]
)
def test_an_index_of_another_kind_is_a_type_error(key: Any) -> None:
    with pytest.raises(TypeError, match=r"only integers, slices .* and one ellipsis"):
        remote((4, 3))[key]


def test_integers_of_numpy_are_integers() -> None:
    row = remote((4, 3))[np.int64(-1)]
    assert (row.shape, row.offset, type(row.offset)) == ((3,), 9, int)


def test_a_tensor_has_as_many_rows_as_its_length_says() -> None:
    tensor = remote((2, 3))
    rows = [tensor[i] for i in range(len(tensor))]
    assert [(row.shape, row.offset) for row in rows] == [((3,), 0), ((3,), 3)]


def test_a_tensor_is_not_fetched_by_accident() -> None:
    for tensor in (remote((2, 3)), remote((2, 3)).T):
        with pytest.raises(TypeError, match=r"call numpy\(\)"):
            np.asarray(tensor)
