"""One GPU stream with a stopwatch, and operands on it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import cupy
import numpy as np

from ...failure import Failure

Array = Any

_FLUSH_BYTES = 256 << 20
_FLUSHES = 4
"""So many that the host has launched a whole step before the GPU comes to it."""
_REPEATS, _SHORT_US = 10, 1000.0
_CALLS = 50
_TILE = 1_048_573
"""Random numbers that an operand repeats; a prime, so that no two rows begin alike."""
_MOST_ERROR, _MOST_DEVIATION = 3e-3, 2e-2


class Gpu:
    """The current stream of this thread, on which all subjects are measured."""

    def __init__(self) -> None:
        self.stream = cupy.cuda.get_current_stream()
        self._scratch = cupy.empty(_FLUSH_BYTES, np.uint8)
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()

    def gpu_us(self, work: Callable[[], object]) -> float:
        """What the GPU takes for `work`, its L2 cache flushed; of short work a median of several.

        Flushing goes on while the host launches the work, so that its own time is not counted.
        """
        first = self._once(work)
        if first > _SHORT_US:
            return first
        return median([first, *(self._once(work) for _ in range(_REPEATS - 1))])

    def _once(self, work: Callable[[], object]) -> float:
        for _ in range(_FLUSHES):
            self._scratch.data.memset_async(0, _FLUSH_BYTES, self.stream)
        self._start.record(self.stream)
        work()
        self._stop.record(self.stream)
        self._stop.synchronize()
        return float(cupy.cuda.get_elapsed_time(self._start, self._stop)) * 1e3

    def host_us(self, work: Callable[[], object]) -> float:
        """What the host takes to launch `work`, the median of some calls in a row."""
        took = []
        self.stream.synchronize()
        for _ in range(_CALLS):
            began = time.perf_counter_ns()
            work()
            took.append(time.perf_counter_ns() - began)
        self.stream.synchronize()
        return median(took) / 1e3

    def wall_us(self, work: Callable[[], object], count: int = 1) -> float:
        """What goes by until `count` times `work` are done, for one."""
        self.stream.synchronize()
        began = time.perf_counter_ns()
        for _ in range(count):
            work()
        self.stream.synchronize()
        return (time.perf_counter_ns() - began) / 1e3 / count

    def trim(self) -> None:
        """Give memory that no array uses back to the device."""
        self.stream.synchronize()
        cupy.get_default_memory_pool().free_all_blocks()


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Array:
    """Random numbers in float16, none of them 0; real ones, since zeros take less power."""
    flat = cupy.empty(int(np.prod(shape)), np.float16)
    tile = cupy.asarray(normal_tile(seed, scale).astype(np.float16))
    for start in range(0, flat.size, _TILE):
        part = flat[start : start + _TILE]
        part[...] = tile[: part.size]
    return flat.reshape(shape)


def normal_tile(seed: int, scale: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The numbers that `normal` repeats, on the host, in float32."""
    tile = np.random.default_rng(seed).standard_normal(_TILE, np.float32) * np.float32(scale)
    return np.where(np.abs(tile) < 1e-4 * scale, np.float32(scale), tile)


def check(subject: str, found: Sequence[Array], expected: Sequence[Array]) -> None:
    """Raise Failure unless every output is right, within what float16 allows.

    `expected` is float32. A single wrong element is found by its deviation from it, many slightly
    wrong ones by the norm.
    """
    for number, (array, wanted) in enumerate(zip(found, expected, strict=True)):
        if array.shape != wanted.shape:
            raise Failure(f"{subject}: expected output {number} of {wanted.shape}, {array.shape}")
        difference = array.astype(np.float32)
        difference -= wanted
        error = _norm(difference) / _norm(wanted)
        deviation = float(abs(difference).max()) / float(abs(wanted).max())
        if not (error <= _MOST_ERROR and deviation <= _MOST_DEVIATION):
            raise Failure(
                f"{subject}: wrong answer, output {number} is off by {error:.2e} in norm and by "
                f"{deviation:.2e} of the greatest at most"
            )


def _norm(array: Array) -> float:
    return math.sqrt((array * array).sum(dtype=np.float64))
