"""`matmuld serve`: addresses, signals, and what it says when it cannot."""

from __future__ import annotations

import re
import signal
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from matmuld_client import Client

from .console import matmuld, serving


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_on_every_address_until_a_signal(tmp_path: Path, number: int) -> None:
    unix = f"unix:{tmp_path}/socket"
    with serving("--device", "cpu", "--listen", "http://127.0.0.1:0", "--listen", unix) as service:
        tcp, second = service.addresses
        assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*", tcp)
        assert second == unix
        for address in service.addresses:
            with Client(address) as client:
                assert client.info()["engine"]["device"] == "cpu"
        assert service.stop(number) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_signal_ends_measuring_and_the_request_that_waits_for_it_is_answered(
    tmp_path: Path,
) -> None:
    listen = "--listen", f"unix:{tmp_path}/socket"
    eager = "--autotune", "eager", "--autotune-s", "60", "--plan-store", "off"
    x = np.random.default_rng(0).standard_normal((2400, 2400))
    with (
        serving("--device", "cpu", *listen, *eager) as service,
        Client(service.addresses[0]) as client,
        ThreadPoolExecutor() as threads,
    ):
        answer = threads.submit(client.linear, x, x)
        with Client(service.addresses[0]) as other:
            while not other.info()["requests"]["working"]:
                pass
        assert service.stop(signal.SIGTERM) == 0
        np.testing.assert_allclose(answer.result(), x @ x.T, rtol=1e-11, atol=1e-10)


def test_the_unix_socket_is_for_its_owner_alone(tmp_path: Path) -> None:
    with serving("--device", "cpu", "--listen", f"unix:{tmp_path}/socket"):
        mode = (tmp_path / "socket").stat().st_mode
    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)


def test_a_socket_left_behind_by_a_dead_service_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    address = f"unix:{path}"
    with serving("--device", "cpu", "--listen", address), Client(address) as client:
        assert client.ready()


def test_a_socket_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with serving("--device", "cpu", "--listen", f"unix:{path}") as service:
        second = matmuld("serve", "--device", "cpu", "--listen", f"unix:{path}")
        with Client(service.addresses[0]) as client:
            assert client.ready()
    assert second.returncode == 1
    assert second.stderr.endswith(f"unix:{path}: another service is listening there\n")


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    refused = matmuld("serve", "--device", "cpu", "--listen", f"unix:{path}")
    assert (refused.returncode, path.read_text()) == (1, "mine")
    assert "the file exists and is no socket" in refused.stderr


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        refused = matmuld("serve", "--device", "cpu", "--listen", address)
    assert refused.returncode == 1
    last = refused.stderr.splitlines()[-1]
    assert last == f"matmuld: cannot listen on {address}: Address already in use"


def test_a_missing_device_is_named_and_leaves_no_socket(tmp_path: Path) -> None:
    refused = matmuld("serve", "--device", "cuda:99", "--listen", f"unix:{tmp_path}/socket")
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("matmuld: device cuda:99 was asked for")
    assert "Traceback" not in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_strategy_is_named() -> None:
    flags = ("--strategies", "split", "--strategies", "fastest")
    refused = matmuld("serve", "--device", "cpu", "--listen", "http://127.0.0.1:0", *flags)
    assert refused.returncode == 1
    last = refused.stderr.splitlines()[-1]
    assert last.startswith("matmuld: strategies: expected direct, transposed, fused, split, ")
    assert last.endswith("got 'fastest'")


def test_it_says_its_settings_and_which_device_auto_took() -> None:
    address = "http://127.0.0.1:0"
    with (
        serving("--plans", "7", "--listen", address, MATMULD_TTL_S="5") as service,
        Client(service.addresses[0]) as client,
    ):
        device = client.info()["engine"]["device"]
    log = "".join(service.log)
    assert 'device = "auto"' in log
    assert f'listen = ["{address}"], plans = 7' in log
    assert "ttl_s = 5.0" in log
    assert f"device auto: {device}, " in log


def test_replies_do_not_advertise_the_server() -> None:
    with serving("--device", "cpu", "--listen", "http://127.0.0.1:0") as service:
        host, port = service.addresses[0].removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            head = connection.recv(65536).lower()
    assert head.startswith(b"http/1.1 200")
    assert b"\r\nserver:" not in head
    assert b"\r\ndate:" not in head
