"""The process around the server: signals, threads to leave behind, open files, the command."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

from lqs import process, serve
from lqs.cli import main
from lqs.engine.drill import Break
from lqs.errors import DeviceError
from lqs.settings import load
from tests.server.test_life import eventually


def test_an_error_in_a_thread_comes_out_where_it_is_awaited() -> None:
    def fail() -> None:
        raise DeviceError("no")

    with pytest.raises(DeviceError):
        asyncio.run(serve.in_thread(fail, "t"))


def test_a_result_that_nobody_waits_for_any_more_is_dropped(recwarn: pytest.WarningsRecorder) -> None:
    """B52: who waited was cancelled; the thread ends without an error."""
    go_on, threads = threading.Event(), []

    def slow() -> None:
        threads.append(threading.current_thread())
        go_on.wait(10)

    async def give_up() -> None:
        waiting = asyncio.ensure_future(process.in_thread(slow, "t"))
        await eventually(lambda: bool(threads))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    go_on.set()
    threads[0].join(10)
    assert not recwarn.list


class Play:
    """A server that gets signals while it runs."""

    def __init__(self, *signals: int) -> None:
        self.signals, self.hung, self.calls = signals, [], []

    def stop(self) -> None:
        self.calls.append("stop")

    def hand_over(self) -> None:
        self.calls.append("hand over")

    def reload(self) -> None:
        self.calls.append("reload")

    async def run(self) -> int:
        for number in self.signals:
            seen = len(self.calls)
            os.kill(os.getpid(), number)
            await eventually(lambda seen=seen: len(self.calls) > seen)
        return 0


@pytest.mark.parametrize(
    ("signals", "calls"),
    [
        ((signal.SIGHUP, signal.SIGTERM), ["reload", "stop"]),
        ((signal.SIGINT,), ["stop"]),
        ((signal.SIGUSR1, signal.SIGTERM), ["hand over", "stop"]),
        ((signal.SIGTERM, signal.SIGTERM), ["stop", "leave 1", "stop"]),
    ],
)
def test_the_first_signal_drains_and_the_second_leaves(
    signals: tuple[int, ...], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Play(*signals)
    monkeypatch.setattr(serve, "build", lambda *_, **__: play)
    monkeypatch.setattr(process, "leave", lambda code: play.calls.append(f"leave {code}"))
    assert serve.run(load()) == 0
    assert play.calls == calls


def test_a_hangup_before_the_server_is_there_is_heeded_when_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    monkeypatch.setattr(serve, "build", lambda *_, **__: play)
    before = signal.getsignal(signal.SIGHUP)
    try:
        hangup = process.Hangup()
        serve.run(load(), hangup=hangup)
        assert play.calls == []
        hangup = process.Hangup()
        os.kill(os.getpid(), signal.SIGHUP)
        assert serve.run(load(), hangup=hangup) == 0
        assert play.calls == ["reload"]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_with_a_hung_thread_leaves_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    play, codes = Play(), []
    play.hung = ["workers"]
    monkeypatch.setattr(serve, "build", lambda *_, **__: play)
    monkeypatch.setattr(serve.os, "_exit", codes.append)
    assert serve.run(load()) == 0
    assert codes == [0]


def test_every_file_that_the_system_allows_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(process.resource, "setrlimit", lambda which, limits: asked.append(limits))
    for limits in ((10, 20), (20, 20)):
        monkeypatch.setattr(process.resource, "getrlimit", lambda which, limits=limits: limits)
        process.raise_file_limit()
    assert asked == [(20, 20)]


def test_the_command_serves_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def run(config: Any, reload_config: Any, hangup: Any, drill: Any, passed: Any) -> int:
        seen.extend([config.server.port, reload_config().server.port, *drill])
        assert (hangup.was_asked, passed) == (False, None)
        return 3

    monkeypatch.setattr(serve, "run", run)
    assert main(["serve", "--port", "9", "--chaos", "device_slot=1 abort@step=40"]) == 3
    assert seen == [9, 9, Break(1, "assert", 40)]
    assert main(["serve", "--chaos", "abort"]) == 2
