"""/v1/matmul: the planner's own semantics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from matmuld_client.errors import InvalidOperands, Malformed

from ..calls import Call, Result, Results, Step
from ..engine.elementwise import assign, aux_shape, reshape, swap
from ..engine.epilogs import CUBLASLT, TABLE, AuxKind, Epilog, output_names
from ..engine.float8 import is_float8
from ..engine.protocol import Array
from ..engine.signature import Options
from ..operands import AUX_DTYPES, FACTORS, Inputs, Operand
from ..schemas import Matmul, Placement
from ..strategies import Product
from .checks import aux_output, check_aux, load_aux, output, scaling
from .float8 import OperandScale, check_bias, check_factors, check_multiples, take_scale
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


@dataclass(frozen=True, slots=True)
class _Product:
    """A checked product."""

    a: Operand
    b: Operand
    c: Operand | None
    scales: tuple[OperandScale, OperandScale]
    alpha: float
    beta: float
    epilog: Epilog
    bias: Operand | None
    aux: Operand | None
    options: Options
    dtype: np.dtype[Any]
    sizes: _Sizes
    places: dict[str, Placement]

    async def run(self, call: Call) -> Results:
        row, sizes, places = TABLE[self.epilog], self.sizes, self.places
        d = _empty_matrices(call, sizes, sizes.m, self.dtype, column_major=row.column_major)
        vector, out_aux = await _epilog_outputs(call, self.epilog, sizes, self.dtype)
        if d.size:
            await self._launch(call, d, vector, out_aux)
        results: Results = {"d": Result(_unflatten(d, sizes), places["d"])}
        for name in output_names(self.epilog):
            value = _unflatten(out_aux if name == row.aux_out else vector, sizes)
            results[name] = Result(value, places[name])
            if row.aux_out is not None:
                results[name] = Result(value, places[name], row.aux_out, sizes.m)
        return results

    async def _launch(
        self, call: Call, d: Array, vector: Array | None, out_aux: Array | None
    ) -> None:
        if self.bias is not None:
            vector = await _load_bias(call, self.bias, self.sizes)
        if self.aux is not None:
            out_aux = await _load_batch(call, self.aux, self.sizes)
        a_scale, b_scale = self.scales
        step = Product(
            await _matrices(call, self.a),
            await _matrices(call, self.b),
            d,
            self.options,
            self.epilog,
            None if self.c is None else await _load_c(call, self.c, d, self.sizes),
            self.alpha * a_scale.number * b_scale.number,
            self.beta,
            vector,
            out_aux,
            await a_scale.load(call),
            await b_scale.load(call),
        )
        await call.choose(step)


def matmul(inputs: Inputs, header: Matmul) -> Step:
    """``D = epilog(alpha · A·B + beta · C)``"""
    epilog = _epilog(header.epilog)
    a, b = inputs.take("a", header.a, FACTORS), inputs.take("b", header.b, FACTORS)
    c = None if header.c is None else inputs.take("c", header.c)
    sizes = _sizes(a, b)
    _check_float8(a, b, epilog)
    scales = (
        take_scale(inputs, "scales.a", a, header.scales.get("a")),
        take_scale(inputs, "scales.b", b, header.scales.get("b")),
    )
    options, dtype = planner_options(inputs, header.options, a.dtype)
    bias = _bias(inputs, header, epilog, sizes, (a.dtype, dtype))
    aux = _aux(inputs, header, epilog, sizes, dtype)
    beta = scaling(c, header.beta)
    if c is not None:
        _check_c(c, sizes, dtype)
    places = _places(inputs, header, epilog, sizes, dtype)
    product = _Product(
        a, b, c, scales, header.alpha, beta, epilog, bias, aux, options, dtype, sizes, places
    )
    return Step(inputs.finish(), product.run)


def _epilog(name: str | None) -> Epilog:
    if name is None or name in ("NONE", "DEFAULT"):
        return Epilog.NONE
    if name not in CUBLASLT:
        raise InvalidOperands(
            f"epilog: expected one of {', '.join(CUBLASLT)}, got {name[:40]!r}", operand="epilog"
        )
    return Epilog(name)


def _sizes(a: Operand, b: Operand) -> _Sizes:
    for operand, form in ((a, "[…, M, K]"), (b, "[…, K, N]")):
        if len(operand.shape) < 2 or 0 in operand.shape[-2:]:
            raise operand.reject(f"expected shape {form}, none of them 0, got {operand.shape}")
    check_factors(a, b)
    (m, k), (k_b, n) = a.shape[-2:], b.shape[-2:]
    if k != k_b:
        raise b.reject(f"expected K = {k} (a is {a.shape}), got {b.shape}")
    lead_a, lead_b = a.shape[:-2], b.shape[:-2]
    if lead_a and lead_b and lead_a != lead_b:
        raise b.reject(f"expected batch dimensions {lead_a} (a is {a.shape}) or none, got {lead_b}")
    return _Sizes(lead_a or lead_b, m, n, k)


def _check_float8(a: Operand, b: Operand, epilog: Epilog) -> None:
    """Raise InvalidOperands for what 8-bit floats cannot do."""
    row = TABLE[epilog]
    if is_float8(a.dtype) and (row.aux_in is not None or row.gradient is not None):
        raise InvalidOperands(
            f"epilog: expected none of a backward pass with {a.dtype.name}, got {epilog}",
            operand="epilog",
        )
    check_multiples(a, "M and K")
    check_multiples(b, "K and N")


def _bias(
    inputs: Inputs,
    header: Matmul,
    epilog: Epilog,
    sizes: _Sizes,
    dtypes: tuple[np.dtype[Any], np.dtype[Any]],
) -> Operand | None:
    """The bias, which the epilog either needs or does not take. `dtypes`: of the factors, of D."""
    if (header.bias is not None) != TABLE[epilog].bias:
        wanted = "a bias" if TABLE[epilog].bias else "no bias"
        raise Malformed(f"bias: expected {wanted} with epilog {epilog}", operand="bias")
    if header.bias is None:
        return None
    bias = inputs.take("bias", header.bias)
    allowed = {(sizes.m,), (sizes.m, 1), (*sizes.lead, sizes.m, 1)}
    if bias.shape not in allowed:
        raise bias.reject(
            f"expected shape {' or '.join(map(str, sorted(allowed)))}, got {bias.shape}"
        )
    check_bias(bias, *dtypes)
    return bias


def _aux(
    inputs: Inputs, header: Matmul, epilog: Epilog, sizes: _Sizes, dtype: np.dtype[Any]
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
        found = inputs.take(kind, tensor, AUX_DTYPES[kind])
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
    inputs: Inputs, header: Matmul, epilog: Epilog, sizes: _Sizes, dtype: np.dtype[Any]
) -> dict[str, Placement]:
    """Where D and the epilog's outputs go; an aux stays in the service unless it is said."""
    row, given = TABLE[epilog], header.outputs
    names = ("d", *output_names(epilog))
    if unknown := sorted(set(given) - set(names)):
        raise InvalidOperands(
            f"outputs.{unknown[0][:40]}: expected one of {', '.join(names)} with epilog {epilog}",
            operand="outputs",
        )
    places: dict[str, Placement] = {}
    for name in names:
        path = f"outputs.{name}"
        if name == row.aux_out:
            d = (*sizes.lead, sizes.m, sizes.n)
            places[name] = aux_output(inputs, path, given.get(name), row.aux_out, d, dtype)
            continue
        shape = (*sizes.lead, sizes.m, sizes.n) if name == "d" else _vector_shape(epilog, sizes)
        places[name] = output(inputs, path, given.get(name), shape, dtype)
    return places


def _vector_shape(epilog: Epilog, sizes: _Sizes) -> tuple[int, ...]:
    """The shape of the bias gradient."""
    length = sizes.n if TABLE[epilog].gradient == "b" else sizes.m
    return (*sizes.lead, length, 1) if sizes.lead else (length,)


async def _epilog_outputs(
    call: Call, epilog: Epilog, sizes: _Sizes, dtype: np.dtype[Any]
) -> tuple[Array | None, Array | None]:
    """Memory for the bias gradient and for the auxiliary output, if the epilog has them."""
    row = TABLE[epilog]
    vector = aux = None
    if row.gradient is not None:
        length = sizes.n if row.gradient == "b" else sizes.m
        shape = (length,) if sizes.batch is None else (sizes.batch, length, 1)
        vector = await call.zeros(shape, dtype)
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
    array = await call.load(operand)
    return array if array.ndim == 2 else reshape(array, -1, *array.shape[-2:])


async def _load_bias(call: Call, bias: Operand, sizes: _Sizes) -> Array:
    array = await call.load(bias)
    return array.reshape(sizes.m) if array.ndim <= 2 else array.reshape(-1, sizes.m, 1)


async def _load_batch(call: Call, aux: Operand, sizes: _Sizes) -> Array:
    columns = swap(await load_aux(call, aux))
    return swap(columns.reshape(sizes.flat(*columns.shape[-2:])))


async def _load_c(call: Call, c: Operand, d: Array, sizes: _Sizes) -> Array:
    """C in the layout of D; copied if it is not."""
    array = await call.load(c)
    full = array if array.shape == (*sizes.lead, sizes.m, sizes.n) else None
    if full is not None:
        full = _flatten(full, sizes)
        if full.strides == d.strides:
            return full
    like = swap(call.empty(swap(d).shape, d.dtype)) if not d.flags.c_contiguous else None
    copy = call.empty(d.shape, d.dtype) if like is None else like
    await call.compute(3 * d.nbytes, assign, _unflatten(copy, sizes), array)
    return copy


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
