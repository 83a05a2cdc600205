"""The client's linear layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, overload

from ._channel import Channel
from ._payloads import Array
from ._requests import Request
from .operations import (
    Activation,
    Gradient,
    LinearGradients,
    LinearScales,
    Operand,
    Options,
    Place,
    Placement,
    Priority,
    wanted,
)
from .tensors import RemoteTensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._keywords import (
        LinearToArray,
        LinearToArrayAndAux,
        LinearToTensor,
        LinearToTensorAndAux,
    )


class LinearOperations:
    """`linear` and `linear_backward`."""

    _channel: Channel

    @overload
    def linear(
        self, x: Operand, weight: Operand, bias: Operand | None = None, **k: Unpack[LinearToArray]
    ) -> Array: ...
    @overload
    def linear(
        self, x: Operand, weight: Operand, bias: Operand | None = None, **k: Unpack[LinearToTensor]
    ) -> RemoteTensor: ...
    @overload
    def linear(
        self,
        x: Operand,
        weight: Operand,
        bias: Operand | None = None,
        **k: Unpack[LinearToArrayAndAux],
    ) -> tuple[Array, RemoteTensor]: ...
    @overload
    def linear(
        self,
        x: Operand,
        weight: Operand,
        bias: Operand | None = None,
        **k: Unpack[LinearToTensorAndAux],
    ) -> tuple[RemoteTensor, RemoteTensor]: ...
    def linear(
        self,
        x: Operand,
        weight: Operand,
        bias: Operand | None = None,
        *,
        c: Operand | None = None,
        scales: LinearScales | None = None,
        alpha: float = 1.0,
        beta: float | None = None,
        activation: Activation = "none",
        save_aux: bool = False,
        options: Options | None = None,
        out: Place | RemoteTensor | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
        priority: Priority | None = None,
    ) -> object:
        """Apply a fused linear layer: ``activation(alpha * x @ weight.T + beta * c + bias)``.

        Args:
            x: (..., batch, in), or (in,) for one row.
            weight: (out, in).
            bias: (out,); not scaled.
            c: the shape of the result; needs `beta`.
            scales: of 8-bit `x` and `weight`, by name: the numbers that they stand for are these
                times what they hold. What `put` has quantized brings its own.
            alpha: factor of the product.
            beta: factor of `c`.
            activation: "none", "relu", "gelu" (its tanh form), "gelu_erf" (the exact one), "silu"
                or "leaky_relu" (of slope 0.01).
            save_aux: also return what `linear_backward` needs of this layer.
            options: how it is computed.
            out: "tensor" leaves the result in the service; a RemoteTensor takes it as contents.
            timeout: seconds; default: the client's.
            deadline: seconds within which the service must be at work, or not run it at all.
            priority: "interactive" (default) or "batch", which lets the other go first.

        Returns:
            (..., batch, out), the dtype of `x`, or bfloat16 if that is an 8-bit one; with
            `save_aux` a pair of that and the aux.

        Raises:
            Overloaded: there are too many requests; see its `retry_after`.
            DeadlineExceeded: the deadline could not be kept, and nothing was run.
            InvalidOperands: the operands do not fit each other; names the one at fault.
            Gone, UnknownHandle: an operand is no longer there.
        """
        request = Request(
            alpha=alpha, beta=beta, activation=activation, save_aux=save_aux, options=options
        )
        request.operands(x=x, weight=weight, bias=bias, c=c)
        request.scales(scales)
        request.outputs(y=out)
        results = request.send(self._channel, "linear/forward", timeout, deadline, priority)
        y = results.tensor("y", out)
        return (y, results.tensor("aux")) if save_aux else y

    def linear_backward(
        self,
        weight: Operand | None = None,
        x: Operand | None = None,
        *,
        dz: Operand | None = None,
        dy: Operand | None = None,
        aux: Operand | None = None,
        input_aux: Operand | None = None,
        input_dbias: bool = False,
        wants: Iterable[Gradient] | None = None,
        options: Options | None = None,
        out: Place | Mapping[str, Placement] | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
        priority: Priority | None = None,
    ) -> LinearGradients:
        """Gradients of a linear layer: ``dx = dz @ weight``, ``dweight = dz.T @ x``, ``dbias``.

        Args:
            weight: (out, in); needed for `dx`.
            x: (..., batch, in); needed for `dweight`.
            dz: (..., batch, out), the gradient by the pre-activation; or
            dy: (..., batch, out), the gradient by the output, together with
            aux: this layer's aux, which knows its activation; an array only of relu's bits.
            input_aux: the aux of the layer that produced `x`; `dx` is then that layer's `dz`.
            input_dbias: also that layer's dbias.
            wants: gradients to compute; default: all that the operands allow.
            options: how it is computed.
            out: "tensor" leaves all in the service; a mapping places gradients by name, where a
                RemoteTensor takes one as contents and `Accumulate` adds dweight or dbias to one.
            timeout: seconds; default: the client's.
            deadline: seconds within which the service must be at work, or not run it at all.
            priority: "interactive" (default) or "batch", which lets the other go first.

        Returns:
            The gradients, of the operands' dtype.

        Raises:
            Overloaded: there are too many requests; see its `retry_after`.
            DeadlineExceeded: the deadline could not be kept, and nothing was run.
            InvalidOperands: the operands do not fit each other, or one is missing.
            Conflict: an aux does not belong here.
            Gone, UnknownHandle: an operand is no longer there.
        """
        names = wanted(wants, weight, x)
        request = Request(wants=names, options=options, input_dbias=input_dbias)
        request.operands(weight=weight, x=x, dz=dz, dy=dy, aux=aux, input_aux=input_aux)
        placements = _by_name(out, [*names, *(["input_dbias"] if input_dbias else [])])
        request.outputs(**placements)
        results = request.send(self._channel, "linear/backward", timeout, deadline, priority)
        return results.gradients(results.header, placements)


def _by_name(
    out: Place | Mapping[str, Placement] | None, names: Iterable[str]
) -> Mapping[str, Placement]:
    if out is None:
        return {}
    if isinstance(out, str):
        return dict.fromkeys(names, out)
    if not isinstance(out, Mapping):
        raise TypeError(f"out: expected a place, or placements by name, got {type(out).__name__}")
    return out
