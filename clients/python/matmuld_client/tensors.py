"""Tensors that stay in the service."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlencode

import numpy as np

from . import wire
from ._channel import Channel, answer
from ._payloads import AUX_DTYPES, Array, byte_view, describe, to_array
from .errors import Gone, InvalidOperands, TransportError
from .views import Key, TensorView

if TYPE_CHECKING:
    from typing import Self

_RAW_FROM = 1 << 20  # bytes; larger tensors are streamed into place
_RAW_FIELDS = f"Accept: {wire.MSGPACK}\r\nContent-Type: {wire.OCTETS}\r\n"


class _Held:
    """What the service holds for us under a handle."""

    def __init__(self, channel: Channel, handle: str, *, owned: bool) -> None:
        self._channel = channel
        self._handle: str | None = handle
        self._finalizer: weakref.finalize[Any, Any] | None = None
        if owned:
            channel.own(handle)
            self._finalizer = weakref.finalize(self, channel.discard, handle)
            self._finalizer.atexit = False

    @property
    def handle(self) -> str:
        """Its name in the service, for other clients too.

        Raises:
            Gone: it was freed through this object.
        """
        if self._handle is None:
            raise Gone("it was freed by this client")
        return self._handle

    def free(self) -> None:
        """Free it now. A second time, or if it has expired, this does nothing."""
        if self._handle is not None:
            self._channel.free(self._handle)
            self._forget()

    def release(self) -> str:
        """Its handle; from now on it stays until it is freed explicitly or expires."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._channel.disown(self.handle)
        return self.handle

    def _forget(self) -> None:
        self.release()
        self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.free()


class Tape(_Held):
    """What `Client.mlp` keeps for `Client.mlp_backward`: inputs and aux of every layer."""

    def consumed(self) -> None:
        """Note that a backward pass has used it up."""
        self._forget()

    def __repr__(self) -> str:
        return f"<Tape {self._handle or 'freed'}>"


class RemoteTensor(_Held):
    """A tensor that the service holds; an operand like any array, but not sent.

    It is freed at the end of a `with` block, by `free`, or when it is collected: then with the
    client's next request, or with the client. `release` keeps it. A slice, `T` and `mT` are views
    of it, which are operands too.

    Attributes:
        shape: its dimensions.
        strides: in elements, as the service holds it.
        dtype: NumPy's dtype; bfloat16 and the 8-bit ones are those of ml_dtypes.
        kind: "tensor", or of what a backward pass needs the activation and "_aux".
        scale: of a tensor that the service quantized: the numbers are this times its elements.
        amax: the largest magnitude that it was made from.
    """

    def __init__(self, channel: Channel, tensor: Mapping[str, Any], *, owned: bool = True) -> None:
        super().__init__(channel, tensor["tensor"], owned=owned)
        self.dtype: np.dtype[Any] = wire.DTYPES[tensor["dtype"]]
        self.shape: tuple[int, ...] = tuple(tensor["shape"])
        self.strides: tuple[int, ...] = tuple(tensor.get("strides") or wire.row_major(self.shape))
        self.kind: str = tensor.get("kind", "tensor")
        self._source = wire.DTYPES[tensor.get("quantized_from") or tensor["dtype"]]
        self._read_scale(tensor)

    def _read_scale(self, metadata: Mapping[str, Any]) -> None:
        self.scale: float | None = metadata.get("scale")
        self.amax: float | None = metadata.get("amax")

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    def numpy(self, *, timeout: float | None = None) -> Array:
        """Its contents, row-major, in memory of their own.

        Raises:
            Gone: it was freed or has expired.
        """
        accept = f"Accept: {wire.OCTETS}\r\n"
        body = self._channel.request("GET", self._target, accept, timeout=timeout).body
        if len(body) != self.nbytes:
            raise TransportError(f"expected {self.nbytes} bytes, got {len(body)}")
        return np.ndarray(self.shape, self.dtype, body)

    def mask(self) -> Array:
        """A relu_aux as booleans, (batch, out): where the pre-activation is not negative.

        Raises:
            Conflict: this is no relu_aux.
        """
        header, payloads = self._channel.get(f"{self._target}/mask")
        return to_array(header["value"], payloads)

    def replace(self, array: Array, *, timeout: float | None = None) -> None:
        """Replace the contents, at once for whoever reads them.

        Args:
            array: of this shape and dtype; of a quantized tensor, of the dtype that it was made
                from, and it is quantized anew.
            timeout: seconds; default: the client's.

        Raises:
            InvalidOperands: shape or dtype differ.
        """
        array = np.asarray(array)
        if array.shape != self.shape or array.dtype != self._source:
            raise InvalidOperands(
                f"value: expected {self._source}{self.shape}, got {array.dtype}{array.shape}",
                operand="value",
            )
        answer = upload(self._channel, "PUT", self._target, array, {}, timeout, self.kind)
        self._read_scale(answer)

    def keep(self, *, pinned: bool | None = None, ttl: float | None = None) -> None:
        """Change how long the service keeps it unused.

        Args:
            pinned: True: for ever.
            ttl: seconds after the last use.
        """
        change = {"pinned": pinned, "ttl_s": ttl}
        header = {name: value for name, value in change.items() if value is not None}
        self._channel.post(self._target, header, method="PATCH")

    @property
    def T(self) -> TensorView:
        """The view with all dimensions in reverse, as in NumPy."""
        return self[()].T

    @property
    def mT(self) -> TensorView:
        """The view with the last two dimensions exchanged."""
        return self[()].mT

    def __getitem__(self, key: Key) -> TensorView:
        return TensorView(self, self.shape, self.strides, 0)[key]

    def __len__(self) -> int:
        return len(self[()])

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        raise TypeError("a RemoteTensor is not fetched implicitly; call numpy()")

    def __repr__(self) -> str:
        state = self._handle or "freed"
        return f"<RemoteTensor {state} {self.kind} {self.dtype}{list(self.shape)}>"

    @property
    def _target(self) -> str:
        return f"/v1/tensors/{self.handle}"


def upload(
    channel: Channel,
    method: str,
    target: str,
    array: Array,
    keep: Mapping[str, object],
    timeout: float | None,
    kind: str = "tensor",
) -> dict[str, Any]:
    """Send `array` as the contents of a tensor; the answer. `keep`: pinned, ttl_s, quantize."""
    if kind != "tensor":
        tensor, block = describe(array, "value", AUX_DTYPES)
        header = {"value": {**tensor, "kind": kind, "payload": 0}, **keep}
        return channel.post(target, header, [byte_view(block)], method=method, timeout=timeout)[0]
    if array.nbytes < _RAW_FROM:
        tensor, block = describe(array, "value")
        header = {"value": {**tensor, "payload": 0}, **keep}
        return channel.post(target, header, [byte_view(block)], method=method, timeout=timeout)[0]
    tensor, block = describe(np.ascontiguousarray(array), "value")
    if method == "POST":
        shape = ",".join(map(str, array.shape))
        query = {"dtype": tensor["dtype"], "shape": shape}
        query |= {name: str(value).lower() for name, value in keep.items()}
        target += "?" + urlencode(query, safe=",")
    body = [byte_view(block)]
    return answer(channel.request(method, target, _RAW_FIELDS, body, timeout=timeout))[0]
