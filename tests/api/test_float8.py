"""8-bit floats through the service: operands with scales, and tensors that it quantizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matmuld_client import Client, Layer

from .. import reference
from ..local import MSGPACK, Wire, packed, raw, tensor
from ..reference import DTYPES, F64, FLOAT8, Host, activate, assert_close, f64
from .refusals import FORWARD, OCTETS, TENSORS, WARM

E4M3, E5M2 = FLOAT8["float8_e4m3fn"], FLOAT8["float8_e5m2"]
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
RESULTS = ["bfloat16", "float16", "float32"]
RNG = np.random.default_rng(3)
X, WEIGHT = RNG.standard_normal((5, 32)).astype(E4M3), RNG.standard_normal((48, 32)).astype(E4M3)
WIDE = RNG.standard_normal((48, 32)).astype(np.float32)
BIAS = reference.random(RNG, (48,), "bfloat16")
SCALES: dict[Any, Any] = {"x": 0.5, "weight": 0.25}


def product(x: Host, weight: Host, factor: float = 0.125) -> tuple[F64, F64]:
    """factor · x·weightᵀ, and what its terms add up to."""
    left, right = f64(x), f64(weight).T
    return factor * (left @ right), factor * (np.abs(left) @ np.abs(right)) + 1


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("shape", [(32,), (1, 32), (16, 32), (2, 3, 32), (17, 32), (0, 32)])
def test_linear(client: Client, shape: tuple[int, ...], activation: Any, result: str) -> None:
    x = RNG.standard_normal(shape).astype(E5M2)
    bias = reference.random(RNG, (48,), "float16" if result == "float16" else "bfloat16")
    z, magnitude = product(x, WEIGHT)
    for given, expected in ((None, z), (bias, z + f64(bias))):
        y = client.linear(
            x,
            WEIGHT,
            given,
            scales=SCALES,
            activation=activation,
            options={"result_type": result},
        )
        assert y.dtype == DTYPES[result]
        assert_close(y, activate(activation, expected), magnitude, f"float8 {result}")


def test_linear_with_c_and_alpha(client: Client) -> None:
    c = reference.random(RNG, (5, 48), "bfloat16")
    y = client.linear(X, WEIGHT, BIAS, c=c, alpha=-2.0, beta=0.5, scales=SCALES)
    z, magnitude = product(X, WEIGHT, -0.25)
    expected = z + 0.5 * f64(c) + f64(BIAS)
    assert_close(y, expected, np.abs(magnitude) + 3 + np.abs(f64(c)), "float8 bfloat16")


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_aux_serves_a_backward_pass_in_the_results_dtype(
    client: Client, activation: Any
) -> None:
    y, aux = client.linear(X, WEIGHT, BIAS, scales=SCALES, activation=activation, save_aux=True)
    dy = reference.random(RNG, (5, 48), "bfloat16")
    x = f64(X).astype(DTYPES["bfloat16"])
    got = client.linear_backward(x=x, dy=dy, aux=aux, wants=["dweight"]).dweight
    z = product(X, WEIGHT)[0] + f64(BIAS)
    dz = f64(dy) * reference.activation_prime(activation, z)
    assert isinstance(got, np.ndarray)
    assert_close(got, dz.T @ f64(x), 4 * np.abs(f64(dy)).T @ np.abs(f64(x)) + 1, "bfloat16")
    assert y.shape == dy.shape


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize(
    ("epilog", "activation"),
    [(None, "none"), ("RELU", "relu"), ("BIAS", "none"), ("GELU_BIAS", "gelu")],
)
@pytest.mark.parametrize("lead", [(), (3,), (2, 2)])
def test_matmul(
    client: Client, lead: tuple[int, ...], epilog: Any, activation: str, result: str
) -> None:
    a = RNG.standard_normal((*lead, 48, 32)).astype(E4M3)
    b = RNG.standard_normal((*lead, 32, 16)).astype(E5M2)
    bias = reference.random(RNG, (48,), "float16" if result == "float16" else "bfloat16")
    given = bias if epilog and "BIAS" in epilog else None
    d = client.matmul(
        a,
        b,
        scales={"a": 0.5, "b": 3},
        epilog=epilog,
        bias=given,
        options={"result_type": result, "fast_accumulation": True},
    )
    z = 1.5 * (f64(a) @ f64(b)) + (0 if given is None else f64(given)[:, None])
    magnitude = 1.5 * (np.abs(f64(a)) @ np.abs(f64(b))) + 1
    assert d.dtype == DTYPES[result]
    assert_close(d, activate(activation, z), magnitude, f"float8 {result}")


@pytest.mark.parametrize("epilog", ["RELU_AUX", "RELU_AUX_BIAS", "GELU_AUX", "GELU_AUX_BIAS"])
def test_matmul_with_aux(client: Client, epilog: Any) -> None:
    bias = BIAS if "BIAS" in epilog else None
    b = np.ascontiguousarray(RNG.standard_normal((32, 16)).astype(E4M3))
    d, extras = client.matmul(WEIGHT, b, scales={"a": 1, "b": 1}, epilog=epilog, bias=bias)
    z = f64(WEIGHT) @ f64(b) + (0 if bias is None else f64(bias)[:, None])
    magnitude = np.abs(f64(WEIGHT)) @ np.abs(f64(b)) + 1
    activation = epilog.split("_")[0].lower()
    assert_close(d, activate(activation, z), magnitude, "float8 bfloat16")
    (aux,) = extras.values()
    assert not isinstance(aux, np.ndarray)
    if activation == "gelu":
        assert_close(aux.numpy()[:48], z, magnitude, "float8 bfloat16")
    else:
        sure = np.abs(z) > 1e-2 * magnitude
        np.testing.assert_array_equal(reference.unpack_mask(aux.numpy(), 48)[sure], (z > 0)[sure])


def test_a_stack_begins_with_8_bit_floats(client: Client) -> None:
    second = reference.random(RNG, (7, 48), "bfloat16")
    layers = [
        Layer(WEIGHT, BIAS, "relu", scales={"weight": 0.25}),
        Layer(second, reference.random(RNG, (7,), "bfloat16")),
    ]
    y = client.mlp(X, layers, scales={"x": 0.5})
    hidden = client.linear(X, WEIGHT, BIAS, activation="relu", scales=SCALES)
    expected = client.linear(hidden, second, layers[1].bias)
    np.testing.assert_array_equal(y.view(np.uint16), expected.view(np.uint16))


def test_the_result_type_of_a_stack_is_that_of_all_its_layers(client: Client) -> None:
    second = reference.random(RNG, (7, 48), "float32")
    layers = [Layer(WEIGHT, BIAS, scales={"weight": 0.25}), Layer(second, np.ones(7, np.float32))]
    y = client.mlp(X, layers, scales={"x": 0.5}, options={"result_type": "float32"})
    hidden, magnitude = product(X, WEIGHT)
    expected = (hidden + f64(BIAS)) @ f64(second).T + 1
    assert y.dtype == np.float32
    bound = (magnitude + np.abs(f64(BIAS))) @ np.abs(f64(second)).T
    assert_close(y, expected, bound, "float8 float32")


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_in_tensors(client: Client, shape: tuple[int, ...]) -> None:
    expected = client.linear(X, WEIGHT, scales=SCALES)
    with client.put(np.full(shape, 0.5, np.float32)) as scale:
        for given in (scale, scale[...], np.full(shape, 0.5, np.float32)):
            y = client.linear(X, WEIGHT, scales={"x": given, "weight": 0.25})
            np.testing.assert_array_equal(y.view(np.uint16), expected.view(np.uint16))
        scale.replace(np.full(shape, 1.0, np.float32))
        y = client.linear(X, WEIGHT, scales={"x": scale, "weight": 0.125})
        np.testing.assert_array_equal(y.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("source", DTYPES)
def test_a_quantized_weight_brings_its_scale(client: Client, source: str, dtype: Any) -> None:
    wide = WIDE.astype(DTYPES[source])
    with client.put(wide, quantize=dtype) as weight:
        amax = np.abs(wide.astype(np.float32)).max()
        assert (weight.dtype, weight.shape) == (FLOAT8[dtype], wide.shape)
        assert (weight.amax, weight.scale) == (amax, amax / np.float32(LARGEST[dtype]))
        assert weight.scale is not None
        held = weight.numpy()
        step = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}[dtype]
        np.testing.assert_allclose(
            f64(held) * weight.scale, f64(wide), rtol=step, atol=weight.scale * 2**-9
        )
        z, magnitude = product(X, held, weight.scale / 2)
        y = client.linear(X, weight, scales={"x": 0.5})
        assert_close(y, z, magnitude, "float8 bfloat16")
        y = client.linear(X, weight[16:32], scales={"x": 0.5})
        assert_close(y, z[:, 16:32], magnitude[:, 16:32], "float8 bfloat16")
        y = client.linear(X, weight, scales={"x": 0.5, "weight": 1.0})
        z, magnitude = product(X, held, 0.5)
        assert_close(y, z, magnitude, "float8 bfloat16")


def test_operands_that_are_views(client: Client) -> None:
    wide = RNG.standard_normal((2, 3, 70)).astype(E4M3)
    weights = RNG.standard_normal((2, 40, 48)).astype(E4M3)
    with client.put(wide) as x, client.put(weights) as weight:
        part, other = wide[:, :, 1:33], weights[1, 1:33].T
        y = client.linear(x[:, :, 1:33], weight[1, 1:33].T, scales=SCALES)
        z, magnitude = product(part, other)
        assert_close(y, z, magnitude, "float8 bfloat16")
        scales: Any = {"a": 1, "b": 1}
        d = client.matmul(weight[:, 3:35].mT, weight[:, 2:34, :16], scales=scales)
        a, b = f64(weights[:, 3:35]).swapaxes(1, 2), f64(weights[:, 2:34, :16])
        assert_close(d, a @ b, np.abs(a) @ np.abs(b), "float8 bfloat16")
        y = client.mlp(
            x[:, :, 1:33], [Layer(weight[1, 1:33].T, scales={"weight": 0.25})], scales={"x": 0.5}
        )
        assert_close(y, z, magnitude, "float8 bfloat16")


def test_zeros_have_a_scale_of_1(client: Client) -> None:
    with client.put(np.zeros((16, 16), np.float32), quantize="float8_e4m3fn") as weight:
        assert (weight.scale, weight.amax) == (1.0, 0.0)
        y = client.linear(np.ones((2, 16), E4M3), weight, scales={"x": 1})
        assert not f64(y).any()


@pytest.mark.parametrize("count", [32, 1 << 15])
def test_a_replacement_is_quantized_anew(client: Client, count: int) -> None:
    """Small tensors are sent as payloads, large ones as raw bodies."""
    old = RNG.standard_normal((16, count)).astype(np.float32)
    x = np.ones((1, count), E4M3)
    with client.put(old, quantize="float8_e4m3fn") as weight:
        before = client.linear(x, weight, scales={"x": 1})
        first = weight.scale
        assert first is not None
        weight.replace(4 * old)
        assert weight.scale == 4 * first
        known = client.tensor(weight.handle)
        assert (vars(known)["scale"], vars(known)["amax"]) == (weight.scale, weight.amax)
        after = client.linear(x, weight, scales={"x": 1})
        np.testing.assert_array_equal(4 * f64(before), f64(after))


def test_metadata(wire: Wire) -> None:
    answer = wire.send(
        TENSORS, {"value": tensor(WIDE, 0), "quantize": "float8_e5m2", "pinned": True}, raw(WIDE)
    )
    created = answer.header
    told = {"dtype": "float8_e5m2", "shape": [48, 32], "nbytes": 1536, "quantized_from": "float32"}
    amax = float(np.abs(WIDE).max())
    told |= {"amax": amax, "scale": float(np.float32(amax) / np.float32(57344))}
    assert (answer.status, created.items() >= told.items()) == (201, True), created
    path = f"{TENSORS}/{created['tensor']}"
    assert wire.get(f"{path}/metadata") == created
    assert created in wire.get(TENSORS)["tensors"]
    assert wire.get(path)["value"].keys() == {"dtype", "shape", "data"}
    assert wire.request("DELETE", path).status == 204


def test_a_raw_body_is_quantized(wire: Wire) -> None:
    query = f"{TENSORS}?dtype=float32&shape=48,32&quantize=float8_e4m3fn"
    answer = wire.request("POST", query, raw(WIDE), {"Content-Type": OCTETS})
    packed_too = wire.send(
        TENSORS, {"value": tensor(WIDE, 0), "quantize": "float8_e4m3fn"}, raw(WIDE)
    )
    paths = [f"{TENSORS}/{created.header['tensor']}" for created in (answer, packed_too)]
    first, second = (wire.request("GET", path, headers={"Accept": OCTETS}) for path in paths)
    assert first.headers["x-tensor-dtype"] == "float8_e4m3fn"
    assert first.body == second.body
    assert answer.header["scale"] == packed_too.header["scale"]
    for path in paths:
        wire.request("DELETE", path)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_8_bit_tensors_are_held_as_they_are(client: Client, dtype: str) -> None:
    array = np.arange(120, dtype=np.uint8).reshape(2, 3, 20).view(FLOAT8[dtype])
    with client.put(array) as held, client.zeros((3, 4), dtype) as zeros:
        assert (held.dtype, held.scale, held.amax) == (array.dtype, None, None)
        np.testing.assert_array_equal(held.numpy().view(np.uint8), array.view(np.uint8))
        held.replace(array[::-1])
        np.testing.assert_array_equal(held.numpy().view(np.uint8), array[::-1].view(np.uint8))
        assert zeros.numpy().tobytes() == bytes(12)
    with client.put(np.asfortranarray(WEIGHT)) as weight:
        y = client.linear(X, weight, scales=SCALES)
        np.testing.assert_array_equal(f64(y), f64(client.linear(X, WEIGHT, scales=SCALES)))


def test_a_request_that_is_repeated_takes_the_scale_of_the_hour(wire: Wire, client: Client) -> None:
    with client.put(WIDE, quantize="float8_e4m3fn") as weight:
        header = {"x": tensor(X, 0), "weight": {"tensor": weight.handle}, "scales": {"x": 1}}
        body = packed(header, raw(X))
        first = wire.request("POST", FORWARD, body, {"Content-Type": MSGPACK})
        for factor in (1, 2, 4):
            weight.replace(factor * WIDE)
            for _ in range(4):
                answer = wire.request("POST", FORWARD, body, {"Content-Type": MSGPACK})
                np.testing.assert_array_equal(
                    f64(answer.array("y")), factor * f64(first.array("y"))
                )


def test_a_request_that_is_repeated_takes_the_scale_that_comes_with_it(wire: Wire) -> None:
    one = np.ones(1, np.float32)
    header = {
        "x": tensor(X, 0),
        "weight": tensor(WEIGHT, 1),
        "scales": {"x": tensor(one, 2), "weight": 0.25},
    }
    z = None
    for factor in (1, 1, 1, 2, 4, 8):
        answer = wire.send(FORWARD, header, raw(X), raw(WEIGHT), raw(factor * one))
        z = f64(answer.array("y")) if z is None else z
        np.testing.assert_array_equal(f64(answer.array("y")), factor * z)


def described(*shape: int, dtype: str = "float8_e4m3fn") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape)}


@pytest.mark.parametrize("scales", [{}, SCALES, {"x": described(dtype="float32")}])
def test_plans_are_made_ahead_whatever_the_scales(wire: Wire, scales: dict[str, Any]) -> None:
    header = {"x": described(3, 32), "weight": described(48, 32), "scales": scales}
    requests = [{"operation": "linear/forward", "header": header}]
    assert wire.request("DELETE", "/v1/plans").status == 200
    answer = wire.send(WARM, {"requests": requests})
    assert answer.header == {"planned": 1, "hits": 0}
    x = RNG.standard_normal((3, 32)).astype(E4M3)
    sent = {"x": tensor(x, 0), "weight": tensor(WEIGHT, 1), "scales": SCALES}
    before = wire.get("/v1/plans")["stats"]["planned"]
    assert wire.send(FORWARD, sent, raw(x), raw(WEIGHT)).status == 200
    assert wire.get("/v1/plans")["stats"]["planned"] == before


def test_the_client_plans_ahead_with_what_it_has(client: Client) -> None:
    with client.put(WIDE, quantize="float8_e4m3fn") as weight, client.zeros(1) as scale:
        layer = Layer(weight, scales={"weight": scale})
        planned = client.warm(
            [
                ("linear/forward", {"x": X, "weight": weight, "scales": {"x": scale}}),
                ("mlp/forward", {"x": X, "layers": [layer]}),
                ("matmul", {"a": weight, "b": weight.T, "scales": {"a": 2.0}}),
            ]
        )
    assert sum(planned.values()) == 3
