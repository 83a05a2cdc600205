"""Tensors beyond 4 GiB, and beyond 2³¹ elements, on a device that has room for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matmuld_client import Client

from ..local import running
from ..reference import f64

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 70_000, 32_768


@pytest.mark.timeout(300)
def test_a_tensor_of_more_than_4_gib_is_streamed_in_used_and_streamed_out(tmp_path: Path) -> None:
    host = np.empty((ROWS, COLUMNS), np.float16)
    host[...] = (np.arange(ROWS) % 1009 / 1009).astype(np.float16)[:, None]
    assert host.nbytes > 1 << 32
    assert host.size > 1 << 31
    path = tmp_path / "s"
    with running(path, device="cuda:0"), Client(f"unix:{path}", timeout=300) as client:
        with client.put(host) as held:
            assert client.info()["tensors"]["nbytes"] == host.nbytes
            x = np.ones((3, COLUMNS), np.float16) / 256
            last = held[ROWS - 7 :]
            y = client.linear(x, last)
            expected = f64(x) @ f64(host[ROWS - 7 :]).T
            np.testing.assert_allclose(f64(y), expected, rtol=2e-3)
            np.testing.assert_array_equal(held.numpy(timeout=300), host)
        assert client.info()["tensors"]["nbytes"] == 0
