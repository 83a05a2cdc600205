"""uvicorn's connections, which wait for their clients, but not for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from matmuld_client.errors import RequestTimeout
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from .exchange import Exchange

HEAD_LIMIT = 1 << 16
"""Bytes of a request line and its header fields, but for those that came at once."""
LOOKS = 8
"""How often a connection is looked at within the time that its client has."""


class Pace:
    """Whether bytes pass: some within every `patience` seconds, and once these have gone by `rate`
    a second over the whole.
    """

    __slots__ = ("_began", "_last", "_patience", "_rate", "_start", "_total")

    def __init__(self, patience: float, rate: int) -> None:
        self._patience = patience
        self._rate = rate
        self._began = self._last = 0.0
        self._start = 0
        self._total: int | None = None

    def reset(self) -> None:
        """Nothing is to pass."""
        self._total = None

    def keeps(self, now: float, total: int) -> bool:
        """Whether it is kept, when `total` bytes have passed."""
        if self._total is None:
            self._began = self._last = now
            self._start = total
        elif total != self._total:
            self._last = now
        self._total = total
        over = now - self._began - self._patience
        return now - self._last < self._patience and total - self._start >= self._rate * over


class Connection(HttpToolsProtocol):
    """Closed if its client is silent or too slow where something is awaited of it: a request, the
    rest of one, or that it takes its reply. The application's settings say how long.

    uvicorn alone waits for ever for the end of a head or body, and for a reply to be taken.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        settings = config.app.settings  # type: ignore[union-attr]
        self._reading = Pace(settings.read_timeout_s, settings.min_rate)
        self._writing = Pace(settings.write_timeout_s, settings.min_rate)
        self._interval = min(settings.read_timeout_s, settings.write_timeout_s, LOOKS) / LOOKS
        self._look_handle: asyncio.TimerHandle | None = None
        self._received = 0
        self._message: object = None
        self._head: int | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # or it would keep the last request until it is due
        if self._look_handle is not None:
            self._look_handle.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:
            self._head = None
        elif self._within_head:
            self._head = 0 if self._head is None else self._head + len(data)
            if self._head > HEAD_LIMIT:
                self._refuse(431, f"The head of the request is over {HEAD_LIMIT} bytes.")

    @property
    def _within_head(self) -> bool:
        """Whether a request's head has begun to come, but not ended."""
        scope = self.scope
        return scope is not None and (self.cycle is None or self.cycle.scope is not scope)

    def _look(self) -> None:
        """See that bytes pass; again and again."""
        now = self.loop.time()
        self._look_handle = self.loop.call_later(self._interval, self._look)
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent > self._unsent:
            self._writing.reset()
        self._unsent = unsent
        if unsent and not self._writing.keeps(now, -unsent):
            self.transport.abort()
            return
        if self.transport.is_closing():
            return
        cycle = self.cycle
        awaited = cycle is None or cycle.response_complete or cycle.more_body
        if not awaited or self.flow.read_paused or self.scope is not self._message:
            self._reading.reset()
        self._message = self.scope
        if awaited and not self.flow.read_paused and not self._reading.keeps(now, self._received):
            self._time_out()

    def _time_out(self) -> None:
        """Answer what has come of a request, and close."""
        cycle = self.cycle
        if self._within_head:
            self._refuse(408, "The request did not come to its end in time.")
        elif cycle is None or cycle.response_started:
            self.transport.close()
        else:
            problem = RequestTimeout("the body came too slowly, or not to its end")
            exchange = Exchange(cycle.scope, cycle.receive, cycle.send, 0, "")  # type: ignore[arg-type]
            answering = self.loop.create_task(
                exchange.problem(problem, [(b"connection", b"close")])
            )
            self.tasks.add(answering)
            answering.add_done_callback(self.tasks.discard)

    def _refuse(self, status: int, text: str) -> None:
        """Answer in plain text, as the parser does, and close; not into another's reply."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        head = f"content-type: text/plain\r\ncontent-length: {len(text)}\r\nconnection: close"
        self.transport.write(STATUS_LINE[status] + f"{head}\r\n\r\n{text}".encode())
        self.transport.close()
