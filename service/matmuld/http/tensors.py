"""/v1/tensors: what the service holds for its callers."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import numpy as np
from matmuld_client.errors import Conflict, InvalidOperands, Malformed, TooLarge
from matmuld_client.wire import DTYPES, OCTETS

from ..calls import Call, describe, laid_out_as
from ..engine.elementwise import assign, read_mask, swap
from ..engine.float8 import FLOAT8, is_float8
from ..engine.protocol import Array, Engine
from ..memory.tensors import Kind, Quantization, Resident
from ..operands import FACTORS, FLOATS, Inputs, Operand, described
from ..operations.mlp import Tape
from ..schemas import CreateTensor, ReplaceTensor, Tensor, TensorLife
from ..service import Service
from .exchange import Disconnected, Exchange

CHUNK_BYTES = 4 << 20
HOLDABLE = (*FACTORS, "uint8")


async def create(service: Service, exchange: Exchange) -> None:
    """Hold a tensor: its value from the body, raw bytes streamed into place, or zeros."""
    if exchange.content_type == OCTETS:
        resident = await _create_raw(service, exchange)
    else:
        header, payloads = await exchange.decode(CreateTensor)
        call = service.call(exchange.tenant, payloads)
        array, kind = await _value(service.inputs(exchange.tenant), call, header)
        array, quantization = await _settled(call.engine, array, header.quantize)
        resident = service.runtime.store.add(
            exchange.tenant,
            array,
            kind=kind,
            pinned=header.pinned,
            ttl=header.ttl_s,
            quantization=quantization,
        )
    if await exchange.is_abandoned():
        service.runtime.store.free(resident)
        raise Disconnected
    await exchange.reply(metadata(resident), status=201)


async def _value(inputs: Inputs, call: Call, header: CreateTensor) -> tuple[Array, Kind]:
    """The value of a body, or zeros, once the quota is known to have room."""
    if header.value is None:
        if header.quantize is not None:
            raise Malformed("quantize: expected with a value only", operand="quantize")
        dtype, shape = described("tensor", header.dtype, header.shape, FACTORS)
        call.bind(inputs.finish())
        call.store.check(call.tenant, math.prod(shape) * dtype.itemsize)
        return await call.zeros(shape, dtype), "tensor"
    if header.dtype is not None or header.shape is not None:
        raise Malformed("value: expected either value, or dtype and shape", operand="value")
    operand, kind = _taken(inputs, call, header.value)
    if header.quantize is not None:
        _check_quantizable(operand.dtype, kind, header.quantize)
    call.store.check(call.tenant, operand.size * operand.dtype.itemsize)
    return await _dense(call, operand), kind


def _taken(inputs: Inputs, call: Call, value: Tensor) -> tuple[Operand, Kind]:
    """The one tensor of a body, checked."""
    if value.tensor is not None:
        raise Malformed("value: expected a payload or data, got a handle", operand="value")
    operand = inputs.take("value", value, HOLDABLE)
    call.bind(inputs.finish())
    kind: Kind = value.kind or "tensor"
    if (operand.dtype == np.uint8) != (kind == "relu_aux"):
        raise operand.reject(
            f"expected uint8 for relu_aux and only for it, got {operand.dtype.name}"
        )
    if kind != "tensor" and is_float8(operand.dtype):
        raise operand.reject(
            f"expected dtype {' or '.join(FLOATS)} for {kind}, got {operand.dtype.name}"
        )
    if kind != "tensor" and len(operand.shape) < 2:
        raise operand.reject(f"expected shape […, R, N] for {kind}, got {operand.shape}")
    return operand, kind


async def _dense(call: Call, operand: Operand) -> Array:
    """The value in memory of its own: row-major, aux data column-major."""
    columns = operand.kind != "tensor"
    source = await call.load(operand)
    source = swap(source) if columns else source
    dense = call.empty(source.shape, operand.dtype)
    await call.engine.call(2 * dense.nbytes, assign, dense, source)
    return swap(dense) if columns else dense


def _check_quantizable(dtype: np.dtype[Any], kind: Kind, target: str) -> None:
    """Raise InvalidOperands unless a tensor of `dtype` can be quantized to `target`."""
    described("quantize", target, (), FLOAT8)
    if kind != "tensor" or dtype.name not in FLOATS:
        expected = f"value: expected a tensor of {' or '.join(FLOATS)} to quantize"
        raise InvalidOperands(f"{expected}, got a {kind} of {dtype.name}", operand="value")


async def _settled(
    engine: Engine, array: Array, target: str | None
) -> tuple[Array, Quantization | None]:
    """A row-major array as it is, or quantized to `target`; complete on return.

    Raises:
        InvalidOperands: there is a NaN or an infinity in what is to be quantized.
    """
    if target is None:
        await engine.synchronize()
        return array, None
    values, scale, amax = await engine.quantize(array, DTYPES[target])
    (number, magnitude), _ = await engine.download([scale, amax])
    if not np.isfinite(magnitude[0]):
        raise InvalidOperands(
            f"value: expected finite float32 numbers to quantize, got {magnitude[0]} among them",
            operand="value",
        )
    return values, Quantization(scale, float(number[0]), float(magnitude[0]), array.dtype)


async def _create_raw(service: Service, exchange: Exchange) -> Resident:
    query = exchange.query()
    dtype, shape = described("tensor", query.get("dtype"), _extents(query.get("shape")), FACTORS)
    if (target := query.get("quantize")) is not None:
        _check_quantizable(dtype, "tensor", target)
    pinned, ttl = _flag(query.get("pinned")), _seconds(query.get("ttl_s"))
    if unknown := sorted(set(query) - {"dtype", "shape", "quantize", "pinned", "ttl_s"}):
        raise Malformed(f"{unknown[0][:40]}: unknown query parameter", operand=unknown[0][:40])
    nbytes = math.prod(shape) * dtype.itemsize
    chunks = exchange.stream(nbytes)
    engine, store = service.runtime.engine, service.runtime.store
    with store.reserved(exchange.tenant, nbytes):
        array = engine.empty(shape, dtype)
        await _fill(service, array, chunks, nbytes)
        array, quantization = await _settled(engine, array, target)
    return store.add(exchange.tenant, array, pinned=pinned, ttl=ttl, quantization=quantization)


async def _fill(service: Service, array: Array, chunks: AsyncIterator[bytes], nbytes: int) -> None:
    """Write a streamed body into place, piece by piece."""
    at = 0
    async for chunk in chunks:
        if at + len(chunk) > nbytes:
            break
        await service.runtime.engine.write(array, at, memoryview(chunk))
        at += len(chunk)
    if at != nbytes:
        raise Malformed(f"tensor: expected a body of {nbytes} bytes, got {at}", operand="tensor")


def _extents(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [_extent(part) for part in text.split(",")] if text else []
    except ValueError:
        raise Malformed(
            f"shape: expected integers with commas, got {text[:40]!r}", operand="shape"
        ) from None


def _extent(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]+", text):
        raise ValueError(text)
    return int(text)


def _flag(text: str | None) -> bool:
    if text not in (None, "true", "false"):
        raise Malformed(f"pinned: expected true or false, got {text[:40]!r}", operand="pinned")
    return text == "true"


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise Malformed(f"ttl_s: expected seconds > 0, got {text[:40]!r}", operand="ttl_s")
    return seconds


async def index(service: Service, exchange: Exchange) -> None:
    """What this tenant holds."""
    held = service.runtime.store.of(exchange.tenant)
    await exchange.reply({"tensors": [metadata(resident) for resident in held]})


async def show(service: Service, exchange: Exchange) -> None:
    """Metadata of one."""
    await exchange.reply(metadata(_held(service, exchange)))


async def read(service: Service, exchange: Exchange) -> None:
    """The contents of one, packed or raw."""
    array = _array(_held(service, exchange))
    engine = service.runtime.engine
    if OCTETS in exchange.accept:
        headers = {
            "X-Tensor-Dtype": array.dtype.name,
            "X-Tensor-Shape": ",".join(map(str, array.shape)),
        }
        await exchange.raw(engine.chunks(array, CHUNK_BYTES), array.nbytes, headers)
        return
    if array.nbytes > exchange.payload_limit:
        raise TooLarge(f"expected Accept: {OCTETS} for {array.nbytes} bytes, got {exchange.form}")
    (value,), _ = await engine.download([array])
    header = {"value": {**describe(array), "payload": 0}}
    del array  # it may be freed while the client takes its time
    await exchange.reply(header, [value])


async def mask(service: Service, exchange: Exchange) -> None:
    """A relu_aux as booleans, ``[batch, out]``."""
    resident = _held(service, exchange)
    if resident.kind != "relu_aux":
        raise Conflict(f"expected a relu_aux, {resident.handle} is a {resident.kind}")
    engine, aux = service.runtime.engine, resident.value
    rows = aux.shape[-2] * 8 if resident.rows is None else resident.rows
    nbytes = rows * aux.size // aux.shape[-2]
    if nbytes > exchange.payload_limit:
        raise TooLarge(
            f"expected a mask of at most {exchange.payload_limit} bytes in {exchange.form}, "
            f"this one has {nbytes}"
        )
    unpacked = await engine.call(8 * aux.nbytes, _unpacked, engine.xp, aux, rows)
    (value,), _ = await engine.download([unpacked])
    await exchange.reply({"value": {**describe(unpacked), "payload": 0}}, [value])


def _unpacked(xp: Any, aux: Array, rows: int) -> Array:
    return xp.ascontiguousarray(swap(read_mask(xp, aux, rows))).astype(bool)


async def replace(service: Service, exchange: Exchange) -> None:
    """New contents, all at once; dtype and shape stay. What was quantized is so again, from the
    dtype that it was made from.
    """
    resident = _held(service, exchange)
    held, quantized = _array(resident), resident.quantization
    engine = service.runtime.engine
    dtype = held.dtype if quantized is None else quantized.source
    if exchange.content_type == OCTETS:
        if resident.kind != "tensor":
            raise Conflict(
                f"a raw body replaces tensors only, {resident.handle} is a {resident.kind}"
            )
        array = engine.empty(held.shape, dtype)
        await _fill(service, array, exchange.stream(array.nbytes), array.nbytes)
    else:
        header, payloads = await exchange.decode(ReplaceTensor)
        call = service.call(exchange.tenant, payloads)
        operand, kind = _taken(service.inputs(exchange.tenant), call, header.value)
        came = f"{kind} {list(operand.shape)} of {operand.dtype.name}"
        expected = f"{resident.kind} {list(held.shape)} of {dtype.name}"
        if came != expected:
            raise operand.reject(f"expected {expected}, got {came}")
        array = await _dense(call, operand)
    array = await laid_out_as(engine, held, array)
    target = None if quantized is None else held.dtype.name
    array, quantization = await _settled(engine, array, target)
    async with resident.lock:
        service.runtime.store.get(exchange.tenant, resident.handle)
        service.runtime.store.replace(resident, array, quantization)
    await exchange.reply(metadata(resident))


async def change(service: Service, exchange: Exchange) -> None:
    """How long one is held."""
    resident = _held(service, exchange)
    header, payloads = await exchange.decode(TensorLife)
    service.inputs(exchange.tenant).finish().check(payloads)
    if header.ttl_s is not None:
        resident.ttl = header.ttl_s
    resident.pin(resident.pinned if header.pinned is None else header.pinned)
    await exchange.reply(metadata(resident))


async def free(service: Service, exchange: Exchange) -> None:
    """Forget one; its memory goes with its last user."""
    service.runtime.store.free(_held(service, exchange))
    await exchange.empty()


def _held(service: Service, exchange: Exchange) -> Resident:
    return service.runtime.store.get(exchange.tenant, exchange.path["handle"])


def _array(resident: Resident) -> Array:
    if isinstance(resident.value, Tape):
        raise Conflict(f"expected a tensor, {resident.handle} is a tape")
    return resident.value


def metadata(resident: Resident) -> dict[str, Any]:
    """What is told about a resident."""
    value, quantized = resident.value, resident.quantization
    looks = {"layers": len(value.layers)} if isinstance(value, Tape) else describe(value)
    if quantized is not None:
        looks |= {
            "scale": quantized.number,
            "amax": quantized.amax,
            "quantized_from": quantized.source.name,
        }
    return {
        "tensor": resident.handle,
        "kind": resident.kind,
        **looks,
        "nbytes": resident.nbytes,
        "pinned": resident.pinned,
        "ttl_s": resident.ttl,
        "expires_in_s": None
        if resident.pinned
        else round(max(resident.expires_at - monotonic(), 0.0), 3),
        "version": resident.version,
    }
