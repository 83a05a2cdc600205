"""Linear layers through the SDK, against unfused float64 products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matmuld_client import Accumulate, Client, RemoteTensor

from .. import reference
from ..reference import (
    ACTIVATIONS,
    DTYPES,
    F64,
    Host,
    activate,
    activation_prime,
    assert_close,
    f64,
)

SHAPES = [((5, 7), 3), ((1, 64), 32), ((33, 1), 9), ((8, 16), 1), ((2, 3, 10), 4), ((6,), 5)]


def arrays(dtype: str, *shapes: tuple[int, ...], seed: int = 0) -> list[Host]:
    rng = np.random.default_rng(seed)
    return [reference.random(rng, shape, dtype) for shape in shapes]


def bound(*factors: Host) -> F64:
    """Row sums of |a|·|b|, what the terms of a product add up to, and 1."""
    left, right = (np.abs(f64(factor)) for factor in factors)
    result: F64 = left @ right + 1
    return result


def fetched(result: Host | RemoteTensor | None) -> Host:
    assert isinstance(result, np.ndarray)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
@pytest.mark.parametrize(("x_shape", "outputs"), SHAPES)
def test_forward(
    client: Client, dtype: str, activation: Any, x_shape: tuple[int, ...], outputs: int
) -> None:
    x, weight, bias, c = arrays(
        dtype, x_shape, (outputs, x_shape[-1]), (outputs,), (*x_shape[:-1], outputs)
    )
    product, scale = f64(x) @ f64(weight).T, bound(x, weight.T) + np.abs(f64(c))
    approximate = activation == "gelu"
    for with_bias in (False, True):
        z = product + f64(bias) * with_bias
        y = client.linear(x, weight, bias if with_bias else None, activation=activation)
        assert y.dtype == DTYPES[dtype]
        assert_close(y, activate(activation, z), scale, dtype, approximate=approximate)
        y = client.linear(
            x,
            weight,
            bias if with_bias else None,
            c=c,
            alpha=-0.5,
            beta=2.0,
            activation=activation,
        )
        z = -0.5 * product + 2 * f64(c) + f64(bias) * with_bias
        assert_close(y, activate(activation, z), 2 * scale, dtype, approximate=approximate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward_from_dy_and_aux(client: Client, dtype: str, activation: Any) -> None:
    x, weight, bias, dy = arrays(dtype, (20, 12), (17, 12), (17,), (20, 17))
    _, aux = client.linear(x, weight, bias, activation=activation, save_aux=True)
    assert aux.kind == f"{activation}_aux"
    got = client.linear_backward(weight, x, dy=dy, aux=aux)
    z = f64(x) @ f64(weight).T + f64(bias)
    check_gradients(got, f64(dy) * activation_prime(activation, z), x, weight, dtype)


def check_gradients(got: object, dz: F64, x: Host, weight: Host, dtype: str) -> None:
    """dx, dweight and dbias against those of dz in float64; dz itself was rounded once."""
    dx, dweight, dbias = (getattr(got, name) for name in ("dx", "dweight", "dbias"))
    spread = np.abs(dz)
    close: Any = {"dtype": dtype, "approximate": True}
    assert_close(fetched(dx), dz @ f64(weight), 2 * spread @ np.abs(f64(weight)) + 1, **close)
    assert_close(fetched(dweight), dz.T @ f64(x), 2 * spread.T @ np.abs(f64(x)) + 1, **close)
    assert_close(fetched(dbias), dz.sum(0), 2 * spread.sum(0) + 1, **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(20, 12, 17), (1, 8, 8), (7, 1, 5), (7, 5, 1), (1, 1, 1)])
def test_backward_from_dz(client: Client, dtype: str, sizes: tuple[int, int, int]) -> None:
    batch, inputs, outputs = sizes
    x, weight, dz = arrays(dtype, (batch, inputs), (outputs, inputs), (batch, outputs))
    check_gradients(client.linear_backward(weight, x, dz=dz), f64(dz), x, weight, dtype)


@pytest.mark.parametrize("wants", [["dx"], ["dweight"], ["dbias"], ["dx", "dbias"]])
def test_only_what_is_wanted_comes_back(client: Client, wants: Any) -> None:
    x, weight, dz = arrays("float64", (6, 4), (5, 4), (6, 5))
    got = client.linear_backward(weight, x, dz=dz, wants=wants)
    expected = {"dx": dz @ weight, "dweight": dz.T @ x, "dbias": dz.sum(0)}
    for name, value in expected.items():
        if name in wants:
            np.testing.assert_allclose(fetched(getattr(got, name)), value)
        else:
            assert getattr(got, name) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("outputs", [17, 1])
def test_input_aux_makes_dx_the_dz_of_the_layer_below(
    client: Client, dtype: str, activation: Any, outputs: int
) -> None:
    x, w1, w2, dz2 = arrays(dtype, (20, 12), (9, 12), (outputs, 9), (20, outputs))
    _, aux = client.linear(x, w1, activation=activation, save_aux=True)
    got = client.linear_backward(w2, dz=dz2, input_aux=aux, input_dbias=True, wants=["dx"])
    slope = activation_prime(activation, f64(x) @ f64(w1).T)
    dz1 = (f64(dz2) @ f64(w2)) * slope
    scale = bound(dz2, w2)
    assert_close(fetched(got.dx), dz1, scale, dtype, approximate=True)
    assert_close(fetched(got.input_dbias), dz1.sum(0), scale.sum(0), dtype, approximate=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_differences(client: Client, activation: Any) -> None:
    x, weight, bias, dy = arrays("float64", (6, 5), (7, 5), (7,), (6, 7), seed=3)
    _, aux = client.linear(x, weight, bias, activation=activation, save_aux=True)
    got = client.linear_backward(weight, x, dy=dy, aux=aux)

    def loss(x: Host, weight: Host, bias: Host) -> float:
        return float(np.sum(dy * client.linear(x, weight, bias, activation=activation)))

    step = 1e-6
    for place, gradient in enumerate((got.dx, got.dweight, got.dbias)):
        for index in np.ndindex(fetched(gradient).shape):
            values = []
            for sign in (1, -1):
                operands = [x.copy(), weight.copy(), bias.copy()]
                operands[place][index] += sign * step
                values.append(loss(*operands))
            difference = (values[0] - values[1]) / (2 * step)
            assert fetched(gradient)[index] == pytest.approx(difference, abs=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_accumulate_into_tensors(client: Client, dtype: str) -> None:
    x, dz, w, b = arrays(dtype, (20, 12), (20, 7), (7, 12), (7,))
    with client.put(w) as weight, client.put(b) as bias:
        place: Any = {
            "dweight": Accumulate(weight, -0.5, 1.0),
            "dbias": Accumulate(bias, -0.25, 2.0),
        }
        client.linear_backward(x=x, dz=dz, out=place)
        product, sums = f64(dz).T @ f64(x), f64(dz).sum(0)
        scale = bound(dz.T, x)
        assert_close(weight.numpy(), f64(w) - 0.5 * product, scale, dtype)
        total = np.abs(f64(dz)).sum(0) + 1
        assert_close(bias.numpy(), 2 * f64(b) - 0.25 * sums, 2 * total, dtype)


def test_accumulation_keeps_every_addend_whoever_else_adds(client: Client) -> None:
    from concurrent.futures import ThreadPoolExecutor

    x, dz = np.ones((4, 64), np.float32), np.ones((4, 64), np.float32)
    with client.zeros((64, 64)) as total, ThreadPoolExecutor(8) as threads:

        def add(_: int) -> None:
            client.linear_backward(
                x=x, dz=dz, wants=["dweight"], out={"dweight": Accumulate(total)}
            )

        list(threads.map(add, range(100)))
        np.testing.assert_array_equal(total.numpy(), np.full((64, 64), 400, np.float32))


def test_an_empty_batch_gives_an_empty_result_and_zero_gradients(client: Client) -> None:
    x, weight, dz = np.ones((0, 4), np.float32), np.ones((3, 4), np.float32), np.ones((0, 3), "f4")
    assert client.linear(x, weight, activation="relu").shape == (0, 3)
    got = client.linear_backward(weight, x, dz=dz)
    assert fetched(got.dx).shape == (0, 4)
    np.testing.assert_array_equal(fetched(got.dweight), np.zeros((3, 4)))
    np.testing.assert_array_equal(fetched(got.dbias), np.zeros(3))
    with client.put(weight) as total:
        client.linear_backward(
            x=x, dz=dz, wants=["dweight"], out={"dweight": Accumulate(total, 1.0, 3.0)}
        )
        np.testing.assert_array_equal(total.numpy(), 3 * weight)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_operands_may_have_a_float32_result(client: Client, dtype: str) -> None:
    x, weight = arrays(dtype, (20, 300), (7, 300))
    (bias,) = arrays("float32", (7,))
    y = client.linear(x, weight, bias, activation="relu", options={"result_type": "float32"})
    assert y.dtype == np.float32
    expected = activate("relu", f64(x) @ f64(weight).T + f64(bias))
    assert_close(y, expected, bound(x, weight.T), "float32")


def test_tf32_is_coarser_than_float32_and_fine_enough(client: Client) -> None:
    x, weight = arrays("float32", (64, 512), (64, 512))
    options: Any = {"compute_type": "COMPUTE_32F_FAST_TF32"}
    y = client.linear(x, weight, options=options)
    assert_close(y, f64(x) @ f64(weight).T, bound(x, weight.T), "float16")


def test_operands_may_be_views_of_what_the_service_holds(client: Client) -> None:
    x, weight = arrays("float32", (10, 24), (16, 30))
    with client.put(x) as held_x, client.put(weight) as held_weight:
        y = client.linear(held_x[::2, 3:20], held_weight[1:9, 5:22])
        assert_close(y, f64(x[::2, 3:20]) @ f64(weight[1:9, 5:22]).T, 40.0, "float32")
        y = client.linear(held_x[:, :16], held_weight.T)
        assert_close(y, f64(x[:, :16]) @ f64(weight), 40.0, "float32")


def test_a_result_may_stay_or_take_the_place_of_a_tensor(client: Client) -> None:
    x, weight = arrays("float32", (10, 24), (16, 24))
    expected = f64(x) @ f64(weight).T
    with client.linear(x, weight, out="tensor") as y:
        assert_close(y.numpy(), expected, 60.0, "float32")
        client.linear(2 * x, weight, out=y)
        assert_close(y.numpy(), 2 * expected, 120.0, "float32")


def test_an_aux_that_came_back_as_bytes_may_be_sent_again(client: Client) -> None:
    x, weight, dy = arrays("float32", (20, 12), (17, 12), (20, 17))
    _, aux = client.linear(x, weight, activation="relu", save_aux=True)
    z = f64(x) @ f64(weight).T
    np.testing.assert_array_equal(aux.mask(), z >= 0)
    np.testing.assert_array_equal(reference.unpack_mask(aux.numpy(), 17), (z >= 0).T)
    got = client.linear_backward(dy=dy, aux=aux, wants=["dbias"])
    assert_close(fetched(got.dbias), (f64(dy) * (z >= 0)).sum(0), 40.0, "float32")
