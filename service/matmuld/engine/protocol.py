"""The seam between matmuld and a device: what an engine must be.

Arrays are the engine's own (`numpy.ndarray`, `cupy.ndarray`); nothing above this package looks
inside them beyond what the two have in common.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from matmuld_client.errors import RequestError

from ..store import Choices

if TYPE_CHECKING:
    from .epilogs import AuxKind, Epilog
    from .signature import Layout, Options, Signature

Array = Any
T = TypeVar("T")
Launch = Callable[[], None]
"""Starts work in the order of calls; may return before it is done."""


@dataclass(slots=True)
class Operands:
    """The operands of one product, ``d = epilog(alpha · a @ b + beta · c)``, 2-D or with one batch
    dimension.

    c has the layout of d; without c, beta is 0. `vector` is the bias (read) or the bias gradient
    (written), `aux` the auxiliary data (read or written): see `epilogs.TABLE`. `scale_a` and
    `scale_b`, one float32 each, multiply a and b if those are 8-bit floats; None is 1. Of such a
    product M and K are multiples of 16, and so is N unless d is a column-major matrix.
    """

    a: Array
    b: Array
    d: Array
    c: Array | None = None
    alpha: float = 1.0
    beta: float = 0.0
    vector: Array | None = None
    aux: Array | None = None
    scale_a: Array | None = None
    scale_b: Array | None = None


class Quantized(NamedTuple):
    """8-bit values; the scale to multiply them by, and the largest magnitude that it was made from,
    float32 of shape (1,).
    """

    values: Array
    scale: Array
    amax: Array


class Disagreement(Exception):
    """An algorithm gives another result than the one in use."""


class Memory(NamedTuple):
    """Bytes of a device's memory: in arrays, left for arrays, and in all."""

    used: int
    free: int
    total: int


class Plan(Protocol):
    """A prepared product. Exclusive: one run at a time."""

    @property
    def path(self) -> str:
        """How the product is carried out.

        `numpy`; `fused` by cuBLASLt, `executed` if it is nvmath's `execute` that runs that, or
        `split` into a plain product and elementwise passes; `staged` if inputs are first copied
        into a layout that cuBLASLt can read.
        """

    @property
    def nbytes(self) -> int:
        """Memory that the plan holds, host and device."""

    @property
    def brief(self) -> bool:
        """Whether a launch may be on the event loop."""

    def bind(self, operands: Operands, *, aside: bool = False) -> Launch:
        """What carries the product out on these operands, as often as it is called.

        `aside`: on the engine's planning stream, for trials.
        """

    def variants(self, operands: Operands) -> list[Launch]:
        """The product by every algorithm that may do it, on the planning stream; the one in use is
        the first. None if there is no choice.
        """

    def take(self, index: int, operands: Operands) -> None:
        """Use another of the variants from now on; for `Engine.aside`.

        Raises:
            Disagreement: it gives another result.
        """

    def record(self) -> tuple[str, dict[str, Any]] | None:
        """What the plan can be made from another time: key and record of an algorithm."""

    def close(self) -> None:
        """Free what the plan holds."""


class Elementwise(Protocol):
    """Elementwise steps bound to a device's arrays, written out in `elementwise`.

    Binding is brief; the first launch may take long, to compile.
    """

    def finishing(self, epilog: Epilog, product: Array, operands: Operands) -> list[Launch]:
        """What applies `epilog` to ``product = alpha · a @ b``, in the accumulator's type, and
        writes every output.
        """

    def masking(self, kind: AuxKind, dy: Array, aux: Array, dz: Array) -> Launch:
        """dz = dy ⊙ activation'(z) for matrices ``[batch, out]``, from the aux of z."""

    def summing(self, matrix: Array, sums: Array) -> Launch:
        """sums ``[out]`` = Σ matrix ``[batch, out]``"""


class Engine(Protocol):
    """A device that holds arrays and plans products. For the event loop's thread alone."""

    choices: Choices
    """Where the algorithms of earlier runs are found."""
    reclaim: Callable[[], bool]
    """Frees memory that can be done without, if there is any; asked before memory is refused."""

    @property
    def name(self) -> str:
        """`cpu`, or `cuda:N`."""

    @property
    def xp(self) -> Any:
        """The array module: numpy or cupy."""

    @property
    def elementwise(self) -> Elementwise:
        """Its elementwise steps."""

    @property
    def alignment(self) -> int:
        """Bytes that every array from `empty` is aligned to."""

    @property
    def brief_bytes(self) -> int:
        """Up to this size an elementwise step, once it has run, may be on the event loop."""

    @property
    def has_float8(self) -> bool:
        """Whether it multiplies 8-bit floats."""

    def describe(self) -> dict[str, Any]:
        """The device and the versions of the libraries in use."""

    def fingerprint(self) -> dict[str, str | int]:
        """What the fastest way to do something depends on: the device's model, and versions."""

    def memory(self) -> Memory:
        """What arrays take and may still take."""

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """A row-major array. Raises OutOfMemory."""

    def view(
        self, array: Array, shape: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> Array:
        """A view into a row-major array; strides and offset in elements. The caller has checked the
        bounds.
        """

    def layout(self, array: Array) -> Layout:
        """How an array lies."""

    def signature(self, operands: Operands, epilog: Epilog, options: Options) -> Signature:
        """The key of the product's plan."""

    async def plan(self, signature: Signature, operands: Operands) -> Plan:
        """Prepare a product, on a thread where that is slow. The outputs among `operands` may be
        overwritten.

        Raises OutOfMemory. A valid product never fails otherwise.
        """

    async def run(self, plan: Plan, operands: Operands) -> None:
        """Run a plan without blocking the event loop for longer than a small product takes."""

    def start(self, launches: Sequence[Launch]) -> None:
        """Make brief launches, one after the other, at once."""

    def capture(self, launches: Sequence[Launch]) -> Launch:
        """One launch for several that have been made before, on memory of their own."""

    def intake(self, target: Array) -> Callable[[memoryview], None]:
        """What fills a row-major array with bytes, as often as it is called."""

    async def call(self, nbytes: int, function: Callable[..., T], *args: Any) -> T:
        """Run an elementwise step over `nbytes` bytes in the device's order, without blocking the
        event loop.
        """

    async def aside(self, function: Callable[..., T], *args: Any) -> T:
        """Call on the thread and in the order of planning."""

    async def time(self, launches: Sequence[Launch]) -> float:
        """Seconds that the device takes for these launches, aside, from cold caches."""

    async def quantize(self, source: Array, dtype: np.dtype[Any]) -> Quantized:
        """A row-major array as 8-bit floats: divided by amax / the dtype's largest number, or by 1
        if all is 0, saturated and rounded to the nearest. amax is NaN or infinite if any element
        is, and the values are then of no use. Raises OutOfMemory.
        """

    def duplicate(self, array: Array) -> Array:
        """A copy of a row- or column-major array, in its layout. Raises OutOfMemory."""

    async def upload(self, source: np.ndarray[Any, Any]) -> Array:
        """A row-major copy of host memory in the device. Raises OutOfMemory."""

    async def borrow(self, source: np.ndarray[Any, Any]) -> Array:
        """An array with the elements of host memory that nobody will write to: on the CPU that
        memory itself, elsewhere a copy. Raises OutOfMemory.
        """

    async def write(self, target: Array, offset: int, data: memoryview) -> None:
        """Copy bytes into a row-major array, from byte `offset` on."""

    async def download(self, arrays: Sequence[Array]) -> tuple[list[np.ndarray[Any, Any]], float]:
        """Host copies of arrays (row- or column-major), complete on return, and the seconds that
        copying took once the arrays were there; on the CPU, the arrays themselves.
        """

    def chunks(self, array: Array, nbytes: int) -> AsyncIterator[memoryview]:
        """The bytes of an array in row-major order, at most `nbytes` at a time."""

    async def synchronize(self) -> None:
        """Return when all that was started so far is done."""

    def explain(self, error: Exception) -> RequestError | None:
        """What an error of the device's libraries means for the caller, if that is known."""

    async def trim(self) -> None:
        """Give memory that no array uses back to the device."""

    def close(self) -> None:
        """Free the device."""
