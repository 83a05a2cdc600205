"""The transport against real sockets: what may go wrong on the way, and what must not."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matmuld_client import Timeout, TransportError
from matmuld_client._http import Reply
from matmuld_client._pool import Transport
from matmuld_client.wire import Buffer

from .loopback import Loopback, Peer, Serve, echo, loopback


def send(transport: Transport, *body: Buffer, method: str = "POST", within: float = 10.0) -> bytes:
    deadline = time.monotonic() + within
    return bytes(transport.request(method, "/v1/x", "", body, deadline).body)


@contextmanager
def connected(serve: Serve, path: Path | None = None) -> Iterator[tuple[Loopback, Transport]]:
    with loopback(serve, path) as server, closing(Transport(server.url)) as transport:
        yield server, transport


def test_requests_share_a_connection() -> None:
    with connected(echo) as (server, transport):
        assert [send(transport, b"%d" % i) for i in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
        assert len(server.connections) == 1


def test_a_unix_socket_serves_as_well(tmp_path: Path) -> None:
    with connected(echo, tmp_path / "socket") as (_, transport):
        assert send(transport, b"hello") == b"hello"


def test_a_name_with_an_address_that_refuses_is_tried_at_the_next() -> None:
    with loopback(echo) as server:  # listens on 127.0.0.1 only; localhost may be ::1 first
        transport = Transport(server.url.replace("127.0.0.1", "localhost"))
        assert send(transport, b"hello") == b"hello"
        transport.close()


def test_the_request_is_as_http_wants_it() -> None:
    with loopback(echo) as server:
        with closing(Transport(server.url + "/behind/a/proxy/")) as transport:
            send(transport, b"ab", b"", b"c")
        (request,) = server.requests
        assert (request.method, request.target) == ("POST", "/behind/a/proxy/v1/x")
        assert request.fields == {"host": server.url[len("http://") :], "content-length": "3"}


def answer_once(peer: Peer) -> None:
    if peer.request() is not None:
        peer.reply(b"once")


def test_a_connection_that_the_service_closed_while_idle_is_replaced() -> None:
    with connected(answer_once) as (server, transport):
        for _ in range(3):
            assert send(transport, b"x") == b"once"
            server.wait_until_closed()
        assert len(server.requests) == 3


def answer_then_hang_up(peer: Peer) -> None:
    """Answer the first request; read the second and say nothing."""
    answer_once(peer)
    peer.request()


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_what_may_run_twice_is_sent_again_if_a_kept_connection_breaks(method: str) -> None:
    with connected(answer_then_hang_up) as (server, transport):
        send(transport, b"first", method=method)
        assert send(transport, b"second", method=method) == b"once"
        assert [request.body for request in server.requests] == [b"first", b"second", b"second"]


def test_a_post_that_was_sent_is_not_sent_again() -> None:
    with connected(answer_then_hang_up) as (server, transport):
        send(transport, b"first")
        with pytest.raises(TransportError, match="closed the connection before") as caught:
            send(transport, b"second")
        assert type(caught.value) is TransportError
        assert [request.body for request in server.requests] == [b"first", b"second"]


def test_connection_close_is_honoured() -> None:
    def serve(peer: Peer) -> None:
        while peer.request() is not None:
            peer.reply(b"bye", more="Connection: close\r\n")

    with connected(serve) as (server, transport):
        assert [send(transport, b"x") for _ in range(3)] == [b"bye"] * 3
        assert len(server.connections) == 3


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1A;name=value\r\n, this is a longer chunk.\r\n\r\n0\r\nTrailer: x\r\n\r\n"
)
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-LENGTH:  5  \r\n\r\nhello"
REPLIES = {
    "chunked": (CHUNKED, b"hello, this is a longer chunk.\r\n"[:31]),
    "interim": (INTERIM + PLAIN, b"hello"),
    "plain": (PLAIN, b"hello"),
    "empty": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
}


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize(("reply", "body"), REPLIES.values(), ids=REPLIES.keys())
def test_a_reply_is_read_however_it_comes(reply: bytes, body: bytes, step: int) -> None:
    def serve(peer: Peer) -> None:
        while peer.request() is not None:
            for at in range(0, len(reply), step):
                peer.send(reply[at : at + step])
                time.sleep(1e-4)

    with connected(serve) as (server, transport):
        assert [send(transport, b"x") for _ in range(2)] == [body, body]
        assert len(server.connections) == 1


def test_a_chunked_reply_longer_than_any_buffer_comes_whole() -> None:
    chunk = bytes(range(256)) * 300

    def serve(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(20):
            peer.send(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        peer.send(b"0\r\n\r\n")

    with connected(serve) as (_, transport):
        assert send(transport, b"x") == chunk * 20


BROKEN = {
    "silence": (b"", "closed the connection before it answered"),
    "no http": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "no HTTP service"),
    "cut in the head": (b"HTTP/1.1 200 OK\r\nContent-Le", "closed the connection"),
    "cut in the body": (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhel", "broke off"),
    "cut in a chunk": (CHUNKED[:80], "broke off"),
    "no length": (b"HTTP/1.1 200 OK\r\n\r\nhello", "does not say how long"),
    "bad length": (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "does not say how long"),
    "bad chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", "how long"),
    "endless head": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000, "head of the reply is over"),
}


@pytest.mark.parametrize(("reply", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_reply_is_a_transport_error_and_ends_the_connection(
    reply: bytes, message: str
) -> None:
    def serve(peer: Peer) -> None:
        peer.request()
        peer.send(reply)

    with connected(serve) as (server, transport):
        for _ in range(2):
            with pytest.raises(TransportError, match=message) as caught:
                send(transport, b"x")
            assert type(caught.value) is TransportError
        assert len(server.connections) == 2


def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    def serve(peer: Peer) -> None:
        while peer.request() is not None:
            peer.send(PLAIN + PLAIN)

    with connected(serve) as (server, transport):
        assert [send(transport, b"x") for _ in range(2)] == [b"hello"] * 2
        assert len(server.connections) == 2


def test_a_service_that_is_not_there_is_a_transport_error(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="no connection to unix:"):
        send(Transport(f"unix:{tmp_path / 'nothing'}"), b"x")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(TransportError, match="no connection to http:"):
        send(Transport(f"http://127.0.0.1:{port}"), b"x")


@pytest.mark.parametrize(
    "url", ["https://host:1", "host:80", "ftp://host", "http://", "", "unix:", None]
)
def test_a_url_that_is_none_of_ours_is_refused_at_once(url: Any) -> None:
    with pytest.raises(ValueError, match="expected http"):
        Transport(url)


def test_after_close_nothing_is_sent() -> None:
    with connected(echo) as (_, transport):
        send(transport, b"x")
        transport.close()
        with pytest.raises(TransportError, match="client is closed"):
            send(transport, b"x")


def say_nothing(peer: Peer) -> None:
    peer.request()
    peer.request()


def dribble_a_head(peer: Peer) -> None:
    peer.request()
    peer.send(b"HTTP/1.1 200 OK\r\n")
    while True:
        peer.send(b"X: y\r\n")
        time.sleep(0.01)


def dribble_a_body(peer: Peer) -> None:
    peer.request()
    peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while True:
        peer.send(b"x")
        time.sleep(0.01)


def read_nothing(peer: Peer) -> None:
    time.sleep(0.5)


@pytest.mark.parametrize("serve", [say_nothing, dribble_a_head, dribble_a_body, read_nothing])
def test_one_deadline_holds_for_sending_and_every_part_of_the_reply(serve: Serve) -> None:
    with connected(serve) as (_, transport):
        began = time.monotonic()
        with pytest.raises(Timeout):
            send(transport, bytes(64 << 20), within=0.2)
        assert 0.19 < time.monotonic() - began < 5.0


def test_a_late_reply_is_not_taken_for_the_next_one() -> None:
    def serve(peer: Peer) -> None:
        while (request := peer.request()) is not None:
            time.sleep(0.3 if request.body == b"slow" else 0)
            peer.reply(request.body)

    with connected(serve) as (_, transport):
        with pytest.raises(Timeout):
            send(transport, b"slow", within=0.1)
        time.sleep(0.3)
        assert send(transport, b"quick") == b"quick"


def test_no_limit_is_a_time_too() -> None:
    with connected(echo) as (_, transport):
        assert send(transport, b"x", within=math.inf) == b"x"


def test_a_full_backlog_is_waited_for_within_the_deadline(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        with pytest.raises(Timeout):
            send(Transport(f"unix:{path}"), b"x", within=0.1)
        with ThreadPoolExecutor() as pool, closing(Transport(f"unix:{path}")) as transport:
            sending = pool.submit(send, transport, b"x")
            time.sleep(0.05)
            listener.accept()[0].close()
            accepted = listener.accept()[0]
            Peer(accepted, []).reply(b"served")
            assert sending.result() == b"served"
            accepted.close()


@pytest.mark.parametrize("unix", [False, True])
def test_a_large_body_goes_out_and_comes_back_whole(tmp_path: Path, unix: bool) -> None:
    def serve(peer: Peer) -> None:
        time.sleep(0.05)  # the client has to wait for room
        echo(peer)

    body = np.random.default_rng(0).integers(0, 256, 12_345_678, np.uint8)
    with connected(serve, tmp_path / "socket" if unix else None) as (_, transport):
        assert send(transport, body[:100].data, body[100:].data) == body.tobytes()


def test_more_parts_than_one_system_call_takes_are_all_sent() -> None:
    parts = [b"%d," % i for i in range(5000)]
    with connected(echo) as (_, transport):
        assert send(transport, *parts) == b"".join(parts)


@pytest.mark.parametrize("unix", [False, True])
@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_an_answer_that_comes_before_the_body_is_read_is_read(
    tmp_path: Path, unix: bool, delay: float
) -> None:
    def refuse(peer: Peer) -> None:
        peer.head()
        time.sleep(delay)
        peer.reply(b"too large", status=413)

    with connected(refuse, tmp_path / "socket" if unix else None) as (server, transport):
        for _ in range(2):
            reply = transport.request("POST", "/v1/x", "", [bytes(64 << 20)], time.monotonic() + 10)
            assert (reply.status, bytes(reply.body)) == (413, b"too large")
        assert len(server.connections) == 2


def test_threads_get_their_own_answers() -> None:
    def ask(transport: Transport, caller: int) -> list[bytes]:
        return [send(transport, b"%d.%d" % (caller, i)) for i in range(100)]

    with connected(echo) as (server, transport), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda caller: ask(transport, caller), range(8)))
        assert answers == [[b"%d.%d" % (caller, i) for i in range(100)] for caller in range(8)]
        assert len(server.connections) <= 8


FORK = """
import os, sys, time
from matmuld_client._pool import Transport

transport = Transport(sys.argv[1])
def ask(who):
    for i in range(100):
        body = b"%s %d" % (who, i)
        assert transport.request("POST", "/", "", [body], time.monotonic() + 10).body == body
ask(b"before")
child = os.fork()
ask(b"child" if child == 0 else b"parent")
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
ask(b"after")
"""


def test_a_forked_child_uses_a_connection_of_its_own() -> None:
    with loopback(echo) as server:
        subprocess.run([sys.executable, "-c", FORK, server.url], check=True, timeout=30)
        assert len(server.connections) == 2
        assert len(server.requests) == 400


def test_header_fields_are_found_by_their_whole_name() -> None:
    reply = Reply("http/1.1 200 ok\r\nx-content-length: 1\r\ncontent-length: 2\r\nlast: 3")
    assert [reply.field(name) for name in ("content-length", "last", "length")] == ["2", "3", ""]


def test_the_last_payload_of_a_body_is_aligned() -> None:
    with connected(echo) as (_, transport):
        for length in (64, 65, 71, 100_003):
            deadline = time.monotonic() + 10
            reply = transport.request("POST", "/", "", [bytes(length)], deadline)
            payload = np.frombuffer(reply.body[-64:], np.uint8)
            assert payload.ctypes.data % 16 == 0
