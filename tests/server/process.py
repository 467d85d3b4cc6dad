"""The real process: started as a user starts it, watched from outside, ended by a signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.server.client import Answer, Call

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 60.0
_SAMPLE = re.compile(r"^([a-z_:]+)(\{.*\})? (\S+)$", re.MULTILINE)
# Everything that a request takes and must give back.
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "lqs_queue_depth",
    "lqs_queue_places_taken",
    "lqs_queue_total_places_taken",
    "lqs_queue_oldest_wait_seconds",
    "lqs_requests_lost_waiting",
    "lqs_device_kv_reserved",
    "lqs_events_lost_total",
    "lqs_core_broken_total",
)


def until(holds: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Ask again and again until it holds; what it said."""
    end_s = time.monotonic() + limit_s
    while not (said := holds()):
        assert time.monotonic() < end_s, "it did not come to hold in time"
        time.sleep(0.005)
    return said


class Server:
    """`python -m lqs serve` on a free loopback port.

    `config` is the text of its lqs.toml. `program` is what python runs in place of `-m lqs`.
    """

    def __init__(
        self,
        folder: Path,
        model: str | Path,
        *flags: str,
        config: str = "",
        environ: dict[str, str] | None = None,
        program: Sequence[str] = ("-m", "lqs"),
    ) -> None:
        file = folder / "lqs.toml"
        file.write_text(config)
        self.log_path = folder / "server.log"
        given = ["--config", str(file), "--port", "0", "--threads", "1", *flags]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, "serve", str(model), *given],
                cwd=REPOSITORY,
                env=os.environ | (environ or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._port = 0
        self.start_figures: dict[str, float] = {}
        self._calls: list[Call] = []

    # Its life.

    @property
    def log(self) -> str:
        """All it has written."""
        return self.log_path.read_text()

    @property
    def tail(self) -> str:
        """The end of what it has written, without the access log."""
        return "\n".join([line for line in self.log.splitlines() if not line.startswith("info    access")][-60:])

    def check_log(self) -> None:
        """Nothing unforeseen was written."""
        for sign in ("Traceback", "unexpected error", "Exception"):
            assert sign not in self.log, self.tail

    @property
    def port(self) -> int:
        """Where it listens; waits for it."""
        if not self._port:
            found = until(lambda: self._is_alive() and re.search(r"listening .*port=(\d+)", self.log))
            self._port = int(found[1])
        return self._port

    def wait_ready(self) -> Server:
        """Wait until requests are let in, and remember how everything stands then."""
        until(lambda: self._is_alive() and self.ask("GET", "/readyz").status == 200)
        self.start_figures = self.figures()
        return self

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        code = self.process.wait(LIMIT_S)
        for call in self._calls:
            call.close()
        return code

    def stop(self) -> None:
        """End it, and see that it ends as it should. Everything was given back before."""
        for call in self._calls:
            call.close()
        try:
            if self.start_figures:
                self.wait_at_rest()
            self.signal()
            assert self.wait() == 0, self.tail
            self.check_log()
        finally:
            self.process.kill()
            self.process.wait()

    def _is_alive(self) -> bool:
        assert self.process.poll() is None, f"it has ended with {self.process.returncode}: {self.tail}"
        return True

    # Asking it.

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> Call:
        """Begin a request. What the test leaves open is closed at the end."""
        begun = Call(self.port, method, path, body, **options)
        self._calls.append(begun)
        return begun

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        """Make a request and read its answer."""
        return self.call(method, path, body, **options).answer()

    def complete(self, max_tokens: Any, **fields: Any) -> Call:
        """Begin a completion of exactly that many tokens."""
        key = fields.pop("key", None)
        body = {"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        return self.call("POST", "/v1/completions", body | fields, key=key)

    # Looking at it.

    def metrics(self) -> dict[str, float]:
        """Every sample, by its name and labels."""
        text = self.ask("GET", "/metrics").body.decode()
        return {name + labels: float(value) for name, labels, value in _SAMPLE.findall(text)}

    def metric(self, name: str) -> float:
        """One metric, over all its labels."""
        return sum(value for key, value in self.metrics().items() if key.partition("{")[0] == name)

    def figures(self) -> dict[str, float]:
        """What must be as at the start when nothing goes on: gauges, files and tasks."""
        samples = self.metrics().items()
        # Over all labels: device slots of models on demand come and go.
        sums = {name: sum(value for key, value in samples if key.partition("{")[0] == name) for name in GAUGES}
        return sums | {"files": self.num_files}

    @property
    def num_files(self) -> int:
        """Open files and sockets."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    @property
    def num_threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    @property
    def memory_bytes(self) -> int:
        """Its resident memory."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")

    def wait_at_rest(self) -> None:
        """Wait until everything that was taken is given back."""
        seen: dict[str, float] = {}

        def is_at_rest() -> bool:
            seen.update(self.figures())
            return seen == self.start_figures

        try:
            until(is_at_rest, 20)
        except AssertionError:
            left = {name: value for name, value in seen.items() if value != self.start_figures.get(name)}
            raise AssertionError(f"not given back: {left}") from None

    def wait_running(self, num: int = 1) -> None:
        """Wait until that many run."""
        until(lambda: self.metric("vllm:num_requests_running") == num)

    def wait_waiting(self, num: int) -> None:
        """Wait until that many wait."""
        until(lambda: self.metric("vllm:num_requests_waiting") == num)
