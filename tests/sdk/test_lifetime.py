"""What the client frees, when, and what it leaves alone."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
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


FORK = """
import os, sys
import numpy as np
from matmuld_client import Client

with Client(sys.argv[1]) as client:
    tensor = client.put(np.zeros((2, 3), np.float32))
    if os.fork() == 0:
        own = client.put(np.zeros((2, 3), np.float32))
        del tensor
        client.tensor("shared")
        client.close()
        os._exit(0)
    assert os.wait()[1] == 0
    print("parent")
    client.tensor("shared")
"""


def test_a_forked_child_frees_its_own_and_not_its_parents() -> None:
    with storing() as (server, _):
        subprocess.run([sys.executable, "-c", FORK, server.url], check=True, timeout=30)
        assert freed(server) == ["t1", "t0"]  # the child's own, then the parent's at its close
