"""What the bench of restarts makes of the answers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench.load.reply import Reply
from bench.restart import Restarts, Result, rows_of

GPU_SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.sh"


def reply(start_s: float, first_s: float, status: int = 200) -> Reply:
    return Reply(start_s, first_s + 1, status=status, token_times_s=[first_s] if status == 200 else [])


@pytest.mark.parametrize(
    ("start_s", "first_s", "is_touched"),
    [(0, 9.9, False), (0, 10, True), (11, 12, True), (20, 21, True), (20.1, 21, False), (5, 30, True)],
)
def test_a_restart_touches_who_waits_while_it_goes_on(start_s: float, first_s: float, is_touched: bool) -> None:
    assert Restarts([(10.0, 20.0)]).touches(reply(start_s, first_s)) is is_touched


def test_the_longest_wait_and_every_failure_are_told() -> None:
    replies = [reply(0, 1), reply(11, 14), reply(12, 13), reply(12, 13, status=503)]
    failed, longest, middle, spans = rows_of(Result(4.0, replies, Restarts([(10.0, 20.0)]), "hold"))
    assert (failed.value, failed.passed) == (1, False)
    assert "the first: 503" in failed.note
    assert (longest.value, longest.peer_value, middle.value) == (3, 1, 1)
    assert spans.values == (10.0,)
    assert rows_of(Result(4.0, replies[:3], Restarts([(10.0, 20.0)]), "hold"))[0].passed is True


@pytest.mark.parametrize(("flags", "code"), [(("--help",), 0), ((), 2), (("--nope",), 2)])
def test_the_gpu_script_says_how_it_is_used(flags: tuple[str, ...], code: int) -> None:
    done = subprocess.run([GPU_SCRIPT, *flags], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == code
    assert "--make-build DIR" in done.stdout + done.stderr
