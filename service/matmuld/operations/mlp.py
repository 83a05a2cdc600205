"""/v1/mlp/forward and /v1/mlp/backward: a stack of layers in one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matmuld_client.errors import Conflict, InvalidOperands, Malformed

from .. import strategies
from ..calls import Call, Reply, Results, TapeResult
from ..engine.epilogs import Activation
from ..engine.protocol import Array
from ..engine.signature import Options
from ..operands import Operand
from ..schemas import Layer, MlpBackward, MlpForward
from .checks import AUX_OF, LinearShape, activation_of, empty_aux, linear_shape
from .linear import Place, output, parameter_gradients
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
    def shape(self) -> tuple[int, int]:
        """(batch, out) of the last layer."""
        return self.layers[-1].x.shape[0], self.layers[-1].weight.shape[0]


@dataclass(slots=True)
class _Layer:
    """A layer of a request: checked operands."""

    weight: Operand
    bias: Operand | None
    activation: Activation
    shape: LinearShape


async def forward(call: Call, header: MlpForward) -> Reply:
    """Every layer in turn; the tape keeps what the backward pass needs."""
    x = call.inputs.take("x", header.x)
    layers = _layers(call, x, header.layers)
    call.inputs.finish()
    if header.options.result_type not in (None, x.dtype.name):
        raise InvalidOperands(
            f"options.result_type: expected that of x ({x.dtype.name}) in a stack, "
            f"got {header.options.result_type}",
            operand="options.result_type",
        )
    options, dtype = planner_options(header.options, x.dtype)
    lead = x.shape[:-1]
    y_shape = (*lead, layers[-1].shape.outputs)
    place = output(call, "y", header.outputs.get("y"), y_shape, dtype)
    async with call.writing([place.target]):
        current = await x.load(call.engine)
        current = current.reshape(layers[0].shape.batch, layers[0].shape.inputs)
        recorded: list[TapeLayer] = []
        for layer in layers:
            step = await _layer_forward(call, layer, current, options, keep=header.save_tape)
            recorded.append(step[1])
            current = step[0]
        tape = None
        if header.save_tape:
            tape = TapeResult(Tape(recorded, lead, options), _tape_bytes(recorded, layers))
        return await call.deliver({"y": place.result(current.reshape(y_shape))}, tape)


def _layers(call: Call, x: Operand, headers: list[Layer]) -> list[_Layer]:
    """The layers, each fed by the one before."""
    layers: list[_Layer] = []
    fed = x
    for index, header in enumerate(headers):
        name = f"layers[{index}]"
        weight = call.inputs.take(f"{name}.weight", header.weight)
        bias = None
        if header.bias is not None:
            bias = call.inputs.take(f"{name}.bias", header.bias)
        activation = activation_of(header.activation, f"{name}.activation")
        if index and (len(weight.shape) != 2 or weight.shape[1] != fed.shape[-1]):
            raise weight.reject(
                f"expected shape [out, {fed.shape[-1]}] after layers[{index - 1}], "
                f"got {weight.shape}"
            )
        shape = linear_shape(fed, weight, bias, x.dtype)
        layers.append(_Layer(weight, bias, activation, shape))
        fed = Operand(f"the input of {name}", x.dtype, (*shape.lead, shape.outputs), "tensor")
    return layers


async def _layer_forward(
    call: Call, layer: _Layer, x: Array, options: Options, *, keep: bool
) -> tuple[Array, TapeLayer]:
    shape = layer.shape
    y = call.empty((shape.batch, shape.outputs), x.dtype)
    kind = AUX_OF.get(layer.activation) if keep else None
    aux = None if kind is None else empty_aux(call, kind, shape.outputs, shape.batch, x.dtype)
    weight = await layer.weight.load(call.engine)
    if shape.batch:
        await strategies.forward(
            call,
            x,
            weight,
            y,
            options,
            bias=None if layer.bias is None else await layer.bias.load(call.engine),
            activation=layer.activation,
            aux=aux,
        )
    return y, TapeLayer(weight, layer.bias is not None, layer.activation, x, aux)


def _tape_bytes(recorded: list[TapeLayer], layers: list[_Layer]) -> int:
    """Inputs and aux, and weights that nothing else holds."""
    total = 0
    for kept, layer in zip(recorded, layers, strict=True):
        total += kept.x.nbytes + (0 if kept.aux is None else kept.aux.nbytes)
        if layer.weight.resident is None:
            total += kept.weight.nbytes
    return total


async def backward(call: Call, header: MlpBackward) -> Reply:
    """The gradients of every layer; the tape is consumed unless it is to be kept."""
    held = call.store.get(call.tenant, header.tape, "tape")
    if not isinstance(held.value, Tape):
        raise Conflict(f"tape: expected a tape, {held.handle} is a {held.kind}", operand="tape")
    reply = await gradients(call, held.value, header)
    if not header.keep_tape:
        call.store.free(held)
    return reply


async def gradients(call: Call, tape: Tape, header: MlpBackward) -> Reply:
    """From the last layer to the first, each layer's dz out of the product that makes the dx above
    it.
    """
    gradient = _gradient(call, header, tape)
    call.inputs.finish()
    wants, dtype = frozenset[str](header.wants), gradient.dtype
    if not wants:
        raise Malformed("wants: expected at least one of dx, dweight, dbias", operand="wants")
    places = _places(call, header, tape, wants, dtype)
    dx_place, dx_shape = None, (*tape.lead, tape.layers[0].weight.shape[1])
    if "dx" in wants:
        dx_place = output(call, "dx", header.outputs.get("dx"), dx_shape, dtype)
    elif header.outputs:
        raise InvalidOperands("outputs.dx: expected with dx in wants", operand="outputs.dx")
    targets = [place.target for layer in places for place in layer.values()]
    async with call.writing([*targets, None if dx_place is None else dx_place.target]):
        dz = await _last_gradient(call, gradient, tape, masked=header.dz is not None)
        parts: list[Results] = []
        for index in range(len(tape.layers) - 1, -1, -1):
            layer, place = tape.layers[index], places[index]
            parts.append(
                await parameter_gradients(
                    call,
                    dz,
                    layer.x,
                    tape.options,
                    dweight=place.get("dweight"),
                    dbias=place.get("dbias"),
                    dtype=dtype,
                )
            )
            if index or dx_place is not None:
                below = tape.layers[index - 1] if index else None
                dz = await _layer_backward(call, layer, below, dz, tape.options)
        results: Results = {}
        if dx_place is not None:
            results["dx"] = dx_place.result(dz.reshape(dx_shape))
        results["layers"] = parts[::-1]
        return await call.deliver(results)


async def _last_gradient(call: Call, gradient: Operand, tape: Tape, *, masked: bool) -> Array:
    """dz of the last layer, from its dz (`masked`) or dy."""
    dz = (await gradient.load(call.engine)).reshape(tape.shape)
    last = tape.layers[-1]
    if masked or last.aux is None or not dz.shape[0]:
        return dz
    return await strategies.pre_activation_gradient(call, dz, last.aux, AUX_OF[last.activation])


def _gradient(call: Call, header: MlpBackward, tape: Tape) -> Operand:
    if (header.dy is None) == (header.dz is None):
        raise Malformed("dy: expected either dy or dz", operand="dy")
    if header.dy is not None:
        gradient = call.inputs.take("dy", header.dy)
    else:
        assert header.dz is not None
        gradient = call.inputs.take("dz", header.dz)
    gradient.expect((*tape.lead, tape.shape[1]), "that of the forward pass's y")
    gradient.expect_dtype(np.dtype(tape.layers[0].x.dtype), "that of the forward pass")
    return gradient


def _places(
    call: Call, header: MlpBackward, tape: Tape, wants: frozenset[str], dtype: np.dtype[Any]
) -> list[dict[str, Place]]:
    """Where every layer's gradients go."""
    given = header.layers
    if given is not None and len(given) != len(tape.layers):
        raise InvalidOperands(
            f"layers: expected {len(tape.layers)} entries, one for each layer of the tape, "
            f"got {len(given)}",
            operand="layers",
        )
    places: list[dict[str, Place]] = []
    for index, layer in enumerate(tape.layers):
        shapes: dict[str, tuple[int, ...]] = {}
        if "dweight" in wants:
            shapes["dweight"] = tuple(layer.weight.shape)
        if "dbias" in wants and layer.has_bias:
            shapes["dbias"] = (layer.weight.shape[0],)
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
                    call,
                    f"layers[{index}].{name}",
                    wanted.get(name),  # type: ignore[call-overload]
                    shape,
                    dtype,
                    gradient=True,
                )
                for name, shape in shapes.items()
            }
        )
    return places


async def _layer_backward(
    call: Call, layer: TapeLayer, below: TapeLayer | None, dz: Array, options: Options
) -> Array:
    """The gradient by a layer's input; masked by the aux of the layer below, so that it is that
    layer's dz.
    """
    dx = call.empty((dz.shape[0], layer.weight.shape[1]), dz.dtype)
    if dz.shape[0]:
        aux = None if below is None else below.aux
        kind = "relu_aux" if below is None else AUX_OF.get(below.activation, "relu_aux")
        await strategies.input_gradient(call, dz, layer.weight, dx, options, aux=aux, kind=kind)
    return dx
