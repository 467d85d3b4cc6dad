"""The command line finds commands, and turns every end into an exit code."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lqs import cli
from lqs.errors import ConfigError, ModelFileError


def test_without_a_command_it_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    text = capsys.readouterr().err
    assert all(about in text for about in cli.COMMANDS.values())


def test_it_tells_its_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"lqs": "1.2.3"}.__getitem__)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "lqs 1.2.3\n"


def test_sources_without_a_version_say_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert cli.main(["--version"]) == 0
    assert "not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code"), [(["--help"], 0), ([], 2), (["bogus"], 2), (["keys", "--help"], 0), (["keys"], 2)]
)
def test_help_is_no_error_and_wrong_use_is_2(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == code
    assert "lqs" in "".join(capsys.readouterr())


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text and about in text for name, about in cli.COMMANDS.items())


def test_help_imports_no_command() -> None:
    code = "import sys; from lqs.cli import main; main(['--help']); sys.exit('msgspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_the_module_can_be_run() -> None:
    done = subprocess.run([sys.executable, "-m", "lqs", "bogus"], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "invalid choice" in done.stderr


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (None, 0, ""),
        (ModelFileError("no model"), 1, "lqs: no model"),
        (ConfigError("no key"), 2, "lqs: no key"),
        (KeyboardInterrupt(), 1, ""),
    ],
)
def test_a_commands_end_is_the_exit_code(
    failure: BaseException | None,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(args: Any) -> int:
        if failure is not None:
            raise failure
        return 0

    command = SimpleNamespace(add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: command)
    assert cli.main(["serve"]) == code
    assert said in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_crash() -> None:
    code = (
        "import sys, types, lqs.cli as cli\n"
        "def run(args):\n"
        "    while True:\n"
        "        print('x' * 65536, flush=True)\n"
        "command = types.SimpleNamespace(add_arguments=lambda parser: None, run=run)\n"
        "cli.importlib.import_module = lambda name: command\n"
        "sys.exit(cli.main(['serve']))\n"
    )
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stderr is not None
    started.stdout.close()
    with started.stderr as said:
        assert said.read() == ""
    assert started.wait(30) == 1
