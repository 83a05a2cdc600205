"""The plan store: damaged and foreign files do no harm, nor does a disk that fails."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matmuld.entries import ENTRY_BYTES, entry_of
from matmuld.store import PlanFolder, PlanStore, StoreStats

from ..choices import ALGORITHM, DEVICE, STRATEGY, files, kept

again = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    return PlanStore(tmp_path / "plans", DEVICE)


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
    process = multiprocessing.get_context("spawn").Process(target=use_a_folder_that_is_read_only)
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


def test_what_is_no_file_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = PlanStore(tmp_path, DEVICE)
    store.put("strategy", "key", STRATEGY)
    (path,) = tmp_path.glob("*/*.plan")
    path.unlink()
    os.mkfifo(path)
    assert PlanStore(tmp_path, DEVICE).get("strategy", "key") is None
    assert "it is no regular file" in caplog.text
