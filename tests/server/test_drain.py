"""How the process ends: what is inside is served or told, and nothing is left."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from pathlib import Path

import pytest

from tests.server.client import Call, collect
from tests.server.conftest import Start
from tests.server.process import Server, until

CONFIG = """
engine.parallel = 2
engine.ctx = 200000
engine.prefix_cache = false
queue.hold_s = 30
server.drain_s = {drain_s}
"""
LONG = 90_000


def idle(server: Server) -> Call:
    """A connection kept alive after an answer."""
    call = server.call("GET", "/livez")
    call.begin().read()
    return call


def stalled(server: Server) -> Call:
    """A stream that nobody reads."""
    return server.complete(LONG, stream=True, receive_bytes=4096)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_serves_until_its_limit_and_tells_the_rest(start: Start, tiny: Path, number: int) -> None:
    """B51: a short stream, a long one, two queued, an idle keep-alive and a stalled reader; limit 3 s."""
    server = start(tiny, config=CONFIG.format(drain_s=3))
    kept = idle(server)
    stalled(server)
    server.wait_running(1)
    short = server.complete(500, stream=True)
    server.wait_running(2)
    queued = server.complete(LONG, stream=True)
    server.wait_waiting(1)
    late = server.complete(LONG)
    server.wait_waiting(2)
    server.signal(number)
    began_s = time.monotonic()
    until(lambda: server.ask("GET", "/readyz").status == 503)
    assert server.ask("GET", "/livez").status == 200
    refused = server.complete(1).answer()
    assert (refused.status, refused.code, refused.headers["connection"]) == (503, "draining", "close")
    assert 1 <= int(refused.headers["retry-after"]) <= 5
    # What ends in time is served whole; what is queued got its turn, and is told in its stream.
    assert collect(short).is_done
    told = collect(queued)
    assert told.text
    assert told.error is not None
    assert (told.error["code"], told.is_done) == ("draining", False)
    answer = late.answer()
    assert (answer.status, answer.code) == (503, "draining")
    assert time.monotonic() - began_s >= 3
    assert kept.sock.recv(1) == b""
    assert server.wait() == 0
    assert time.monotonic() - began_s < 3 + 3
    server.check_log()
    assert server.log.rstrip().endswith("stopped")


def test_a_drain_ends_as_soon_as_nobody_is_inside(start: Start, tiny: Path) -> None:
    server = start(tiny, config=CONFIG.format(drain_s=60))
    running = server.complete(2000)
    server.wait_running()
    idle(server)
    server.signal()
    assert running.answer().usage[1] == 2000
    assert server.wait() == 0


def test_a_second_signal_ends_it_at_once(start: Start, tiny: Path) -> None:
    """B51: whatever is inside."""
    server = start(tiny, config=CONFIG.format(drain_s=60))
    for _ in range(2):
        server.complete(LONG, stream=True)
    server.wait_running(2)
    server.signal()
    until(lambda: server.ask("GET", "/readyz").status == 503)
    began_s = time.monotonic()
    server.signal()
    assert server.wait() == 1
    assert time.monotonic() - began_s < 1


def test_a_hangup_reads_keys_again_and_drops_nobody(start: Start, tiny: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"

    def write(*names: str) -> None:
        digests = {name: hashlib.sha256(f"key-{name}".encode()).hexdigest() for name in names}
        lines = [json.dumps({"name": name, "tier": "normal", "sha256": digest}) for name, digest in digests.items()]
        keys.write_text("".join(line + "\n" for line in lines))

    write("old", "both")
    server = start(tiny, config=CONFIG.format(drain_s=1) + f'keys.file = "{keys}"\n')
    running = server.complete(3000, key="key-old", stream=True)
    events = running.events()
    next(events)
    assert server.complete(1, key="key-new").answer().status == 401
    write("new", "both")
    server.signal(signal.SIGHUP)
    until(lambda: server.complete(1, key="key-new").answer().status == 200)
    assert server.complete(1, key="key-old").answer().status == 401
    assert server.complete(1, key="key-both").answer().status == 200
    # Who is inside stays, and what is wrong changes nothing.
    assert list(events)[-1] == "[DONE]"
    keys.write_text("not a key\n")
    server.signal(signal.SIGHUP)
    until(lambda: "reload failed" in server.log)
    assert server.complete(1, key="key-new").answer().status == 200


BREAK = """
import sys
import lqs.serve
import lqs.{module} as module

def broken(*args, **kwargs):
    raise RuntimeError("secret")

module.{name} = broken
from lqs.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("engine.loading", "Loader.load"),
        ("engine.opening", "Opening.open_all"),
        ("serve", "announce"),
        ("serve", "take_leave"),
    ],
)
def test_an_error_that_nobody_foresaw_ends_it_cleanly_and_in_one_line(
    start: Start, tiny: Path, module: str, name: str
) -> None:
    """B52: in the thread that loads, when all is ready, while it drains; nobody is left behind."""
    program = BREAK.format(module=module, name=name)
    server = start(tiny, is_ready=name == "take_leave", config=CONFIG.format(drain_s=1), program=("-c", program))
    if name == "take_leave":
        server.signal()
    assert server.wait() == 1
    server_says = server.log.splitlines()
    assert len([line for line in server_says if line.startswith("error")]) == 1
    assert 'failed, please report it reason="RuntimeError in broken, <string>:7"' in server.log
    assert "left behind" not in server.log
    assert server_says[-1].endswith("stopped")
    assert "secret" not in server.log
    server.check_log()


# Two hundred in parts, since a single test may take four minutes at most.
PARTS = [0, *(pytest.param(part, marks=pytest.mark.stress) for part in range(1, 40))]


@pytest.mark.parametrize("part", PARTS)
def test_five_starts_and_stops_under_load_leave_cleanly(start: Start, tiny: Path, part: int) -> None:
    """B52: SIGTERM in the middle of a decode, of a load, with debug checks of the event loop; as stress 200 times."""
    for number in range(5 * part, 5 * part + 5):
        environ = {"PYTHONASYNCIODEBUG": "1"} if number % 3 == 0 else {}
        is_loaded = number % 5 != 4
        server = start(
            tiny, is_ready=is_loaded, config=CONFIG.format(drain_s=0), environ=environ | {"PYTHONUNBUFFERED": "1"}
        )
        if is_loaded:
            for n in range(4):
                server.complete(LONG, stream=bool(n % 2))
            server.wait_running(2)
        else:
            assert server.port
        server.signal()
        assert server.wait() == 0, server.tail
        server.check_log()
