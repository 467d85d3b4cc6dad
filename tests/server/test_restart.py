"""`lqs serve --supervise`: the socket outlives the servers, and nobody notices that they change."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.server.client import HOST, collect
from tests.server.conftest import Start
from tests.server.process import REPOSITORY, Server, until

CONFIG = """
engine.parallel = 4
engine.ctx = 100000
engine.prefix_cache = false
server.restart = "{mode}"
"""
LONG = 90_000
LIMIT_S = 60.0


def child_of(server: Server) -> int:
    """The process that answers."""
    return int(server.ask("GET", "/admin/devices").json["pid"])


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def run(command: str, server: Server, *flags: str) -> subprocess.CompletedProcess[str]:
    """A command of lqs for this server."""
    return subprocess.run(
        [sys.executable, "-m", "lqs", command, "--url", f"http://{HOST}:{server.port}", *flags],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


class Load:
    """Clients that ask without a pause until they are told to end, each on a connection that it keeps if it can."""

    def __init__(self, server: Server, num_clients: int) -> None:
        self.came: Counter[Any] = Counter()
        self.longest_s = 0.0
        self._port = server.port
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n % 2 == 0,)) for n in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, is_kept: bool) -> None:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=LIMIT_S)
        body = json.dumps({"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "temperature": 0})
        while not self._is_over.is_set():
            began_s = time.monotonic()
            try:
                connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
                answer = connection.getresponse()
                told = json.loads(answer.read())
                self.came[answer.status if "choices" in told else told["error"]["code"]] += 1
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.came[repr(error)] += 1
                connection.close()
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)
            if not is_kept:
                connection.close()
        connection.close()

    def end(self) -> Counter[Any]:
        """What came, once all have ended."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
        return self.came


@pytest.mark.parametrize("mode", ["overlap", "hold"])
def test_a_restart_under_load_loses_no_request(start: Start, tiny: Path, mode: str) -> None:
    """A rolling restart while clients ask without a pause, on old connections and on new ones."""
    server = start(tiny, "--supervise", config=CONFIG.format(mode=mode))
    old = child_of(server)
    stream = server.complete(1500, stream=True)
    events = stream.events()
    next(events)
    load = Load(server, 4)
    until(lambda: sum(load.came.values()) > 20)
    server.signal(signal.SIGUSR2)
    until(lambda: not is_alive(old))
    num_before = sum(load.came.values())
    until(lambda: sum(load.came.values()) > num_before + 20)
    assert set(load.end()) == {200}, server.tail
    # What ran there when it was replaced ran to its end there.
    assert list(events)[-1] == "[DONE]"
    assert child_of(server) != old
    assert load.longest_s < LIMIT_S / 2
    server.check_log()


def test_a_server_that_is_killed_is_started_again_and_who_connects_meanwhile_waits(start: Start, tiny: Path) -> None:
    """B49: what it took is free when its process is gone, so the next one loads at once."""
    server = start(tiny, "--supervise", config=CONFIG.format(mode="auto"))
    old = child_of(server)
    os.kill(old, signal.SIGKILL)
    until(lambda: not is_alive(old))
    # Nobody accepts now; the kernel does.
    assert server.complete(5).answer().status == 200
    assert child_of(server) != old
    assert "the server died" in server.log
    assert "how=SIGKILL" in server.log


def test_the_supervisor_passes_a_stop_on_and_leaves_nobody_behind(start: Start, tiny: Path) -> None:
    server = start(tiny, "--supervise", config=CONFIG.format(mode="auto"))
    child = child_of(server)
    running = server.complete(2000, stream=True)
    server.wait_running()
    server.signal(signal.SIGINT)
    assert collect(running).is_done
    assert server.wait() == 0
    assert not is_alive(child)
    server.check_log()


def test_a_drain_while_a_successor_comes_ends_both(start: Start, tiny: Path) -> None:
    server = start(tiny, "--supervise", config=CONFIG.format(mode="overlap"))
    old = child_of(server)
    stream = server.complete(1500, stream=True)
    next(events := stream.events())
    server.signal(signal.SIGUSR2)
    until(lambda: len(children(server)) == 2)
    assert server.ask("POST", "/admin/drain").json["status"] == "draining"
    # Cut off, had the old one taken a second signal for haste.
    assert list(events)[-1] == "[DONE]"
    assert server.wait() == 0
    assert not is_alive(old)
    server.check_log()


def children(server: Server) -> list[str]:
    pid = server.process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_restart_that_comes_to_nothing_is_told_to_who_asked(start: Start, tiny: Path) -> None:
    server = start(tiny, "--supervise", config=CONFIG.format(mode="overlap"))
    old = child_of(server)
    assert run("drain", server, "--restart").returncode == 0
    # The first one is under way: a load takes longer than a call.
    again = server.ask("POST", "/admin/restart")
    assert (again.status, again.json["error"]["message"]) == (409, "No restart: a server is starting already.")
    until(lambda: child_of(server) != old and len(children(server)) == 1)
    (server.log_path.parent / "lqs.toml").write_text("engine.parallel = 0")
    began_s = time.monotonic()
    failed = run("drain", server, "--restart", "--wait", "60")
    assert (failed.returncode, "did not come up (exit code 2)" in failed.stderr) == (1, True)
    assert time.monotonic() - began_s < 30
    assert server.complete(1).answer().status == 200


@pytest.mark.parametrize("after_s", [0, 0.1, 0.3])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_the_server_cannot_heed_yet_is_kept_for_it(
    start: Start, tiny: Path, number: int, after_s: float
) -> None:
    server = start(tiny, "--supervise", is_ready=False, config=CONFIG.format(mode="auto"))
    until(lambda: "supervising" in server.log)
    time.sleep(after_s)
    server.signal(number)
    assert server.wait() == 0
    server.check_log()


def test_a_second_stop_ends_at_once_under_a_supervisor_too(start: Start, tiny: Path) -> None:
    server = start(tiny, "--supervise", config=CONFIG.format(mode="auto") + "server.drain_s = 60\n")
    server.complete(LONG, stream=True)
    server.wait_running()
    server.signal()
    until(lambda: server.ask("GET", "/readyz").status == 503)
    server.signal()
    assert server.wait() == 1


def test_a_server_whose_supervisor_is_gone_drains(start: Start, tiny: Path) -> None:
    server = start(tiny, "--supervise", config=CONFIG.format(mode="auto"))
    child = child_of(server)
    server.signal(signal.SIGKILL)
    server.wait()
    until(lambda: not is_alive(child))
    assert "draining" in server.log


def test_a_start_that_fails_ends_the_supervisor_with_its_code(start: Start, tiny: Path, tmp_path: Path) -> None:
    server = start(tmp_path / "none.gguf", "--supervise", is_ready=False)
    assert server.wait() == 1
    server = start(tiny, "--supervise", is_ready=False, config='engine.devices = ["tpu:0"]\n')
    assert server.wait() == 2


def test_a_hangup_at_any_time_after_the_start_ends_nobody(start: Start, tiny: Path) -> None:
    """A key file may be written and announced while the server still starts."""
    server = start(tiny, "--supervise", is_ready=False, config=CONFIG.format(mode="auto"))
    until(lambda: "supervising" in server.log)
    while " ready " not in server.log:
        server.signal(signal.SIGHUP)
        time.sleep(0.01)
    server.signal(signal.SIGHUP)
    until(lambda: "reloaded" in server.log)
    assert server.complete(1).answer().status == 200
    plain = start(tiny, is_ready=False, config=CONFIG.format(mode="auto"))
    until(lambda: heeds_hangup(plain.process.pid))
    while " ready " not in plain.log:
        plain.signal(signal.SIGHUP)
        time.sleep(0.01)
    assert plain.complete(1).answer().status == 200


def heeds_hangup(pid: int) -> bool:
    """Whether SIGHUP no longer ends a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = {name: int(value, 16) for name, _, value in (line.partition(":") for line in lines) if name[:3] == "Sig"
             and name != "SigQ"}  # fmt: skip
    return bool((masks["SigIgn"] | masks["SigCgt"]) >> (signal.SIGHUP - 1) & 1)


def test_a_socket_that_is_passed_is_served_from(start: Start, tiny: Path) -> None:
    """As systemd passes it: descriptor 3, for this process."""
    passes = (
        "import os, socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
        "os.dup2(s.fileno(), 3); os.set_inheritable(3, True); "
        "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1'); "
        "os.execv(sys.executable, [sys.executable, '-m', 'lqs', *sys.argv[1:]])"
    )
    server = start(tiny, "--host", "0.0.0.0", program=("-c", passes), config=CONFIG.format(mode="auto"))
    # The address is the socket's, whatever the config says: loopback, so no key is wanted.
    assert "host=127.0.0.1" in server.log
    assert server.complete(1).answer().status == 200


def test_the_command_drains_a_part_opens_it_restarts_and_drains_the_whole(start: Start, tiny: Path) -> None:
    server = start(tiny, "--supervise", "--device", "cpu:0", "--device", "cpu:1", config=CONFIG.format(mode="overlap"))
    done = run("drain", server, "--device-slot", "cpu:1", "--wait", "30")
    assert (done.returncode, done.stderr) == (0, "")
    assert "drained" in done.stdout
    calls = [server.complete(20_000) for _ in range(4)]
    server.wait_running(4)
    slots = server.ask("GET", "/admin/devices").json["data"]
    assert [slot["running"] for slot in slots] == [4, 0]
    late = run("drain", server, "--model", "tiny", "--wait", "0")
    assert (late.returncode, "Some still runs there" in late.stderr) == (1, True)
    for call in calls:
        call.close()
    assert run("drain", server, "--model", "tiny", "--undrain").returncode == 0
    assert {slot["state"] for slot in server.ask("GET", "/admin/devices").json["data"]} == {"ready"}
    old = child_of(server)
    assert run("drain", server, "--restart", "--wait", "30").returncode == 0
    assert child_of(server) != old
    assert run("drain", server, "--undrain").returncode == 2
    assert run("drain", server, "--device-slot", "7").returncode == 1
    ended = run("drain", server, "--wait", "30")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert server.wait() == 0
