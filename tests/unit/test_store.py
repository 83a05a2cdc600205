"""The plan store: what was put is found again, and whatever else lies there does no harm."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matmuld.entries import ENTRY_BYTES, Kind, device_id, entry_of, from_line, to_line
from matmuld.store import NoChoices, PlanFolder, PlanStore, StoreStats

DEVICE = {"gpu": "NVIDIA H200", "multiprocessors": 132, "cublaslt": 130100, "matmuld": "0.1.0"}
ALGORITHM = {"algorithm": bytes(range(64)), "workspace_bytes": 1 << 20, "median_us": 12.5}
STRATEGY = {
    "way": "fused",
    "median_us": 40.0,
    "candidates": {"fused": 40.0, "split": 55.5},
    "measured_at": 1_700_000_000.0,
}
RECORDS: dict[Kind, dict[str, Any]] = {"algorithm": ALGORITHM, "strategy": STRATEGY}

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


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.plan"))


def kept(folder: Path) -> Path:
    """The file of the one choice that is there."""
    PlanStore(folder, DEVICE).put("strategy", "key", STRATEGY)
    (path,) = files(folder)
    return path


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


def test_without_a_store_nothing_is_remembered() -> None:
    choices = NoChoices()
    choices.put("strategy", "key", STRATEGY)
    choices.drop("strategy", "key", "because")
    assert choices.get("strategy", "key") is None
    assert choices.stats == StoreStats()


# Damage


def framed(body: bytes) -> bytes:
    """A file with this body."""
    return b"matmuld plan\n" + sha256(body).digest() + body


def packed(**changed: Any) -> bytes:
    """The file of the entry that `kept` has, with other values."""
    entry = entry_of(DEVICE, "strategy", "key", STRATEGY).model_dump() | changed
    return framed(msgpack.packb(entry))


def ignored(path: Path, data: bytes, caplog: pytest.LogCaptureFixture) -> str:
    """What is said of a file with such contents, which must be ignored and can be replaced."""
    caplog.clear()
    path.write_bytes(data)
    store = PlanStore(path.parents[1], DEVICE)
    assert store.get("strategy", "key") is None
    assert store.get("strategy", "key") is None
    (record,) = caplog.records
    said = record.getMessage()
    assert record.levelno == logging.WARNING
    assert said.startswith(f"plan store: {path} is ignored: ")
    assert list(store) == []
    store.put("strategy", "key", STRATEGY)
    assert store.get("strategy", "key") == STRATEGY
    return said


@again
@given(st.data())
def test_a_changed_byte_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    path = kept(tmp_path)
    sound = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(sound) - 1))
    sound[at] ^= data.draw(st.integers(1, 255))
    ignored(path, bytes(sound), caplog)


@again
@given(st.data())
def test_a_file_cut_off_or_continued_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    path = kept(tmp_path)
    sound = path.read_bytes()
    cut = sound[: data.draw(st.integers(0, len(sound) - 1))]
    longer = sound + data.draw(st.binary(min_size=1, max_size=9))
    ignored(path, data.draw(st.sampled_from([cut, longer])), caplog)


@again
@given(st.binary(max_size=200))
def test_any_body_with_a_right_checksum_is_judged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    path = kept(tmp_path)
    ignored(path, framed(body), caplog)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"format": 2, "record": {"new": 1}}, "format: input should be 1"),
        ({"format": None}, "format: input should be 1"),
        ({"device": DEVICE | {"cublaslt": 1}}, "it is the entry of "),
        ({"key": "other"}, "it is the entry of "),
        ({"kind": "algorithm", "record": ALGORITHM}, "it is the entry of "),
        ({"kind": "recipe"}, "input tag 'recipe'"),
        ({"record": ALGORITHM}, "record.way: field required"),
        ({"record": STRATEGY | {"median_us": float("inf")}}, "record.median_us: input should be"),
        ({"record": STRATEGY | {"extra": 1}}, "record.extra: extra inputs are not permitted"),
        ({"device": {"gpu": 1.5}}, "device.gpu"),
        ({"key": ""}, "key: string should have at least 1 character"),
    ],
)
def test_what_is_foreign_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], reason: str
) -> None:
    assert reason in ignored(kept(tmp_path), packed(**changed), caplog)


def test_a_file_that_is_too_large_is_not_read_to_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = kept(tmp_path)
    ignored(path, path.read_bytes() + bytes(2 * ENTRY_BYTES), caplog)


def test_what_else_lies_there_is_left_alone(store: PlanStore, tmp_path: Path) -> None:
    store.put("strategy", "key", STRATEGY)
    root = tmp_path / "plans"
    foreign = [root / "README", root / "other" / "x.plan", files(root)[0].with_name("notes.plan")]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    assert [entry.key for entry in PlanFolder(root)] == ["key"]
    assert PlanFolder(root).clear() == 1
    assert all(path.read_text() == "mine" for path in foreign)


# The disk


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    """A store's folder that cannot be made, also by root, because a file is in its way."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "plans"


def test_a_disk_that_fails_is_said_once(failing: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = PlanStore(failing, DEVICE)
    for key in ("a", "b"):
        store.put("strategy", key, STRATEGY)
        assert store.get("strategy", key) is None
        store.drop("strategy", key, "because")
    said = [text for text in caplog.messages if "is dropped" not in text]
    assert [text.split(str(failing.parents[1]))[0] for text in said] == [
        "plan store: cannot write ",
        "plan store: cannot read ",
    ]
    assert store.stats == StoreStats(misses=2, dropped=2)


def use_a_folder_that_is_read_only() -> None:
    """As somebody whom permissions concern."""
    if os.geteuid() == 0:
        os.setuid(65534)
    with TemporaryDirectory() as folder:
        store = PlanStore(Path(folder), DEVICE)
        store.put("strategy", "key", STRATEGY)
        (path,) = files(Path(folder))
        path.parent.chmod(0o500)
        store.put("strategy", "other", STRATEGY)
        store.drop("strategy", "key", "because")
        assert store.get("strategy", "key") == STRATEGY
        assert store.stats == StoreStats(hits=1, written=1, dropped=1)
        path.parent.chmod(0o000)
        assert store.get("strategy", "key") is None
        path.parent.chmod(0o700)


def test_a_folder_that_is_read_only_is_read() -> None:
    process = SPAWN.Process(target=use_a_folder_that_is_read_only)
    process.start()
    process.join()
    assert process.exitcode == 0


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may be longer than 64 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_fails_leaves_the_old_record_and_no_other_file(
    store: PlanStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("strategy", "key", STRATEGY)
    before = sorted(tmp_path.rglob("*"))
    with full_disk():
        store.put("strategy", "key", STRATEGY | {"way": "split"})
    assert "cannot write" in caplog.text
    assert store.get("strategy", "key") == STRATEGY
    assert sorted(tmp_path.rglob("*")) == before


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
