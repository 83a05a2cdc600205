"""/v1/linear/forward and /v1/linear/backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from matmuld_client.errors import Conflict, InvalidOperands, Malformed

from .. import strategies
from ..calls import Call, Result, Results, Step
from ..engine.elementwise import reshape
from ..engine.epilogs import ACTIVATIONS, AUX_OF, Activation, AuxKind
from ..engine.protocol import Array
from ..engine.signature import Options
from ..operands import FACTORS, Inputs, Operand
from ..schemas import Into, LinearBackward, LinearForward, Placement
from ..strategies import Forward, HiddenGradient, InputGradient, WeightGradient
from .checks import (
    LinearShape,
    activation_of,
    aux_output,
    check_aux,
    empty_aux,
    linear_shape,
    load_aux,
    one_of,
    output,
    scale_of,
    scaling,
    take_aux,
    weight_shape,
)
from .float8 import OperandScale, take_scale
from .options import planner_options


@dataclass(frozen=True, slots=True)
class _Forward:
    """A checked forward pass."""

    x: Operand
    weight: Operand
    bias: Operand | None
    c: Operand | None
    scales: tuple[OperandScale, OperandScale]
    alpha: float
    beta: float
    activation: Activation
    kind: AuxKind | None
    options: Options
    dtype: np.dtype[Any]
    shape: LinearShape
    y_place: Placement
    aux_place: Placement

    async def run(self, call: Call) -> Results:
        shape = self.shape
        y = call.empty((shape.batch, shape.outputs), self.dtype)
        aux = None
        if self.kind is not None:
            aux = empty_aux(call, self.kind, shape.outputs, shape.batch, self.dtype)
        if shape.batch:
            await self._product(call, y, aux)
        results: Results = {"y": Result(y.reshape(*shape.lead, shape.outputs), self.y_place)}
        if self.kind is not None:
            owner = self.weight.handle
            results["aux"] = Result(aux, self.aux_place, self.kind, shape.outputs, owner)
        return results

    async def _product(self, call: Call, y: Array, aux: Array | None) -> None:
        x_scale, weight_scale = self.scales
        step = Forward(
            reshape(await call.load(self.x), self.shape.batch, self.shape.inputs),
            await call.load(self.weight),
            y,
            self.options,
            None if self.bias is None else await call.load(self.bias),
            self.activation,
            aux,
            None if self.c is None else (await call.load(self.c)).reshape(y.shape),
            self.alpha * x_scale.number * weight_scale.number,
            self.beta,
            await x_scale.load(call),
            await weight_scale.load(call),
        )
        await call.choose(step)


def forward(inputs: Inputs, header: LinearForward) -> Step:
    """``y = activation(alpha · x·weightᵀ + beta · c + bias)``, and the aux."""
    x = inputs.take("x", header.x, FACTORS)
    weight = inputs.take("weight", header.weight, FACTORS)
    bias = None if header.bias is None else inputs.take("bias", header.bias)
    c = None if header.c is None else inputs.take("c", header.c)
    beta = scaling(c, header.beta)
    activation = activation_of(header.activation)
    options, dtype = planner_options(inputs, header.options, x.dtype)
    shape = linear_shape(x, weight, bias, dtype)
    scales = (
        take_scale(inputs, "scales.x", x, header.scales.get("x")),
        take_scale(inputs, "scales.weight", weight, header.scales.get("weight")),
    )
    y_shape = (*shape.lead, shape.outputs)
    if c is not None:
        c.expect(y_shape, "that of y")
        c.expect_dtype(dtype, "that of y")
    kind = AUX_OF.get(activation) if header.save_aux else None
    if header.save_aux and kind is None:
        raise InvalidOperands(
            f"save_aux: expected activation {one_of(ACTIVATIONS[1:])}, got {activation}",
            operand="save_aux",
        )
    y_place = output(inputs, "outputs.y", header.outputs.get("y"), y_shape, dtype)
    aux_place: Placement = "tensor"
    if kind is not None:
        d = (shape.outputs, shape.batch)
        aux_place = aux_output(
            inputs, "outputs.aux", header.outputs.get("aux"), kind, d, dtype, weight.handle
        )
    elif "aux" in header.outputs:
        raise InvalidOperands("outputs.aux: expected save_aux with it", operand="outputs.aux")
    step = _Forward(
        x,
        weight,
        bias,
        c,
        scales,
        header.alpha,
        beta,
        activation,
        kind,
        options,
        dtype,
        shape,
        y_place,
        aux_place,
    )
    return Step(inputs.finish(), step.run)


async def parameter_gradients(
    call: Call,
    dz: Array,
    x: Array | None,
    options: Options,
    *,
    dweight: Placement | None,
    dbias: Placement | None,
    dtype: np.dtype[Any],
) -> Results:
    """dweight and dbias of one layer, those that have a place, from dz ``[batch, out]`` and x
    ``[batch, in]``.
    """
    results: Results = {}
    sums = None if dbias is None else await empty_sums(call, dz.shape, dtype)
    if dweight is not None:
        assert x is not None
        gradient, old, alpha, beta = _accumulator(call, dweight, (dz.shape[1], x.shape[1]), dtype)
        if dz.shape[0]:
            await call.choose(WeightGradient(dz, x, gradient, options, sums, old, alpha, beta))
        else:
            await call.compute(gradient.nbytes, gradient.fill, 0)
            if old is not None:
                gradient = await strategies.accumulate(call, gradient, old, alpha, beta)
        results["dweight"] = Result(gradient, dweight)
    elif sums is not None and dz.shape[0]:
        await strategies.bias_gradient(call, dz, sums)
    if dbias is not None:
        results["dbias"] = await _summed(call, sums, dbias)
    return results


async def hidden_gradients(
    call: Call,
    dz: Array,
    weight: Array,
    aux: Array,
    kind: AuxKind,
    x: Array,
    options: Options,
    *,
    dweight: Placement,
    dbias: Placement,
) -> tuple[Array, Results]:
    """dz of the layer below, and that layer's dweight and dbias, as one step."""
    dx = call.empty((dz.shape[0], weight.shape[1]), dz.dtype)
    sums = call.empty((dx.shape[1],), dz.dtype)
    gradient, old, alpha, beta = _accumulator(call, dweight, (dx.shape[1], x.shape[1]), dz.dtype)
    await call.choose(
        HiddenGradient(dz, weight, dx, options, aux, kind, x, gradient, sums, old, alpha, beta)
    )
    return dx, {"dweight": Result(gradient, dweight), "dbias": await _summed(call, sums, dbias)}


async def empty_sums(call: Call, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
    """Memory for the sums over the batch; they are zero for an empty one."""
    batch, length = shape
    return call.empty((length,), dtype) if batch else await call.zeros((length,), dtype)


def _accumulator(
    call: Call, place: Placement, shape: tuple[int, int], dtype: np.dtype[Any]
) -> tuple[Array, Array | None, float, float]:
    """Memory for a weight's gradient, and what is added to it: tensor, alpha and beta."""
    alpha, beta = scale_of(place)
    old = call.target(place).value if isinstance(place, Into) and beta else None
    return call.empty(shape, dtype), old, alpha, beta


async def _summed(call: Call, sums: Array, place: Placement) -> Result:
    """A bias's gradient, added to what is in its place."""
    alpha, beta = scale_of(place)
    if isinstance(place, Into) and (alpha, beta) != (1.0, 0.0):
        sums = await strategies.accumulate(call, sums, call.target(place).value, alpha, beta)
    return Result(sums, place)


@dataclass(frozen=True, slots=True)
class _Backward:
    """A checked backward pass. `places` are those of the gradients wanted."""

    gradient: Operand
    aux: tuple[Operand, AuxKind] | None
    weight: Operand | None
    x: Operand | None
    input_aux: tuple[Operand, AuxKind] | None
    options: Options
    dtype: np.dtype[Any]
    shape: LinearShape
    places: dict[str, Placement]

    async def run(self, call: Call) -> Results:
        shape, places = self.shape, self.places
        dz = (await call.load(self.gradient)).reshape(shape.batch, shape.outputs)
        if self.aux is not None and shape.batch:
            aux = await load_aux(call, self.aux[0])
            dz = await strategies.pre_activation_gradient(call, dz, aux, self.aux[1])
        results = await self._input_gradient(call, dz) if "dx" in places else {}
        x = None
        if "dweight" in places:
            assert self.x is not None
            x = (await call.load(self.x)).reshape(shape.batch, shape.inputs)
        return results | await parameter_gradients(
            call,
            dz,
            x,
            self.options,
            dweight=places.get("dweight"),
            dbias=places.get("dbias"),
            dtype=self.dtype,
        )

    async def _input_gradient(self, call: Call, dz: Array) -> Results:
        assert self.weight is not None
        shape, places = self.shape, self.places
        dx = call.empty((shape.batch, shape.inputs), self.dtype)
        sums = None
        if "input_dbias" in places:
            sums = await empty_sums(call, (shape.batch, shape.inputs), self.dtype)
        if shape.batch:
            aux = None if self.input_aux is None else await load_aux(call, self.input_aux[0])
            kind = "relu_aux" if self.input_aux is None else self.input_aux[1]
            weight = await call.load(self.weight)
            await call.choose(InputGradient(dz, weight, dx, self.options, aux, kind, sums))
        results: Results = {"dx": Result(dx.reshape(*shape.lead, shape.inputs), places["dx"])}
        if sums is not None:
            results["input_dbias"] = Result(sums, places["input_dbias"])
        return results


def backward(inputs: Inputs, header: LinearBackward) -> Step:
    """``dx = dz·weight``, ``dweight = dzᵀ·x``, ``dbias = Σ dz``"""
    gradient, aux = _gradient(inputs, header)
    weight = None if header.weight is None else inputs.take("weight", header.weight)
    x = None if header.x is None else inputs.take("x", header.x)
    input_aux = None
    if header.input_aux is not None:
        input_aux = take_aux(inputs, "input_aux", header.input_aux)
    options, dtype = planner_options(inputs, header.options, gradient.dtype)
    wants = _wants(header, weight, x)
    lead, outputs = gradient.shape[:-1], gradient.shape[-1] if gradient.shape else 0
    shape = LinearShape(lead, math.prod(lead), _inputs(gradient, weight, x), outputs)
    if aux is not None:
        check_aux(*aux, (outputs, shape.batch), gradient.dtype)
        _check_owner(aux[0], weight)
    if input_aux is not None:
        check_aux(*input_aux, (shape.inputs, shape.batch), gradient.dtype)
    places = _places(inputs, header, wants, shape, dtype)
    step = _Backward(gradient, aux, weight, x, input_aux, options, dtype, shape, places)
    return Step(inputs.finish(), step.run)


def _gradient(
    inputs: Inputs, header: LinearBackward
) -> tuple[Operand, tuple[Operand, AuxKind] | None]:
    """dz, or dy and this layer's aux. Raises Malformed for anything else."""
    if header.dz is not None and header.dy is None and header.aux is None:
        return inputs.take("dz", header.dz), None
    if header.dz is None and header.dy is not None and header.aux is not None:
        return inputs.take("dy", header.dy), take_aux(inputs, "aux", header.aux)
    given = [name for name in ("dz", "dy", "aux") if getattr(header, name) is not None]
    raise Malformed(f"dz: expected dz alone, or dy with aux, got {given or 'none'}", operand="dz")


def _wants(header: LinearBackward, weight: Operand | None, x: Operand | None) -> set[str]:
    """The gradients asked for, whose operands must be there."""
    given = {"dx": weight is not None, "dweight": x is not None, "dbias": True}
    if header.wants is None:
        wants = {name for name, possible in given.items() if possible}
    else:
        wants = set(header.wants)
    for name, needed in (("dx", "weight"), ("dweight", "x")):
        if name in wants and not given[name]:
            raise Malformed(f"{needed}: expected with {name}, is missing", operand=needed)
    if not wants:
        raise Malformed("wants: expected at least one of dx, dweight, dbias", operand="wants")
    if header.input_aux is not None and "dx" not in wants:
        raise Malformed("input_aux: expected with dx only", operand="input_aux")
    if header.input_dbias and header.input_aux is None:
        raise Malformed("input_aux: expected with input_dbias, is missing", operand="input_aux")
    return wants


def _inputs(gradient: Operand, weight: Operand | None, x: Operand | None) -> int:
    """`in`, on which weight and x agree; 1 if neither is there."""
    if not gradient.shape or gradient.shape[-1] == 0:
        raise gradient.reject(f"expected shape […, batch, out] with out ≥ 1, got {gradient.shape}")
    inputs = 1
    if weight is not None:
        _, inputs = weight_shape(weight)
        weight.expect(
            (gradient.shape[-1], inputs), f"[out, in], {gradient.name} is {gradient.shape}"
        )
        weight.expect_dtype(gradient.dtype, f"that of {gradient.name}")
    if x is not None:
        if weight is None:
            inputs = x.shape[-1] if x.shape else 0
        x.expect((*gradient.shape[:-1], inputs or 1), "[…, batch, in] with in ≥ 1")
        x.expect_dtype(gradient.dtype, f"that of {gradient.name}")
    return inputs


def _check_owner(aux: Operand, weight: Operand | None) -> None:
    """Raise Conflict if aux is known to be of another layer than `weight`."""
    owner, given = aux.weight, None if weight is None else weight.handle
    if owner is not None and given is not None and owner != given:
        raise Conflict(
            f"aux: expected the aux of the layer of weight {given}, it is that of {owner}",
            operand="aux",
        )


def _places(
    inputs: Inputs,
    header: LinearBackward,
    wants: set[str],
    shape: LinearShape,
    dtype: np.dtype[Any],
) -> dict[str, Placement]:
    """Where the gradients that are wanted go."""
    shapes: dict[str, tuple[int, ...]] = {
        "dx": (*shape.lead, shape.inputs),
        "dweight": (shape.outputs, shape.inputs),
        "dbias": (shape.outputs,),
    }
    wanted = {name: looks for name, looks in shapes.items() if name in wants}
    if header.input_dbias:
        wanted["input_dbias"] = (shape.inputs,)
    given: dict[str, Placement] = {str(name): to for name, to in header.outputs.items()}
    if unused := sorted(set(given) - set(wanted)):
        path = f"outputs.{unused[0]}"
        raise InvalidOperands(
            f"{path}: expected an output of this request, which are {sorted(wanted)}", operand=path
        )
    return {
        name: output(
            inputs,
            f"outputs.{name}",
            given.get(name),
            looks,
            dtype,
            parameter=name in ("dweight", "dbias"),
        )
        for name, looks in wanted.items()
    }
