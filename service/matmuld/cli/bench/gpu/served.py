"""matmuld as a service: a child process, and connections on its unix socket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import Any

from matmuld_client import Client
from matmuld_client.wire import MSGPACK, Buffer, pack, unpack

from ...server import child
from ..load import Wire, post_request

_REPLY_BYTES = 1 << 24
"""More than any reply that is measured."""

Request = list[bytes]


@dataclass(frozen=True)
class Service:
    """A running service, and a client of it."""

    client: Client
    address: str

    @contextmanager
    def connections(self, count: int) -> Iterator[list[Wire]]:
        wires = [Wire(self.address, _REPLY_BYTES) for _ in range(count)]
        with ExitStack() as stack:
            for wire in wires:
                stack.enter_context(wire)
            yield wires


@contextmanager
def serving(device: str, *flags: str) -> Iterator[Service]:
    """A service on an address of its own."""
    with TemporaryDirectory(prefix="matmuld-") as folder:
        address = f"unix:{folder}/matmuld"
        with child(device, "--listen", address, *flags) as client:
            yield Service(client, address)


def request(operation: str, header: dict[str, Any], payload: Buffer | None = None) -> Request:
    """A request, ready made."""
    body = pack(header, [] if payload is None else [payload])
    return post_request(f"/v1/{operation}", MSGPACK, b"".join(body))


def back_to_back(wires: Sequence[Wire], requests: Sequence[Request], count: int) -> BackToBack:
    """Send `count` requests over every connection, each after the reply to the one before."""
    with ThreadPoolExecutor(len(wires)) as threads:
        began = perf_counter_ns()
        pending = [
            threads.submit(_repeat, wire, one, count)
            for wire, one in zip(wires, requests, strict=True)
        ]
        replies = [reply for future in pending for reply in future.result()]
        took = perf_counter_ns() - began
    return BackToBack(took / 1e3 / len(replies), replies)


@dataclass(frozen=True)
class BackToBack:
    """What went by for one of many requests, and all replies."""

    us: float
    replies: list[bytes]

    def handles(self, name: str) -> list[str]:
        """The tensors that the replies tell under that name."""
        headers = [unpack(reply)[0] for reply in self.replies]
        return [header[name]["tensor"] for header in headers if name in header]


def _repeat(wire: Wire, one: Request, count: int) -> list[bytes]:
    return [bytes(wire.post(one)) for _ in range(count)]
