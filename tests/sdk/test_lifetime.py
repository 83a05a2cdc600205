"""What the client frees, when, and what it leaves alone."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np
import pytest
from matmuld_client import Client, Gone, InvalidOperands, RemoteTensor, TransportError, wire

from .loopback import Loopback, Peer, loopback

ARRAY = np.zeros((2, 3), np.float32)
METADATA = {"dtype": "float32", "shape": [2, 3], "kind": "tensor"}


@contextmanager
def storing(gone: frozenset[str] = frozenset()) -> Iterator[tuple[Loopback, Client]]:
    """A service that stores and frees, and a client; handles are t0, t1, …"""
    handles = count()

    def serve(peer: Peer) -> None:
        while (request := peer.request()) is not None:
            handle = request.target.rpartition("/")[2]
            if request.method == "DELETE" and handle in gone:
                problem = {"code": "gone", "detail": "gone", "status": 410}
                peer.reply(json.dumps(problem).encode(), 410, "application/problem+json")
            elif request.method == "DELETE":
                peer.reply(status=204)
            else:
                handle = f"t{next(handles)}" if request.method == "POST" else "shared"
                peer.reply(b"".join(wire.pack({"tensor": handle, **METADATA})))

    with loopback(serve) as server, Client(server.url) as client:
        yield server, client


def freed(server: Loopback) -> list[str]:
    return [r.target.rpartition("/")[2] for r in server.requests if r.method == "DELETE"]


def test_a_with_block_frees_at_its_end() -> None:
    with storing() as (server, client):
        with client.put(ARRAY):
            assert freed(server) == []
        assert freed(server) == ["t0"]


def test_freeing_twice_is_once() -> None:
    with storing() as (server, client):
        tensor = client.put(ARRAY)
        tensor.free()
        tensor.free()
        del tensor
        client.put(ARRAY).release()
        assert freed(server) == ["t0"]


def test_a_collected_tensor_is_freed_with_the_next_request_and_not_before() -> None:
    with storing() as (server, client):
        tensor = client.put(ARRAY)
        del tensor
        gc.collect()
        assert freed(server) == []
        client.tensor("shared")
        assert freed(server) == ["t0"]
        client.tensor("shared")
        assert freed(server) == ["t0"]


def test_a_view_keeps_its_tensor() -> None:
    with storing() as (server, client):
        view = client.put(ARRAY).T
        gc.collect()
        client.tensor("shared")
        assert freed(server) == []
        del view
        gc.collect()
        client.tensor("shared")
        assert freed(server) == ["t0"]


def test_closing_frees_what_is_left_and_was_not_released() -> None:
    with storing() as (server, client):
        kept = [client.put(ARRAY), client.put(ARRAY), client.put(ARRAY)]
        assert kept[1].release() == "t1"
        client.tensor("shared")
        client.close()
        assert sorted(freed(server)) == ["t0", "t2"]


def test_a_tensor_of_another_client_is_freed_only_on_demand() -> None:
    with storing() as (server, client):
        client.tensor("shared")
        gc.collect()
        client.put(ARRAY).release()
        assert freed(server) == []
        client.tensor("shared").free()
        assert freed(server) == ["shared"]


def test_what_is_gone_already_counts_as_freed() -> None:
    with storing(gone=frozenset({"t0", "t1"})) as (server, client):
        client.put(ARRAY).free()
        tensor = client.put(ARRAY)
        del tensor
        gc.collect()
        client.tensor("shared")
        assert freed(server) == ["t0", "t1"]


def use_handle(tensor: RemoteTensor) -> None:
    assert tensor.handle


def use_numpy(tensor: RemoteTensor) -> None:
    tensor.numpy()


def use_replace(tensor: RemoteTensor) -> None:
    tensor.replace(ARRAY)


def use_release(tensor: RemoteTensor) -> None:
    tensor.release()


@pytest.mark.parametrize("use", [use_handle, use_numpy, use_replace, use_release])
def test_use_after_free_is_told_without_asking_the_service(use: object) -> None:
    with storing() as (server, client):
        tensor = client.put(ARRAY)
        tensor.free()
        asked = len(server.requests)
        with pytest.raises(Gone, match="was freed"):
            use(tensor)  # type: ignore[operator]
        with pytest.raises(Gone, match="was freed"):
            client.linear(tensor, tensor.T)
        assert "freed" in repr(tensor)
        assert len(server.requests) == asked


def test_a_replacement_that_does_not_fit_is_refused_before_it_is_sent() -> None:
    with storing() as (server, client):
        tensor = client.put(ARRAY)
        asked = len(server.requests)
        for other in (ARRAY.T, ARRAY.astype(np.float64)):
            with pytest.raises(InvalidOperands, match=r"expected float32\(2, 3\), got float"):
                tensor.replace(other)
        assert len(server.requests) == asked


def test_a_service_that_went_away_does_not_disturb_closing() -> None:
    with storing() as (server, client):
        client.put(ARRAY)
        tensor = client.put(ARRAY)
        server.stop()
        with pytest.raises(TransportError):
            tensor.free()
        client.close()


def leave_all(url: str) -> None:
    client = Client(url)
    kept = client.put(ARRAY)
    assert client.put(ARRAY).shape == kept.shape
    client.put(ARRAY).release()


def test_what_a_function_leaves_is_freed_at_its_end() -> None:
    with storing() as (server, _):
        leave_all(server.url)
        assert sorted(freed(server)) == ["t0", "t1"]
        server.wait_until_closed()


def test_tensors_that_outlive_their_client_are_freed_with_the_last_of_them() -> None:
    with storing() as (server, _):
        client = Client(server.url)
        first, second = client.put(ARRAY), client.put(ARRAY).T
        del client, first
        assert freed(server) == []
        del second
        assert sorted(freed(server)) == ["t0", "t1"]
        server.wait_until_closed()


SCRIPT = """
import os, sys
import numpy as np
from matmuld_client import Client

client = Client(sys.argv[1], timeout=60)
array = np.zeros((2, 3), np.float32)
kept = client.put(array)
client.put(array).release()
last = client.put(array)
del last
"""
ENDS = {"": "", "sys.exit()": "", "raise KeyError('end')": "KeyError: 'end'"}


@pytest.mark.parametrize(("end", "says"), ENDS.items(), ids=["end", "exit", "uncaught"])
def test_what_a_script_leaves_is_freed_at_its_end(end: str, says: str) -> None:
    with storing() as (server, _):
        command = [sys.executable, "-c", SCRIPT + end, server.url]
        run = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert sorted(freed(server)) == ["t0", "t2"]
        assert run.stderr.strip().rpartition("\n")[2] == says


def test_a_service_that_is_gone_at_the_end_is_passed_over_in_silence() -> None:
    with storing() as (server, _):
        command = [sys.executable, "-c", SCRIPT + "print(flush=True); input()", server.url]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as script:
            assert script.stdout is not None
            script.stdout.readline()
            server.stop()
            assert script.communicate("\n", timeout=30) == ("", "")
        assert script.returncode == 0


def test_a_service_that_is_silent_at_the_end_is_not_waited_for() -> None:
    def serve(peer: Peer) -> None:
        while (request := peer.request()) is not None:
            if request.method == "POST":
                peer.reply(b"".join(wire.pack({"tensor": f"t{request.body[-1]}", **METADATA})))

    with loopback(serve) as server:
        client = Client(server.url, timeout=60)
        kept = [client.put(np.full((2, 3), i, np.float32)) for i in range(4)]
        began = time.monotonic()
        del client, kept
        assert 1.9 < time.monotonic() - began < 6


FORKED = """
if os.fork() == 0:
    own = client.put(array)
    del kept
    client.tensor("shared")
    {end}
assert os.wait()[1] == 0
client.tensor("shared")
"""


@pytest.mark.parametrize("end", ["client.close(); os._exit(0)", "sys.exit()"])
def test_a_forked_child_frees_its_own_and_not_its_parents(end: str) -> None:
    with storing() as (server, _):
        command = [sys.executable, "-c", SCRIPT + FORKED.format(end=end), server.url]
        subprocess.run(command, check=True, timeout=30)
        assert freed(server) == ["t3", "t2", "t0"]  # the child's, what was dropped, what was kept
