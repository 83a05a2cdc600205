"""/v1/matmul: the planner's own semantics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from matmuld_client.errors import InvalidOperands, Malformed

from ..calls import Call, Reply, Result, Results
from ..engine.elementwise import aux_shape, swap
from ..engine.epilogs import TABLE, AuxKind, Epilog, output_names
from ..engine.protocol import Array, Operands
from ..operands import AUX_DTYPES, Operand
from ..schemas import Into, Matmul, Placement
from .checks import check_aux, load_aux, scaling
from .linear import Place, output
from .options import planner_options


@dataclass(slots=True)
class _Sizes:
    """``[lead…, m, k] @ [lead…, k, n]``; `batch` is None without leading dimensions."""

    lead: tuple[int, ...]
    m: int
    n: int
    k: int

    @property
    def batch(self) -> int | None:
        return math.prod(self.lead) if self.lead else None

    def flat(self, *matrix: int) -> tuple[int, ...]:
        """The shape of a matrix, or of a batch of them with one batch dimension."""
        return matrix if self.batch is None else (self.batch, *matrix)


async def matmul(call: Call, header: Matmul) -> Reply:
    """``D = epilog(alpha · A·B + beta · C)``"""
    epilog = _epilog(header.epilog)
    row = TABLE[epilog]
    a, b = call.inputs.take("a", header.a), call.inputs.take("b", header.b)
    c = None if header.c is None else call.inputs.take("c", header.c)
    sizes = _sizes(a, b)
    options, dtype = planner_options(header.options, a.dtype)
    bias = _bias(call, header, epilog, sizes, dtype)
    aux = _aux(call, header, epilog, sizes, dtype)
    call.inputs.finish()
    beta = scaling(c, header.beta)
    if c is not None:
        _check_c(c, sizes, dtype)
    places = _places(call, header, epilog, sizes, dtype)

    async with call.writing([place.target for place in places.values()]):
        d = _empty_matrices(call, sizes, sizes.m, dtype, column_major=row.column_major)
        vector, out_aux = _epilog_outputs(call, epilog, sizes, dtype)
        if d.size:
            await call.run(
                Operands(
                    await _matrices(call, a),
                    await _matrices(call, b),
                    d,
                    None if c is None else await _load_c(call, c, d, sizes),
                    header.alpha,
                    beta,
                    vector if bias is None else await _load_bias(call, bias, sizes),
                    out_aux if aux is None else await _load_batch(call, aux, sizes),
                ),
                epilog,
                options,
            )
        results: Results = {"d": places["d"].result(_unflatten(d, sizes))}
        for name in output_names(epilog):
            if name == row.aux_out:
                value, place = _unflatten(out_aux, sizes), places[name].placement
                results[name] = Result(value, place, row.aux_out, sizes.m)
            else:
                results[name] = places[name].result(_unflatten(vector, sizes))
        return await call.deliver(results)


def _epilog(name: str | None) -> Epilog:
    if name is None or name in ("NONE", "DEFAULT"):
        return Epilog.NONE
    if name not in Epilog.__members__:
        raise InvalidOperands(
            f"epilog: expected one of {', '.join(Epilog)}, got {name[:40]!r}", operand="epilog"
        )
    return Epilog(name)


def _sizes(a: Operand, b: Operand) -> _Sizes:
    for operand, form in ((a, "[…, M, K]"), (b, "[…, K, N]")):
        if len(operand.shape) < 2 or 0 in operand.shape[-2:]:
            raise operand.reject(f"expected shape {form}, none of them 0, got {operand.shape}")
    b.expect_dtype(a.dtype, "that of a")
    (m, k), (k_b, n) = a.shape[-2:], b.shape[-2:]
    if k != k_b:
        raise b.reject(f"expected K = {k} (a is {a.shape}), got {b.shape}")
    lead_a, lead_b = a.shape[:-2], b.shape[:-2]
    if lead_a and lead_b and lead_a != lead_b:
        raise b.reject(f"expected batch dimensions {lead_a} (a is {a.shape}) or none, got {lead_b}")
    return _Sizes(lead_a or lead_b, m, n, k)


def _bias(
    call: Call, header: Matmul, epilog: Epilog, sizes: _Sizes, dtype: np.dtype[Any]
) -> Operand | None:
    """The bias, which the epilog either needs or does not take."""
    if (header.bias is not None) != TABLE[epilog].bias:
        wanted = "a bias" if TABLE[epilog].bias else "no bias"
        raise Malformed(f"bias: expected {wanted} with epilog {epilog}", operand="bias")
    if header.bias is None:
        return None
    bias = call.inputs.take("bias", header.bias)
    allowed = {(sizes.m,), (sizes.m, 1), (*sizes.lead, sizes.m, 1)}
    if bias.shape not in allowed:
        raise bias.reject(
            f"expected shape {' or '.join(map(str, sorted(allowed)))}, got {bias.shape}"
        )
    bias.expect_dtype(dtype, "that of D")
    return bias


def _aux(
    call: Call, header: Matmul, epilog: Epilog, sizes: _Sizes, dtype: np.dtype[Any]
) -> Operand | None:
    """The auxiliary input, which the epilog either needs or does not take."""
    found: Operand | None = None
    kinds: tuple[AuxKind, ...] = ("relu_aux", "gelu_aux")
    for kind in kinds:
        tensor = header.relu_aux if kind == "relu_aux" else header.gelu_aux
        if (tensor is not None) != (TABLE[epilog].aux_in == kind):
            wanted = kind if tensor is None else f"no {kind}"
            raise Malformed(f"{kind}: expected {wanted} with epilog {epilog}", operand=kind)
        if tensor is None:
            continue
        found = call.inputs.take(kind, tensor, AUX_DTYPES[kind])
        if found.kind not in (kind, "tensor"):
            raise found.reject(f"expected kind {kind}, got {found.kind}")
        check_aux(found, kind, (*sizes.lead, sizes.m, sizes.n), dtype)
    return found


def _check_c(c: Operand, sizes: _Sizes, dtype: np.dtype[Any]) -> None:
    full = (*sizes.lead, sizes.m, sizes.n)
    try:
        fits = np.broadcast_shapes(c.shape, full) == full
    except ValueError:
        fits = False
    if not fits:
        raise c.reject(f"expected a shape that broadcasts to {full}, got {c.shape}")
    c.expect_dtype(dtype, "that of D")


def _places(
    call: Call, header: Matmul, epilog: Epilog, sizes: _Sizes, dtype: np.dtype[Any]
) -> dict[str, Place]:
    row, outputs = TABLE[epilog], header.outputs
    names = ("d", *output_names(epilog))
    if unknown := sorted(set(outputs) - set(names)):
        raise InvalidOperands(
            f"outputs.{unknown[0][:40]}: expected one of {', '.join(names)} with epilog {epilog}",
            operand="outputs",
        )
    places: dict[str, Place] = {}
    for name in names:
        default: Placement = "tensor" if name == row.aux_out else "payload"
        placement = outputs.get(name, default)
        if name == row.aux_out:
            if isinstance(placement, Into):
                raise InvalidOperands(
                    f"outputs.{name}: expected payload or tensor, got a handle", operand=name
                )
            places[name] = Place(placement, None)
            continue
        shape = (*sizes.lead, sizes.m, sizes.n) if name == "d" else _vector_shape(epilog, sizes)
        places[name] = output(call, name, placement, shape, dtype)
    return places


def _vector_shape(epilog: Epilog, sizes: _Sizes) -> tuple[int, ...]:
    """The shape of the bias gradient."""
    length = sizes.n if TABLE[epilog].gradient == "b" else sizes.m
    return (*sizes.lead, length, 1) if sizes.lead else (length,)


def _epilog_outputs(
    call: Call, epilog: Epilog, sizes: _Sizes, dtype: np.dtype[Any]
) -> tuple[Array | None, Array | None]:
    """Memory for the bias gradient and for the auxiliary output, if the epilog has them."""
    row = TABLE[epilog]
    vector = aux = None
    if row.gradient is not None:
        length = sizes.n if row.gradient == "b" else sizes.m
        vector = call.zeros((length,) if sizes.batch is None else (sizes.batch, length, 1), dtype)
    if row.aux_out is not None:
        rows = aux_shape(row.aux_out, (sizes.m, sizes.n))[0]
        element = np.dtype(np.uint8) if row.aux_out == "relu_aux" else dtype
        aux = _empty_matrices(call, sizes, rows, element, column_major=True)
    return vector, aux


def _empty_matrices(
    call: Call, sizes: _Sizes, rows: int, dtype: np.dtype[Any], *, column_major: bool
) -> Array:
    if column_major:
        return swap(call.empty(sizes.flat(sizes.n, rows), dtype))
    return call.empty(sizes.flat(rows, sizes.n), dtype)


async def _matrices(call: Call, operand: Operand) -> Array:
    """An operand as a matrix, or a batch with one batch dimension."""
    array = await operand.load(call.engine)
    return array if array.ndim == 2 else array.reshape(-1, *array.shape[-2:])


async def _load_bias(call: Call, bias: Operand, sizes: _Sizes) -> Array:
    array = await bias.load(call.engine)
    return array.reshape(sizes.m) if array.ndim <= 2 else array.reshape(-1, sizes.m, 1)


async def _load_batch(call: Call, aux: Operand, sizes: _Sizes) -> Array:
    columns = swap(await load_aux(call, aux))
    return swap(columns.reshape(sizes.flat(*columns.shape[-2:])))


async def _load_c(call: Call, c: Operand, d: Array, sizes: _Sizes) -> Array:
    """C in the layout of D; copied if it is not."""
    array = await c.load(call.engine)
    full = array if array.shape == (*sizes.lead, sizes.m, sizes.n) else None
    if full is not None:
        full = _flatten(full, sizes)
        if full.strides == d.strides:
            return full
    like = swap(call.empty(swap(d).shape, d.dtype)) if not d.flags.c_contiguous else None
    copy = call.empty(d.shape, d.dtype) if like is None else like
    await call.engine.call(3 * d.nbytes, _assign, _unflatten(copy, sizes), array)
    return copy


def _assign(target: Array, source: Array) -> None:
    target[...] = source


def _flatten(array: Array, sizes: _Sizes) -> Array:
    return array if sizes.batch is None else array.reshape(sizes.flat(*array.shape[-2:]))


def _unflatten(array: Array, sizes: _Sizes) -> Array:
    """With the leading dimensions of the request again; a view, as those are outermost."""
    if len(sizes.lead) <= 1:
        return array
    if array.flags.c_contiguous:
        return array.reshape(*sizes.lead, *array.shape[1:])
    columns = swap(array)
    return swap(columns.reshape(*sizes.lead, *columns.shape[1:]))
