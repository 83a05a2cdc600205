"""The load suite, short; and that it fails if something is wrong.

Nothing here imports locust, which would replace the sockets of all other tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.load.__main__ import Footprint, load, run_locust
from tests.load.expected import Dense, check_stack
from tests.load.shared import Shared, contents
from tests.reference import Host, random

SIZE = 48


@pytest.mark.timeout(300)
def test_every_answer_is_right_and_nothing_is_left_behind(device: str) -> None:
    assert load(device, users=12, seconds=12) == []


def test_a_run_fails_if_nobody_answers() -> None:
    assert run_locust(["unix:/nowhere/socket"], users=6, seconds=1) == 1


EMPTY = Footprint(
    tensors=0, tensor_bytes=0, leased=0, plans=0, plan_bytes=0, used_bytes=512, rss=1 << 20
)


@pytest.mark.parametrize(
    "name", ["tensors", "tensor_bytes", "leased", "plans", "plan_bytes", "used_bytes"]
)
def test_what_is_left_behind_is_named(name: str) -> None:
    before = getattr(EMPTY, name)
    left = replace(EMPTY, **{name: before + 1})
    assert left.leaks(EMPTY) == [f"{name}: {before + 1}, before the load {before}"]
    assert EMPTY.leaks(left) == []


def test_one_wrong_element_is_found() -> None:
    rng = np.random.default_rng(0)
    layer = Dense.random(rng, 40, 30, "float32", "none")
    x = random(rng, (3, 40), "float32")
    y = x @ layer.weight.T + layer.bias
    check_stack([layer], x, y)
    y[1, 7] += 1e-4
    with pytest.raises(AssertionError, match="of what float32 allows"):
        check_stack([layer], x, y)


@pytest.fixture
def check() -> Callable[[Host, int], None]:
    """Of contents that were seen, at a moment when versions 3 to 5 may be there."""
    shared = Shared(SIZE, begun=5)
    return lambda got, since: shared.check(got, since, lambda whole: whole)


def test_a_whole_version_of_its_time_is_right(check: Callable[[Host, int], None]) -> None:
    for version in (3, 4, 5):
        check(contents(SIZE, version), 3)


def test_a_version_that_was_replaced_before_is_wrong(check: Callable[[Host, int], None]) -> None:
    with pytest.raises(AssertionError, match="expected version 3 to 5, got 2"):
        check(contents(SIZE, 2), 3)


def test_a_mixture_of_versions_is_wrong(check: Callable[[Host, int], None]) -> None:
    mixture = contents(SIZE, 4)
    mixture[-1] = contents(SIZE, 5)[-1]
    with pytest.raises(AssertionError, match="expected a whole version, 3 to 5, got a mixture"):
        check(mixture, 3)
