"""One HTTP request and its reply: bytes to header and payloads, results or a problem to bytes.

Below FastAPI's dependency layer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import reprlib
import secrets
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgpack
import numpy as np
from matmuld_client.errors import (
    LengthRequired,
    Malformed,
    RequestError,
    TooLarge,
    UnsupportedMediaType,
)
from matmuld_client.wire import (
    JSON,
    MSGPACK,
    OCTETS,
    PAYLOAD_LIMIT,
    Buffer,
    WireError,
    octets,
    pack,
    unpack_header,
    unpack_payloads,
)
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from ..calls import Timing
from ..operations.program import STEPS
from ..recordings import JOIN_BYTES
from ..scheduler import PRIORITIES, USUAL, Urgency
from ..schemas import Header

H = TypeVar("H", bound=Header)
T = TypeVar("T")

JSON_LIMIT = 1 << 24
"""Bytes of a JSON body, and of a tensor in a JSON reply: base64 takes the whole service's time."""
HANG_UP_TURNS = 8
"""Turns of the event loop until a client that has hung up is noticed; uvloop takes 4 or 5."""
UNION_MEMBERS = ("literal['payload','tensor']", "Into", "[key]", "str", "StepOutput")
"""What pydantic adds to the place of an error."""
WORDING = {
    "missing": "expected, is missing",
    "extra_forbidden": "unknown field",
    "union_tag_invalid": f"expected as operation one of {', '.join(STEPS)}",
    "union_tag_not_found": f"expected as operation one of {', '.join(STEPS)}",
    "model_type": "expected a map",
    "model_attributes_type": "expected a map",
}
DEPTHS: dict[int | str, int] = {"steps": 2, "layers": 3, "options": 2, "outputs": 2}
"""How many parts of a place name an operand, where it is not the first alone."""

_PROCESS = secrets.token_hex(4)
_COUNTER = itertools.count(1)


class Disconnected(Exception):
    """The client went away before its request was read."""


class Exchange:
    """A request being answered.

    Attributes:
        form: the media type of the reply, `application/msgpack` or `application/json`.
        started: whether the reply has begun, so that no other can be given.
        grown: told of the bytes of a body of unknown length, as they come.
    """

    __slots__ = (
        "_limit",
        "_receive",
        "_send",
        "accept",
        "content_type",
        "deadline",
        "encoding",
        "form",
        "grown",
        "length",
        "priority",
        "request_id",
        "scope",
        "started",
        "tenant",
        "timing",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, limit: int, tenant: str) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._limit = limit
        self.tenant = tenant
        self.timing: Timing | None = None
        self.started = False
        self.content_type = self.accept = self.encoding = ""
        self.request_id = ""
        self.deadline = self.priority = b""
        self.length: int | None = None
        self.grown: Callable[[int], None] | None = None
        for name, value in scope["headers"]:
            if name == b"content-type":
                if value == b"application/msgpack":
                    self.content_type = MSGPACK
                    continue
                self.content_type = value.decode("latin-1").partition(";")[0].strip().lower()
            elif name == b"content-length":
                self.length = int(value)
            elif name == b"accept":
                self.accept = value.decode("latin-1").lower()
            elif name == b"content-encoding":
                self.encoding = value.decode("latin-1")
            elif name == b"x-request-id":
                self.request_id = _visible(value)
            elif name == b"x-deadline-ms":
                self.deadline = value
            elif name == b"x-priority":
                self.priority = value
        if not self.request_id:
            self.request_id = f"{_PROCESS}-{next(_COUNTER)}"
        packed = self.content_type == MSGPACK or (
            self.content_type != JSON and MSGPACK in self.accept
        )
        self.form = MSGPACK if packed else JSON

    @property
    def path(self) -> dict[str, str]:
        """The variable parts of the path."""
        return dict(self.scope.get("path_params", {}))

    @property
    def payload_limit(self) -> int:
        """Bytes that a tensor in the reply may have."""
        return JSON_LIMIT if self.form == JSON else PAYLOAD_LIMIT

    def query(self) -> dict[str, str]:
        """The query parameters. Raises Malformed if one is given twice."""
        text = self.scope["query_string"].decode("latin-1")
        given = parse_qsl(text, keep_blank_values=True)
        named = dict(given)
        if len(named) < len(given):
            twice = next(name for name, _ in given if sum(n == name for n, _ in given) > 1)
            raise Malformed(f"{twice[:40]}: expected one query parameter of that name, got more")
        return named

    def urgency(self) -> Urgency:
        """What the headers `X-Deadline-Ms` and `X-Priority` say. Raises Malformed."""
        if not self.deadline and not self.priority:
            return USUAL
        priority = (self.priority or b"interactive").decode("latin-1")
        if priority not in PRIORITIES:
            expected = " or ".join(PRIORITIES)
            raise Malformed(f"X-Priority: expected {expected}, got {priority[:40]!r}")
        if not self.deadline:
            return Urgency(PRIORITIES.index(priority))
        if not re.fullmatch(rb"0*[1-9][0-9]{0,8}", self.deadline):
            came = self.deadline[:40].decode("latin-1")
            raise Malformed(f"X-Deadline-Ms: expected an integer from 1 to 999999999, got {came!r}")
        return Urgency(PRIORITIES.index(priority), monotonic() + int(self.deadline) / 1e3)

    async def wait_for(self, future: asyncio.Future[T]) -> T:
        """The result of `future`. Raises Disconnected as soon as the client hangs up."""
        hearing = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((future, hearing), return_when=asyncio.FIRST_COMPLETED)
            if hearing.done() and hearing.result()["type"] == "http.disconnect":
                raise Disconnected
            return await future
        finally:
            hearing.cancel()

    async def is_abandoned(self) -> bool:
        """Whether the client has hung up, which is the next that the server hears of it.

        The server must be let to read again, to read, and to close: that takes turns of the loop.
        """
        hearing = asyncio.ensure_future(self._receive())
        for _ in range(HANG_UP_TURNS):
            await asyncio.sleep(0)
        if not hearing.done():
            hearing.cancel()
            return False
        return bool(hearing.result()["type"] == "http.disconnect")

    async def decode(self, model: type[H]) -> tuple[H, list[memoryview]]:
        """The header as `model`, and the payloads.

        Raises:
            TooLarge, UnsupportedMediaType, Malformed: the body is not that.
        """
        self.check_body()
        header, payloads, _ = self.understand(model, memoryview(await self.body()))
        return header, payloads

    def understand(self, model: type[H], body: memoryview) -> tuple[H, list[memoryview], int]:
        """The header of a body as `model`, its payloads, and where the header ends.

        Raises:
            Malformed: the body is not that.
        """
        payloads: list[memoryview] = []
        end = len(body)
        try:
            if self.content_type == MSGPACK:
                header, end = unpack_header(body)
                payloads = self.payloads(body, end)
            else:
                header = json.loads(bytes(body), parse_constant=_no_constant)
        except WireError as error:
            raise Malformed(str(error)) from None
        except RecursionError:
            raise Malformed("the header is nested too deeply") from None
        except ValueError as error:
            raise Malformed(f"the body is not JSON: {error}") from None
        return validated(model, header), payloads, end

    def payloads(self, body: memoryview, end: int) -> list[memoryview]:
        """The payloads of a body whose header ends at `end`. Raises Malformed."""
        try:
            return unpack_payloads(body, end)
        except WireError as error:
            raise Malformed(str(error)) from None

    def check_body(self) -> None:
        """Raise UnsupportedMediaType or TooLarge for a body that is not worth reading."""
        length = self.length or 0
        if self.content_type == MSGPACK and not self.encoding and length <= self._limit:
            return
        if self.content_type not in (MSGPACK, JSON):
            raise UnsupportedMediaType(
                f"expected Content-Type {MSGPACK} or {JSON}, got {self.content_type[:80]!r}"
            )
        self.refuse_encoding()
        if self.content_type == JSON:
            self._limit = min(self._limit, JSON_LIMIT)
        if length > self._limit:
            raise self._too_large(f"{length} bytes")

    async def body(self) -> bytes | bytearray:
        """The whole body of a msgpack or JSON request, which has been checked."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            body = bytes(message.get("body", b""))
            if self.length is None and self.grown is not None:
                self.grown(len(body))
            return body
        if self.length is not None:
            return await self._fill(message)
        return await self._gather(message)

    def refuse_encoding(self) -> None:
        """Raise UnsupportedMediaType for a compressed body."""
        if self.encoding not in ("", "identity"):
            raise UnsupportedMediaType(f"expected no Content-Encoding, got {self.encoding[:40]!r}")

    async def _fill(self, message: Any) -> bytearray:
        """A body of known length, read into one buffer."""
        assert self.length is not None
        buffer = bytearray(self.length)
        at = 0
        async for chunk in self._chunks(message):
            buffer[at : at + len(chunk)] = chunk
            at += len(chunk)
        if at != self.length:
            raise Malformed(f"expected {self.length} bytes (Content-Length), got {at}")
        return buffer

    def _too_large(self, came: str) -> TooLarge:
        hint = "JSON bodies; MessagePack has more" if self.content_type == JSON else "--body-limit"
        return TooLarge(f"expected a body of at most {self._limit} bytes ({hint}), got {came}")

    async def _gather(self, message: Any) -> bytearray:
        buffer = bytearray()
        async for chunk in self._chunks(message):
            buffer += chunk
            if len(buffer) > self._limit:
                raise self._too_large("more")
            if self.grown is not None:
                self.grown(len(chunk))
        return buffer

    async def _chunks(self, message: Any = None) -> AsyncIterator[bytes]:
        while True:
            if message is None:
                message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            if chunk := message.get("body"):
                yield chunk
            if not message.get("more_body"):
                return
            message = None

    def stream(self, nbytes: int) -> AsyncIterator[bytes]:
        """The chunks of a raw body that is to have `nbytes` bytes, refused if it says otherwise.

        Raises:
            LengthRequired, Malformed: the length is missing or another.
        """
        self.refuse_encoding()
        if self.length is None:
            raise LengthRequired("tensor: expected a Content-Length with a raw body, got none")
        if self.length != nbytes:
            raise Malformed(
                f"tensor: expected a body of {nbytes} bytes, Content-Length is {self.length}",
                operand="tensor",
            )
        return self._chunks()

    async def reply(
        self,
        header: dict[str, Any],
        arrays: Sequence[np.ndarray[Any, Any]] = (),
        status: int = 200,
    ) -> None:
        """Answer with a header and payloads."""
        payloads = [octets(array) for array in arrays]
        if self.form == MSGPACK:
            await self.reply_parts(pack(header, payloads), status)
        else:
            await self.reply_parts([json.dumps(_inlined(header, payloads)).encode()], status)

    async def reply_parts(self, parts: Sequence[Buffer], status: int = 200) -> None:
        """Answer with a body in the form that was asked for; return once the client has taken
        it, but for what the connection holds anyway.
        """
        nbytes = sum(map(len, parts))
        await self._start(status, self.form, nbytes)
        if nbytes <= JOIN_BYTES:
            joined = b"".join(parts)
            await self._send({"type": "http.response.body", "body": joined, "more_body": False})
            return
        for part in parts:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
        await self._end()

    async def problem(self, error: RequestError, extra: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Answer with a problem document."""
        document = error.problem(self.request_id)
        if self.form == MSGPACK:
            body, form = msgpack.packb(document), "application/problem+msgpack"
        else:
            body, form = json.dumps(document).encode(), "application/problem+json"
        if error.retry_after is not None:
            extra = [*extra, (b"retry-after", b"%d" % error.retry_after)]
        if any(name == b"expect" for name, _ in self.scope["headers"]):
            extra = [*extra, (b"connection", b"close")]  # nobody knows whether the body will come
        await self._start(error.status, form, len(body), extra)
        await self._end(body)

    async def empty(self, status: int = 204) -> None:
        """Answer without a body."""
        await self._start(status, None, None)
        await self._end()

    async def raw(
        self, chunks: AsyncIterator[memoryview], nbytes: int, headers: dict[str, str]
    ) -> None:
        """Answer with `nbytes` raw bytes, as they come, while the client takes them."""
        extra = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._start(200, OCTETS, nbytes, extra)
        async for chunk in chunks:
            if await self.is_abandoned():
                raise Disconnected
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._end()

    async def _start(
        self,
        status: int,
        form: str | None,
        nbytes: int | None,
        extra: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        headers = [(b"x-request-id", self.request_id.encode()), *extra]
        if form is not None:
            headers.append((b"content-type", form.encode()))
        if nbytes is not None:
            headers.append((b"content-length", b"%d" % nbytes))
        if (t := self.timing) is not None:
            text = b"queue;dur=%.3f, plan;dur=%.3f, compute;dur=%.3f, copy;dur=%.3f" % (
                t.queue * 1e3,
                t.plan * 1e3,
                t.compute * 1e3,
                t.copy * 1e3,
            )
            headers.append((b"server-timing", text))
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _end(self, body: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def validated(model: type[H], header: object) -> H:
    """`header` as `model`. Raises Malformed that names the field at fault."""
    try:
        return model.model_validate(header)
    except ValidationError as error:
        # A placement is a word or a map: the deepest error is that of the form that was meant.
        fault = max(error.errors(include_url=False), key=lambda fault: len(fault["loc"]))
        parts = [part for part in fault["loc"] if part not in UNION_MEMBERS]
        inside = 0
        if parts[:1] == ["steps"]:  # the operation, and `header` if it is about a field of that
            del parts[2 : 4 if len(parts) > 4 else 3]
            inside = 2 if len(parts) > 2 else 0
        expected = re.sub(r"^\w+ should (be|have)", "expected", fault["msg"])
        came = "" if fault["type"] == "missing" else f", got {reprlib.repr(fault['input'])}"
        raise Malformed(
            f"{_location(parts) or 'header'}: {WORDING.get(fault['type'], expected)}{came}",
            operand=_location(parts[: inside + DEPTHS.get(parts[inside], 1)]) if parts else None,
        ) from None


def _location(parts: Sequence[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")[:160]


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _inlined(header: Any, payloads: Sequence[memoryview]) -> Any:
    """The header with payloads in base64, as JSON has them."""
    if isinstance(header, list):
        return [_inlined(part, payloads) for part in header]
    if not isinstance(header, dict):
        return header
    inlined = {name: _inlined(part, payloads) for name, part in header.items()}
    if isinstance(index := inlined.get("payload"), int):
        del inlined["payload"]
        inlined["data"] = b64encode(payloads[index]).decode()
    return inlined


def _visible(value: bytes) -> str:
    """A request id as it came, or nothing if it is not 1 to 128 visible ASCII characters."""
    if 1 <= len(value) <= 128 and all(0x21 <= byte <= 0x7E for byte in value):
        return value.decode("ascii")
    return ""
