"""What all requests of one client share: connections, the time allowed, and what is to be freed."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgpack

from . import wire
from ._http import Reply
from ._pool import Transport
from .errors import BY_CODE, Gone, RequestError, TransportError, UnknownHandle
from .wire import Buffer

Answer = tuple[dict[str, Any], list[memoryview]]
"""A reply's header and payloads."""

_ACCEPT = f"Accept: {wire.MSGPACK}\r\n"
_MSGPACK_FIELDS = f"{_ACCEPT}Content-Type: {wire.MSGPACK}\r\n"
_LAST_SECONDS = 2.0  # allowed for freeing what nobody closed, when it is collected or at exit


class Channel:
    """Requests to one service, their errors raised as exceptions.

    A client and its tensors share it. When the last of them is collected, and at the latest at the
    end of the program, what it owns is freed as by `close`, but faster and without a word.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._transport = Transport(url)
        self._timeout = timeout
        self._owned: dict[str, int] = {}  # handle: the process that came by it
        self._discarded: deque[str] = deque()
        self._finalizer = weakref.finalize(self, _finalize, self._transport, self._owned)

    def post(
        self,
        target: str,
        header: dict[str, Any],
        payloads: Sequence[Buffer] = (),
        *,
        method: str = "POST",
        fields: str = "",
        timeout: float | None = None,
    ) -> Answer:
        """The answer to a request in MessagePack; `fields` are further header lines."""
        body, fields = wire.pack(header, payloads), _MSGPACK_FIELDS + fields
        return answer(self.request(method, target, fields, body, timeout=timeout))

    def get(self, target: str, *, method: str = "GET") -> Answer:
        return answer(self.request(method, target, _ACCEPT))

    def request(
        self,
        method: str,
        target: str,
        fields: str,
        body: Sequence[Buffer] = (),
        *,
        timeout: float | None = None,
    ) -> Reply:
        """A reply of status 2xx; `fields` are header lines.

        Raises:
            RequestError: the service refused; its subclass says why.
            TransportError: no answer came, or not in time.
        """
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        if self._discarded:
            self._free_discarded(deadline)
        reply = self._transport.request(method, target, fields, body, deadline)
        if not 200 <= reply.status < 300:
            raise _error(reply)
        return reply

    def own(self, handle: str) -> None:
        """From now on `handle` is freed at the latest with the channel."""
        self._owned[handle] = os.getpid()

    def disown(self, handle: str) -> None:
        self._owned.pop(handle, None)

    def discard(self, handle: str) -> None:
        """Have `handle` freed with the next request; safe in a finalizer, since it does no more.

        A copy that a forked child inherited, and now drops, is not the child's to free.
        """
        if self._owned.get(handle) == os.getpid():
            self._discarded.append(handle)

    def free(self, handle: str) -> None:
        _free(self._transport, handle, time.monotonic() + self._timeout)
        self.disown(handle)

    def close(self) -> None:
        """Free what this process owns, as far as the service can be reached, and disconnect."""
        self._finalizer.detach()
        _close(self._transport, self._owned, time.monotonic() + self._timeout)

    def _free_discarded(self, deadline: float) -> None:
        """Free what was collected. What the service refuses to free is left to its time to live:
        that is no fault of the request which comes along.
        """
        while True:
            try:
                handle = self._discarded.pop()
            except IndexError:  # another thread may have taken the last
                return
            if self._owned.get(handle) != os.getpid():  # inherited by a forked child
                continue
            try:
                with suppress(RequestError):
                    _free(self._transport, handle, deadline)
            except TransportError:
                self._discarded.append(handle)
                raise
            self.disown(handle)


def _finalize(transport: Transport, owned: dict[str, int]) -> None:
    with suppress(Exception):  # nobody is left to be told
        _close(transport, owned, time.monotonic() + _LAST_SECONDS)


def _close(transport: Transport, owned: dict[str, int], deadline: float) -> None:
    try:
        for handle, process in list(owned.items()):
            if process == os.getpid():
                with suppress(RequestError):
                    _free(transport, handle, deadline)
    except TransportError:
        pass  # the service is away; time will free them
    finally:
        transport.close()


def _free(transport: Transport, handle: str, deadline: float) -> None:
    reply = transport.request("DELETE", f"/v1/tensors/{handle}", _ACCEPT, (), deadline)
    if not 200 <= reply.status < 300:
        error = _error(reply)
        if not isinstance(error, Gone | UnknownHandle):
            raise error


def answer(reply: Reply) -> Answer:
    """Header and payloads of a reply in MessagePack; both empty if it has no body."""
    if not reply.body:
        return {}, []
    try:
        return wire.unpack(reply.body)
    except wire.WireError as error:
        raise TransportError(f"the reply is not as the protocol says: {error}") from error


def _error(reply: Reply) -> RequestError:
    problem = _problem(reply)
    code, detail = problem.get("code"), problem.get("detail")
    kind = BY_CODE.get(str(code))
    if kind is None:
        return RequestError(f"status {reply.status}, {code or 'no code'}: {detail}")
    error = kind(str(detail), operand=problem.get("operand"), request_id=problem.get("request_id"))
    if (seconds := reply.field("retry-after")).isdecimal():
        error.retry_after = int(seconds)
    return error


def _problem(reply: Reply) -> dict[str, Any]:
    """The problem document of a reply; its beginning as the detail if it has none."""
    read = msgpack.unpackb if "msgpack" in reply.field("content-type") else json.loads
    try:
        problem = read(bytes(reply.body))
    except ValueError:
        problem = None
    if isinstance(problem, dict):
        return problem
    return {"detail": bytes(reply.body[:200]).decode("utf-8", "replace")}
