"""`matmuld plans`: what is kept goes out to a file and comes back the same."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from matmuld.cli import main
from matmuld.engine.epilogs import Epilog
from matmuld.engine.signature import Layout, Options, Signature
from matmuld.store import PlanFolder, PlanStore

H200 = {"gpu": "NVIDIA H200", "cublaslt": 130100, "matmuld": "0.1.0"}
CPU = {"cpu": "AMD EPYC [2]", "cores": 2, "matmuld": "0.1.0"}
LAYOUT = Layout("float16", (64, 32), (32, 1), 256)
KEY = Signature(LAYOUT, LAYOUT, None, LAYOUT, Epilog.BIAS, None, None, Options("COMPUTE_32F")).text
ALGORITHM = {"algorithm": b"\xff" * 64, "workspace_bytes": 0, "median_us": 12.34}
STRATEGY = {"way": "split [b]", "median_us": 7.0, "candidates": {"fused": 9.0}, "measured_at": 0.0}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with three choices for two devices, which the environment names."""
    folder = tmp_path / "plans"
    PlanStore(folder, H200).put("algorithm", KEY, ALGORITHM)
    PlanStore(folder, H200).put("strategy", "a step", STRATEGY)
    PlanStore(folder, CPU).put("strategy", "a step", STRATEGY)
    monkeypatch.setenv("MATMULD_PLAN_STORE", str(folder))
    monkeypatch.setenv("COLUMNS", "160")
    return folder


@pytest.fixture
def device(folder: Path) -> str:
    """The id of the GPU."""
    return next(entry.device_id for entry in PlanFolder(folder) if "gpu" in entry.device)


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """What `matmuld plans` prints, on whichever of the two outputs."""
    assert main(["plans", *arguments]) == status
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out + err


@pytest.fixture
def export(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """All of it in a file."""
    path = tmp_path / "export"
    assert said(capsys, "export", str(path)) == "exported: 3\n"
    return path


def test_the_list_shows_devices_signatures_and_choices(
    folder: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = said(capsys, "list")
    for part in (
        device,
        "gpu NVIDIA H200, cublaslt 130100",
        "AMD EPYC [2]",
        "BIAS COMPUTE_32F",
        "a float16[64,32] strides [32,1] align 256",
        "a step",
        "split [b]",
        "12.3",
        "3 choices in ",
    ):
        assert part in shown
    assert "AMD EPYC" not in said(capsys, "list", "--device", device)


def test_what_is_exported_and_cleared_is_imported_again(
    folder: Path, export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, listed = list(PlanFolder(folder)), said(capsys, "list")
    assert said(capsys, "clear", "--all") == "removed: 3\n"
    assert said(capsys, "list").startswith("0 choices in ")
    assert said(capsys, "import", str(export)) == "imported: 3, not taken: 0\n"
    assert list(PlanFolder(folder)) == before
    assert said(capsys, "list") == listed


def test_one_device_is_exported_and_cleared(
    folder: Path, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(capsys, "export", "-", "--device", device).splitlines()
    assert [json.loads(line)["device"] for line in lines] == [H200, H200]
    assert said(capsys, "clear", "--device", device) == "removed: 2\n"
    assert [entry.device for entry in PlanFolder(folder)] == [CPU]


def test_an_export_can_come_through_a_pipe(
    folder: Path, export: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(export.read_text()))
    assert said(capsys, "import", "-") == "imported: 3, not taken: 0\n"


def changed(line: str, **values: Any) -> str:
    return json.dumps(json.loads(line) | values)


def test_every_line_is_checked_and_the_sound_ones_are_taken(
    folder: Path, export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = export.read_text().splitlines()
    algorithm = next(line for line in lines if '"kind":"algorithm"' in line)
    record = json.loads(algorithm)["record"]
    wrong = {
        "": "invalid JSON",
        "{": "invalid JSON",
        "[]": "input should be an object",
        changed(algorithm, format=2): "format: input should be 1",
        changed(algorithm, key="x"): "key: expected the text of a signature, got 'x'",
        changed(algorithm, kind="recipe"): "input tag 'recipe'",
        changed(algorithm, record=record | {"algorithm": "AAAA"}): "record.algorithm: data should",
        changed(algorithm, record=record | {"algorithm": "?"}): "record.algorithm: data should",
        changed(algorithm, record={}): "record.algorithm: field required",
        changed(algorithm, device={"gpu": None}): "device.gpu",
        changed(algorithm, more=1): "more: extra inputs are not permitted",
        changed(algorithm, device={"gpu": "x" * 70000}): "expected at most 65536 bytes",
        changed(algorithm, device={"n": 1 << 70}): "device.n",
        '{"format": 1, "key": "\\ud800"}': "invalid JSON",
    }
    export.write_text("\n".join([*wrong, *lines]))
    PlanFolder(folder).clear()
    told = said(capsys, "import", str(export), status=1).splitlines()
    assert told[-1] == f"imported: 3, not taken: {len(wrong)}"
    assert len(told) == len(wrong) + 1
    for number, (line, reason) in enumerate(zip(told, wrong.values(), strict=False), 1):
        assert line.startswith(f"line {number} was not taken: ")
        assert reason in line
    assert len(list(PlanFolder(folder))) == 3


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        ([], 2, "plans: expected list, export, import or clear"),
        (["clear"], 1, "clear: expected either --device ID or --all"),
        (["clear", "--all", "--device", "x"], 1, "clear: expected either --device ID or --all"),
        (["clear", "--device", "x"], 1, "device: expected one of those kept, "),
        (["list", "--device", "x"], 1, "; got 'x'"),
        (["list", "--plan-store", "off"], 1, "plan_store: expected a folder, got off"),
        (["list", "--plan-store", ""], 2, "plan_store: expected a folder or off, got ''"),
        (["export", "/nowhere/x"], 1, "cannot write to /nowhere/x"),
        (["import", "/nowhere/x"], 1, "file: cannot read /nowhere/x: No such file"),
        (["import", "/dev/null", "--plan-store", "/dev/null/x"], 0, "imported: 0"),
        (["export"], 2, "required"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path,
    arguments: list[str],
    status: int,
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = said(capsys, *arguments, status=status)
    assert complaint in told
    assert told.count("\n") == 1


def test_a_store_that_cannot_be_written_is_named(
    export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = said(capsys, "import", str(export), "--plan-store", "/dev/null/x", status=1)
    assert told == "matmuld: plan_store: /dev/null/x: Not a directory\n"


def test_binary_is_no_export(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "cannot read" in said(capsys, "import", str(tmp_path / "binary"), status=1)


def test_the_store_may_be_named_by_a_file_of_settings(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MATMULD_PLAN_STORE")
    config = tmp_path / "matmuld.toml"
    config.write_text(f'plan_store = "{folder}"\nttl_s = 3.0\n')
    assert "3 choices in " in said(capsys, "list", "--config", str(config))
