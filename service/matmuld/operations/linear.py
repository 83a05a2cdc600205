"""/v1/linear/forward and /v1/linear/backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from matmuld_client.errors import Conflict, InvalidOperands, Malformed
from matmuld_client.wire import PAYLOAD_LIMIT

from .. import strategies
from ..calls import Call, Reply, Result, Results
from ..engine.epilogs import AuxKind
from ..engine.protocol import Array
from ..engine.signature import Options
from ..memory.tensors import Resident
from ..operands import Operand, check_bytes
from ..schemas import Into, LinearBackward, LinearForward, Placement
from .checks import (
    AUX_OF,
    activation_of,
    check_aux,
    empty_aux,
    linear_shape,
    load_aux,
    scaling,
    take_aux,
    weight_shape,
)
from .options import planner_options


async def forward(call: Call, header: LinearForward) -> Reply:
    """``y = activation(alpha · x·weightᵀ + beta · c + bias)``, and the aux."""
    take = call.inputs.take
    x, weight = take("x", header.x), take("weight", header.weight)
    bias = None if header.bias is None else take("bias", header.bias)
    c = None if header.c is None else take("c", header.c)
    call.inputs.finish()
    beta = scaling(c, header.beta)
    activation = activation_of(header.activation)
    options, dtype = planner_options(header.options, x.dtype)
    shape = linear_shape(x, weight, bias, dtype)
    y_shape = (*shape.lead, shape.outputs)
    if c is not None:
        c.expect(y_shape, "that of y")
        c.expect_dtype(dtype, "that of y")
    kind = AUX_OF.get(activation) if header.save_aux else None
    if header.save_aux and kind is None:
        raise InvalidOperands(
            f"save_aux: expected activation relu or gelu, got {activation}", operand="save_aux"
        )
    place = output(call, "y", header.outputs.get("y"), y_shape, dtype)
    aux_place = header.outputs.get("aux", "tensor")
    if isinstance(aux_place, Into) or ("aux" in header.outputs and kind is None):
        raise InvalidOperands(
            "outputs.aux: expected payload or tensor, and save_aux with it", operand="outputs.aux"
        )

    async with call.writing([place.target]):
        y = call.empty((shape.batch, shape.outputs), dtype)
        aux = None if kind is None else empty_aux(call, kind, shape.outputs, shape.batch, dtype)
        if shape.batch:
            await strategies.forward(
                call,
                (await x.load(call.engine)).reshape(shape.batch, shape.inputs),
                await weight.load(call.engine),
                y,
                options,
                bias=None if bias is None else await bias.load(call.engine),
                activation=activation,
                aux=aux,
                c=None if c is None else (await c.load(call.engine)).reshape(y.shape),
                alpha=header.alpha,
                beta=beta,
            )
        results: Results = {"y": place.result(y.reshape(y_shape))}
        if kind is not None:
            owner = weight.resident.handle if weight.resident else None
            results["aux"] = Result(aux, aux_place, kind, shape.outputs, owner)
        return await call.deliver(results)


class Place(NamedTuple):
    """Where an output goes."""

    placement: Placement
    target: Resident | None

    def result(self, value: Array) -> Result:
        return Result(value, self.placement, target=self.target)

    @property
    def scale(self) -> tuple[float, float]:
        """alpha and beta of what the target becomes."""
        into = self.placement
        return (into.alpha, into.beta) if isinstance(into, Into) else (1.0, 0.0)


def output(
    call: Call,
    name: str,
    placement: Placement | None,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    gradient: bool = False,
) -> Place:
    """The place of an output of that shape and dtype; only gradients of parameters may be
    accumulated.

    Raises:
        InvalidOperands: it cannot go there.
    """
    check_bytes(name, shape, dtype)
    placement = placement or "payload"
    place = Place(placement, call.target(name, placement, shape, dtype))
    if not gradient and place.scale != (1.0, 0.0):
        raise InvalidOperands(
            f"outputs.{name}: alpha and beta are for dweight and dbias", operand=f"outputs.{name}"
        )
    nbytes = math.prod(shape) * dtype.itemsize
    if placement == "payload" and nbytes > PAYLOAD_LIMIT:
        raise InvalidOperands(
            f"outputs.{name}: expected a tensor for {nbytes} bytes, a payload has at most 2^32 - 1",
            operand=f"outputs.{name}",
        )
    return place


async def parameter_gradients(
    call: Call,
    dz: Array,
    x: Array | None,
    options: Options,
    *,
    dweight: Place | None,
    dbias: Place | None,
    dtype: np.dtype[Any],
) -> Results:
    """dweight and dbias of one layer, those that have a place, from dz ``[batch, out]`` and x
    ``[batch, in]``.
    """
    results: Results = {}
    batch, outputs = dz.shape
    sums = None if dbias is None else call.zeros((outputs,), dtype)
    if dweight is not None:
        assert x is not None
        alpha, beta = dweight.scale
        old = dweight.target.value if dweight.target is not None and beta else None
        gradient = call.empty((outputs, x.shape[1]), dtype)
        if batch:
            await strategies.weight_gradient(
                call, dz, x, gradient, options, dbias=sums, c=old, alpha=alpha, beta=beta
            )
        else:
            gradient.fill(0)
            if old is not None:
                gradient = await strategies.accumulate(call, gradient, old, alpha, beta)
        results["dweight"] = dweight.result(gradient)
    elif sums is not None and batch:
        await strategies.bias_gradient(call, dz, sums)
    if dbias is not None:
        alpha, beta = dbias.scale
        if dbias.target is not None and (alpha, beta) != (1.0, 0.0):
            sums = await strategies.accumulate(call, sums, dbias.target.value, alpha, beta)
        results["dbias"] = dbias.result(sums)
    return results


async def backward(call: Call, header: LinearBackward) -> Reply:
    """``dx = dz·weight``, ``dweight = dzᵀ·x``, ``dbias = Σ dz``"""
    take = call.inputs.take
    gradient, aux = _gradient(call, header)
    weight = None if header.weight is None else take("weight", header.weight)
    x = None if header.x is None else take("x", header.x)
    input_aux = None if header.input_aux is None else take_aux(call, "input_aux", header.input_aux)
    call.inputs.finish()
    options, dtype = planner_options(header.options, gradient.dtype)
    wants = _wants(header, weight, x)
    inputs = _inputs(gradient, weight, x)
    lead, outputs = gradient.shape[:-1], gradient.shape[-1]
    batch = math.prod(lead)
    if aux is not None:
        check_aux(*aux, (outputs, batch), gradient.dtype)
        _check_owner(aux[0], weight)
    if input_aux is not None:
        check_aux(*input_aux, (inputs, batch), gradient.dtype)

    outs, dx_shape = header.outputs, (*lead, inputs)
    places: dict[str, Place] = {}
    if "dx" in wants:
        places["dx"] = output(call, "dx", outs.get("dx"), dx_shape, dtype)
    if header.input_dbias:
        places["input_dbias"] = output(
            call, "input_dbias", outs.get("input_dbias"), (inputs,), dtype
        )
    for name, shape in (("dweight", (outputs, inputs)), ("dbias", (outputs,))):
        if name in wants:
            place = outs.get(name)  # type: ignore[call-overload]
            places[name] = output(call, name, place, shape, dtype, gradient=True)
    if unused := sorted(set(outs) - set(places)):
        raise InvalidOperands(
            f"outputs.{unused[0]}: expected an output of this request, which are {sorted(places)}",
            operand=f"outputs.{unused[0]}",
        )

    async with call.writing([place.target for place in places.values()]):
        dz = (await gradient.load(call.engine)).reshape(batch, outputs)
        if aux is not None and batch:
            loaded = await load_aux(call, aux[0])
            dz = await strategies.pre_activation_gradient(call, dz, loaded, aux[1])
        results: Results = {}
        if "dx" in wants:
            assert weight is not None
            dx = call.empty((batch, inputs), dtype)
            sums = call.zeros((inputs,), dtype) if header.input_dbias else None
            if batch:
                await strategies.input_gradient(
                    call,
                    dz,
                    await weight.load(call.engine),
                    dx,
                    options,
                    aux=None if input_aux is None else await load_aux(call, input_aux[0]),
                    kind="relu_aux" if input_aux is None else input_aux[1],
                    dbias=sums,
                )
            results["dx"] = places["dx"].result(dx.reshape(dx_shape))
            if sums is not None:
                results["input_dbias"] = places["input_dbias"].result(sums)
        loaded_x = None
        if "dweight" in wants:
            assert x is not None
            loaded_x = (await x.load(call.engine)).reshape(batch, inputs)
        results |= await parameter_gradients(
            call,
            dz,
            loaded_x,
            options,
            dweight=places.get("dweight"),
            dbias=places.get("dbias"),
            dtype=dtype,
        )
        return await call.deliver(results)


def _gradient(call: Call, header: LinearBackward) -> tuple[Operand, tuple[Operand, AuxKind] | None]:
    """dz, or dy and this layer's aux. Raises Malformed for anything else."""
    if header.dz is not None and header.dy is None and header.aux is None:
        return call.inputs.take("dz", header.dz), None
    if header.dz is None and header.dy is not None and header.aux is not None:
        return call.inputs.take("dy", header.dy), take_aux(call, "aux", header.aux)
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
    owner = aux.resident.weight if aux.resident else None
    given = weight.resident.handle if weight is not None and weight.resident else None
    if owner is not None and given is not None and owner != given:
        raise Conflict(
            f"aux: expected the aux of the layer of weight {given}, it is that of {owner}",
            operand="aux",
        )
