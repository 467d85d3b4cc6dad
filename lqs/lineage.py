"""Which server serves, which one comes and which ones go: the rules of `lqs serve --supervise`.

    begin -----> current -- ready                       a crash: again after a while, too many: give up
    restart,
      overlap:   current + next -- next is ready -----> next is current, the old one leaves
      hold:      the old one leaves -- it has ended --> current

No process is touched here and no clock is read: it is told what happens, and says what is to be done.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol


class Teller(Protocol):
    """Where the operator reads what happens."""

    def info(self, event: str, **fields: object) -> None: ...
    def warning(self, event: str, **fields: object) -> None: ...
    def error(self, event: str, **fields: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """`overlap`: whether old and new run side by side, None for what the old one says of its memory.

    `leave_s` is how long an old server may take to serve who is connected before it is killed. After more than
    `num_crashes_max` crashes within `window_s` nobody starts it again; until then each is started later
    after its crash than the one before, from `backoff_s` to `backoff_s_max`.
    """

    overlap: bool | None
    leave_s: float
    num_crashes_max: int = 5
    window_s: float = 300.0
    backoff_s: float = 0.5
    backoff_s_max: float = 30.0


@dataclass(slots=True, eq=False)
class Child:
    """A server's process."""

    pid: int
    is_ready: bool = False
    may_overlap: bool = False
    kill_at_s: float = math.inf


class Lineage:
    """Keeps one server serving. `start` starts a process and gives its number, `send` sends one a signal.

    Times are seconds of any clock that only goes forward. Owner: the thread that calls it.
    """

    def __init__(
        self, rules: Rules, *, start: Callable[[], int], send: Callable[[int, int], None], log: Teller
    ) -> None:
        self._rules = rules
        self._start = start
        self._send = send
        self._log = log
        self._current: Child | None = None
        self._next: Child | None = None
        self._leaving: list[Child] = []
        self._start_at_s = math.inf
        self._is_held = False  # The next one starts when the old one has made room.
        self._has_served = False
        self._failed = ""  # The last successor, and how.
        self._crashes: list[float] = []
        self._is_stopping = False
        self._exit = 0

    @property
    def code(self) -> int | None:
        """The exit code, once all is over."""
        return self._exit if self._is_stopping and not any(self._children()) else None

    @property
    def is_ready(self) -> bool:
        """Whether requests are served."""
        return self._current is not None and self._current.is_ready

    @property
    def is_stopping(self) -> bool:
        """Whether nobody is started any more."""
        return self._is_stopping

    def due_s(self) -> float:
        """When `tend` has something to do next."""
        return min([self._start_at_s, *(child.kill_at_s for child in self._leaving)])

    def begin(self) -> None:
        """Start the first one."""
        self._current = Child(self._start())

    @property
    def successor(self) -> str:
        """What became of the last restart, for who asked for it: none, starting, or failed and how."""
        is_coming = self._next is not None or (self._current is None and not self._is_stopping)
        return "starting" if is_coming else self._failed or "none"

    def restart(self, now_s: float) -> str:
        """Put a new one in the place of the one that serves, without a gap that anybody sees; why not, or empty."""
        current = self._current
        if self._is_stopping:
            return self._refuse("the server is told to end")
        if current is None or not current.is_ready or self._next is not None:
            return self._refuse("a server is starting already")
        self._failed = ""
        overlap = current.may_overlap if self._rules.overlap is None else self._rules.overlap
        self._log.info("restarting", old=current.pid, mode="overlap" if overlap else "hold")
        if overlap:
            self._next = Child(self._start())
        else:
            self._current, self._is_held = None, True
            self._retire(current, now_s)
        return ""

    def stop(self, number: int) -> None:
        """Pass on a signal that ends servers; all is over when they have ended."""
        self._is_stopping = True
        self._start_at_s = math.inf
        self.send_all(number)

    def drains(self, pid: int) -> None:
        """A server was told to end, by a signal of its own or an admin's call: so do those before and after it."""
        if self._is_stopping or not self.has(pid):
            return
        self._log.info("a server was told to end: all of it ends", pid=pid)
        self._end_beside(pid)

    def has(self, pid: int) -> bool:
        """Whether that process is one of the servers."""
        return any(child.pid == pid for child in self._children())

    def send_all(self, number: int) -> None:
        """Pass a signal on to every server."""
        for child in list(self._children()):
            self._send(child.pid, number)

    def ready(self, pid: int, now_s: float, *, may_overlap: bool) -> None:
        """A server serves. `may_overlap`: there is memory for a second one."""
        child = next((child for child in self._children() if child.pid == pid), None)
        if child is None or child.is_ready:
            return
        child.is_ready, child.may_overlap = True, may_overlap
        self._has_served = True
        if child is not self._next:
            return
        old, self._current, self._next = self._current, child, None
        if old is not None:
            self._log.info("replaced", old=old.pid, new=pid)
            self._retire(old, now_s)

    def ended(self, pid: int, code: int, now_s: float) -> None:
        """A server has ended, with that exit code or by the signal of minus that number."""
        if self._current is not None and pid == self._current.pid:
            self._current = None
            self._lost(pid, code, now_s)
        elif self._next is not None and pid == self._next.pid:
            self._next = None
            if not self._is_stopping:
                self._failed = f"failed: {how(code)}"
                self._log.error("the new server did not come up, the old one goes on", pid=pid, how=how(code))
        elif any(pid == child.pid for child in self._leaving):
            self._leaving = [child for child in self._leaving if child.pid != pid]
            if code:
                self._log.warning("the old server did not end well", pid=pid, how=how(code))
            if self._is_held and not self._leaving and not self._is_stopping:
                self._is_held = False
                self.begin()

    def tend(self, now_s: float) -> None:
        """Start and kill whom it is time for."""
        if now_s >= self._start_at_s:
            self._start_at_s = math.inf
            self.begin()
        for child in self._leaving:
            if now_s >= child.kill_at_s:
                child.kill_at_s = math.inf
                self._log.error("the old server does not end: killed", pid=child.pid)
                self._send(child.pid, signal.SIGKILL)

    def _children(self) -> Iterator[Child]:
        yield from (child for child in (self._current, self._next, *self._leaving) if child is not None)

    def _refuse(self, reason: str) -> str:
        self._log.warning(f"no restart: {reason}")
        return reason

    def _end_beside(self, pid: int) -> None:
        """End whoever is not of that number; that one ends already, and would take a second signal for haste."""
        self._is_stopping = True
        self._start_at_s = math.inf
        for child in list(self._children()):
            if child.pid != pid:
                self._send(child.pid, signal.SIGTERM)

    def _retire(self, child: Child, now_s: float) -> None:
        """Have it accept nobody any more, serve who is connected, and end."""
        child.kill_at_s = now_s + self._rules.leave_s
        self._leaving.append(child)
        self._send(child.pid, signal.SIGUSR1)

    def _lost(self, pid: int, code: int, now_s: float) -> None:
        """The one that served, or was to, is gone."""
        if self._is_stopping:
            self._exit = code if code >= 0 else 1
        elif code == 0:
            # By a signal of its own, or an admin's call.
            self._log.info("the server has ended as it was told to", pid=pid)
            self._end_beside(pid)
        elif code > 0 and not self._has_served:
            # It has said why; another try would say the same.
            self._exit, self._is_stopping = code, True
        elif self._next is not None:
            self._log.error("the server died, its successor is on its way", pid=pid, how=how(code))
            self._current, self._next = self._next, None
        else:
            self._again(pid, code, now_s)

    def _again(self, pid: int, code: int, now_s: float) -> None:
        """Start it once more, later each time; in the end no more."""
        rules = self._rules
        self._crashes = [at_s for at_s in self._crashes if now_s - at_s < rules.window_s] + [now_s]
        num = len(self._crashes)
        if num > rules.num_crashes_max:
            self._log.error(
                "gave up: the server died too often", times=num, within_s=rules.window_s, pid=pid, how=how(code)
            )
            self._exit, self._is_stopping = 1, True
            return
        wait_s = min(rules.backoff_s * 2 ** (num - 1), rules.backoff_s_max)
        self._log.error("the server died", pid=pid, how=how(code), again_in_s=wait_s)
        self._start_at_s = now_s + wait_s


def how(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
