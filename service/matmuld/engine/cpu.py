"""The NumPy engine: the embedded default, and what CI tests.

16- and 8-bit types are computed in float32 and rounded once, in buffers that the plan keeps.
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
import re
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from ctypes import addressof, c_char
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from matmuld_client.errors import OutOfMemory, RequestError
from threadpoolctl import ThreadpoolController

from ..store import Choices, InMemoryChoices
from . import elementwise, float8
from .elementwise import in_turn, swap
from .protocol import Array, Elementwise, Launch, Memory, Operands, Plan, Quantized
from .signature import Signature, Signer

T = TypeVar("T")

ALIGNMENT = 64
INLINE_WORK = 1 << 24
"""Operations that are cheaper done on the event loop than handed to a thread: about 0.5 ms of one
core.
"""


class CpuPlan:
    """A product in NumPy, in the orientation of D, with scratch space for 16-bit types."""

    path = "numpy"

    def __init__(
        self, signature: Signature, empty: Callable[[Sequence[int], np.dtype[Any]], Array]
    ) -> None:
        """Scratch space comes from `empty`. Raises OutOfMemory."""
        d = signature.d
        self._epilog = signature.epilog
        self._column_major = d.strides[-2] == 1 and d.shape[-1] > 1
        result = np.dtype(d.dtype)
        self._compute = elementwise.accumulator_dtype(result)
        self._a = self._b = self._product = None
        if signature.a.dtype != self._compute.name:
            self._a = empty(signature.a.shape, self._compute)
            self._b = empty(signature.b.shape, self._compute)
        if result != self._compute:
            shape = (*d.shape[:-2], d.shape[-1], d.shape[-2]) if self._column_major else d.shape
            product = empty(shape, self._compute)
            self._product = swap(product) if self._column_major else product
        self.nbytes = sum(x.nbytes for x in (self._a, self._b, self._product) if x is not None)
        self.brief = signature.flops + 4 * self.nbytes <= INLINE_WORK

    def bind(self, operands: Operands, *, aside: bool = False) -> Launch:
        o = operands
        a, b, product = o.a, o.b, o.d if self._product is None else self._product
        launches: list[Launch] = []
        if self._a is not None and self._b is not None:
            launches.append(partial(np.copyto, self._a, a, casting="unsafe"))
            launches.append(partial(np.copyto, self._b, b, casting="unsafe"))
            a, b = self._a, self._b
        if self._column_major:
            launches.append(partial(np.matmul, swap(b), swap(a), out=swap(product)))
        else:
            launches.append(partial(np.matmul, a, b, out=product))
        if o.alpha != 1.0 or o.scale_a is not None or o.scale_b is not None:
            launches.append(partial(_scale, product, o))
        launches += elementwise.finishing(self._epilog, product, o)
        return launches[0] if len(launches) == 1 else partial(in_turn, launches)

    def variants(self, operands: Operands) -> list[Launch]:
        return []

    def take(self, index: int, operands: Operands) -> None:
        return None

    def record(self) -> None:
        return None

    def close(self) -> None:
        self._a = self._b = self._product = None


class _Block(weakref.ref["np.ndarray[Any, Any]"]):
    """Memory handed out, and how much it is."""

    __slots__ = ("nbytes",)
    nbytes: int


class _BlasThreads:
    """How many threads BLAS may use: one for short products, whose threads would wait for a core
    that others have for far longer than the product takes; for long ones what it found, shared.
    """

    def __init__(self) -> None:
        self._libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        self._most = max((library.num_threads for library in self._libraries), default=1)
        self._lock = threading.Lock()
        self._running = 0
        self._set(1)

    def run(self, launch: Launch) -> None:
        """Run a long product, on a thread of its own."""
        with self._lock:
            self._running += 1
            self._allow()
        try:
            _quietly(launch)
        finally:
            with self._lock:
                self._running -= 1
                self._allow()

    def close(self) -> None:
        """As it was before."""
        self._set(self._most)

    def _allow(self) -> None:
        self._set(max(self._most // self._running, 1) if self._running else 1)

    def _set(self, threads: int) -> None:
        for library in self._libraries:
            library.set_num_threads(threads)


class CpuEngine:
    """Arrays in host memory, at most `limit` bytes of them."""

    name = "cpu"
    xp = np
    elementwise: Elementwise = elementwise
    alignment = ALIGNMENT
    brief_bytes = 1 << 18
    has_float8 = True

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit or int(physical_memory() * 0.8)
        self._used = 0
        self._blocks: dict[int, _Block] = {}
        self._ledger = threading.RLock()
        self._quiet = copy_context()
        self._quiet.run(np.seterr, all="ignore")
        self.choices: Choices = InMemoryChoices()
        self.reclaim: Callable[[], bool] = bool
        signer = Signer(_alignment)
        self.signature, self.layout = signer.sign, signer.layout
        self._blas = _BlasThreads()
        self._threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="matmuld-cpu")

    def describe(self) -> dict[str, Any]:
        return {"device": self.name, "numpy": np.__version__, "cores": os.cpu_count()}

    def fingerprint(self) -> dict[str, str | int]:
        return {"cpu": _model(), "cores": os.cpu_count() or 1, "numpy": np.__version__}

    def memory(self) -> Memory:
        used = self._used
        return Memory(used, max(self._limit - used, 0), self._limit)

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self._limit - self._used:
            self.reclaim()
        if nbytes > self._limit - self._used:
            memory = self.memory()
            raise OutOfMemory(
                f"{nbytes} bytes are needed, {memory.free} of {memory.total} are free"
            )
        try:
            block = np.empty(nbytes + ALIGNMENT, np.uint8)
        except MemoryError:
            raise OutOfMemory(f"the host has no {nbytes} bytes left") from None
        reference = _Block(block, self._forget)
        reference.nbytes = nbytes
        with self._ledger:
            self._blocks[id(reference)] = reference
            self._used += nbytes
        start = -addressof(c_char.from_buffer(block.data)) % ALIGNMENT
        return np.ndarray(shape, dtype, block, start)

    def _forget(self, reference: _Block) -> None:
        """A block was collected, on whatever thread."""
        with self._ledger:
            del self._blocks[id(reference)]
            self._used -= reference.nbytes

    def view(
        self, array: Array, shape: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> Array:
        itemsize = array.itemsize
        steps = [stride * itemsize for stride in strides]
        return np.ndarray(shape, array.dtype, array, offset * itemsize, steps)

    async def plan(self, signature: Signature, operands: Operands) -> Plan:
        return CpuPlan(signature, self.empty)

    async def run(self, plan: Plan, operands: Operands) -> None:
        launch = plan.bind(operands)
        if plan.brief:
            self.start((launch,))
        else:
            await self._in_thread(self._blas.run, launch)

    def start(self, launches: Sequence[Launch]) -> None:
        self._quiet.run(in_turn, launches)

    def capture(self, launches: Sequence[Launch]) -> Launch:
        return partial(in_turn, launches)

    def intake(self, target: Array) -> Callable[[memoryview], None]:
        return partial(target.reshape(-1).view(np.uint8).data.__setitem__, slice(None))

    async def call(self, nbytes: int, function: Callable[..., T], *args: Any) -> T:
        if nbytes <= self.brief_bytes:
            return self._quiet.run(function, *args)
        return await self._in_thread(_quietly, function, *args)

    async def aside(self, function: Callable[..., T], *args: Any) -> T:
        return await self._in_thread(_quietly, function, *args)

    async def time(self, launches: Sequence[Launch]) -> float:
        return await self._in_thread(_quietly, _timed, launches)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call on a thread; wait for its end also if cancelled, for it uses what the caller then
        gives back.
        """
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, function, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    async def quantize(self, source: Array, dtype: np.dtype[Any]) -> Quantized:
        values = self.empty(source.shape, dtype)
        scale, amax = np.ones(1, np.float32), np.zeros(1, np.float32)
        await self.call(source.nbytes, float8.quantize, source, values, scale, amax)
        return Quantized(values, scale, amax)

    def duplicate(self, array: Array) -> Array:
        copy = elementwise.empty_like(self, array)
        copy[...] = array
        return copy

    async def upload(self, source: np.ndarray[Any, Any]) -> Array:
        target = self.empty(source.shape, source.dtype)
        if source.nbytes <= self.brief_bytes:
            target[...] = source
        else:
            await self._in_thread(np.copyto, target, source)
        return target

    async def borrow(self, source: np.ndarray[Any, Any]) -> Array:
        return source

    async def write(self, target: Array, offset: int, data: memoryview) -> None:
        flat = target.reshape(-1).view(np.uint8)
        flat[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    async def download(self, arrays: Sequence[Array]) -> tuple[list[np.ndarray[Any, Any]], float]:
        return list(arrays), 0.0

    async def chunks(self, array: Array, nbytes: int) -> AsyncIterator[memoryview]:
        dense = await self.call(array.nbytes, np.ascontiguousarray, array)
        flat = dense.reshape(-1).view(np.uint8).data
        for start in range(0, len(flat), nbytes):
            yield flat[start : start + nbytes]

    async def synchronize(self) -> None:
        return None

    def explain(self, error: Exception) -> RequestError | None:
        if isinstance(error, MemoryError):
            return OutOfMemory(f"the host's memory does not suffice: {error}")
        return None

    async def trim(self) -> None:
        return None

    def close(self) -> None:
        self._threads.shutdown()
        self._blas.close()


def _scale(product: Array, o: Operands) -> None:
    """Multiply by alpha and the scales, as they are now."""
    factor = o.alpha
    if o.scale_a is not None:
        factor *= o.scale_a.item()
    if o.scale_b is not None:
        factor *= o.scale_b.item()
    np.multiply(product, product.dtype.type(factor), out=product)


def _alignment(array: Array) -> int:
    """One class for all: plans do not depend on it, NumPy copies what is not aligned."""
    return int(array.itemsize)


def _timed(launches: Sequence[Launch]) -> float:
    began = perf_counter()
    in_turn(launches)
    return perf_counter() - began


def _quietly(function: Callable[..., T], *args: Any) -> T:
    with np.errstate(all="ignore"):
        return function(*args)


def _model() -> str:
    """The name of the processor; of its architecture, where the kernel does not tell the name."""
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def physical_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return machine if text == "max" else min(machine, int(text))
