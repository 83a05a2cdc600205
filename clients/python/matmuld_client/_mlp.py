"""The client's stacks of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, overload

from ._channel import Channel
from ._payloads import Array
from ._requests import Request, placed
from .operations import (
    Gradient,
    InputScales,
    Layer,
    MLPGradients,
    Operand,
    Options,
    Place,
    Placement,
    Priority,
)
from .tensors import RemoteTensor, Tape

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._keywords import MLPToArray, MLPToArrayAndTape, MLPToTensor, MLPToTensorAndTape


class MLPOperations:
    """`mlp` and `mlp_backward`."""

    _channel: Channel

    @overload
    def mlp(self, x: Operand, layers: Sequence[Layer], **k: Unpack[MLPToArray]) -> Array: ...
    @overload
    def mlp(
        self, x: Operand, layers: Sequence[Layer], **k: Unpack[MLPToTensor]
    ) -> RemoteTensor: ...
    @overload
    def mlp(
        self, x: Operand, layers: Sequence[Layer], **k: Unpack[MLPToArrayAndTape]
    ) -> tuple[Array, Tape]: ...
    @overload
    def mlp(
        self, x: Operand, layers: Sequence[Layer], **k: Unpack[MLPToTensorAndTape]
    ) -> tuple[RemoteTensor, Tape]: ...
    def mlp(
        self,
        x: Operand,
        layers: Sequence[Layer],
        *,
        scales: InputScales | None = None,
        save_tape: bool = False,
        options: Options | None = None,
        out: Place | RemoteTensor | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
        priority: Priority | None = None,
    ) -> object:
        """Apply a stack of linear layers in one request.

        Args:
            x: (..., batch, in).
            layers: 1 to 64; the `in` of each is the `out` of the one before. Only the first weight
                can be 8-bit, with an 8-bit `x`; the others have the result's dtype.
            scales: of an 8-bit `x`, by name.
            save_tape: also return what `mlp_backward` needs.
            options: how it is computed.
            out: "tensor" leaves the result in the service; a RemoteTensor takes it as contents.
            timeout: seconds; default: the client's.
            deadline: seconds within which the service must be at work, or not run it at all.
            priority: "interactive" (default) or "batch", which lets the other go first.

        Returns:
            (..., batch, out of the last layer); with `save_tape` a pair of that and the tape.

        Raises:
            Overloaded: there are too many requests; see its `retry_after`.
            DeadlineExceeded: the deadline could not be kept, and nothing was run.
            InvalidOperands: the operands do not fit each other; names the one at fault.
            Gone, UnknownHandle: an operand is no longer there.
        """
        request = Request(save_tape=save_tape, options=options)
        request.operands(x=x)
        request.scales(scales)
        request.layers(layers)
        request.outputs(y=out)
        results = request.send(self._channel, "mlp/forward", timeout, deadline, priority)
        y = results.tensor("y", out)
        return (y, results.tape()) if save_tape else y

    def mlp_backward(
        self,
        tape: Tape,
        *,
        dy: Operand | None = None,
        dz: Operand | None = None,
        wants: Iterable[Gradient] | None = None,
        layers: Sequence[Mapping[str, Placement]] = (),
        keep_tape: bool = False,
        out: Place | RemoteTensor | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
        priority: Priority | None = None,
    ) -> MLPGradients:
        """Gradients of a stack of layers, at the weights that the forward pass used.

        Args:
            tape: of the forward pass; it is used up unless `keep_tape`.
            dy: (..., batch, out), the gradient by the output; or
            dz: (..., batch, out), the gradient by the last layer's pre-activation.
            wants: gradients to compute; default: dweight and dbias.
            layers: for each layer where its "dweight" and "dbias" go: `Accumulate` on the weights
                themselves with ``alpha=-lr`` is a step of SGD; all are changed together.
            keep_tape: whether the tape can be used again.
            out: where `dx` goes: "tensor", or a RemoteTensor.
            timeout: seconds; default: the client's.
            deadline: seconds within which the service must be at work, or not run it at all.
            priority: "interactive" (default) or "batch", which lets the other go first.

        Returns:
            The gradients; a layer without a bias has no dbias.

        Raises:
            InvalidOperands: an operand does not fit the tape.
            Gone: the tape was used up, was freed or has expired.
        """
        request = Request(
            tape=tape.handle,
            wants=None if wants is None else list(wants),
            layers=[placed(placements) for placements in layers] or None,
            keep_tape=keep_tape,
        )
        request.operands(dy=dy, dz=dz)
        request.outputs(dx=out)
        results = request.send(self._channel, "mlp/backward", timeout, deadline, priority)
        if not keep_tape:
            tape.consumed()
        dx = results.tensor("dx", out) if "dx" in results.header else None
        return MLPGradients(dx, results.layers(layers))
