"""Framing: what was packed comes back, and nothing else is taken for it."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matmuld_client.wire import (
    HEADER_LIMIT,
    PAYLOAD_LIMIT,
    WireError,
    is_row_major,
    pack,
    payload_head,
    row_major,
    unpack,
)

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
headers = st.dictionaries(
    st.text(),
    st.recursive(
        scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
    ),
    max_size=6,
)
payloads = st.lists(st.binary(max_size=300), max_size=4)


def joined(header: dict[str, Any], payloads: list[bytes]) -> bytes:
    return b"".join(pack(header, payloads))


@given(headers, payloads)
def test_what_was_packed_is_unpacked(header: dict[str, Any], payloads: list[bytes]) -> None:
    again, views = unpack(joined(header, payloads))
    assert repr(again) == repr(header)  # NaN is not equal to itself
    assert [bytes(view) for view in views] == payloads


@given(headers, payloads)
def test_a_body_is_what_any_msgpack_stream_reader_reads(
    header: dict[str, Any], payloads: list[bytes]
) -> None:
    reader = msgpack.Unpacker()
    reader.feed(joined(header, payloads))
    assert repr(list(reader)) == repr([header, *payloads])


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 65535, 65536, 100_000])
def test_payloads_of_every_length_class_come_back(nbytes: int) -> None:
    header, (view,) = unpack(joined({"payload": 0}, [bytes(nbytes)]))
    assert (header, bytes(view)) == ({"payload": 0}, bytes(nbytes))


@given(headers, payloads.filter(any), st.data())
def test_a_body_cut_inside_is_refused(
    header: dict[str, Any], payloads: list[bytes], data: st.DataObject
) -> None:
    parts = pack(header, payloads)
    whole = b"".join(parts)
    boundaries = {len(joined(header, payloads[:count])) for count in range(len(payloads) + 1)}
    cut = data.draw(st.integers(0, len(whole) - 1).filter(lambda at: at not in boundaries))
    with pytest.raises(WireError):
        unpack(whole[:cut])


def test_a_body_cut_at_any_byte_is_refused_or_lacks_a_payload() -> None:
    header = {"x": {"dtype": "float32", "shape": [2, 3], "payload": 0}, "alpha": 0.5}
    whole = joined(header, [b"0123456789", b"abcdef" * 60])
    lengths = {len(joined(header, [])): 0, len(joined(header, [b"0123456789"])): 1}
    for cut in range(len(whole)):
        if cut in lengths:
            assert len(unpack(whole[:cut])[1]) == lengths[cut]
        else:
            with pytest.raises(WireError):
                unpack(whole[:cut])


@pytest.mark.parametrize("rest", [b"\x00", b"\xc0", b"\x81\xa1a\x01", b"\xa3abc", b"\xff"])
def test_what_follows_and_is_no_payload_is_refused(rest: bytes) -> None:
    with pytest.raises(WireError, match="expected a bin object"):
        unpack(joined({"a": 1}, [b"payload"]) + rest)


@pytest.mark.parametrize("body", [b"\x93\x01\x02\x03", b"\x01", b"\xc4\x01a", b"\xa1a", b"\xc0"])
def test_a_header_that_is_no_map_is_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="must be a map"):
        unpack(body)


def test_keys_that_are_no_text_are_refused() -> None:
    with pytest.raises(WireError, match="not MessagePack"):
        unpack(b"\x81\x01\x02")


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"])
def test_deep_nesting_is_refused(opening: bytes) -> None:
    with pytest.raises(WireError, match="nested too deeply"):
        unpack(b"\x81\xa1a" + opening * 100_000 + b"\xc0")


HUGE = {
    "array": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "text": b"\xdb\xff\xff\xff\xff",
    "bin": b"\xc6\xff\xff\xff\xff",
}


@pytest.mark.parametrize("declared", HUGE.values(), ids=HUGE.keys())
def test_huge_declared_lengths_inside_the_header_are_refused(declared: bytes) -> None:
    with pytest.raises(WireError):
        unpack(b"\x81\xa1a" + declared)


def test_nested_lists_do_not_allocate_what_they_declare() -> None:
    largest_list = b"\xdd\x00\x0f\xff\xff"  # a million elements
    tracemalloc.start()
    with pytest.raises(WireError):
        unpack(b"\x81\xa1a" + largest_list * 400)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_payload_that_declares_more_than_came_is_refused() -> None:
    with pytest.raises(WireError, match="4294967295 bytes declared, 3 came"):
        unpack(joined({"a": 1}, []) + payload_head(PAYLOAD_LIMIT) + b"abc")


def test_a_payload_over_the_limit_cannot_be_announced() -> None:
    with pytest.raises(WireError, match="at most 4294967295"):
        payload_head(PAYLOAD_LIMIT + 1)


def test_a_header_longer_than_the_first_read_comes_back() -> None:
    header = {"names": [f"tensor {i}" for i in range(10_000)]}
    assert unpack(joined(header, [b"abc"]))[0] == header


def test_a_header_over_the_limit_is_refused() -> None:
    with pytest.raises(WireError, match="over 1 MiB"):
        unpack(joined({str(i): "x" * 1000 for i in range(HEADER_LIMIT // 1000)}, []))


def test_payloads_are_views_of_the_body() -> None:
    body = bytearray(joined({"a": 1}, [b"abc"]))
    _, (view,) = unpack(body)
    body[-1:] = b"X"
    assert bytes(view) == b"abX"


def test_payloads_are_handed_on_uncopied() -> None:
    array = np.zeros(10, np.uint8)
    parts = pack({"a": 1}, [array.data])
    array[0] = 7
    assert bytes(parts[-1])[0] == 7


def test_numpy_scalars_are_packed_as_numbers() -> None:
    header = {"alpha": np.float32(0.5), "sm_count_target": np.int64(3), "flag": np.bool_(True)}
    assert unpack(joined(header, []))[0] == {"alpha": 0.5, "sm_count_target": 3, "flag": True}


def test_what_a_header_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot hold a ndarray"):
        pack({"x": np.zeros(3)})


shapes = st.lists(st.integers(0, 4), max_size=5)


@given(shapes)
def test_row_major_strides_are_those_of_numpy(shape: list[int]) -> None:
    array = np.empty([max(extent, 1) for extent in shape], np.float32)
    expected = tuple(stride // 4 for stride in array.strides)
    assert row_major([max(extent, 1) for extent in shape]) == expected


@given(shapes, st.data())
def test_row_major_is_told_as_numpy_tells_it(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    array = np.empty(shape, np.float32).transpose(order)
    strides = [stride // 4 for stride in array.strides]
    assert is_row_major(array.shape, strides) == array.flags.c_contiguous
