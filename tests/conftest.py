"""Devices: every test of an engine runs on the CPU, and with the marker `gpu` on a CUDA device if
there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from matmuld.engine import cuda_devices
from matmuld_client import Client

from .local import Wire, running

DEVICES = [pytest.param("cpu"), pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    """Services of the tests find nothing of earlier ones, and measure nothing, unless a test says
    so.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MATMULD_PLAN_STORE", "off")
        patch.setenv("MATMULD_AUTOTUNE", "off")
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if cuda_devices():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session", params=DEVICES)
def socket_path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The unix socket of a service that runs for the whole session."""
    path = tmp_path_factory.mktemp("service") / "s"
    with running(path, device=request.param):
        yield path


@pytest.fixture
def url(socket_path: Path) -> str:
    return f"unix:{socket_path}"


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


@pytest.fixture
def wire(socket_path: Path) -> Iterator[Wire]:
    wire = Wire(socket_path)
    yield wire
    wire.close()
