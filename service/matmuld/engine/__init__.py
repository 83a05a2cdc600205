"""Devices: the only code that knows NumPy's and CUDA's insides."""

from __future__ import annotations

from .cpu import CpuEngine
from .protocol import Engine


def open_engine(
    device: str, memory_limit: int | None = None, *, lean_launch: bool = True
) -> Engine:
    """The engine of `device`: `cpu`, `cuda:N`, or `auto`, which takes the first GPU if there is
    one; `lean_launch` is that of `CudaEngine`.

    Raises:
        RuntimeError: the device, or a library that it needs, is missing.
    """
    if device == "auto":
        device = "cuda:0" if cuda_devices() else "cpu"
    if device == "cpu":
        return CpuEngine(memory_limit)
    count = cuda_devices()
    ordinal = int(device.removeprefix("cuda:"))
    if ordinal >= count:
        raise RuntimeError(f"device {device} was asked for, {count} CUDA devices are usable")
    from .cuda import CudaEngine

    return CudaEngine(ordinal, lean_launch=lean_launch)


def cuda_devices() -> int:
    """CUDA devices that can be used: 0 without CuPy, nvmath-python or a driver."""
    try:
        import cupy
        import nvmath.linalg.advanced  # noqa: F401
    except ImportError:
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0
