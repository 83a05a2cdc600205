"""Raw bodies: never held twice, nothing left of half of one; contents change as a whole."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ..local import UnixConnection, Wire, raw, tensor
from .refusals import FORWARD, OCTETS, TENSORS, footprint, unchanged, wait_for, works

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
CHILD = """
import sys
from pathlib import Path
from tests.local import running
with running(Path(sys.argv[1]), device="cpu"):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A service in a process of its own, on the unix socket `tmp_path / "s"`."""
    command = [sys.executable, "-c", CHILD, str(tmp_path / "s")]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()
        assert process.wait(30) == 0


def peak(process: subprocess.Popen[str]) -> int:
    """The most memory that the process has had, in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def test_a_raw_body_is_never_held_twice(child: subprocess.Popen[str], tmp_path: Path) -> None:
    """Neither on its way in, nor when it is read again, nor when it is replaced but for the old."""
    size, piece = 512 * MIB, bytes(MIB)
    headers = {"Content-Type": OCTETS, "Content-Length": str(size)}
    with closing(Wire(tmp_path / "s")) as wire:
        assert works(wire)
        before = peak(child)
        query = f"{TENSORS}?dtype=float32&shape={size // 4}"
        answer = wire.request("POST", query, (piece for _ in range(512)), headers)
        assert answer.status == 201
        assert peak(child) - before <= 1.3 * size
        path = f"{TENSORS}/{answer.header['tensor']}"
        assert download(tmp_path / "s", path) == size
        assert peak(child) - before <= 1.3 * size
        assert wire.request("PUT", path, (piece for _ in range(512)), headers).status == 200
        assert peak(child) - before <= 2.3 * size


def download(socket: Path, path: str) -> int:
    """Read a tensor slowly, piece by piece; its size."""
    connection = UnixConnection(str(socket))
    connection.request("GET", path, headers={"Accept": OCTETS})
    reply = connection.getresponse()
    size = 0
    while part := reply.read(MIB):
        size += len(part)
    connection.close()
    return size


@pytest.mark.parametrize("sent", [0, 1, 3 * MIB])
def test_a_client_that_goes_away_leaves_no_half_tensor(
    wire: Wire, socket_path: Path, sent: int
) -> None:
    assert works(wire)
    used = footprint(wire)["used"]
    with unchanged(wire):
        connection = begin(socket_path, "POST", f"{TENSORS}?dtype=float32&shape={MIB}", sent)
        wait_for(lambda: footprint(wire)["used"] >= used + 4 * MIB)
        connection.close()
    assert works(wire)


@pytest.mark.parametrize("sent", [0, 1, 3 * MIB])
def test_a_client_that_goes_away_replaces_nothing(wire: Wire, socket_path: Path, sent: int) -> None:
    handle = wire.hold(np.ones(MIB, np.float32))
    path = f"{TENSORS}/{handle}"
    used = footprint(wire)["used"]
    with unchanged(wire):
        connection = begin(socket_path, "PUT", path, sent)
        wait_for(lambda: footprint(wire)["used"] >= used + 4 * MIB)
        connection.close()
    assert wire.get(f"{path}/metadata")["version"] == 1
    body = wire.request("GET", path, headers={"Accept": OCTETS}).body
    assert body == raw(np.ones(MIB, np.float32))
    wire.request("DELETE", path)


def begin(socket: Path, method: str, path: str, sent: int) -> UnixConnection:
    """A request with a body of 4 MiB, of which `sent` bytes are on their way."""
    connection = UnixConnection(str(socket))
    connection.putrequest(method, path)
    connection.putheader("Content-Type", OCTETS)
    connection.putheader("Content-Length", str(4 * MIB))
    connection.endheaders(bytes(sent))
    return connection


def test_what_is_being_written_is_not_there_yet(wire: Wire, socket_path: Path) -> None:
    """Old contents until the last byte; then the new."""
    handle = wire.hold(np.zeros(MIB, np.float32))
    path = f"{TENSORS}/{handle}"
    connection = begin(socket_path, "PUT", path, 4 * MIB - 1)
    assert wire.request("GET", path, headers={"Accept": OCTETS}).body == bytes(4 * MIB)
    connection.send(b"\x3f")
    assert connection.getresponse().status == 200
    connection.close()
    body = wire.request("GET", path, headers={"Accept": OCTETS}).body
    assert body == bytes(4 * MIB - 1) + b"\x3f"
    wire.request("DELETE", path)


def test_freed_while_it_is_written(wire: Wire, socket_path: Path) -> None:
    assert works(wire)
    with unchanged(wire):
        handle = wire.hold(np.zeros(MIB, np.float32))
        connection = begin(socket_path, "PUT", f"{TENSORS}/{handle}", MIB)
        assert wire.request("DELETE", f"{TENSORS}/{handle}").status == 204
        connection.send(bytes(3 * MIB))
        reply = connection.getresponse()
        assert (reply.status, b"was freed or has expired" in reply.read()) == (410, True)
        connection.close()


SIDE = 256


def by_octets(wire: Wire, path: str, number: float) -> None:
    body = raw(np.full((SIDE, SIDE), number, np.float32))
    assert wire.request("PUT", path, body, {"Content-Type": OCTETS}).status == 200


def by_payload(wire: Wire, path: str, number: float) -> None:
    array = np.full((SIDE, SIDE), number, np.float32)
    assert wire.send(path, {"value": tensor(array, 0)}, raw(array), method="PUT").status == 200


def by_product(wire: Wire, path: str, number: float) -> None:
    column = np.full((SIDE, 1), 1, np.float32)
    into = {"y": {"tensor": path.rpartition("/")[2]}}
    header = {"x": tensor(column, 0), "weight": tensor(column, 0), "alpha": number}
    assert wire.send(FORWARD, {**header, "outputs": into}, raw(column)).status == 200


@pytest.mark.parametrize("write", [by_octets, by_payload, by_product])
def test_readers_see_whole_versions(
    wire: Wire, socket_path: Path, write: Callable[[Wire, str, float], None]
) -> None:
    """One writer between two constants; readers of the bytes, and of products of them."""
    path = f"{TENSORS}/{wire.hold(np.full((SIDE, SIDE), 1.0, np.float32))}"
    seen: set[float] = set()
    done = threading.Event()
    readers = [
        threading.Thread(target=watch, args=(reader, socket_path, path, seen, done))
        for reader in (contents, sums)
    ]
    for reader in readers:
        reader.start()
    for number in range(100):
        write(wire, path, 1.0 + number % 2)
    done.set()
    for reader in readers:
        reader.join()
    assert seen == {1.0, 2.0}
    assert wire.get(f"{path}/metadata")["version"] == 101
    wire.request("DELETE", path)


Read = Callable[[Wire, str], "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]


def watch(read: Read, socket: Path, path: str, seen: set[float], done: threading.Event) -> None:
    """Collect what is read; a mixture of versions as NaN."""
    with closing(Wire(socket)) as wire:
        while not done.is_set():
            values = read(wire, path)
            whole = values.size == SIDE * SIDE and values.min() == values.max()
            seen.add(float(values.flat[0]) if whole else float("nan"))


def contents(wire: Wire, path: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    body = wire.request("GET", path, headers={"Accept": OCTETS}).body
    return np.frombuffer(body, np.float32)


def sums(wire: Wire, path: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    eye = np.eye(SIDE, dtype=np.float32)
    header = {"x": {"tensor": path.rpartition("/")[2]}, "weight": tensor(eye, 0)}
    y = wire.send(FORWARD, header, raw(eye)).array("y")
    return np.asarray(y, np.float32)
