"""The framing of docs/protocol.md: a MessagePack map, then one `bin` object for each payload.

Payloads stand behind the header and are neither packed nor unpacked: sending hands out views of the
caller's memory, receiving gives views of the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any

import ml_dtypes
import msgpack
import numpy as np

MSGPACK = "application/msgpack"
JSON = "application/json"
OCTETS = "application/octet-stream"

HEADER_LIMIT = 1 << 20
PAYLOAD_LIMIT = (1 << 32) - 1
DIMENSIONS_LIMIT = 8
_ARRAY_LIMIT = 1 << 14  # msgpack allocates a list at its declared length, at every level of nesting
_FIRST_READ = 1 << 12  # most headers are smaller, and what the unpacker is fed it copies

DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "uint8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}
"""Names of element types on the wire."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The same the other way round: `dtype.name` takes NumPy 2 µs."""

_BIN8, _BIN16, _BIN32 = Struct(">BB"), Struct(">BH"), Struct(">BI")
_FRAMES = {0xC4: _BIN8, 0xC5: _BIN16, 0xC6: _BIN32}

Buffer = bytes | bytearray | memoryview


class WireError(ValueError):
    """A body that is not framed as the protocol says."""


def payload_head(nbytes: int) -> bytes:
    """The bytes that stand before a payload of `nbytes` bytes."""
    if nbytes < 1 << 8:
        return _BIN8.pack(0xC4, nbytes)
    if nbytes < 1 << 16:
        return _BIN16.pack(0xC5, nbytes)
    if nbytes <= PAYLOAD_LIMIT:
        return _BIN32.pack(0xC6, nbytes)
    raise WireError(f"a payload is at most {PAYLOAD_LIMIT} bytes, this one has {nbytes}")


def pack(header: dict[str, Any] | bytes, payloads: Sequence[Buffer] = ()) -> list[Buffer]:
    """The parts of a body, to be sent one after the other; payloads are handed on as they are, and
    so is a header that is packed already.
    """
    head = header if isinstance(header, bytes) else msgpack.packb(header, default=_plain)
    if not payloads:
        return [head]
    first = payloads[0]
    parts: list[Buffer] = [head + payload_head(len(first)), first]
    for payload in payloads[1:]:
        parts += (payload_head(len(payload)), payload)
    return parts


def _plain(value: object) -> object:
    """A NumPy scalar as a Python number."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a header cannot hold a {type(value).__name__}")


def octets(array: np.ndarray[Any, Any]) -> memoryview:
    """The memory of a dense array, row- or column-major, as bytes."""
    if not array.flags.c_contiguous:
        array = array.swapaxes(-1, -2)
    return array.reshape(-1).view(np.uint8).data


def unpack(body: Buffer) -> tuple[dict[str, Any], list[memoryview]]:
    """Header and payloads of a body; the payloads are views of it.

    Raises:
        WireError: the body is truncated, too deeply nested, or is no such sequence.
    """
    view = memoryview(body)
    header, at = unpack_header(view)
    return header, unpack_payloads(view, at)


def unpack_payloads(view: memoryview, at: int) -> list[memoryview]:
    """The payloads of a body whose header ends at `at`, as views of it. Raises WireError."""
    payloads: list[memoryview] = []
    end = len(view)
    while at < end:
        start, stop = _payload_span(view, at)
        if stop > end:
            raise WireError(
                f"payload {len(payloads)} is truncated: "
                f"{stop - start} bytes declared, {end - start} came"
            )
        payloads.append(view[start:stop])
        at = stop
    return payloads


def unpack_header(view: memoryview) -> tuple[dict[str, Any], int]:
    """The header of a body, and where it ends. Raises WireError."""
    unpacker = msgpack.Unpacker(
        strict_map_key=True,
        max_buffer_size=HEADER_LIMIT,
        max_array_len=_ARRAY_LIMIT,
        read_size=_FIRST_READ,
    )
    unpacker.feed(view[:_FIRST_READ])
    try:
        try:
            header = unpacker.unpack()
        except msgpack.OutOfData:
            unpacker.feed(view[_FIRST_READ:HEADER_LIMIT])
            header = unpacker.unpack()
    except msgpack.OutOfData:
        what = "is over 1 MiB" if len(view) > HEADER_LIMIT else "is truncated"
        raise WireError(f"the header {what}") from None
    except (msgpack.StackError, RecursionError):
        raise WireError("the header is nested too deeply") from None
    except (msgpack.FormatError, ValueError) as error:
        raise WireError(f"the header is not MessagePack: {error}") from None
    if not isinstance(header, dict):
        raise WireError(f"the header must be a map, got {type(header).__name__}")
    return header, unpacker.tell()


def _payload_span(view: memoryview, at: int) -> tuple[int, int]:
    """Where the payload whose head stands at `at` begins and ends."""
    frame = _FRAMES.get(view[at])
    if frame is None:
        raise WireError(f"byte {at}: expected a bin object, got type byte 0x{view[at]:02x}")
    if at + frame.size > len(view):
        raise WireError(f"byte {at}: the length of a payload is truncated")
    start = at + frame.size
    return start, start + frame.unpack_from(view, at)[1]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a dense row-major tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements stand densely in row-major order.

    Strides of dimensions of size 1 do not matter.
    """
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1:
            if stride != expected:
                return 0 in shape
            expected *= extent
    return True
