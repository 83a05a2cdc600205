"""`elementwise` on a GPU: one kernel for all that an epilog does to D and for sums across the rows
of memory, and one for sums along them.

Both compute in the accumulator's type, round once, and move up to 16 bytes at a time where arrays
lie so that they can. Sums are made in parts whose number and order depend on nothing but shapes and
types, so they come out the same every time. Whatever does not change from launch to launch is done
when it is bound, but for compiling, which the first launch of its kind does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Structure, addressof, c_double, c_int64, c_uint, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver

from .activations import NEGATIVE_SLOPE
from .elementwise import accumulator_dtype, as_column, in_turn, swap
from .epilogs import ACTIVATION_OF, TABLE, AuxKind, Epilog, Row
from .protocol import Array, Launch, Operands
from .split import is_column_major

_SOURCE = Path(__file__).with_name("kernels.cu").read_text()
_TYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "f16",
    "bfloat16": "bf16",
    "uint8": "unsigned char",
}
_WARP, _THREADS = 32, 256
_PACK_BYTES = 16
"""What a thread can read or write at once."""
_ROWS = 4
"""So many reads of each array a thread has under way."""
_BLOCKS, _SUM_BLOCKS = 8192, 528
"""So many keep a large GPU busy to the end; of those that sum, so many as run at the same time."""


class _Matrix(Structure):
    _fields_ = (("at", c_void_p), ("batch", c_int64), ("inner", c_int64), ("outer", c_int64))


class _Finish(Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("product", "d", "c", "vector", "aux", "sums")),
        *((name, c_void_p) for name in ("partial", "arrived")),
        ("beta", c_double),
        *((name, c_int64) for name in ("inners", "covered", "outers", "length")),
        *((name, c_uint) for name in ("tiles", "parts")),
    )


class _Summation(Structure):
    _fields_ = (
        ("source", _Matrix),
        ("sums", _Matrix),
        *((name, c_int64) for name in ("kept", "summed", "length")),
        *((name, c_uint) for name in ("tiles", "parts")),
    )


def finishing(epilog: Epilog, product: Array, operands: Operands) -> list[Launch]:
    """What applies `epilog` to ``product = alpha · a @ b``, in the accumulator's type, and writes
    every output.

    `product` may be `operands.d` itself; if not, it is left as it is.
    """
    row, o = TABLE[epilog], operands
    launches: list[Launch] = []
    if product is not o.d or row._replace(gradient=None) != Row() or row.gradient == "d" or o.beta:
        launches.append(_finishing(row, product, o))
    if row.gradient == "a":
        launches += _summing(o.a, as_column(o.vector))
    elif row.gradient == "b":
        launches += _summing(swap(o.b), as_column(o.vector))
    return launches


def masking(kind: AuxKind, dy: Array, aux: Array, dz: Array) -> Launch:
    """dz = dy ⊙ activation'(z) for matrices ``[batch, out]``, from the aux of z."""
    return _finishing(Row(aux_in=kind), dy.T, Operands(None, None, dz.T, aux=aux))


def summing(matrix: Array, sums: Array) -> Launch:
    """sums ``[out]`` = Σ matrix ``[batch, out]``"""
    return partial(in_turn, _summing(matrix.T, as_column(sums)))


def _finishing(row: Row, product: Array, o: Operands) -> Launch:
    """All that the epilog makes, but for the sums of A and B; without D, sums alone."""
    m, n = product.shape[-2:]
    sums = as_column(o.vector) if row.gradient == "d" else None
    makes_mask = row.aux_out == "relu_aux"
    rows_inner = makes_mask or sums is not None or n == 1 or (m > 1 and is_column_major(product))
    inners, outers = (m, n) if rows_inner else (n, m)
    covered = o.aux.shape[-2] * 8 if makes_mask and o.aux is not None else inners
    lead = (product if sums is None else sums).shape[:-2]
    batches = lead[0] if lead else 1
    across = min(_WARP, 1 << (-(-covered // 8) - 1).bit_length())
    down = _THREADS // across
    enough = _BLOCKS if sums is None else _SUM_BLOCKS
    blocks = -(-inners // (8 * across)) * batches
    parts, length = _parts(enough, blocks, outers, 2 * _ROWS * down)
    arrays = {
        "product": product,
        "d": o.d,
        "c": o.c if o.beta else None,
        "vector": as_column(o.vector) if row.bias else None,
        "aux": o.aux if row.aux else None,
        "sums": sums,
    }
    matrices = {name: _matrix(array, rows_inner) for name, array in arrays.items()}
    packed = ("product", "d", "c", *(() if row.aux == "relu_aux" else ("aux",)))
    width = _width(inners, [(arrays[name], matrices[name]) for name in packed])
    tiles = -(-covered // (across * width))
    accumulator = accumulator_dtype(np.dtype(product.dtype))
    kernel = _finish_kernel(
        row._replace(gradient=None if sums is None else "d"),
        rows_inner,
        width,
        accumulator.name,
        tuple(None if array is None else array.dtype.name for array in arrays.values()),
    )
    arguments = _Finish(
        **matrices,
        beta=o.beta,
        inners=inners,
        covered=covered,
        outers=outers,
        length=length,
        tiles=tiles,
        parts=parts,
    )
    scratch: tuple[Array, ...] = ()
    if sums is not None and parts > 1:
        partial = cupy.empty(batches * parts * tiles * across * width, accumulator)
        arrived = cupy.zeros(batches * tiles, np.uint32)
        arguments.partial, arguments.arrived = _address(partial), _address(arrived)
        scratch = partial, arrived
    held = arrays, scratch
    return _Bound(kernel, tiles * parts * batches, (across, down), arguments, held)


def _summing(source: Array, sums: Array) -> list[Launch]:
    """Sums of ``source (…, kept, summed)`` along its last axis, in ``sums (…, kept, 1)``, which may
    have a batch where the source has none.
    """
    kept, summed = source.shape[-2:]
    matrix = _matrix(source, True)
    if kept > 1 and (summed == 1 or matrix.inner < matrix.outer):
        return [_sums_across(source, sums)]
    batches = sums.shape[0] if sums.ndim == 3 else 1
    tiles = -(-kept // (_THREADS // _WARP))
    width = _PACK_BYTES // source.itemsize
    parts, length = _parts(_SUM_BLOCKS, tiles * batches, summed, _WARP * width * _ROWS)
    accumulator = accumulator_dtype(np.dtype(source.dtype))
    target = sums
    if parts > 1:
        target = cupy.empty((parts, batches, kept), accumulator).transpose(1, 2, 0)
    along = _matrix(source, False)
    dense = _fits(width, width, source.itemsize, along)
    kernel = _sum_kernel(dense, width, accumulator.name, source.dtype.name, target.dtype.name)
    arguments = _Summation(
        source=matrix,
        sums=_matrix(target, True),
        kept=kept,
        summed=summed,
        length=length,
        tiles=tiles,
        parts=parts,
    )
    threads = (_WARP, _THREADS // _WARP)
    launch = _Bound(kernel, tiles * parts * batches, threads, arguments, (source, target))
    return [launch] if parts == 1 else [launch, _sums_across(target, sums)]


def _sums_across(source: Array, sums: Array) -> Launch:
    """`_summing` where what is kept lies side by side."""
    return _finishing(Row(gradient="d"), source, Operands(None, None, None, vector=sums))


def _parts(enough: int, blocks: int, extent: int, unit: int) -> tuple[int, int]:
    """In how many parts, of whole units, to divide `extent` where `blocks` blocks do each, and how
    long they are.
    """
    parts = max(min(-(-enough // blocks), extent // unit), 1)
    length = -(-extent // (parts * unit)) * unit
    return -(-extent // length), length


def _matrix(array: Array | None, rows_inner: bool) -> _Matrix:
    """Its address and steps in elements, 0 along what there is one of."""
    if array is None:
        return _Matrix()
    steps = [
        stride // array.itemsize if extent > 1 else 0
        for extent, stride in zip(array.shape, array.strides, strict=True)
    ]
    batch = steps[0] if len(steps) == 3 else 0
    inner, outer = steps[-2:] if rows_inner else steps[:-3:-1]
    return _Matrix(_address(array), batch, inner, outer)


def _address(array: Array) -> int:
    address: int = array.data.ptr
    return address


def _width(inners: int, matrices: Sequence[tuple[Array | None, _Matrix]]) -> int:
    """How many elements along the inner axis can be read or written at once in all of these."""
    present = [(array.itemsize, matrix) for array, matrix in matrices if array is not None]
    width: int = _PACK_BYTES // max(itemsize for itemsize, _ in present)
    while width > 1 and not all(_fits(width, inners, *matrix) for matrix in present):
        width //= 2
    return width


def _fits(width: int, inners: int, itemsize: int, matrix: _Matrix) -> bool:
    steps = inners, matrix.batch, matrix.outer, matrix.at // itemsize
    return matrix.inner == 1 and not any(step % width for step in steps)


class _Bound:
    """A launch of a kernel, on the stream that is then current."""

    __slots__ = ("_function", "_held", "_pointers", "_shape", "kernel")

    def __init__(
        self,
        kernel: Any,
        blocks: int,
        threads: tuple[int, int],
        arguments: Structure,
        arrays: object,
    ) -> None:
        """`arrays` are what the arguments point to."""
        pointers = (c_void_p * 1)(addressof(arguments))
        self.kernel = kernel
        self._function = 0
        self._shape = blocks, 1, 1, *threads, 1, 0
        self._pointers = addressof(pointers)
        self._held = arguments, pointers, arrays

    def __call__(self) -> None:
        if not self._function:
            self._function = self.kernel.kernel.ptr
        stream = cupy.cuda.get_current_stream().ptr
        driver.launchKernel(self._function, *self._shape, stream, self._pointers, 0)


def kernels_of(launch: Launch) -> tuple[object, ...]:
    """What a bound launch compiles when it is made for the first time."""
    if isinstance(launch, _Bound):
        return (launch.kernel,)
    if isinstance(launch, partial) and launch.func is in_turn:
        return tuple(kernel for part in launch.args[0] for kernel in kernels_of(part))
    return ()


@cache
def _finish_kernel(
    row: Row, rows_inner: bool, width: int, accumulator: str, dtypes: tuple[str | None, ...]
) -> Any:
    """`dtypes`: of the product, D, C, the vector, the aux and the sums; None if there is none."""
    activation = "none" if row.aux_in is None else ACTIVATION_OF[row.aux_in]
    types = dict(zip("PDCVXT", (dtype or "uint8" for dtype in dtypes), strict=True))
    macros = {
        "FINISH": 1,
        "ROWS_INNER": int(rows_inner),
        "WIDTH": width,
        "WRITE_D": int(dtypes[1] is not None),
        "ADD_C": int(dtypes[2] is not None),
        "BIAS": int(row.bias),
        "MASK_OUT": int(row.aux_out == "relu_aux"),
        "AUX_OUT": int(row.aux_out not in (None, "relu_aux")),
        "MASK_IN": int(row.aux_in == "relu_aux"),
        "AUX_IN": int(row.aux_in not in (None, "relu_aux")),
        "SUM_D": int(row.gradient == "d"),
        "ACTIVATION": row.activation,
        "SLOPE": f"{activation}_slope",
        "NEGATIVE_SLOPE": NEGATIVE_SLOPE,
    }
    return _compiled("finish", {"A": accumulator, **types}, macros)


@cache
def _sum_kernel(dense: bool, width: int, accumulator: str, source: str, target: str) -> Any:
    types = {"A": accumulator, "S": source, "T": target}
    return _compiled("summation", types, {"DENSE": int(dense), "WIDTH": width})


def _compiled(name: str, types: Mapping[str, str], macros: Mapping[str, object]) -> Any:
    lines = [
        "struct f16;",
        "struct bf16;",
        *(f"using {letter} = {_TYPES[dtype]};" for letter, dtype in types.items()),
        f"#define ROWS {_ROWS}",
        *(f"#define {macro} {value}" for macro, value in macros.items()),
    ]
    return cupy.RawKernel("\n".join([*lines, _SOURCE]), name)
