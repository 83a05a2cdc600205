"""Several operations as one request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ._channel import Channel
from ._payloads import Array
from ._requests import Request, Results, placed
from .operations import (
    Activation,
    AuxEpilog,
    Gradient,
    InputScales,
    Layer,
    LinearScales,
    MatmulScales,
    Operand,
    Options,
    Placement,
    PlainEpilog,
    Priority,
    StepGradients,
    StepMLPGradients,
    StepResult,
    wanted,
)
from .tensors import RemoteTensor, Tape
from .views import TensorView
from .wire import DTYPES

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._keywords import (
        LinearStep,
        LinearStepAndAux,
        MatmulStep,
        MatmulStepAndExtra,
        MLPStep,
        MLPStepAndTape,
    )


class Program:
    """Up to 64 operations that are sent as one request: later steps take results of earlier ones,
    which stay on the device, and only what is asked for comes back.

    Its methods are those of `Client`, without `out` and `timeout`. Nothing is computed before
    `run`, which does all of it or, if a step cannot be done, nothing. Every step reads the tensors
    of the service as they were at the start; where results are put into tensors, all of them change
    together, at the end.

    A program may be run many times. Arrays in C order are read each time, so that their contents
    may be changed in between; of others it has copies. The service recognizes what it has run
    before, and is faster then.

    Example:
        >>> program = client.program()
        >>> hidden, aux = program.linear(x, w0, activation="relu", save_aux=True)
        >>> y = program.linear(hidden, w1)
        >>> last = program.linear_backward(w1, hidden, dz=dy, input_aux=aux)
        >>> first = program.linear_backward(x=x, dz=last.dx, wants=["dweight"])
        >>> results = program.run({"y": y, "dw0": first.dweight, "dw1": last.dweight})
        >>> results["dw0"].shape == w0.shape
        True
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._steps: list[dict[str, Any]] = []
        self._payloads: list[memoryview] = []
        self._sent: dict[tuple[int, bool], tuple[Array, dict[str, Any]]] = {}
        self._stacks: dict[str, tuple[Operand, tuple[Layer, ...]]] = {}

    def __len__(self) -> int:
        """How many steps it has."""
        return len(self._steps)

    @overload
    def linear(
        self, x: Operand, weight: Operand, bias: Operand | None = None, **k: Unpack[LinearStep]
    ) -> StepResult: ...
    @overload
    def linear(
        self,
        x: Operand,
        weight: Operand,
        bias: Operand | None = None,
        **k: Unpack[LinearStepAndAux],
    ) -> tuple[StepResult, StepResult]: ...
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
    ) -> StepResult | tuple[StepResult, StepResult]:
        """Add a linear layer, see `Client.linear`."""
        request = self._request(
            alpha=alpha, beta=beta, activation=activation, save_aux=save_aux, options=options
        )
        request.operands(x=x, weight=weight, bias=bias, c=c)
        request.scales(scales)
        step = self._add("linear/forward", request)
        y = self._result(step, "y", _layer_shape(_shape(x), weight), _result_dtype(x, options))
        return (y, self._result(step, "aux")) if save_aux else y

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
    ) -> StepGradients:
        """Add the gradients of a linear layer, see `Client.linear_backward`."""
        names = wanted(wants, weight, x)
        request = self._request(wants=names, options=options, input_dbias=input_dbias)
        request.operands(weight=weight, x=x, dz=dz, dy=dy, aux=aux, input_aux=input_aux)
        step = self._add("linear/backward", request)
        gradient = dy if dz is None else dz
        of_gradient, of_x = _shape(gradient), _shape(x if weight is None else weight)
        lead, outputs, inputs = of_gradient[:-1], of_gradient[-1:], of_x[-1:]
        shapes = {"dx": (*lead, *inputs), "dweight": (*outputs, *inputs), "dbias": outputs}
        shapes["input_dbias"] = inputs
        dtype = _result_dtype(gradient, options)
        given = [*names, *(["input_dbias"] if input_dbias else [])]
        return StepGradients(
            **{name: self._result(step, name, shapes[name], dtype) for name in given}
        )

    @overload
    def mlp(self, x: Operand, layers: Sequence[Layer], **k: Unpack[MLPStep]) -> StepResult: ...
    @overload
    def mlp(
        self, x: Operand, layers: Sequence[Layer], **k: Unpack[MLPStepAndTape]
    ) -> tuple[StepResult, StepResult]: ...
    def mlp(
        self,
        x: Operand,
        layers: Sequence[Layer],
        *,
        scales: InputScales | None = None,
        save_tape: bool = False,
        options: Options | None = None,
    ) -> StepResult | tuple[StepResult, StepResult]:
        """Add a stack of linear layers, see `Client.mlp`."""
        request = self._request(save_tape=save_tape, options=options)
        request.operands(x=x)
        request.scales(scales)
        request.layers(layers)
        step = self._add("mlp/forward", request)
        self._stacks[step] = x, tuple(layers)
        shape = _shape(x)
        for layer in layers:
            shape = _layer_shape(shape, layer.weight)
        y = self._result(step, "y", shape, _result_dtype(x, options))
        return (y, self._result(step, "tape")) if save_tape else y

    def mlp_backward(
        self,
        tape: StepResult,
        *,
        dy: Operand | None = None,
        dz: Operand | None = None,
        wants: Iterable[Gradient] = ("dweight", "dbias"),
    ) -> StepMLPGradients:
        """Add the gradients of a stack of this program, see `Client.mlp_backward`."""
        names = list(wants)
        request = self._request(wants=names)
        request.header["tape"] = request.reference("tape", tape)
        if tape.output != "tape":
            raise TypeError(f"tape: expected the tape of an mlp, got its {tape.output}")
        request.operands(dy=dy, dz=dz)
        step = self._add("mlp/backward", request)
        x, layers = self._stacks[tape.step]
        dtype = _dtype(x)
        dx = self._result(step, "dx", _shape(x), dtype) if "dx" in names else None
        gradients = []
        for index, layer in enumerate(layers):
            weight = _shape(layer.weight)
            dweight = dbias = None
            if "dweight" in names:
                dweight = self._result(step, f"layers[{index}].dweight", weight, dtype)
            if "dbias" in names and layer.bias is not None:
                dbias = self._result(step, f"layers[{index}].dbias", _shape(layer.bias), dtype)
            gradients.append(StepGradients(dweight=dweight, dbias=dbias))
        return StepMLPGradients(dx, tuple(gradients))

    @overload
    def matmul(
        self, a: Operand, b: Operand, c: Operand | None = None, **k: Unpack[MatmulStep]
    ) -> StepResult: ...
    @overload
    def matmul(
        self, a: Operand, b: Operand, c: Operand | None = None, **k: Unpack[MatmulStepAndExtra]
    ) -> tuple[StepResult, StepResult]: ...
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
    ) -> StepResult | tuple[StepResult, StepResult]:
        """Add a product, see `Client.matmul`; of an epilog with a further output, a pair of D and
        that.
        """
        request = self._request(alpha=alpha, beta=beta, epilog=epilog, options=options)
        request.scales(scales)
        request.operands(a=a, b=b, c=c, bias=bias, relu_aux=relu_aux, gelu_aux=gelu_aux)
        step = self._add("matmul", request)
        rows, columns = _shape(a), _shape(b)
        shape = (*(rows[:-2] or columns[:-2]), *rows[-2:-1], *columns[-1:])
        d = self._result(step, "d", shape, _result_dtype(a, options))
        extra = _EXTRAS.get(epilog or "")
        return d if extra is None else (d, self._result(step, extra))

    def run(
        self,
        outputs: Mapping[str, StepResult | None],
        *,
        out: Mapping[str, Placement] | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
        priority: Priority | None = None,
    ) -> dict[str, Array | RemoteTensor | Tape]:
        """Send it, and get the results that are asked for.

        Args:
            outputs: results by names of your choice. Gradients of parameters may go into tensors by
                `Accumulate`, if nothing else uses them.
            out: where results go that are not to be returned as arrays, by the same names: as in
                `Client.linear` and `Client.linear_backward`. An aux stays in the service unless it
                is to be an "array", a tape always does.
            timeout: seconds; default: the client's.
            deadline: seconds within which the service must be at work, or not run it at all.
            priority: "interactive" (default) or "batch", which lets the other go first.

        Returns:
            The results by the same names.

        Raises:
            InvalidOperands: operands of a step do not fit each other; names step and operand, such
                as ``steps[2].x``.
            Gone, UnknownHandle: an operand is no longer there.
            OutOfMemory: a step, or holding the results, found no room.
            DeadlineExceeded: the deadline could not be kept, and nothing was run.
            Overloaded: there are too many requests; see its `retry_after`.
        """
        request = self._request(steps=self._steps)
        placements = out or {}
        if unknown := sorted(set(placements) - set(outputs)):
            raise TypeError(f"out: expected names of outputs, got {unknown[0]!r}")
        request.header["outputs"] = named = {}
        where = placed(placements)
        for name, result in outputs.items():
            if not isinstance(result, StepResult):
                raise TypeError(f"{name}: expected a result of a step, got {type(result).__name__}")
            named[name] = request.reference(name, result)
            if name in where:
                named[name]["placement"] = where[name]
        results = request.send(self._channel, "run", timeout, deadline, priority)
        return {name: _read(results, name, placements.get(name)) for name in outputs}

    def _request(self, **fields: object) -> Request:
        request = Request(**fields)
        request.program = self
        request.payloads, request.sent = list(self._payloads), dict(self._sent)
        return request

    def _add(self, operation: str, request: Request) -> str:
        """Append a step; its name."""
        name = str(len(self._steps))
        self._payloads, self._sent = request.payloads, request.sent
        self._steps.append({"name": name, "operation": operation, "header": request.header})
        return name

    def _result(
        self,
        step: str,
        output: str,
        shape: tuple[int, ...] | None = None,
        dtype: np.dtype[Any] | None = None,
    ) -> StepResult:
        return StepResult(self, step, output, shape, dtype)


_EXTRAS = {
    "RELU_AUX": "relu_aux",
    "RELU_AUX_BIAS": "relu_aux",
    "GELU_AUX": "gelu_aux",
    "GELU_AUX_BIAS": "gelu_aux",
    "DRELU_BGRAD": "drelu_bgrad",
    "DGELU_BGRAD": "dgelu_bgrad",
    "BGRADA": "bgrada",
    "BGRADB": "bgradb",
}
"""What an epilog gives besides D."""


def _read(results: Results, name: str, placement: Placement | None) -> Array | RemoteTensor | Tape:
    if results.header[name].get("kind") == "tape":
        return results.tape(name)
    return results.tensor(name, placement)


def _shape(operand: Operand | None) -> tuple[int, ...]:
    """As far as it is known: what is wrong with it is for the service to say."""
    if isinstance(operand, RemoteTensor | TensorView | StepResult):
        return operand.shape or ()
    return np.shape(() if operand is None else operand)


def _layer_shape(x: tuple[int, ...], weight: Operand) -> tuple[int, ...]:
    return (*x[:-1], *_shape(weight)[:1])


def _dtype(operand: Operand | None) -> np.dtype[Any] | None:
    if isinstance(operand, TensorView):
        return operand.tensor.dtype
    if isinstance(operand, RemoteTensor | StepResult):
        return operand.dtype
    return None if operand is None else np.asarray(operand).dtype


def _result_dtype(operand: Operand | None, options: Options | None) -> np.dtype[Any] | None:
    """The dtype of what is made of `operand`."""
    if options is not None and (name := options.get("result_type")) is not None:
        return DTYPES.get(name)
    dtype = _dtype(operand)
    narrow = dtype is not None and dtype.itemsize == 1
    return DTYPES["bfloat16"] if narrow else dtype
