"""A measured choice as it is kept: an algorithm or a strategy, for one key and one device.

A file is a line that says what it is, a checksum, and a MessagePack map. A line of an export is the
same map as JSON, bytes in base64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Any, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

FORMAT = 1
ENTRY_BYTES = 1 << 16
"""Of a file, at most."""
ALGORITHM_BYTES = 64

Kind = Literal["algorithm", "strategy"]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_MAGIC = b"matmuld plan\n"
_BODY = len(_MAGIC) + sha256().digest_size


class _Kept(BaseModel):
    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        ser_json_bytes="base64",
        val_json_bytes="base64",
    )


class AlgorithmRecord(_Kept):
    """cuBLASLt's own record of an algorithm, valid for the version that it came from."""

    algorithm: Annotated[
        bytes, Field(min_length=ALGORITHM_BYTES, max_length=ALGORITHM_BYTES, repr=False)
    ]
    workspace_bytes: Count
    median_us: Time | None = None


class StrategyRecord(_Kept):
    """The fastest way to do a step, and what it was compared with: median times by name.

    `measured_at` is in seconds of Unix time.
    """

    way: str
    median_us: Time
    candidates: dict[str, Time]
    measured_at: Time


class _Entry(_Kept):
    """`device` is all that the choice holds for: model and versions."""

    format: Literal[1]
    device: dict[str, str | Count]
    key: Annotated[str, Field(min_length=1)]

    @property
    def device_id(self) -> str:
        """What the entry is filed under."""
        return device_id(self.device)


class AlgorithmEntry(_Entry):
    """The algorithm of a fused product; the key is its signature's text."""

    kind: Literal["algorithm"]
    record: AlgorithmRecord


class StrategyEntry(_Entry):
    """The strategy of a step."""

    kind: Literal["strategy"]
    record: StrategyRecord


Entry = AlgorithmEntry | StrategyEntry
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


def entry_of(device: Mapping[str, Any], kind: Kind, key: str, record: Mapping[str, Any]) -> Entry:
    """Raises ValueError if `record` is none of that kind."""
    parts = {"device": dict(device), "kind": kind, "key": key, "record": dict(record)}
    return _ENTRY.validate_python({"format": FORMAT, **parts})


def device_id(device: Mapping[str, Any]) -> str:
    """A name for a device's model and versions."""
    return sha256(json.dumps(device, sort_keys=True).encode()).hexdigest()[:16]


def file_name(kind: Kind, key: str) -> str:
    """Of the entry of a key."""
    return f"{kind}-{sha256(key.encode()).hexdigest()[:32]}.plan"


def to_bytes(entry: Entry) -> bytes:
    """The contents of its file. Raises ValueError if it is too large for one."""
    body = msgpack.packb(entry.model_dump())
    if _BODY + len(body) > ENTRY_BYTES:
        raise ValueError(f"expected at most {ENTRY_BYTES} bytes, got {_BODY + len(body)}")
    return b"".join((_MAGIC, sha256(body).digest(), body))


def from_bytes(data: bytes) -> Entry:
    """The entry in a file. Raises ValueError that says what is wrong with it."""
    if not data.startswith(_MAGIC):
        raise ValueError("it does not begin as a plan does")
    checksum, body = data[len(_MAGIC) : _BODY], data[_BODY:]
    if sha256(body).digest() != checksum:
        raise ValueError("its checksum is another: it is damaged or cut off")
    try:
        return _ENTRY.validate_python(msgpack.unpackb(body))
    except ValidationError as error:
        raise ValueError(_reason(error)) from None
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"it is not MessagePack: {error}") from None


def to_line(entry: Entry) -> str:
    """A line of an export."""
    return entry.model_dump_json()


def from_line(line: str) -> Entry:
    """The entry in a line of an export. Raises ValueError that says what is wrong with it."""
    try:
        return _ENTRY.validate_json(line)
    except ValidationError as error:
        raise ValueError(_reason(error)) from None


def _reason(error: ValidationError) -> str:
    """The first fault; another format before all that follows from it."""
    faults = error.errors(include_url=False)
    fault = next((fault for fault in faults if "format" in fault["loc"]), faults[0])
    place = ".".join(str(part) for part in fault["loc"][1:])
    message = f"{fault['msg'][0].lower()}{fault['msg'][1:]}"
    return f"{place}: {message}" if place else message
