"""Arrays of an engine: up, down, views, limits."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from matmuld.engine import open_engine
from matmuld.engine.cpu import CpuEngine
from matmuld.engine.epilogs import Epilog
from matmuld.engine.protocol import Operands
from matmuld_client.errors import OutOfMemory
from threadpoolctl import threadpool_info

from ..reference import DTYPES
from .conftest import Bench


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_goes_up_comes_down(bench: Bench, dtype: str) -> None:
    host = np.arange(3 * 5 * 7).reshape(3, 5, 7).astype(DTYPES[dtype])
    array = bench.wait(bench.engine.upload(host))
    np.testing.assert_array_equal(bench.down(array), host)
    np.testing.assert_array_equal(bench.down(array.swapaxes(-1, -2)), host.swapaxes(-1, -2))


def test_memory_is_aligned(bench: Bench) -> None:
    for size in (1, 3, 1000, 1 << 20):
        array = bench.engine.empty((size,), np.dtype(np.uint8))
        address = getattr(array.data, "ptr", None) or array.__array_interface__["data"][0]
        assert address % bench.engine.alignment == 0


def test_a_stream_of_pieces_fills_an_array_and_comes_back_in_pieces(bench: Bench) -> None:
    data = np.random.default_rng(0).integers(0, 255, 1 << 16, np.uint8)

    async def there_and_back() -> bytes:
        array = bench.engine.empty((128, 128), np.dtype(np.float32))
        for start in range(0, len(data), 5000):
            await bench.engine.write(array, start, data[start : start + 5000].data)
        return b"".join([bytes(part) async for part in bench.engine.chunks(array, 7001)])

    assert bench.wait(there_and_back()) == data.tobytes()


def test_chunks_are_row_major_whatever_the_array_is(bench: Bench) -> None:
    host = np.arange(12, dtype=np.float32).reshape(3, 4)

    async def pieces() -> bytes:
        array = (await bench.engine.upload(host)).T
        return b"".join([bytes(part) async for part in bench.engine.chunks(array, 16)])

    assert bench.wait(pieces()) == host.T.tobytes()


def test_memory_that_no_array_uses_is_free_again(bench: Bench) -> None:
    gc.collect()
    bench.wait(bench.engine.trim())
    before = bench.engine.memory()
    array = bench.engine.empty((64, 1 << 20), np.dtype(np.uint8))
    assert bench.engine.memory().used == before.used + array.nbytes
    assert bench.engine.memory().free <= before.free - array.nbytes
    del array
    gc.collect()
    bench.wait(bench.engine.trim())
    assert bench.engine.memory() == before


def test_more_than_there_is_is_refused(bench: Bench) -> None:
    with pytest.raises(OutOfMemory):
        bench.engine.empty((1 << 20, 1 << 22), np.dtype(np.uint8))


def test_the_cpu_engine_keeps_its_limit() -> None:
    engine = CpuEngine(limit=1000)
    held = engine.empty((900,), np.dtype(np.uint8))
    with pytest.raises(OutOfMemory, match="200 bytes are needed, 100 of 1000 are free"):
        engine.empty((200,), np.dtype(np.uint8))
    del held
    engine.empty((1000,), np.dtype(np.uint8))
    engine.close()


def test_a_missing_device_is_named() -> None:
    with pytest.raises(RuntimeError, match="cuda:64"):
        open_engine("cuda:64")


def blas_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_the_cpu_engine_has_one_blas_thread_for_short_products_and_leaves_it_as_it_was() -> None:
    before = blas_threads()
    engine = CpuEngine()
    bench = Bench(engine)
    assert blas_threads() == {1}
    a, b = (np.ones((900, 900), np.float32) for _ in range(2))
    d = bench.empty((900, 900), np.float32)
    bench.run(Operands(bench.up(a), bench.up(b), d), Epilog.NONE)
    np.testing.assert_array_equal(bench.down(d), np.full((900, 900), 900))
    assert blas_threads() == {1}
    engine.close()
    assert blas_threads() == before
