"""What a layer's forward and backward pass mean as products.

There are several ways to do each step, all of them right; which one is fastest depends on the
device and on the shapes. The first of a table is taken until another is measured to be faster.

cuBLASLt wants a bias along the rows of D, and D column-major with any bias, aux or gradient: those
products run transposed (``yᵀ = W·xᵀ``), which on row-major memory costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .calls import Call, Way
from .engine import epilogs
from .engine.elementwise import accumulator_dtype, assign, swap
from .engine.epilogs import CUBLASLT, TABLE, Activation, AuxKind, Epilog
from .engine.float8 import is_float8
from .engine.protocol import Array, Operands
from .engine.signature import Options

NAMES = (
    *("direct", "transposed", "fused", "split", "masked+sum", "bgrad", "bgradb", "sum", "gemv"),
    *("bgrada", "masked+bgradb", "split+bgradb"),
)
"""Of all ways of all steps."""


class Forward(NamedTuple):
    """y ``[batch, out]`` = activation(alpha · x·weightᵀ + beta · c + bias), and the aux if there is
    an array for it. 8-bit floats always run transposed, where the batch may have any size.
    """

    x: Array
    weight: Array
    y: Array
    options: Options
    bias: Array | None = None
    activation: Activation = "none"
    aux: Array | None = None
    c: Array | None = None
    alpha: float = 1.0
    beta: float = 0.0
    x_scale: Array | None = None
    weight_scale: Array | None = None

    @property
    def epilog(self) -> Epilog:
        bias, aux = self.bias is not None, self.aux is not None
        return epilogs.forward(self.activation, bias=bias, aux=aux)

    @property
    def outputs(self) -> dict[str, Array]:
        aux = None if self.aux is None else self.aux[: self.y.shape[1]]
        return _numbers(y=self.y, aux=aux)

    @property
    def ways(self) -> dict[str, Way]:
        if self.epilog is Epilog.NONE:
            if is_float8(self.x.dtype):
                return {"transposed": _forward_transposed}
            return {"direct": _forward_direct, "transposed": _forward_transposed}
        return _fused_or_split(self.epilog, _forward, _forward_split)


async def _forward(call: Call, step: Forward, *, split: bool = False) -> None:
    """Transposed if the epilog asks for it."""
    if TABLE[step.epilog].column_major or is_float8(step.x.dtype):
        await _forward_transposed(call, step, split=split)
    else:
        await _forward_direct(call, step, split=split)


async def _forward_split(call: Call, step: Forward) -> None:
    await _forward(call, step, split=True)


async def _forward_direct(call: Call, step: Forward, *, split: bool = False) -> None:
    operands = Operands(step.x, step.weight.T, step.y, step.c, step.alpha, step.beta)
    await call.run(operands, step.epilog, step.options._replace(split=split))


async def _forward_transposed(call: Call, step: Forward, *, split: bool = False) -> None:
    operands = Operands(
        step.weight,
        step.x.T,
        step.y.T,
        None if step.c is None else step.c.T,
        step.alpha,
        step.beta,
        step.bias,
        step.aux,
        step.weight_scale,
        step.x_scale,
    )
    await call.run(operands, step.epilog, step.options._replace(split=split))


class InputGradient(NamedTuple):
    """dx ``[batch, in]`` = dz·weight; with the aux of the layer that produced x it is that layer's
    dz, summed in `dbias`.
    """

    dz: Array
    weight: Array
    dx: Array
    options: Options
    aux: Array | None = None
    kind: AuxKind = "relu_aux"
    dbias: Array | None = None

    @property
    def outputs(self) -> dict[str, Array]:
        return _numbers(dx=self.dx, dbias=self.dbias)

    @property
    def ways(self) -> dict[str, Way]:
        if self.aux is None:
            return {"direct": _input_direct, "transposed": _input_transposed}
        if self.dbias is None:
            epilog = epilogs.backward(self.kind, gradient=False)
            return _fused_or_split(epilog, _input_masked, _input_split)
        if epilogs.backward(self.kind, gradient=True) not in CUBLASLT:
            return {"split": _input_split}
        return {"masked+sum": _input_masked_sum, "bgrad": _input_bgrad, "split": _input_split}


async def _input_direct(call: Call, step: InputGradient) -> None:
    await call.run(Operands(step.dz, step.weight, step.dx), Epilog.NONE, step.options)


async def _input_transposed(call: Call, step: InputGradient) -> None:
    operands = Operands(step.weight.T, step.dz.T, step.dx.T)
    await call.run(operands, Epilog.NONE, step.options)


async def _input_bgrad(call: Call, step: InputGradient, *, split: bool = False) -> None:
    """The mask and the sum in the product's epilog."""
    epilog = epilogs.backward(step.kind, gradient=step.dbias is not None)
    operands = Operands(step.weight.T, step.dz.T, step.dx.T, vector=step.dbias, aux=step.aux)
    await call.run(operands, epilog, step.options._replace(split=split))


async def _input_split(call: Call, step: InputGradient) -> None:
    await _input_bgrad(call, step, split=True)


async def _input_masked(call: Call, step: InputGradient, *, split: bool = False) -> None:
    await _input_bgrad(call, step._replace(dbias=None), split=split)


async def _input_masked_sum(call: Call, step: InputGradient) -> None:
    await _input_masked(call, step)
    await bias_gradient(call, step.dx, step.dbias)


class WeightGradient(NamedTuple):
    """dweight ``[out, in]`` = alpha · dzᵀ·x + beta · c, and dbias = Σ dz if there is an array for
    it.
    """

    dz: Array
    x: Array
    dweight: Array
    options: Options
    dbias: Array | None = None
    c: Array | None = None
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def outputs(self) -> dict[str, Array]:
        return _numbers(dweight=self.dweight, dbias=self.dbias)

    @property
    def ways(self) -> dict[str, Way]:
        if self.dbias is None:
            return {"transposed": _weight_transposed, "direct": _weight_direct}
        ways: dict[str, Way] = {
            "bgradb": _weight_bgradb,
            "sum": _weight_sum,
            "gemv": _weight_gemv,
        }
        if self.c is None:
            ways["bgrada"] = _weight_bgrada
        return ways


async def _weight_bgradb(call: Call, step: WeightGradient) -> None:
    """The sum in the product's epilog."""
    epilog = Epilog.NONE if step.dbias is None else Epilog.BGRADB
    c = None if step.c is None else step.c.T
    operands = Operands(
        step.x.T, step.dz, step.dweight.T, c, step.alpha, step.beta, vector=step.dbias
    )
    await call.run(operands, epilog, step.options)


async def _weight_bgrada(call: Call, step: WeightGradient) -> None:
    """The other order, whose D is column-major and copied."""
    product = swap(call.empty(step.dweight.T.shape, step.dweight.dtype))
    operands = Operands(step.dz.T, step.x, product, alpha=step.alpha, vector=step.dbias)
    await call.run(operands, Epilog.BGRADA, step.options)
    await call.compute(2 * product.nbytes, assign, step.dweight, product)


async def _weight_transposed(call: Call, step: WeightGradient) -> None:
    await _weight_bgradb(call, step._replace(dbias=None))


async def _weight_direct(call: Call, step: WeightGradient) -> None:
    operands = Operands(step.dz.T, step.x, step.dweight, step.c, step.alpha, step.beta)
    await call.run(operands, Epilog.NONE, step.options)


async def _weight_sum(call: Call, step: WeightGradient) -> None:
    await _weight_transposed(call, step)
    await bias_gradient(call, step.dz, step.dbias)


async def _weight_gemv(call: Call, step: WeightGradient) -> None:
    """The sum as a product with ones."""
    await _weight_transposed(call, step)
    assert step.dbias is not None
    ones = call.empty((step.dz.shape[0], 1), step.dz.dtype)
    await call.compute(ones.nbytes, ones.fill, 1)
    operands = Operands(step.dz.T, ones, step.dbias[:, None])
    await call.run(operands, Epilog.NONE, step.options)


class HiddenGradient(NamedTuple):
    """What goes backward through a layer into the one below: dx as that layer's dz, and from it
    that layer's dweight and dbias.
    """

    dz: Array
    weight: Array
    dx: Array
    options: Options
    aux: Array
    kind: AuxKind
    x: Array
    dweight: Array
    dbias: Array
    c: Array | None = None
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def outputs(self) -> dict[str, Array]:
        return _numbers(dx=self.dx, dweight=self.dweight, dbias=self.dbias)

    @property
    def ways(self) -> dict[str, Way]:
        ways: dict[str, Way] = {
            "masked+bgradb": _hidden_masked_bgradb,
            "masked+sum": _hidden_masked_sum,
            "bgrad": _hidden_bgrad,
            "split": _hidden_split,
            "split+bgradb": _hidden_split_bgradb,
        }
        if epilogs.backward(self.kind, gradient=True) in CUBLASLT:
            return ways
        return {name: way for name, way in ways.items() if name.startswith("split")}

    @property
    def above(self) -> InputGradient:
        return InputGradient(
            self.dz, self.weight, self.dx, self.options, self.aux, self.kind, self.dbias
        )

    @property
    def below(self) -> WeightGradient:
        return WeightGradient(
            self.dx, self.x, self.dweight, self.options, self.dbias, self.c, self.alpha, self.beta
        )


async def _hidden_masked_bgradb(call: Call, step: HiddenGradient) -> None:
    await _input_masked(call, step.above)
    await _weight_bgradb(call, step.below)


async def _hidden_masked_sum(call: Call, step: HiddenGradient) -> None:
    await _input_masked(call, step.above)
    await _weight_sum(call, step.below)


async def _hidden_bgrad(call: Call, step: HiddenGradient) -> None:
    await _input_bgrad(call, step.above)
    await _weight_transposed(call, step.below)


async def _hidden_split(call: Call, step: HiddenGradient) -> None:
    await _input_split(call, step.above)
    await _weight_transposed(call, step.below)


async def _hidden_split_bgradb(call: Call, step: HiddenGradient) -> None:
    await _input_masked(call, step.above, split=True)
    await _weight_bgradb(call, step.below)


class Product(NamedTuple):
    """d = epilog(alpha · a·b + beta · c)"""

    a: Array
    b: Array
    d: Array
    options: Options
    epilog: Epilog
    c: Array | None = None
    alpha: float = 1.0
    beta: float = 0.0
    vector: Array | None = None
    aux: Array | None = None
    a_scale: Array | None = None
    b_scale: Array | None = None

    @property
    def outputs(self) -> dict[str, Array]:
        row = TABLE[self.epilog]
        vector = None if row.gradient is None else self.vector
        aux = None
        if row.aux_out is not None and self.aux is not None:
            aux = self.aux[..., : self.d.shape[-2], :]
        return _numbers(d=self.d, vector=vector, aux=aux)

    @property
    def ways(self) -> dict[str, Way]:
        if self.epilog is Epilog.NONE:
            return {"fused": _product}
        return _fused_or_split(self.epilog, _product, _product_split)


async def _product(call: Call, step: Product, *, split: bool = False) -> None:
    operands = Operands(
        step.a,
        step.b,
        step.d,
        step.c,
        step.alpha,
        step.beta,
        step.vector,
        step.aux,
        step.a_scale,
        step.b_scale,
    )
    await call.run(operands, step.epilog, step.options._replace(split=split))


async def _product_split(call: Call, step: Product) -> None:
    await _product(call, step, split=True)


def _numbers(**arrays: Array | None) -> dict[str, Array]:
    """Those that there are, but for masks."""
    return {
        name: array
        for name, array in arrays.items()
        if array is not None and array.dtype != np.uint8
    }


def _fused_or_split(epilog: Epilog, fused: Way, split: Way) -> dict[str, Way]:
    """In one product if cuBLASLt has the epilog, or as a plain one and a pass over the result."""
    return {"fused": fused, "split": split} if epilog in CUBLASLT else {"split": split}


async def pre_activation_gradient(call: Call, dy: Array, aux: Array, kind: AuxKind) -> Array:
    """dz ``[batch, out]`` = dy ⊙ activation'(z), from the layer's aux."""
    dz = call.empty(dy.shape, dy.dtype)
    await call.compute(4 * dy.nbytes, call.engine.elementwise.masking(kind, dy, aux, dz))
    return dz


async def bias_gradient(call: Call, dz: Array, dbias: Array | None) -> None:
    """dbias ``[out]`` = Σ dz over the batch."""
    await call.compute(2 * dz.nbytes, call.engine.elementwise.summing(dz, dbias))


async def accumulate(call: Call, gradient: Array, old: Array, alpha: float, beta: float) -> Array:
    """alpha · gradient + beta · old, as a new array."""
    new = call.empty(old.shape, old.dtype)
    await call.compute(4 * old.nbytes, _accumulate, new, gradient, old, alpha, beta)
    return new


def _accumulate(new: Array, gradient: Array, old: Array, alpha: float, beta: float) -> None:
    dtype = accumulator_dtype(np.dtype(old.dtype))
    new[...] = dtype.type(alpha) * gradient.astype(dtype) + dtype.type(beta) * old.astype(dtype)
