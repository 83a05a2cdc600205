"""The client's matrix products as the planner takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, overload

from ._channel import Channel
from ._payloads import Array
from ._requests import Request
from .operations import AuxEpilog, MatmulScales, Operand, Options, Place, PlainEpilog, Priority
from .tensors import RemoteTensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._keywords import (
        MatmulToArray,
        MatmulToArrayAndExtras,
        MatmulToTensor,
        MatmulToTensorAndExtras,
    )

Extras: TypeAlias = dict[str, Array | RemoteTensor]


class MatmulOperations:
    """`matmul`."""

    _channel: Channel

    @overload
    def matmul(
        self, a: Operand, b: Operand, c: Operand | None = None, **k: Unpack[MatmulToArray]
    ) -> Array: ...
    @overload
    def matmul(
        self, a: Operand, b: Operand, c: Operand | None = None, **k: Unpack[MatmulToTensor]
    ) -> RemoteTensor: ...
    @overload
    def matmul(
        self, a: Operand, b: Operand, c: Operand | None = None, **k: Unpack[MatmulToArrayAndExtras]
    ) -> tuple[Array, Extras]: ...
    @overload
    def matmul(
        self, a: Operand, b: Operand, c: Operand | None = None, **k: Unpack[MatmulToTensorAndExtras]
    ) -> tuple[RemoteTensor, Extras]: ...
    def matmul(
        self,
        a: Operand,
        b: Operand,
        c: Operand | None = None,
        *,
        scales: MatmulScales | None = None,
        alpha: float = 1.0,
        beta: float | None = None,
        epilog: PlainEpilog | AuxEpilog | None = None,
        bias: Operand | None = None,
        relu_aux: Operand | None = None,
        gelu_aux: Operand | None = None,
        options: Options | None = None,
        out: Place | RemoteTensor | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
        priority: Priority | None = None,
    ) -> object:
        """Compute ``D = epilog(alpha * a @ b + beta * c)``, with nvmath's epilogs.

        Args:
            a: (..., M, K); may be transposed or a slice, as may `b`.
            b: (..., K, N); leading dimensions are batches, equal or absent on one side.
            c: broadcastable to (..., M, N); needs `beta`.
            scales: of 8-bit `a` and `b`, by name; what `put` has quantized brings its own.
            alpha: factor of the product.
            beta: factor of `c`.
            epilog: a name of ``nvmath.linalg.advanced.MatmulEpilog``; None: the plain product.
            bias: (M,), (M, 1) or (..., M, 1), a value for each row of D.
            relu_aux: of a forward product, for DRELU and DRELU_BGRAD.
            gelu_aux: of a forward product, for DGELU and DGELU_BGRAD.
            options: how it is computed.
            out: "tensor" leaves D in the service; a RemoteTensor takes it as contents.
            timeout: seconds; default: the client's.
            deadline: seconds within which the service must be at work, or not run it at all.
            priority: "interactive" (default) or "batch", which lets the other go first.

        Returns:
            D, (..., M, N); for an epilog with further outputs a pair of D and those by name:
            "relu_aux" and "gelu_aux" stay in the service, "drelu_bgrad", "dgelu_bgrad", "bgrada"
            and "bgradb" are arrays.

        Raises:
            Overloaded: there are too many requests; see its `retry_after`.
            DeadlineExceeded: the deadline could not be kept, and nothing was run.
            InvalidOperands: the operands do not fit each other; names the one at fault.
            Conflict: an aux does not belong here.
            Gone, UnknownHandle: an operand is no longer there.
        """
        request = Request(alpha=alpha, beta=beta, epilog=epilog, options=options)
        request.scales(scales)
        request.operands(a=a, b=b, c=c, bias=bias, relu_aux=relu_aux, gelu_aux=gelu_aux)
        request.outputs(d=out)
        results = request.send(self._channel, "matmul", timeout, deadline, priority)
        d = results.tensor("d", out)
        extras = {name: results.tensor(name) for name in results.header if name != "d"}
        return (d, extras) if extras else d
