"""A real HTTP server on a local socket whose replies the test writes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from matmuld_client import wire


@dataclass(frozen=True)
class Recorded:
    """A request as it came."""

    method: str
    target: str
    fields: dict[str, str]
    body: bytes


class Peer:
    """The server's end of one connection."""

    def __init__(self, sock: socket.socket, record: list[Recorded]) -> None:
        self.sock = sock
        self._file = sock.makefile("rb")
        self._record = record

    def head(self) -> Recorded | None:
        """The head of the next request; None at the end of the connection."""
        line = self._file.readline().decode()
        if not line:
            return None
        method, target, _ = line.split(" ")
        fields = {}
        while (line := self._file.readline().decode().strip()) != "":
            name, _, value = line.partition(": ")
            fields[name.lower()] = value
        return Recorded(method, target, fields, b"")

    def request(self) -> Recorded | None:
        """The next request, which is recorded; None at the end of the connection."""
        head = self.head()
        if head is None:
            return None
        body = self._file.read(int(head.fields["content-length"]))
        request = Recorded(head.method, head.target, head.fields, body)
        self._record.append(request)
        return request

    def reply(
        self, body: bytes = b"", status: int = 200, kind: str = wire.MSGPACK, more: str = ""
    ) -> None:
        self.send(
            f"HTTP/1.1 {status} -\r\nContent-Length: {len(body)}\r\n"
            f"Content-Type: {kind}\r\n{more}\r\n".encode()
            + body
        )

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def close(self) -> None:
        self._file.close()
        self.sock.close()


Serve = Callable[[Peer], None]


@dataclass
class Loopback:
    """Runs `serve` for every connection, in a thread of its own; the connection ends with it."""

    listener: socket.socket
    serve: Serve
    url: str
    requests: list[Recorded] = field(default_factory=list)
    connections: list[threading.Thread] = field(default_factory=list)
    _peers: list[Peer] = field(default_factory=list)

    def accept(self) -> None:
        with suppress(OSError):  # closed by the test
            while True:
                sock, _ = self.listener.accept()
                peer = Peer(sock, self.requests)
                thread = threading.Thread(target=self._run, args=(peer,))
                self._peers.append(peer)
                self.connections.append(thread)
                thread.start()

    def wait_until_closed(self) -> None:
        """Wait for the end of the connections that there are."""
        for thread in self.connections:
            thread.join()

    def stop(self) -> None:
        with suppress(OSError):  # stopped before
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for peer in self._peers:
            with suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)
        self.wait_until_closed()

    def _run(self, peer: Peer) -> None:
        with suppress(ConnectionError):  # the client hung up
            self.serve(peer)
        peer.close()


@contextmanager
def loopback(serve: Serve, path: Path | None = None, backlog: int = 16) -> Iterator[Loopback]:
    """A server on the unix socket `path`, or on a free port of the loopback interface."""
    if path is None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(backlog)
        url = f"unix:{path}"
    server = Loopback(listener, serve, url)
    accepting = threading.Thread(target=server.accept)
    accepting.start()
    try:
        yield server
    finally:
        server.stop()
        accepting.join()


def echo(peer: Peer) -> None:
    """Answer every request with its own body."""
    while (request := peer.request()) is not None:
        peer.reply(request.body)
