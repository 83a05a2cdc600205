"""A service in this process, on a unix socket, and an HTTP client that says anything to it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import uvicorn
from matmuld.http.app import Application
from matmuld.http.connection import Connection
from matmuld.settings import Settings

from .reference import DTYPES, FLOAT8, Host

MSGPACK = "application/msgpack"


@contextmanager
def running(path: Path, **settings: Any) -> Iterator[Application]:
    """The application, answering on the unix socket `path`."""
    app = Application(Settings(**settings))
    config = uvicorn.Config(
        app,
        http=Connection,
        lifespan="on",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the service did not start"
            thread.join(0.005)
        yield app
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


class UnixConnection(http.client.HTTPConnection):
    """http.client over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=30)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


@dataclass
class Answer:
    """A reply, not interpreted."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def header(self) -> dict[str, Any]:
        """The reply's header or problem document, whatever form it has."""
        if not self.body:
            return {}
        if "json" in self.headers["content-type"]:
            document = json.loads(self.body)
        else:
            unpacker = msgpack.Unpacker()
            unpacker.feed(self.body)
            document = unpacker.unpack()
        assert isinstance(document, dict)
        return document

    @property
    def payloads(self) -> list[bytes]:
        unpacker = msgpack.Unpacker(max_buffer_size=0)
        unpacker.feed(self.body)
        return list(unpacker)[1:]

    def array(self, name: str) -> Host:
        """A result of the reply, from its payload."""
        return decoded(self.header[name], self.payloads)


def decoded(tensor: dict[str, Any], payloads: list[bytes]) -> Host:
    dtypes = {**DTYPES, **FLOAT8, "uint8": np.dtype(np.uint8), "bool": np.dtype(np.bool_)}
    dtype = dtypes[tensor["dtype"]]
    flat = np.frombuffer(payloads[tensor["payload"]], dtype)
    if "strides" not in tensor:
        return flat.reshape(tensor["shape"])
    strides = [stride * dtype.itemsize for stride in tensor["strides"]]
    return np.lib.stride_tricks.as_strided(flat, tensor["shape"], strides)


class Wire:
    """Says what it is told to a service, over one connection."""

    def __init__(self, path: Path | str) -> None:
        self._connection = UnixConnection(str(path))

    def close(self) -> None:
        self._connection.close()

    def request(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        self._connection.request(method, path, body, headers or {})
        reply = self._connection.getresponse()
        named = {name.lower(): value for name, value in reply.getheaders()}
        return Answer(reply.status, named, reply.read())

    def send(self, path: str, header: object, *payloads: bytes, method: str = "POST") -> Answer:
        """A msgpack request."""
        body = packed(header, *payloads)
        return self.request(method, path, body, {"Content-Type": MSGPACK})

    def get(self, path: str) -> dict[str, Any]:
        answer = self.request("GET", path)
        assert answer.status == 200, answer
        return answer.header

    def hold(self, array: Host, **more: Any) -> str:
        """The handle of a tensor with these contents."""
        answer = self.send(
            "/v1/tensors",
            {"value": tensor(array, 0), **more},
            np.ascontiguousarray(array).tobytes(),
        )
        assert answer.status == 201, answer
        return str(answer.header["tensor"])


def packed(header: object, *payloads: bytes) -> bytes:
    """A body as docs/protocol.md says, by msgpack alone."""
    return b"".join(
        [msgpack.packb(header), *(msgpack.packb(part, use_bin_type=True) for part in payloads)]
    )


def tensor(array: Host, payload: int, **more: Any) -> dict[str, Any]:
    """The description of a row-major array whose bytes are payload `payload`."""
    return {"dtype": array.dtype.name, "shape": list(array.shape), "payload": payload, **more}


def raw(array: Host) -> bytes:
    return np.ascontiguousarray(array).tobytes()
