"""The plan store: what was put is found again, by device and key, within bounds."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matmuld.entries import ENTRY_BYTES, Kind, device_id, entry_of, from_line, to_line
from matmuld.store import InMemoryChoices, PlanFolder, PlanStore, StoreStats

from ..choices import ALGORITHM, DEVICE, RECORDS, STRATEGY, files

TIMES = st.floats(0, allow_nan=False, allow_infinity=False)
ALGORITHMS = st.fixed_dictionaries(
    {
        "algorithm": st.binary(min_size=64, max_size=64),
        "workspace_bytes": st.integers(0, (1 << 63) - 1),
        "median_us": st.none() | TIMES,
    }
)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=100)
STRATEGIES = st.fixed_dictionaries(
    {
        "way": WORDS,
        "median_us": TIMES,
        "candidates": st.dictionaries(WORDS, TIMES, max_size=4),
        "measured_at": TIMES,
    }
)
ANY_RECORD = st.tuples(st.just("algorithm"), ALGORITHMS) | st.tuples(
    st.just("strategy"), STRATEGIES
)
SPAWN = multiprocessing.get_context("spawn")
again = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    return PlanStore(tmp_path / "plans", DEVICE)


@again
@given(WORDS, ANY_RECORD)
def test_what_was_put_is_found_again(
    tmp_path: Path, key: str, kept: tuple[Kind, dict[str, Any]]
) -> None:
    kind, record = kept
    PlanStore(tmp_path, DEVICE).put(kind, key, record)
    assert PlanStore(tmp_path, DEVICE).get(kind, key) == record


@given(WORDS, ANY_RECORD)
def test_a_line_is_its_entry_again(key: str, kept: tuple[Kind, dict[str, Any]]) -> None:
    entry = entry_of(DEVICE, kept[0], key, kept[1])
    line = to_line(entry)
    assert from_line(line) == entry
    assert "\n" not in line
    assert json.loads(line)["device"] == DEVICE


def test_kinds_keys_and_devices_are_told_apart(store: PlanStore, tmp_path: Path) -> None:
    store.put("strategy", "key", STRATEGY)
    assert store.get("strategy", "key") == STRATEGY
    assert store.get("algorithm", "key") is None
    assert store.get("strategy", "Key") is None
    for name, other in (("cublaslt", 130200), ("matmuld", "0.2.0"), ("gpu", "NVIDIA H100")):
        assert PlanStore(tmp_path / "plans", DEVICE | {name: other}).get("strategy", "key") is None
    assert store.stats == StoreStats(hits=1, misses=2, written=1)


def test_a_record_replaces_the_one_before(store: PlanStore, tmp_path: Path) -> None:
    store.put("strategy", "key", STRATEGY)
    store.put("strategy", "key", STRATEGY | {"way": "split"})
    assert (store.get("strategy", "key") or {})["way"] == "split"
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_of_another_kind_is_a_mistake(store: PlanStore, kind: Kind) -> None:
    for record in (*(RECORDS[other] for other in RECORDS if other != kind), {}):
        with pytest.raises(ValueError, match="record"):
            store.put(kind, "key", record)
    with pytest.raises(ValueError, match="median_us"):
        store.put(kind, "key", RECORDS[kind] | {"median_us": float("nan")})


def test_what_no_file_has_room_for_is_a_mistake(store: PlanStore) -> None:
    with pytest.raises(ValueError, match=f"expected at most {ENTRY_BYTES} bytes"):
        store.put("strategy", "k" * ENTRY_BYTES, STRATEGY)


def test_the_device_can_be_read_and_others_cannot_look(store: PlanStore, tmp_path: Path) -> None:
    store.put("strategy", "key", STRATEGY)
    (path,) = files(tmp_path)
    assert json.loads(path.with_name("device.json").read_text()) == DEVICE
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.name == device_id(DEVICE)


def test_a_store_is_iterated_over_and_cleared_by_device(tmp_path: Path) -> None:
    mine, yours = PlanStore(tmp_path, DEVICE), PlanStore(tmp_path, DEVICE | {"gpu": "other"})
    for store in (mine, yours):
        for key in ("a", "b"):
            store.put("strategy", key, STRATEGY)
    assert sorted(entry.key for entry in mine) == ["a", "b"]
    assert len(list(PlanFolder(tmp_path))) == 4
    assert mine.clear() == 2
    assert (list(mine), len(list(yours))) == ([], 2)
    assert PlanFolder(tmp_path).clear() == 2
    assert files(tmp_path) == []


def test_a_dropped_record_is_gone_and_counted(
    store: PlanStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("algorithm", "key", ALGORITHM)
    store.drop("algorithm", "key", "it gives other numbers")
    assert store.get("algorithm", "key") is None
    assert store.stats.dropped == 1
    assert "is dropped: it gives other numbers" in caplog.text
    store.drop("algorithm", "key", "again")


def test_without_a_store_choices_are_remembered_by_the_process() -> None:
    choices = InMemoryChoices()
    choices.put("strategy", "key", STRATEGY)
    assert choices.get("strategy", "key") == STRATEGY
    assert choices.get("algorithm", "key") is None
    choices.drop("strategy", "key", "because")
    assert choices.get("strategy", "key") is None
    choices.drop("strategy", "key", "again")
    assert choices.stats == StoreStats()


# Bounds


@pytest.mark.parametrize("limit", [1, 3, 40])
def test_the_least_recently_used_go_first(tmp_path: Path, limit: int) -> None:
    store = PlanStore(tmp_path, DEVICE, limit)
    for number in range(2 * limit + 3):
        store.put("strategy", f"key {number}", STRATEGY)
        assert len(files(tmp_path)) <= limit
        for path in files(tmp_path):  # an hour goes by
            stat = path.stat()
            os.utime(path, (stat.st_atime - 3600, stat.st_mtime - 3600))
        if limit > 1:
            assert store.get("strategy", "key 0") == STRATEGY
    assert store.get("strategy", f"key {number}") == STRATEGY


def test_the_bound_is_for_all_devices_together(tmp_path: Path) -> None:
    for version in range(5):
        store = PlanStore(tmp_path, DEVICE | {"matmuld": str(version)}, limit=3)
        store.put("strategy", "key", STRATEGY)
        assert store.get("strategy", "key") == STRATEGY
    assert len(files(tmp_path)) == 3


def test_what_a_killed_process_left_is_removed_later(store: PlanStore, tmp_path: Path) -> None:
    store.put("strategy", "key", STRATEGY)
    folder = files(tmp_path)[0].parent
    old, new = folder / ".old.tmp", folder / ".new.tmp"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    PlanStore(tmp_path / "plans", DEVICE).put("strategy", "other", STRATEGY)
    assert (old.exists(), new.exists()) == (False, True)


# Several processes


def write(folder: Path, name: str, count: int) -> None:
    store = PlanStore(folder, DEVICE, limit=64)
    for number in range(count):
        store.put("strategy", f"key {number % 40}", STRATEGY | {"way": name})


def clear(folder: Path, count: int) -> None:
    for _ in range(count):
        PlanFolder(folder).clear()


def read(folder: Path, count: int) -> None:
    """Fails on a record that nobody wrote; what is logged would be a file not seen whole."""
    logging.getLogger("matmuld").addHandler(Refusing())
    store = PlanStore(folder, DEVICE)
    for number in range(count):
        record = store.get("strategy", f"key {number % 40}")
        assert record is None or record["way"] in ("one", "two")
    assert all(entry.key.startswith("key ") for entry in store)


class Refusing(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(record.getMessage())


def test_processes_write_read_and_clear_at_once(tmp_path: Path) -> None:
    jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (write, (tmp_path, "one", 300)),
        (write, (tmp_path, "two", 300)),
        (read, (tmp_path, 2000)),
        (clear, (tmp_path, 100)),
    ]
    processes = [SPAWN.Process(target=job, args=arguments) for job, arguments in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert list(tmp_path.rglob(".*.tmp")) == []
    assert len(list(PlanFolder(tmp_path))) == len(files(tmp_path))
