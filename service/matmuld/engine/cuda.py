"""The CUDA engine: CuPy arrays, cuBLASLt products.

Everything runs on one stream in the order it was started, so that memory freed by one request is
safe to use in the next. Products are launched on the event loop; planning and elementwise steps,
which may compile, on threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any, TypeVar
from uuid import UUID

import cupy
import numpy as np
import nvmath
from cuda.bindings import driver, runtime
from cuda.core import Device
from cupy.cuda.memory import OutOfMemoryError
from cupy.cuda.runtime import CUDARuntimeError
from matmuld_client.errors import DeviceLost, Internal, InvalidOperands, OutOfMemory, RequestError

from ..store import Choices, InMemoryChoices
from . import cublaslt, elementwise, kernels, quantization
from .cublaslt import FusedPlan, Launcher, Unsupported
from .epilogs import CUBLASLT, TABLE, Epilog
from .executed import ExecutedPlan, fault_of_bare_launch
from .float8 import FLOAT8, MULTIPLE, empty
from .protocol import Array, Elementwise, Launch, Memory, Operands, Plan, Quantized
from .signature import Layout, Signature, Signer
from .split import (
    SplitPlan,
    StagedPlan,
    is_column_major,
    product_of,
    stage,
    staging,
    without_epilog,
)

log = logging.getLogger("matmuld")

T = TypeVar("T")

WORKSPACE_BYTES = 32 << 20
"""NVIDIA's advice for Hopper; a fixed size keeps the choice of algorithm from depending on free
memory.
"""
SAFE_ALIGNMENT = 16
"""Bytes; below, cuBLASLt has no algorithm for some types."""
FLOAT8_CAPABILITY = 8, 9
INLINE_BYTES = 1 << 18
SPIN_SECONDS = 0.002
FLUSH_BYTES = 1 << 28
FLUSHES = 4
_TOO_LITTLE = "the GPU's or the host's memory does not suffice: {}"
_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3


class CudaEngine:
    """Arrays on one GPU. Construct it on the event loop's thread."""

    xp = cupy
    elementwise: Elementwise = kernels
    alignment = cublaslt.ALIGNMENT
    brief_bytes = 1 << 62

    def __init__(self, ordinal: int, *, lean_launch: bool = True) -> None:
        """`lean_launch`: products by the bare binding, unless a self-test finds it wrong; else all
        by nvmath's `execute`, which takes the host five times as long.
        """
        cublaslt.check_version()
        self.name = f"cuda:{ordinal}"
        self._device = cupy.cuda.Device(ordinal)
        self._enter()
        properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
        self._capability = properties["major"], properties["minor"]
        self.has_float8 = self._capability >= FLOAT8_CAPABILITY
        self._stream = cupy.cuda.Stream(non_blocking=True)
        _make_current(self._stream)
        self._handle = cublaslt.create_handle()
        self._main = Launcher(self._handle, self._stream, WORKSPACE_BYTES)
        planning = cupy.cuda.Stream(non_blocking=True)
        self._planning = Launcher(self._handle, planning, WORKSPACE_BYTES)
        self._planner = self._thread("plan", planning)
        self._worker = self._thread("work", self._stream)
        signer = Signer(_alignment)
        self.signature, self.layout = signer.sign, signer.layout
        self.choices: Choices = InMemoryChoices()
        self.reclaim: Callable[[], bool] = bool
        self._events: list[Any] = []
        self._compiled: set[tuple[Any, ...]] = set()
        self._is_lean = lean_launch and self._may_launch()

    def _may_launch(self) -> bool:
        launchers = self._main, self._planning
        fault = self._planner.submit(fault_of_bare_launch, *launchers, self.signature).result()
        if fault is not None:
            log.warning("products are run by nvmath's execute, a bare launch is wrong: %s", fault)
        return fault is None

    def _thread(self, name: str, stream: Any) -> ThreadPoolExecutor:
        def bind() -> None:
            self._enter()
            _make_current(stream)

        return ThreadPoolExecutor(1, f"matmuld-{name}", initializer=bind)

    def _enter(self) -> None:
        """What every thread must do first: for CuPy, and for cuda.core, on which nvmath stands and
        which nvmath itself sees to in the first thread only that uses a stream.
        """
        self._device.use()
        Device(self._device.id).set_current()

    def describe(self) -> dict[str, Any]:
        ordinal = self._device.id
        properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
        return {
            "device": self.name,
            "gpu": properties["name"].decode(),
            "uuid": _uuid(ordinal),
            "compute_capability": f"{properties['major']}.{properties['minor']}",
            "multiprocessors": properties["multiProcessorCount"],
            "driver": cupy.cuda.runtime.driverGetVersion(),
            "runtime": cupy.cuda.runtime.runtimeGetVersion(),
            "cublaslt": cublaslt.version(),
            "cupy": cupy.__version__,
            "nvmath": nvmath.__version__,
            "launch": "lean" if self._is_lean else "execute",
        }

    def fingerprint(self) -> dict[str, str | int]:
        described = self.describe()
        names = ("gpu", "compute_capability", "multiprocessors", "cublaslt", "nvmath")
        return {name: described[name] for name in names}

    def memory(self) -> Memory:
        free, total = cupy.cuda.runtime.memGetInfo()
        pool = cupy.get_default_memory_pool()
        return Memory(pool.used_bytes(), free + pool.free_bytes(), total)

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        try:
            try:
                return empty(cupy, tuple(shape), dtype)
            except OutOfMemoryError:
                if not self.reclaim():
                    raise
                return empty(cupy, tuple(shape), dtype)
        except OutOfMemoryError as error:
            raise OutOfMemory(_TOO_LITTLE.format(error)) from None

    def view(
        self, array: Array, shape: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> Array:
        itemsize = array.itemsize
        steps = [stride * itemsize for stride in strides]
        return cupy.ndarray(shape, array.dtype, array.data + offset * itemsize, steps)

    async def plan(self, signature: Signature, operands: Operands) -> Plan:
        ready = cupy.cuda.Event(disable_timing=True)
        ready.record(self._stream)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._planner, self._plan, signature, operands, ready)

    def _plan(self, signature: Signature, operands: Operands, ready: Any) -> Plan:
        """Memory given back by earlier work may be tried on only after that work: hence `ready`.

        A plan with elementwise steps is run once, so that they are compiled here.
        """
        if signature.a.dtype in FLOAT8 and not self.has_float8:
            needed, found = (".".join(map(str, c)) for c in (FLOAT8_CAPABILITY, self._capability))
            raise InvalidOperands(
                f"{signature.a.dtype}: expected a GPU of compute capability {needed}, got {found}"
            )
        self._planning.stream.wait_event(ready)
        try:
            plan = self._choose(signature, operands)
        except Unsupported as error:
            raise Internal(f"cuBLASLt refuses {signature.describe()}: {error}") from error
        if plan.path != "fused":
            try:
                plan.bind(operands, aside=True)()
                self._planning.stream.synchronize()
            except BaseException:
                plan.close()
                raise
        return plan

    def _choose(self, signature: Signature, operands: Operands) -> Plan:
        """Fused by cuBLASLt if it can be, else split; the plain product must do."""
        if not _unfusable(signature):
            try:
                return self._whole(signature, operands)
            except Unsupported:
                if signature.epilog is Epilog.NONE and signature.c is None:
                    raise
        plain = self._plain(signature, operands)
        return SplitPlan(cupy, kernels.finishing, signature.epilog, plain)

    def _whole(self, signature: Signature, operands: Operands) -> Plan:
        """Fused, with those inputs staged that cuBLASLt cannot or will not read as they lie."""
        unreadable, awkward = _to_stage(signature)
        if not unreadable:
            try:
                return self._fused(signature, operands)
            except Unsupported:
                if not awkward:
                    raise
        names = unreadable + awkward
        copies = staging(cupy, operands, names)
        stage(copies, operands, names)
        dense = self.signature(copies, signature.epilog, signature.options)
        return StagedPlan(cupy, self._fused(dense, copies), names)

    def _plain(self, signature: Signature, operands: Operands) -> Plan:
        """The product alone; COMPUTE_16F cannot write the accumulator's type."""
        options = signature.options._replace(split=False)
        if options.compute_type.startswith("COMPUTE_16F"):
            options = options._replace(compute_type="COMPUTE_32F")
        product = without_epilog(operands, product_of(cupy, signature.epilog, operands))
        return self._choose(self.signature(product, Epilog.NONE, options), product)

    def _fused(self, signature: Signature, operands: Operands) -> Plan:
        """By the algorithm that was measured in an earlier run, if there is one."""
        if not self._is_lean:
            return ExecutedPlan(signature, operands, self._main, self._planning)
        key = signature.text
        record = self.choices.get("algorithm", key)
        plan = FusedPlan(signature, operands, self._main, self._planning, record)
        if plan.refusal is not None:
            self.choices.drop("algorithm", key, plan.refusal)
        return plan

    async def run(self, plan: Plan, operands: Operands) -> None:
        plan.bind(operands)()

    def start(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            launch()

    def capture(self, launches: Sequence[Launch]) -> Launch:
        """A CUDA graph, which the host launches in the time of one product; not of nvmath's
        `execute`, which allocates memory each time.
        """
        if not self._is_lean:
            return partial(elementwise.in_turn, launches)
        self._stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
        try:
            self.start(launches)
        finally:
            graph = self._stream.end_capture()

        def launch(memory: Sequence[Launch] = tuple(launches)) -> None:
            graph.launch(self._stream)

        return launch

    def intake(self, target: Array) -> Callable[[memoryview], None]:
        address = target.data.ptr

        def fill(data: memoryview, memory: Array = target) -> None:
            self._copy_in(address, np.frombuffer(data, np.uint8))

        return fill

    async def call(self, nbytes: int, function: Callable[..., T], *args: Any) -> T:
        """On the worker thread the first time, when it may be compiled; after that it is short."""
        kind = _kind(function, args)
        if kind in self._compiled:
            return function(*args)
        result = await self._in_worker(function, *args)
        self._compiled.add(kind)
        return result

    async def _in_worker(self, function: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, function, *args)

    async def aside(self, function: Callable[..., T], *args: Any) -> T:
        ready = cupy.cuda.Event(disable_timing=True)
        ready.record(self._stream)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._planner, self._aside, ready, function, *args)

    def _aside(self, ready: Any, function: Callable[..., T], *args: Any) -> T:
        stream = self._planning.stream
        stream.wait_event(ready)
        result = function(*args)
        stream.synchronize()
        return result

    async def time(self, launches: Sequence[Launch]) -> float:
        return await self.aside(self._time, launches)

    def _time(self, launches: Sequence[Launch]) -> float:
        """Flushing the caches takes long enough for the host to queue what is timed."""
        stream = self._planning.stream
        flushed = cupy.empty(FLUSH_BYTES, np.uint8)
        began, ended = cupy.cuda.Event(), cupy.cuda.Event()
        for value in range(FLUSHES):
            flushed.data.memset_async(value, FLUSH_BYTES, stream)
        began.record(stream)
        for launch in launches:
            launch()
        ended.record(stream)
        ended.synchronize()
        return float(cupy.cuda.get_elapsed_time(began, ended)) / 1e3

    async def quantize(self, source: Array, dtype: np.dtype[Any]) -> Quantized:
        values = self.empty(source.shape, dtype)
        scale, amax = await self.call(source.nbytes, quantization.quantize, source, values)
        return Quantized(values, scale, amax)

    def duplicate(self, array: Array) -> Array:
        copy = elementwise.empty_like(self, array)
        cupy.cuda.runtime.memcpyAsync(
            copy.data.ptr, array.data.ptr, array.nbytes, _DEVICE_TO_DEVICE, self._stream.ptr
        )
        return copy

    async def upload(self, source: np.ndarray[Any, Any]) -> Array:
        target = self.empty(source.shape, source.dtype)
        if source.nbytes <= INLINE_BYTES:
            self._copy_in(target.data.ptr, source)
        else:
            await self._in_worker(self._copy_in, target.data.ptr, source)
        return target

    async def borrow(self, source: np.ndarray[Any, Any]) -> Array:
        return await self.upload(source)

    def _copy_in(self, address: int, source: np.ndarray[Any, Any]) -> None:
        """Pageable memory: the driver has taken the bytes when this returns."""
        cupy.cuda.runtime.memcpyAsync(
            address,
            source.__array_interface__["data"][0],
            source.nbytes,
            _HOST_TO_DEVICE,
            self._stream.ptr,
        )

    async def write(self, target: Array, offset: int, data: memoryview) -> None:
        self._copy_in(target.data.ptr + offset, np.frombuffer(data, np.uint8))

    async def download(self, arrays: Sequence[Array]) -> tuple[list[np.ndarray[Any, Any]], float]:
        computed = self._mark()
        copies = [self._copy_out(array) for array in arrays]
        copied = self._mark()
        await self._reached(computed)
        began = perf_counter()
        await self._reached(copied)
        return copies, perf_counter() - began

    def _copy_out(self, array: Array) -> np.ndarray[Any, Any]:
        swapped = array.ndim > 1 and not array.flags.c_contiguous and is_column_major(array)
        source = elementwise.copyable(elementwise.swap(array) if swapped else array)
        source = cupy.ascontiguousarray(source)
        pinned = cupy.cuda.alloc_pinned_memory(max(source.nbytes, 1))
        copy = np.frombuffer(pinned, np.uint8, source.nbytes)
        cupy.cuda.runtime.memcpyAsync(
            pinned.ptr, source.data.ptr, source.nbytes, _DEVICE_TO_HOST, self._stream.ptr
        )
        shaped: np.ndarray[Any, Any] = copy.view(array.dtype).reshape(source.shape)
        return shaped.swapaxes(-1, -2) if swapped else shaped

    async def chunks(self, array: Array, nbytes: int) -> AsyncIterator[memoryview]:
        flat = cupy.ascontiguousarray(elementwise.copyable(array)).reshape(-1).view(np.uint8)
        for start in range(0, flat.nbytes, nbytes):
            (part,), _ = await self.download([flat[start : start + nbytes]])
            yield part.data

    async def synchronize(self) -> None:
        await self._reached(self._mark())

    def _mark(self) -> Any:
        """An event after all that was started so far."""
        event = self._events.pop() if self._events else cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        return event

    async def _reached(self, event: Any) -> None:
        """Return when the device has come to `event`, which is then used again."""
        began = perf_counter()
        while not event.done:
            await asyncio.sleep(0 if perf_counter() - began < SPIN_SECONDS else SPIN_SECONDS / 4)
        self._events.append(event)

    def explain(self, error: Exception) -> RequestError | None:
        if isinstance(error, OutOfMemoryError | MemoryError):
            return OutOfMemory(_TOO_LITTLE.format(error))
        if isinstance(error, CUDARuntimeError):
            if error.status == runtime.cudaError_t.cudaErrorMemoryAllocation:
                return OutOfMemory(_TOO_LITTLE.format(error))
            return DeviceLost(f"{self.name} has failed, the service must be started again: {error}")
        return None

    async def trim(self) -> None:
        await self._in_worker(cupy.get_default_memory_pool().free_all_blocks)
        await self._in_worker(cupy.get_default_pinned_memory_pool().free_all_blocks)

    def close(self) -> None:
        self._planner.shutdown()
        self._worker.shutdown()
        self._stream.synchronize()
        cublaslt.destroy_handle(self._handle)
        cupy.get_default_memory_pool().free_all_blocks()


def _make_current(stream: Any) -> None:
    """For good: `stream.use()` lasts until the next ``with`` of any stream ends, such as nvmath's,
    which then makes the stream current that was entered before, or the null stream.
    """
    stream.__enter__()


def _kind(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """What is compiled when it is called for the first time."""
    if bound := kernels.kernels_of(function):
        return bound
    operands = (getattr(function, "__self__", None), *args)
    looks = [
        (array.dtype.num, array.ndim, array.flags.c_contiguous, array.flags.f_contiguous)
        for array in operands
        if isinstance(array, cupy.ndarray)
    ]
    return getattr(function, "__name__", function), *looks


def _alignment(array: Array) -> int:
    """The largest power of two, up to 256, that divides the address."""
    address = array.data.ptr
    return min(address & -address, cublaslt.ALIGNMENT) if address else cublaslt.ALIGNMENT


def _unfusable(signature: Signature) -> bool:
    """Whether the epilog must not be left to cuBLASLt for this product.

    K = 1 with a D… epilog is not supported. With a D of one row or column, BGRADA and BGRADB are
    not supported or wrong: float16 [1, 4096] by [4096, 4096] with BGRADB ran and gave wrong sums
    (H200, cuBLASLt 13.1, algorithm 13). The tanh inside GELU is good to 2.6e-10 only, which is no
    float64.
    """
    row, d = TABLE[signature.epilog], signature.d
    if signature.epilog not in CUBLASLT or signature.options.split:
        return True
    if row.aux_in is not None and signature.a.shape[-1] == 1:
        return True
    if row.gradient in ("a", "b") and 1 in d.shape[-2:]:
        return True
    return d.dtype == "float64" and (row.activation == "gelu" or row.aux == "gelu_aux")


def _to_stage(signature: Signature) -> tuple[list[str], list[str]]:
    """Inputs that cuBLASLt cannot read as they lie, and those that it may refuse for their
    alignment.
    """
    row = TABLE[signature.epilog]
    unreadable = [name for name in ("a", "b") if not _is_readable(signature, name)]
    if signature.c is not None and signature.c != signature.d:
        unreadable.append("c")
    if row.bias and not _is_dense_column(signature.vector):
        unreadable.append("vector")
    if row.aux_in is not None and not _is_dense_column(signature.aux):
        unreadable.append("aux")
    inputs = ["a", "b", *(["vector"] if row.bias else []), *(["aux"] if row.aux_in else [])]
    awkward = [
        name
        for name in inputs
        if name not in unreadable and getattr(signature, name).alignment < SAFE_ALIGNMENT
    ]
    return unreadable, awkward


def _is_readable(signature: Signature, name: str) -> bool:
    """Whether A or B has a unit stride; of 8-bit floats along K, in rows that begin at multiples of
    16 bytes.
    """
    layout: Layout = getattr(signature, name)
    strides = layout.strides
    if layout.dtype not in FLOAT8:
        return 1 in strides[-2:] and all(stride > 0 for stride in strides[-2:])
    along = len(strides) - (1 if name == "a" else 2)
    gaps = [
        stride
        for axis, (stride, extent) in enumerate(zip(strides, layout.shape, strict=True))
        if axis != along and extent > 1
    ]
    return (
        strides[along] == 1
        and layout.alignment >= MULTIPLE
        and all(gap % MULTIPLE == 0 for gap in gaps)
    )


def _is_dense_column(layout: Layout | None) -> bool:
    """Whether a vector or column-major matrix, or a batch of them, has no gaps."""
    assert layout is not None
    expected = 1
    shape, strides = layout.shape, layout.strides
    axes = [0] if len(shape) == 1 else [len(shape) - 2, len(shape) - 1, *range(len(shape) - 2)]
    for axis in axes:
        if shape[axis] != 1 and strides[axis] != expected:
            return False
        expected *= shape[axis]
    return True


def _uuid(ordinal: int) -> str:
    """The UUID of a GPU as nvidia-smi prints it."""
    status, uuid = driver.cuDeviceGetUuid(ordinal)
    return f"GPU-{UUID(bytes=bytes(uuid.bytes))}" if not status.value else "unknown"
