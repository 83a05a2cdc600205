"""What a layer's forward and backward pass mean as products.

cuBLASLt wants a bias along the rows of D, and D column-major with any bias, aux or gradient: those
products run transposed (``yᵀ = W·xᵀ``), which on row-major memory costs nothing. The plain ones run
as they are written.
"""

from __future__ import annotations

import numpy as np

from .calls import Call
from .engine import elementwise, epilogs
from .engine.epilogs import Activation, AuxKind, Epilog
from .engine.float8 import is_float8
from .engine.protocol import Array, Operands
from .engine.signature import Options


async def forward(
    call: Call,
    x: Array,
    weight: Array,
    y: Array,
    options: Options,
    *,
    bias: Array | None = None,
    activation: Activation = "none",
    aux: Array | None = None,
    c: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    x_scale: Array | None = None,
    weight_scale: Array | None = None,
) -> None:
    """y ``[batch, out]`` = activation(alpha · x·weightᵀ + beta · c + bias), and the aux if there is
    an array for it. 8-bit floats always run transposed, where the batch may have any size.
    """
    epilog = epilogs.forward(activation, bias=bias is not None, aux=aux is not None)
    if epilogs.TABLE[epilog].column_major or is_float8(x.dtype):
        c = None if c is None else c.T
        operands = Operands(
            weight, x.T, y.T, c, alpha, beta, bias, aux, scale_a=weight_scale, scale_b=x_scale
        )
    else:
        operands = Operands(x, weight.T, y, c, alpha, beta)
    await call.run(operands, epilog, options)


async def pre_activation_gradient(call: Call, dy: Array, aux: Array, kind: AuxKind) -> Array:
    """dz ``[batch, out]`` = dy ⊙ activation'(z), from the layer's aux."""
    dz = call.empty(dy.shape, dy.dtype)
    mask = call.engine.elementwise.pre_activation_gradient
    await call.compute(4 * dy.nbytes, mask, kind, dy, aux, dz)
    return dz


async def input_gradient(
    call: Call,
    dz: Array,
    weight: Array,
    dx: Array,
    options: Options,
    *,
    aux: Array | None = None,
    kind: AuxKind = "relu_aux",
    dbias: Array | None = None,
) -> None:
    """dx ``[batch, in]`` = dz·weight; with the aux of the layer that produced x it is that layer's
    dz, summed in `dbias`.
    """
    if aux is None:
        await call.run(Operands(dz, weight, dx), Epilog.NONE, options)
        return
    epilog = epilogs.backward(kind, gradient=dbias is not None)
    operands = Operands(weight.T, dz.T, dx.T, vector=dbias, aux=aux)
    await call.run(operands, epilog, options)


async def weight_gradient(
    call: Call,
    dz: Array,
    x: Array,
    dweight: Array,
    options: Options,
    *,
    dbias: Array | None = None,
    c: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> None:
    """dweight ``[out, in]`` = alpha · dzᵀ·x + beta · c, and the bias gradient Σ dz in the same
    product.
    """
    epilog = Epilog.NONE if dbias is None else Epilog.BGRADB
    c = None if c is None else c.T
    operands = Operands(x.T, dz, dweight.T, c, alpha, beta, vector=dbias)
    await call.run(operands, epilog, options)


async def bias_gradient(call: Call, dz: Array, dbias: Array) -> None:
    """dbias ``[out]`` = Σ dz over the batch."""
    await call.compute(2 * dz.nbytes, call.engine.elementwise.sum_rows, dz, dbias)


async def accumulate(call: Call, gradient: Array, old: Array, alpha: float, beta: float) -> Array:
    """alpha · gradient + beta · old, as a new array."""
    new = call.empty(old.shape, old.dtype)
    await call.compute(4 * old.nbytes, _accumulate, new, gradient, old, alpha, beta)
    return new


def _accumulate(new: Array, gradient: Array, old: Array, alpha: float, beta: float) -> None:
    dtype = elementwise.accumulator_dtype(np.dtype(old.dtype))
    new[...] = dtype.type(alpha) * gradient.astype(dtype) + dtype.type(beta) * old.astype(dtype)
