"""Handles and the tensors behind them: each tenant by itself, each run of the service by itself."""

from __future__ import annotations

import numpy as np
import pytest
from matmuld.memory.handles import HandleMint
from matmuld.memory.tensors import TensorStore
from matmuld_client.errors import Gone, OutOfMemory, RequestError, UnknownHandle

VALUE = np.zeros(10, np.float32)


@pytest.fixture
def store() -> TensorStore:
    return TensorStore(HandleMint(), quota=100, ttl=60.0)


def test_a_handle_is_of_one_tenant(store: TensorStore) -> None:
    mine = store.add("a", VALUE)
    assert store.get("a", mine.handle) is mine
    for tenant in ("b", "", "A"):
        with pytest.raises(UnknownHandle, match="was not issued to it") as caught:
            store.get(tenant, mine.handle, "x")
        assert caught.value.operand == "x"
    store.free(mine)
    with pytest.raises(Gone, match="freed"):
        store.get("a", mine.handle)
    with pytest.raises(UnknownHandle):
        store.get("b", mine.handle)


def test_tenants_do_not_see_each_other(store: TensorStore) -> None:
    mine, yours = store.add("a", VALUE), store.add("b", VALUE)
    assert list(store.of("a")) == [mine]
    assert list(store.of("b")) == [yours]
    assert list(store.of("c")) == []


def test_tenants_have_a_quota_each(store: TensorStore) -> None:
    for tenant in ("a", "b"):
        for _ in range(2):
            store.add(tenant, VALUE.copy())
        with pytest.raises(
            OutOfMemory, match="40 bytes are needed, 80 of the tenant's quota of 100"
        ):
            store.add(tenant, VALUE.copy())
    assert (len(store), store.nbytes) == (4, 160)


def test_what_has_expired_makes_room(store: TensorStore) -> None:
    for _ in range(2):
        store.add("a", VALUE.copy(), ttl=-1.0)
    kept = store.add("a", VALUE)
    assert (len(store), store.nbytes, store.expired) == (1, 40, 2)
    assert list(store.of("a")) == [kept]


def test_what_several_hold_counts_once_for_as_long_as_one_does(store: TensorStore) -> None:
    weight, x = VALUE.copy(), VALUE.copy()
    tensor = store.add("a", weight)
    tape = store.add("a", object(), kind="tape", arrays=[weight, x, weight])
    assert (store.nbytes, store.fresh("a", [weight, VALUE])) == (80, 40)
    store.replace(tensor, VALUE)
    assert store.nbytes == 120
    store.free(tape)
    assert store.nbytes == 40
    store.free(tensor)
    assert store.nbytes == 0


def test_what_is_reserved_counts_for_a_while(store: TensorStore) -> None:
    with store.reserved("a", 70), pytest.raises(OutOfMemory, match="70 of the tenant's quota"):
        store.add("a", VALUE)
    assert store.nbytes == 0
    store.add("a", VALUE)


def test_freeing_twice_counts_once(store: TensorStore) -> None:
    first, second = store.add("a", VALUE), store.add("a", VALUE.copy())
    store.free(first)
    store.free(first)
    assert (len(store), store.nbytes) == (1, 40)
    assert store.get("a", second.handle) is second


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda handle: handle.upper(), RequestError),
        (lambda handle: handle[:-1], UnknownHandle),
        (lambda handle: handle + "0", UnknownHandle),
        (lambda handle: "", UnknownHandle),
        (lambda handle: "--", UnknownHandle),
        (lambda handle: handle.replace("-", "_"), UnknownHandle),
        (lambda handle: handle[:-1] + chr(ord(handle[-1]) ^ 1), UnknownHandle),
        (lambda handle: handle[:9] + "0" * 32 + handle[41:], UnknownHandle),
        (lambda handle: handle[:9] + "\ud800" * 32 + handle[41:], UnknownHandle),
        (lambda handle: handle[:42] + "é" * 12, UnknownHandle),
        (lambda handle: "z" * 8 + handle[8:], Gone),
    ],
)
def test_forged_handles(store: TensorStore, spoil: object, error: type[RequestError]) -> None:
    handle = store.add("a", VALUE).handle
    assert callable(spoil)
    with pytest.raises(error):
        store.get("a", spoil(handle))


def test_a_handle_of_another_run(store: TensorStore) -> None:
    other = TensorStore(HandleMint(), quota=100, ttl=60.0)
    handle = other.add("a", VALUE).handle
    with pytest.raises(Gone, match=f"epoch {store.mint.epoch}, got {handle}"):
        store.get("a", handle)


def test_handles_do_not_repeat(store: TensorStore) -> None:
    handles = [store.mint.issue("a") for _ in range(1000)]
    assert len({handle[9:41] for handle in handles}) == 1000
    assert all(handle.isascii() and len(handle) == 54 for handle in handles)
