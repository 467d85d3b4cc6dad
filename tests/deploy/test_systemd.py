"""The unit files: systemd takes them, and what they say fits what lqs does."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from lqs.cli import main
from lqs.config import Config
from lqs.sockets import take_socket

DEPLOY = Path(__file__).parents[2] / "deploy"


def unit(name: str) -> configparser.ConfigParser:
    """A unit file; the keys of systemd are not folded to lower case."""
    read = configparser.ConfigParser(strict=False, interpolation=None)
    read.optionxform = str  # type: ignore[assignment,method-assign]
    read.read_string((DEPLOY / name).read_text())
    return read


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here to check with")
def test_systemd_finds_nothing_wrong_with_them(tmp_path: Path) -> None:
    for name in ("lqs.socket", "lqs.service"):
        # Where lqs is installed is for the reader to say.
        text = (DEPLOY / name).read_text().replace("/usr/local/bin/lqs", shutil.which("true") or "/bin/true")
        (tmp_path / name).write_text(text)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_service_runs_a_command_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    program, command, *flags = shlex.split(unit("lqs.service")["Service"]["ExecStart"])
    assert (Path(program).name, command) == ("lqs", "serve")
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in flags if flag.startswith("--"))


def test_there_is_time_to_drain_before_it_is_killed() -> None:
    service, server = unit("lqs.service")["Service"], Config().server
    assert float(service["TimeoutStopSec"]) > server.drain_s + server.close_s
    # Only the parent gets SIGTERM; a server that got it twice would end at once.
    assert service["KillMode"] == "mixed"
    assert service["Type"] == "notify"


def test_the_socket_is_one_that_lqs_takes() -> None:
    listen = [line for line in (DEPLOY / "lqs.socket").read_text().splitlines() if line.startswith("Listen")]
    assert len(listen) == 1
    address, _, port = unit("lqs.socket")["Socket"]["ListenStream"].rpartition(":")
    assert (address, int(port)) == (Config().server.host, Config().server.port)
    assert int(unit("lqs.socket")["Socket"]["Backlog"]) == Config().server.backlog
    # Not for this process: nothing is passed here.
    assert take_socket({"LISTEN_PID": "0", "LISTEN_FDS": str(len(listen))}) is None
