"""The client on a running service, against unfused float64 products."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from matmuld_client import (
    Accumulate,
    Client,
    Conflict,
    Gone,
    InvalidOperands,
    Layer,
    NotFound,
    RemoteTensor,
)
from matmuld_client.operations import Activation

from ..reference import (
    ACTIVATIONS,
    DTYPES,
    FLOAT8,
    TOLERANCE,
    Host,
    activate,
    activation_prime,
    f64,
    random,
    unpack_mask,
)

BATCH, IN, OUT = 12, 24, 20


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def close(got: object, expected: Host, dtype: str = "float32") -> None:
    """Equal within the dtype's tolerance, relative to the largest element."""
    array = got.numpy() if isinstance(got, RemoteTensor) else got
    assert isinstance(array, np.ndarray)
    assert array.dtype == DTYPES[dtype]
    assert array.shape == expected.shape
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(f64(array), f64(expected), rtol=0, atol=8 * TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
def test_linear(
    client: Client, rng: np.random.Generator, dtype: str, activation: Activation
) -> None:
    x, weight = random(rng, (BATCH, IN), dtype), random(rng, (OUT, IN), dtype)
    bias = random(rng, (OUT,), dtype)
    y = client.linear(x, weight, bias, activation=activation)
    close(y, activate(activation, f64(x) @ f64(weight).T + f64(bias)), dtype)
    assert y.flags.writeable
    assert y.flags.aligned


def test_linear_with_a_residual(client: Client, rng: np.random.Generator) -> None:
    x, weight = random(rng, (2, BATCH, IN), "float32"), random(rng, (OUT, IN), "float32")
    c = random(rng, (2, BATCH, OUT), "float32")
    y = client.linear(x, weight, c=c, alpha=0.5, beta=-2.0)
    close(y, 0.5 * (f64(x) @ f64(weight).T) - 2 * f64(c))


@pytest.mark.parametrize("shape", [(IN,), (0, IN), (1, IN), (3, 1, IN)])
def test_the_result_has_the_batch_of_x(
    client: Client, rng: np.random.Generator, shape: tuple[int, ...]
) -> None:
    x, weight = random(rng, shape, "float64"), random(rng, (OUT, IN), "float64")
    expected = f64(x) @ f64(weight).T
    y = client.linear(x, weight)
    np.testing.assert_allclose(y.reshape(expected.shape), expected, rtol=1e-12, atol=1e-12)


def test_operands_of_any_layout(client: Client, rng: np.random.Generator) -> None:
    x, weight = random(rng, (BATCH, IN), "float32"), random(rng, (OUT, IN), "float32")
    expected = f64(x) @ f64(weight).T
    strided = np.repeat(x, 2, axis=1)[:, ::2]
    for operand in (np.asfortranarray(x), strided, x.astype(">f4"), x[::-1][::-1]):
        close(client.linear(operand, np.asfortranarray(weight)), expected)


def test_remote_operands_and_their_views(client: Client, rng: np.random.Generator) -> None:
    x, weight = random(rng, (BATCH, IN), "float32"), random(rng, (IN, OUT), "float32")
    remote_x, remote_weight = client.put(x), client.put(weight)
    expected = f64(x) @ f64(weight)
    close(client.linear(remote_x, remote_weight.T), expected)
    close(client.linear(remote_x[3:9], remote_weight.T), expected[3:9])
    close(client.linear(remote_x[::2], remote_weight.T[5:]), expected[::2, 5:])
    close(client.linear(remote_x[4], remote_weight.T).reshape(1, OUT), expected[4:5])


def test_a_result_may_stay_or_replace_a_tensor(client: Client, rng: np.random.Generator) -> None:
    x, weight = random(rng, (BATCH, IN), "float32"), random(rng, (OUT, IN), "float32")
    expected = f64(x) @ f64(weight).T
    stays = client.linear(x, weight, out="tensor")
    close(stays, expected)
    target = client.zeros((BATCH, OUT))
    assert client.linear(x, weight, alpha=2.0, out=target) is target
    close(target, 2 * expected)
    close(client.linear(x, weight, out="array"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_backward(
    client: Client, rng: np.random.Generator, dtype: str, activation: Activation
) -> None:
    x, weight = random(rng, (BATCH, IN), dtype), random(rng, (OUT, IN), dtype)
    dy = random(rng, (BATCH, OUT), dtype)
    _, aux = client.linear(x, weight, activation=activation, save_aux=True)
    gradients = client.linear_backward(weight, x, dy=dy, aux=aux)
    dz = f64(dy) * activation_prime(activation, f64(x) @ f64(weight).T)
    close(gradients.dx, dz @ f64(weight), dtype)
    close(gradients.dweight, dz.T @ f64(x), dtype)
    close(gradients.dbias, dz.sum(0), dtype)
    assert gradients.input_dbias is None


@pytest.mark.parametrize("fetched", [False, True])
def test_a_fused_chain_of_two_layers(
    client: Client, rng: np.random.Generator, fetched: bool
) -> None:
    x, hidden = random(rng, (BATCH, IN), "float64"), random(rng, (OUT, IN), "float64")
    weight, dz = random(rng, (7, OUT), "float64"), random(rng, (BATCH, 7), "float64")
    h, aux = client.linear(x, hidden, activation="relu", save_aux=True)
    input_aux = np.asfortranarray(aux.numpy()) if fetched else aux
    gradients = client.linear_backward(
        weight, h, dz=dz, input_aux=input_aux, input_dbias=True, out={"dx": "tensor"}
    )
    expected = (dz @ weight) * (x @ hidden.T > 0)
    assert isinstance(gradients.dx, RemoteTensor)
    close(gradients.dx, expected, "float64")
    close(gradients.input_dbias, expected.sum(0), "float64")
    close(gradients.dweight, dz.T @ h, "float64")


def test_only_what_is_wanted_is_computed(client: Client, rng: np.random.Generator) -> None:
    x, weight = random(rng, (BATCH, IN), "float32"), random(rng, (OUT, IN), "float32")
    dz = random(rng, (BATCH, OUT), "float32")
    only_bias = client.linear_backward(dz=dz)
    assert (only_bias.dx, only_bias.dweight) == (None, None)
    close(only_bias.dbias, f64(dz).sum(0))
    only_dx = client.linear_backward(weight, x, dz=dz, wants=["dx"], out="tensor")
    assert (only_dx.dweight, only_dx.dbias) == (None, None)
    close(only_dx.dx, f64(dz) @ f64(weight))


def test_a_step_of_sgd_inside_the_product(client: Client, rng: np.random.Generator) -> None:
    x, weight = random(rng, (BATCH, IN), "float32"), random(rng, (OUT, IN), "float32")
    dz = random(rng, (BATCH, OUT), "float32")
    remote, total = client.put(weight), client.zeros((OUT,))
    for _ in range(2):
        gradients = client.linear_backward(
            x=x,
            dz=dz,
            out={"dweight": Accumulate(remote, alpha=-0.1), "dbias": Accumulate(total)},
        )
        assert gradients.dweight is remote
        assert gradients.dbias is total
    close(remote, f64(weight) - 0.2 * (f64(dz).T @ f64(x)))
    close(total, 2 * f64(dz).sum(0))


def stack(rng: np.random.Generator) -> tuple[Host, Host, Host, Host]:
    return (
        random(rng, (BATCH, IN), "float64"),
        random(rng, (OUT, IN), "float64"),
        random(rng, (OUT,), "float64"),
        random(rng, (5, OUT), "float64"),
    )


def test_mlp_forward_and_backward(client: Client, rng: np.random.Generator) -> None:
    x, first, bias, second = stack(rng)
    layers = [Layer(first, bias, activation="gelu"), Layer(second)]
    z = x @ first.T + bias
    y, tape = client.mlp(x, layers, save_tape=True)
    close(y, activate("gelu", z) @ second.T, "float64")
    close(client.mlp(x, layers), y, "float64")

    dy = random(rng, y.shape, "float64")
    dz = (dy @ second) * activation_prime("gelu", z)
    for keep_tape in (True, False):
        gradients = client.mlp_backward(
            tape, dy=dy, wants=["dx", "dweight", "dbias"], keep_tape=keep_tape
        )
        close(gradients.dx, dz @ first, "float64")
        close(gradients.layers[0].dweight, dz.T @ x, "float64")
        close(gradients.layers[0].dbias, dz.sum(0), "float64")
        close(gradients.layers[1].dweight, dy.T @ activate("gelu", z), "float64")
        assert gradients.layers[1].dbias is None
    with pytest.raises(Gone, match="was freed"):
        client.mlp_backward(tape, dy=dy)


def test_mlp_trains_in_the_service(client: Client, rng: np.random.Generator) -> None:
    x, first, bias, second = stack(rng)
    weights = [client.put(first), client.put(second)]
    remote_bias = client.put(bias)
    layers = [Layer(weights[0], remote_bias, activation="relu"), Layer(weights[1])]
    y, tape = client.mlp(x, layers, save_tape=True, out="tensor")
    gradients = client.mlp_backward(
        tape,
        dz=y,
        layers=[
            {
                "dweight": Accumulate(weights[0], alpha=-0.1),
                "dbias": Accumulate(remote_bias, alpha=-0.1),
            },
            {"dweight": Accumulate(weights[1], alpha=-0.1)},
        ],
    )
    assert gradients.dx is None
    assert gradients.layers[1].dweight is weights[1]
    hidden = activate("relu", x @ first.T + bias)
    dy = hidden @ second.T
    dz = (dy @ second) * (hidden > 0)
    close(weights[1], second - 0.1 * dy.T @ hidden, "float64")
    close(weights[0], first - 0.1 * dz.T @ x, "float64")
    close(remote_bias, bias - 0.1 * dz.sum(0), "float64")


def test_matmul_takes_batches_and_transposes(client: Client, rng: np.random.Generator) -> None:
    a, b = random(rng, (3, 8, 16), "float32"), random(rng, (3, 24, 16), "float32")
    expected = f64(a) @ f64(b).swapaxes(1, 2)
    close(client.matmul(a, b.swapaxes(1, 2)), expected)
    close(client.matmul(a, client.put(b).mT), expected)
    c = random(rng, (8, 24), "float32")
    close(client.matmul(a[0], b[0].T, c, alpha=2.0, beta=0.5), 2 * expected[0] + 0.5 * f64(c))
    close(client.matmul(a[0], b[0].T, out="tensor"), expected[0])


def test_matmul_returns_what_the_epilog_gives_besides(
    client: Client, rng: np.random.Generator
) -> None:
    a, b = random(rng, (16, 8), "float32"), random(rng, (8, 24), "float32")
    bias, dy = random(rng, (16,), "float32"), random(rng, (16, 24), "float32")
    z = f64(a) @ f64(b) + f64(bias)[:, None]
    d, extras = client.matmul(a, b, epilog="RELU_AUX_BIAS", bias=bias)
    close(d, activate("relu", z))
    mask = extras["relu_aux"]
    assert isinstance(mask, RemoteTensor)
    assert mask.kind == "relu_aux"
    np.testing.assert_array_equal(unpack_mask(mask.numpy(), 16), z > 0)

    weight = random(rng, (16, 16), "float32")
    for aux in (mask, np.asfortranarray(mask.numpy())):
        dz, sums = client.matmul(weight, dy, epilog="DRELU_BGRAD", relu_aux=aux)
        expected = (f64(weight) @ f64(dy)) * (z > 0)
        close(dz, expected)
        (bgrad,) = sums.values()
        assert isinstance(bgrad, np.ndarray)
        close(bgrad.ravel(), expected.sum(1))


def test_the_mask_of_a_linear_layer(client: Client, rng: np.random.Generator) -> None:
    x, weight = random(rng, (BATCH, IN), "float32"), random(rng, (OUT, IN), "float32")
    _, aux = client.linear(x, weight, activation="relu", save_aux=True)
    np.testing.assert_array_equal(aux.mask(), f64(x) @ f64(weight).T > 0)
    with pytest.raises(Conflict):
        client.put(x).mask()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_aux_takes_other_contents(
    client: Client, rng: np.random.Generator, activation: Activation
) -> None:
    x, weight = random(rng, (BATCH, IN), "float32"), random(rng, (OUT, IN), "float32")
    _, aux = client.linear(x, weight, activation=activation, save_aux=True)
    _, other = client.linear(-x, weight, activation=activation, save_aux=True)
    aux.replace(other.numpy())
    dy = random(rng, (BATCH, OUT), "float32")
    expected = f64(dy) * activation_prime(activation, -f64(x) @ f64(weight).T)
    close(client.linear_backward(dy=dy, aux=aux).dbias, expected.sum(0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_aux_is_put_back_under_its_kind(
    client: Client, rng: np.random.Generator, activation: Activation
) -> None:
    x, weight = random(rng, (BATCH, IN), "float32"), random(rng, (OUT, IN), "float32")
    _, aux = client.linear(x, weight, activation=activation, save_aux=True)
    dy = random(rng, (BATCH, OUT), "float32")
    kind: Any = f"{activation}_aux"
    with client.put(aux.numpy(), kind=kind) as again:
        assert again.kind == aux.kind == kind
        first, second = (client.linear_backward(dy=dy, aux=a).dbias for a in (aux, again))
    np.testing.assert_array_equal(first, second)


def test_options_reach_the_planner(client: Client, rng: np.random.Generator) -> None:
    x, weight = random(rng, (BATCH, IN), "bfloat16"), random(rng, (OUT, IN), "bfloat16")
    y = client.linear(x, weight, options={"result_type": "float32"})
    close(y, f64(x) @ f64(weight).T)
    with pytest.raises(InvalidOperands):
        client.linear(x, weight, options={"compute_type": "COMPUTE_64F"})


def test_what_does_not_fit_names_the_operand(client: Client) -> None:
    with pytest.raises(InvalidOperands) as caught:
        client.linear(np.zeros((2, 3)), np.zeros((5, 3)), np.zeros(4))
    assert caught.value.operand == "bias"
    assert caught.value.request_id
    assert "5" in caught.value.detail


def test_a_tensor_freed_elsewhere_is_gone(client: Client) -> None:
    tensor = client.put(np.zeros((2, 3)))
    client.tensor(tensor.handle).free()
    with pytest.raises(Gone):
        client.linear(np.zeros((4, 3)), tensor)


def test_what_was_warmed_is_not_planned_again(client: Client) -> None:
    x, weight = np.ones((33, 17), np.float32), client.put(np.ones((19, 17), np.float32))
    bias = np.ones(19, np.float32)
    header = {"x": np.empty_like(x), "weight": weight, "bias": bias, "activation": "relu"}
    layers = [Layer(weight, bias, activation="relu"), Layer(np.ones((5, 19), np.float32))]
    warmed = client.warm([("linear/forward", header), ("mlp/forward", {"x": x, "layers": layers})])
    assert warmed["planned"] > 0
    planned = client.plans()["stats"]["planned"]
    client.linear(x, weight, bias, activation="relu")
    client.mlp(x, layers)
    assert client.plans()["stats"]["planned"] == planned


def test_plans_are_listed_and_evicted(client: Client) -> None:
    client.linear(np.ones((3, 5)), np.ones((7, 5)))
    assert client.plans().keys() == {"plans", "strategies", "stats"}
    plan = client.plans()["plans"][-1]
    assert client.evict_plans(plan["id"]) == 1
    assert plan["id"] not in [other["id"] for other in client.plans()["plans"]]
    with pytest.raises(NotFound):
        client.evict_plans(plan["id"])
    client.evict_plans()
    assert client.plans()["stats"]["plans"] == 0


def test_the_service_tells_about_itself(client: Client) -> None:
    assert client.live()
    assert client.ready()
    assert client.info()["dtypes"] == [*DTYPES, *FLOAT8]


def test_threads_share_a_client(client: Client, rng: np.random.Generator) -> None:
    weight = client.put(random(rng, (OUT, IN), "float64"))
    inputs = [random(rng, (1 + i % 5, IN), "float64") for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda x: client.linear(x, weight), inputs))
    for x, y in zip(inputs, results, strict=True):
        close(y, x @ weight.numpy().T, "float64")
