"""Settings: where they come from, and what is said of those that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from matmuld import __version__
from matmuld.cli import Matmuld, main
from matmuld.cli.serve import Serve, described
from matmuld.settings import Settings
from pydantic import SecretStr
from pydantic_settings import CliApp


@pytest.fixture(autouse=True)
def _no_settings_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"MATMULD_{name.upper()}", raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "matmuld.toml"
    lines = ("plans = 3", "ttl_s = 3.0", 'log_level = "error"', 'listen = ["unix:/a", "unix:/b"]')
    path.write_text("\n".join(lines))
    return path


def parsed(*arguments: str) -> Serve:
    command = CliApp.run(Matmuld, cli_args=["serve", *arguments]).serve
    assert isinstance(command, Serve)
    return command


def test_flags_go_before_the_environment_and_that_before_the_file(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MATMULD_PLANS", "2")
    monkeypatch.setenv("MATMULD_TTL_S", "2")
    settings = parsed("--config", str(config), "--plans", "1")
    assert (settings.plans, settings.ttl_s, settings.log_level) == (1, 2.0, "error")
    assert settings.body_limit == Settings().body_limit


def test_the_file_can_be_named_by_the_environment_and_a_flag_goes_before_that(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MATMULD_CONFIG", str(config))
    assert parsed().plans == 3
    other = config.with_name("other.toml")
    other.write_text("plans = 4")
    assert parsed("--config", str(other)).plans == 4


def test_addresses_may_be_many_from_everywhere(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parsed("--listen", "unix:/c", "--listen", "http://[::1]:1/").listen == [
        "unix:/c",
        "http://[::1]:1",
    ]
    assert parsed("--config", str(config)).listen == ["unix:/a", "unix:/b"]
    monkeypatch.setenv("MATMULD_LISTEN", "unix:/d, http://localhost:0")
    assert parsed().listen == ["unix:/d", "http://localhost:0"]


def test_strategies_may_be_many_from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed("--strategies", "split", "--strategies", "gemv").strategies == ["split", "gemv"]
    monkeypatch.setenv("MATMULD_STRATEGIES", "masked+sum, bgrad")
    assert parsed().strategies == ["masked+sum", "bgrad"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--autotune", "often"], "autotune: input should be 'off', 'lazy' or 'eager', got"),
        (["--autotune-s", "0"], "autotune_s: input should be greater than 0, got '0'"),
        (["--plans", "0"], "plans: input should be greater than or equal to 1, got '0'"),
        (["--device", "gpu"], "device: expected auto, cpu or cuda:N, got 'gpu'"),
        (["--listen", "localhost:80"], "expected unix:PATH or http://HOST:PORT"),
        (["--listen", "http://localhost"], "expected unix:PATH or http://HOST:PORT"),
        (["--listen", "http://localhost:70000"], "Port out of range"),
        (["--listen", "http://localhost:80/v1"], "expected unix:PATH or http://HOST:PORT"),
        (["--listen", "unix:"], "expected unix:PATH or http://HOST:PORT"),
        (["--listen", "unix:/" + "x" * 107], "at most 107 bytes"),
        (["--log-level", "loud"], "log_level: input should be 'debug', 'info'"),
        (["--config", "/nowhere.toml"], "config: no such file: /nowhere.toml"),
        (["--memory-limit", "1"], "memory_limit: input should be greater than or equal to 1048576"),
        (["--janitor-s", "inf"], "janitor_s: input should be a finite number, got 'inf'"),
        (["--ttl-s", "nan"], "ttl_s: input should be a finite number, got 'nan'"),
        (["--colour", "blue"], "unrecognized arguments: --colour"),
        (["--plans", "0", "--ttl-s", "0"], "; ttl_s: input should be greater than 0"),
    ],
)
def test_a_wrong_flag_is_one_line_and_status_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("matmuld: ")
    assert complaint in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("plans = 'many'", "plans: input should be a valid integer"),
        ("plants = 3", "plants: there is no such setting"),
        ("plans = = 3", "config: cannot read"),
    ],
)
def test_a_wrong_file_is_one_line_and_status_2(
    content: str, complaint: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(content)
    assert main(["serve", "--config", str(config)]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_a_wrong_environment_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MATMULD_PLANS", "-1")
    assert main(["serve"]) == 2
    assert capsys.readouterr().err.startswith("matmuld: plans: input should be greater")


def test_the_environment_names_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERSION", "1")
    monkeypatch.setenv("DEMO", "{}")
    assert isinstance(CliApp.run(Matmuld, cli_args=["serve"]).serve, Serve)


def test_secrets_are_not_shown() -> None:
    class Guarded(Settings):
        token: SecretStr = SecretStr("hush")

    shown = described(Guarded(plans=5))
    assert "plans = 5" in shown
    assert "hush" not in shown


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"matmuld {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in ("serve", "plans", "demo", "verify", "bench"))
