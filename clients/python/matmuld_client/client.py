"""The client: NumPy in, NumPy out, the products in the service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from ._channel import Channel
from ._linear import LinearOperations
from ._matmul import MatmulOperations
from ._mlp import MLPOperations
from ._payloads import Array, dtype_name, dtype_of
from ._requests import Request, template
from .errors import DeviceLost, Draining, Starting, TransportError
from .operations import AuxKind, Float8
from .program import Program
from .tensors import RemoteTensor, Tape, upload

if TYPE_CHECKING:
    from typing import Self


class Client(LinearOperations, MLPOperations, MatmulOperations):
    """A matmuld service. Threads may share a client; a forked child may go on using it.

    All operands of one operation have one dtype: float64, float32, float16, bfloat16 (that of
    ml_dtypes), or, in forward passes, 8-bit ones with scales (float8_e4m3fn and float8_e5m2 of
    ml_dtypes; products of both, but not of two e5m2). An operand is a NumPy array or a
    `RemoteTensor`; results are NumPy arrays unless `out` says otherwise. Every method raises a
    `RequestError` if the service refuses, by which nothing is changed, and a `TransportError` if no
    answer comes, a `Timeout` if none in time.

    Without an answer it is unknown whether the request was carried out. What only computes, or
    replaces contents, may be sent again; do not blindly repeat an `Accumulate`, which may be added
    twice: look at its tensor first. A tensor that such a request left in the service expires.

    What this client stored is freed when it is closed, or else when it and its tensors have been
    collected, at the latest at the end of the program; if the program is killed, it expires.

    Args:
        url: "http://host:port" or "unix:/path".
        timeout: seconds allowed for a request, with connecting and sending; math.inf: no limit.

    Example:
        >>> with Client("unix:/run/matmuld.sock") as client:
        ...     weight = client.put(np.ones((10, 64), np.float32))
        ...     y = client.linear(np.ones((8, 64), np.float32), weight, activation="relu")
    """

    def __init__(self, url: str, *, timeout: float = 30.0) -> None:
        self._channel = Channel(url, timeout)

    def close(self) -> None:
        """Free the tensors that came from this client and were not released, and disconnect."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def put(
        self,
        array: Array,
        *,
        kind: AuxKind | None = None,
        quantize: Float8 | None = None,
        pinned: bool = False,
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> RemoteTensor:
        """Store an array in the service.

        Args:
            array: of a floating-point dtype and up to 8 dimensions.
            kind: of auxiliary data, such as "gelu_aux": a layer's aux that was fetched before.
            quantize: make it 8-bit: the service divides by the largest magnitude over the dtype's
                largest number, which is the tensor's `scale`, and rounds. NaN and infinity are
                refused.
            pinned: whether it never expires.
            ttl: seconds after its last use until it expires; default: the service's.
            timeout: seconds; default: the client's.

        Raises:
            OutOfMemory: there is no room for it.
        """
        keep: dict[str, object] = {"pinned": pinned} if pinned else {}
        if ttl is not None:
            keep["ttl_s"] = ttl
        if quantize is not None:
            keep["quantize"] = quantize
        array = np.asarray(array)
        target, said = "/v1/tensors", kind or "tensor"
        tensor = upload(self._channel, "POST", target, array, keep, timeout, said)
        return RemoteTensor(self._channel, tensor)

    def zeros(
        self,
        shape: SupportsIndex | Sequence[int],
        dtype: DTypeLike = np.float32,
        *,
        pinned: bool = False,
        ttl: float | None = None,
    ) -> RemoteTensor:
        """Store zeros without sending them; see `put`."""
        extents = shape if isinstance(shape, Iterable) else [shape]
        request = Request(shape=list(map(index, extents)), pinned=pinned, ttl_s=ttl)
        request.header["dtype"] = dtype_name(dtype_of(dtype), "dtype")
        return RemoteTensor(self._channel, self._channel.post("/v1/tensors", request.header)[0])

    def tensor(self, handle: str) -> RemoteTensor | Tape:
        """What another client stored; it is not freed when this object is collected.

        Raises:
            UnknownHandle: there is none.
            Gone: it was freed or has expired.
        """
        metadata = self._channel.get(f"/v1/tensors/{handle}/metadata")[0]
        if metadata["kind"] == "tape":
            return Tape(self._channel, handle, owned=False)
        return RemoteTensor(self._channel, metadata, owned=False)

    def tensors(self) -> list[dict[str, Any]]:
        """Metadata of all tensors that the service holds."""
        return list(self._channel.get("/v1/tensors")[0]["tensors"])

    def program(self) -> Program:
        """An empty program: operations to be sent as one request, see `Program`."""
        return Program(self._channel)

    def warm(self, requests: Iterable[tuple[str, Mapping[str, object]]]) -> dict[str, int]:
        """Plan products ahead, so that the first request of a kind is as fast as the next.

        Args:
            requests: operations with their arguments, such as
                ``("linear/forward", {"x": np.empty((8, 64)), "weight": weight})``. An array stands
                for its dtype, shape and strides only: np.empty will do.

        Returns:
            How many products were "planned", and how many had been before ("hits").

        Raises:
            InvalidOperands: such a request would be refused.
        """
        entries = [{"operation": name, "header": template(header)} for name, header in requests]
        return self._channel.post("/v1/plans/warm", {"requests": entries})[0]

    def plans(self) -> dict[str, Any]:
        """The planned products, under "plans"; the ways chosen to do steps, and what they were
        measured to take, under "strategies"; and counters of the pool, under "stats".
        """
        return self._channel.get("/v1/plans")[0]

    def evict_plans(self, id: str | None = None) -> int:
        """Free one idle plan, or all; how many were freed.

        Raises:
            NotFound: there is no such plan.
        """
        target = "/v1/plans" if id is None else f"/v1/plans/{id}"
        return int(self._channel.get(target, method="DELETE")[0]["evicted"])

    def info(self) -> dict[str, Any]:
        """Versions, device, dtypes, limits and counters of the service."""
        return self._channel.get("/v1/info")[0]

    def live(self) -> bool:
        """Whether the service runs; False also if it cannot be reached."""
        return self._is_healthy("live")

    def ready(self) -> bool:
        """Whether the service takes requests; False also if it cannot be reached."""
        return self._is_healthy("ready")

    def _is_healthy(self, aspect: str) -> bool:
        try:
            self._channel.get(f"/health/{aspect}")
        except (Starting, Draining, DeviceLost, TransportError):
            return False
        return True
