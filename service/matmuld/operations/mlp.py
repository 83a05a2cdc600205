"""/v1/mlp/forward and /v1/mlp/backward: a stack of layers in one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matmuld_client.errors import Conflict, InvalidOperands, Malformed

from .. import strategies
from ..calls import Call, Result, Results, Step
from ..engine.elementwise import reshape
from ..engine.epilogs import AUX_OF, Activation
from ..engine.float8 import is_float8
from ..engine.protocol import Array
from ..engine.signature import Options
from ..operands import FACTORS, Inputs, Operand, Output
from ..schemas import Layer, MlpBackward, MlpForward, Placement, StepOutput
from ..strategies import Forward, InputGradient
from .checks import LinearShape, activation_of, declare, empty_aux, linear_shape, output
from .float8 import OperandScale, take_scale
from .linear import hidden_gradients, parameter_gradients
from .options import planner_options


@dataclass(slots=True)
class TapeLayer:
    """What the backward pass of one layer needs: the weight as it was, the input ``[batch, in]``,
    the aux.
    """

    weight: Array
    has_bias: bool
    activation: Activation
    x: Array
    aux: Array | None


@dataclass(slots=True)
class Tape:
    """What a forward pass keeps for its backward pass."""

    layers: list[TapeLayer]
    lead: tuple[int, ...]
    options: Options

    @property
    def arrays(self) -> list[Array]:
        """All that the tape keeps."""
        kept = [part for layer in self.layers for part in (layer.weight, layer.x, layer.aux)]
        return [array for array in kept if array is not None]

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, out) of the last layer."""
        return self.layers[-1].x.shape[0], self.layers[-1].weight.shape[0]

    @property
    def looks(self) -> TapeLooks:
        layers = [(layer.weight.shape, layer.has_bias) for layer in self.layers]
        return TapeLooks(layers, self.lead, np.dtype(self.layers[0].x.dtype))


class TapeLooks(NamedTuple):
    """What a tape is like before it is there. `layers`: shape of the weight, whether it has a bias;
    `lead`: the dimensions of x before the last.
    """

    layers: list[tuple[tuple[int, ...], bool]]
    lead: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(slots=True)
class _Layer:
    """A layer of a request: checked operands."""

    weight: Operand
    bias: Operand | None
    scale: OperandScale
    activation: Activation
    shape: LinearShape


@dataclass(frozen=True, slots=True)
class _Forward:
    """A checked forward pass."""

    x: Operand
    scale: OperandScale
    layers: list[_Layer]
    save_tape: bool
    options: Options
    dtype: np.dtype[Any]
    place: Placement

    async def run(self, call: Call) -> Results:
        lead, first, last = self.x.shape[:-1], self.layers[0].shape, self.layers[-1].shape
        current = reshape(await call.load(self.x), first.batch, first.inputs)
        scale, recorded = self.scale, list[TapeLayer]()
        for layer in self.layers:
            y = call.empty((first.batch, layer.shape.outputs), self.dtype)
            recorded.append(
                await _layer_forward(
                    call, layer, (current, scale), y, self.options, keep=self.save_tape
                )
            )
            current, scale = y, OperandScale()
        results: Results = {"y": Result(current.reshape(*lead, last.outputs), self.place)}
        if self.save_tape:
            tape = Tape(recorded, lead, self.options)
            results["tape"] = Result(tape, "tensor", "tape", parts=tape.arrays)
        return results


def forward(inputs: Inputs, header: MlpForward) -> Step:
    """Every layer in turn; the tape keeps what the backward pass needs."""
    x = inputs.take("x", header.x, FACTORS)
    narrow = is_float8(x.dtype)
    if not narrow and header.options.result_type not in (None, x.dtype.name):
        raise InvalidOperands(
            f"options.result_type: expected that of x ({x.dtype.name}) in a stack, "
            f"got {header.options.result_type}",
            operand="options.result_type",
        )
    if narrow and header.save_tape:
        raise InvalidOperands(
            f"save_tape: expected false with {x.dtype.name}, which has no backward pass",
            operand="save_tape",
        )
    options, dtype = planner_options(inputs, header.options, x.dtype)
    layers = _layers(inputs, x, header.layers, dtype)
    scale = take_scale(inputs, "scales.x", x, header.scales.get("x"))
    y_shape = (*x.shape[:-1], layers[-1].shape.outputs)
    place = output(inputs, "outputs.y", header.outputs.get("y"), y_shape, dtype)
    if header.save_tape:
        weights = [(layer.weight.shape, layer.bias is not None) for layer in layers]
        tape = TapeLooks(weights, x.shape[:-1], dtype)
        declare(inputs, "tape", None, Output((), dtype, "tape", tape=tape))
    step = _Forward(x, scale, layers, header.save_tape, options, dtype, place)
    return Step(inputs.finish(), step.run)


def _layers(inputs: Inputs, x: Operand, headers: list[Layer], dtype: np.dtype[Any]) -> list[_Layer]:
    """The layers, each fed by the one before, whose result is of `dtype`."""
    layers: list[_Layer] = []
    fed = x
    for index, header in enumerate(headers):
        name = f"layers[{index}]"
        weight = inputs.take(f"{name}.weight", header.weight, FACTORS)
        bias = None
        if header.bias is not None:
            bias = inputs.take(f"{name}.bias", header.bias)
        activation = activation_of(header.activation, f"{name}.activation")
        if index and (len(weight.shape) != 2 or weight.shape[1] != fed.shape[-1]):
            raise weight.reject(
                f"expected shape [out, {fed.shape[-1]}] after layers[{index - 1}], "
                f"got {weight.shape}"
            )
        shape = linear_shape(fed, weight, bias, dtype)
        given = header.scales.get("weight")
        scale = take_scale(inputs, f"{name}.scales.weight", weight, given)
        layers.append(_Layer(weight, bias, scale, activation, shape))
        fed = Operand(f"the output of {name}", dtype, (*shape.lead, shape.outputs), "tensor")
    return layers


async def _layer_forward(
    call: Call,
    layer: _Layer,
    fed: tuple[Array, OperandScale],
    y: Array,
    options: Options,
    *,
    keep: bool,
) -> TapeLayer:
    (x, x_scale), shape = fed, layer.shape
    kind = AUX_OF.get(layer.activation) if keep else None
    aux = None if kind is None else empty_aux(call, kind, shape.outputs, shape.batch, y.dtype)
    weight = await call.load(layer.weight)
    if shape.batch:
        step = Forward(
            x,
            weight,
            y,
            options,
            None if layer.bias is None else await call.load(layer.bias),
            layer.activation,
            aux,
            alpha=x_scale.number * layer.scale.number,
            x_scale=await x_scale.load(call),
            weight_scale=await layer.scale.load(call),
        )
        await call.choose(step)
    return TapeLayer(weight, layer.bias is not None, layer.activation, x, aux)


@dataclass(frozen=True, slots=True)
class _Backward:
    """A checked backward pass. `masked`: the gradient is by the last layer's pre-activation."""

    tape: Operand
    gradient: Operand
    masked: bool
    places: list[dict[str, Placement]]
    dx_place: Placement | None

    async def run(self, call: Call) -> Results:
        """From the last layer to the first, each layer's dz out of the product that makes the dx
        above it.
        """
        tape: Tape = call.tape(self.tape)
        dz = await self._last_gradient(call, tape)
        last = len(tape.layers) - 1
        parts = [await self._layer_gradients(call, tape, last, dz)]
        for index in range(last, 0, -1):
            dz, part = await self._below(call, tape, index, dz)
            parts.append(part)
        results: Results = {}
        if self.dx_place is not None:
            dx = await self._input_gradient(call, tape, 0, dz)
            results["dx"] = Result(dx.reshape(*tape.lead, dx.shape[-1]), self.dx_place)
        return {**results, "layers": parts[::-1]}

    async def _last_gradient(self, call: Call, tape: Tape) -> Array:
        """dz of the last layer."""
        dz = (await call.load(self.gradient)).reshape(tape.shape)
        last = tape.layers[-1]
        if self.masked or last.aux is None or not dz.shape[0]:
            return dz
        kind = AUX_OF[last.activation]
        return await strategies.pre_activation_gradient(call, dz, last.aux, kind)

    async def _layer_gradients(self, call: Call, tape: Tape, index: int, dz: Array) -> Results:
        place = self.places[index]
        return await parameter_gradients(
            call,
            dz,
            tape.layers[index].x,
            tape.options,
            dweight=place.get("dweight"),
            dbias=place.get("dbias"),
            dtype=self.gradient.dtype,
        )

    async def _below(self, call: Call, tape: Tape, index: int, dz: Array) -> tuple[Array, Results]:
        """dz of the layer below, and that layer's gradients."""
        below, place = tape.layers[index - 1], self.places[index - 1]
        if below.aux is None or len(place) < 2 or not dz.shape[0]:
            dz = await self._input_gradient(call, tape, index, dz)
            return dz, await self._layer_gradients(call, tape, index - 1, dz)
        return await hidden_gradients(
            call,
            dz,
            tape.layers[index].weight,
            below.aux,
            AUX_OF[below.activation],
            below.x,
            tape.options,
            dweight=place["dweight"],
            dbias=place["dbias"],
        )

    async def _input_gradient(self, call: Call, tape: Tape, index: int, dz: Array) -> Array:
        """The gradient by a layer's input; masked by the aux of the layer below, so that it is that
        layer's dz.
        """
        weight = tape.layers[index].weight
        below = tape.layers[index - 1] if index else None
        dx = call.empty((dz.shape[0], weight.shape[1]), self.gradient.dtype)
        if dz.shape[0]:
            aux = None if below is None else below.aux
            kind = "relu_aux" if below is None else AUX_OF.get(below.activation, "relu_aux")
            await call.choose(InputGradient(dz, weight, dx, tape.options, aux, kind))
        return dx


def backward(inputs: Inputs, header: MlpBackward) -> Step:
    """The gradients of every layer; the tape is consumed unless it is to be kept."""
    tape, looks = _take_tape(inputs, header)
    gradient = _gradient(inputs, header, looks)
    wants, dtype = frozenset[str](header.wants), gradient.dtype
    if not wants:
        raise Malformed("wants: expected at least one of dx, dweight, dbias", operand="wants")
    places = _places(inputs, header, looks, wants, dtype)
    dx_place = None
    if "dx" in wants:
        dx_shape = (*looks.lead, looks.layers[0][0][1])
        dx_place = output(inputs, "outputs.dx", header.outputs.get("dx"), dx_shape, dtype)
    elif header.outputs:
        raise InvalidOperands("outputs.dx: expected with dx in wants", operand="outputs.dx")
    step = _Backward(tape, gradient, header.dz is not None, places, dx_place)
    return Step(inputs.finish(), step.run, repeatable=tape.handle is None)


def _take_tape(inputs: Inputs, header: MlpBackward) -> tuple[Operand, TapeLooks]:
    """The tape, which a handle or an earlier step of a program gives."""
    handle = step = None
    looks: TapeLooks | None = None
    if isinstance(header.tape, StepOutput):
        index, found = inputs.find("tape", header.tape)
        step, came = (index, header.tape.output), "that output"
        kind, looks = found.kind, found.tape
    else:
        held = inputs.store.get(inputs.tenant, header.tape, "tape")
        handle = came = held.handle
        kind, looks = held.kind, held.value.looks if held.kind == "tape" else None
    if looks is None:
        raise Conflict(f"tape: expected a tape, {came} is a {kind}", operand="tape")
    operand = Operand("tape", looks.dtype, (), "tape", handle=handle, step=step)
    operand.consumed = handle is not None and not header.keep_tape and not inputs.sourceless
    return inputs.add(operand), looks


def _gradient(inputs: Inputs, header: MlpBackward, tape: TapeLooks) -> Operand:
    if (header.dy is None) == (header.dz is None):
        raise Malformed("dy: expected either dy or dz", operand="dy")
    if header.dy is not None:
        gradient = inputs.take("dy", header.dy)
    else:
        assert header.dz is not None
        gradient = inputs.take("dz", header.dz)
    gradient.expect((*tape.lead, tape.layers[-1][0][0]), "that of the forward pass's y")
    gradient.expect_dtype(tape.dtype, "that of the forward pass")
    return gradient


def _places(
    inputs: Inputs,
    header: MlpBackward,
    tape: TapeLooks,
    wants: frozenset[str],
    dtype: np.dtype[Any],
) -> list[dict[str, Placement]]:
    """Where every layer's gradients go."""
    given = header.layers
    if given is not None and len(given) != len(tape.layers):
        raise InvalidOperands(
            f"layers: expected {len(tape.layers)} entries, one for each layer of the tape, "
            f"got {len(given)}",
            operand="layers",
        )
    places: list[dict[str, Placement]] = []
    for index, (weight, has_bias) in enumerate(tape.layers):
        shapes: dict[str, tuple[int, ...]] = {}
        if "dweight" in wants:
            shapes["dweight"] = weight
        if "dbias" in wants and has_bias:
            shapes["dbias"] = (weight[0],)
        wanted = {} if given is None else given[index]
        for name in wanted:
            if name not in shapes:
                raise InvalidOperands(
                    f"layers[{index}].{name}: expected one of {sorted(shapes)}, got {name}",
                    operand=f"layers[{index}].{name}",
                )
        places.append(
            {
                name: output(
                    inputs,
                    f"layers[{index}].{name}",
                    wanted.get(name),  # type: ignore[call-overload]
                    shape,
                    dtype,
                    parameter=True,
                )
                for name, shape in shapes.items()
            }
        )
    return places
