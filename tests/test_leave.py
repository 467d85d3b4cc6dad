"""What a server says of itself when it serves: whether a second one would fit beside it."""

from __future__ import annotations

import socket

import pytest

from lqs import leave
from lqs.engine.plan import Machine

STATUS = "Name:\tlqs\nVmRSS:\t  900 kB\nRssAnon:\t  400 kB\nRssFile:\t  500 kB\nRssShmem:\t  100 kB\n"


def test_only_what_is_its_own_counts() -> None:
    """Weights are mapped from their file: two servers have them once."""
    assert leave.own_bytes(STATUS) == 500 * 1024
    assert leave.own_bytes("Name:\tlqs\n") == 0


@pytest.mark.parametrize(
    ("devices", "free_bytes", "more_bytes", "fits"),
    [
        (["cpu:0", "cpu:1@m"], 10**15, 0, True),
        (["cpu:0"], 0, 0, False),
        (["cpu:0", "cuda:0"], 10**15, 0, False),
        (["cpu:0@cuda"], 10**15, 0, True),
        # A model on demand would not come to it any more.
        (["cpu:0"], 10**15, 10**15, False),
    ],
)
def test_a_second_one_fits_on_cpus_where_there_is_memory(
    devices: list[str], free_bytes: int, more_bytes: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leave, "probe_machine", lambda: Machine(1, free_bytes))
    assert leave.fits_twice(devices, more_bytes) is fits


def test_who_started_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leave, "probe_machine", lambda: Machine(1, 0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notes:
        notes.bind("\0lqs-test-announce")
        leave.announce({"NOTIFY_SOCKET": "@lqs-test-announce"}, ["cpu:0"], 0)
        assert notes.recv(100) == b"READY=1\nX_LQS_OVERLAP=0"
