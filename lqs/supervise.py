"""The parent of `lqs serve --supervise`: keeps the listening socket while servers come and go on it.

All of them accept from the one socket, so who waits in the kernel to be accepted is never lost with a
server. Nothing of llama.cpp and no event loop is in here: what brings a server down does not bring this down.

    SIGTERM, SIGINT, SIGHUP   passed on
    SIGUSR2                   a successor for the server, see lineage.py
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence

from lqs.lineage import Lineage, Rules, Teller
from lqs.parent import RESTART, SUCCESSOR, notify
from lqs.sockets import FIRST_FD

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of who sent a datagram.
_NOTE_BYTES_MAX = 4096
_PR_SET_PDEATHSIG = 1
_STOPPING = (signal.SIGTERM, signal.SIGINT)


class Supervisor:
    """Runs `command` as a child on the socket, again and again. Owner: the main thread, the only one there is."""

    def __init__(
        self,
        listening: socket.socket,
        command: Sequence[str],
        rules: Rules,
        log: Teller,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._listening = listening
        self._command = list(command)
        self._log = log
        self._environ = dict(environ)
        # Before there is a child: what it calls between fork and exec is loaded then.
        self._prctl: Callable[..., int] = ctypes.CDLL(None).prctl
        self._notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._lineage = Lineage(rules, start=self._start, send=_send, log=log)

    def run(self) -> int:
        """Supervise until a signal ends it or the server cannot be kept up; the exit code."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._listening)
            self._listen_to_notes(stack.enter_context(self._notes))
            signals = self._listen_to_signals(stack)
            self._log.info("supervising", pid=os.getpid())
            self._lineage.begin()
            while (code := self._lineage.code) is None:
                left_s = self._lineage.due_s() - time.monotonic()
                select.select([signals, self._notes], [], [], None if left_s == math.inf else max(left_s, 0))
                # What a child has said before it ended counts.
                self._take_notes()
                self._take_signals(signals)
                self._reap()
                self._lineage.tend(time.monotonic())
        self._log.info("supervisor stopped", code=code)
        return code

    def _listen_to_notes(self, notes: socket.socket) -> None:
        # Anybody on this machine may write there; the kernel says who did.
        notes.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        notes.setblocking(False)
        notes.bind("")

    def _listen_to_signals(self, stack: contextlib.ExitStack) -> socket.socket:
        """Have the numbers of signals come as bytes on a socket."""
        reader, writer = (stack.enter_context(end) for end in socket.socketpair())
        reader.setblocking(False)
        writer.setblocking(False)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False))
        for number in (*_STOPPING, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD):
            stack.callback(signal.signal, number, signal.signal(number, _ignore))
        return reader

    def _take_notes(self) -> None:
        while True:
            try:
                data, extra, _, sender = self._notes.recvmsg(_NOTE_BYTES_MAX, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return
            words = data.decode(errors="replace").split("\n")
            pids = [
                _CREDENTIALS.unpack(content[: _CREDENTIALS.size])[0]
                for level, kind, content in extra
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
            ]
            if pids and self._lineage.has(pids[0]):
                self._heed(pids[0], words, sender)

    def _heed(self, pid: int, words: Sequence[str], sender: bytes) -> None:
        """What a server says of itself, or asks."""
        if "READY=1" in words:
            self._lineage.ready(pid, time.monotonic(), may_overlap="X_LQS_OVERLAP=1" in words)
            if self._lineage.is_ready:
                notify(self._environ, "READY=1")
        elif "X_LQS_DRAIN=1" in words:
            self._lineage.drains(pid)
            if self._lineage.is_stopping:
                notify(self._environ, "STOPPING=1")
        elif RESTART in words:
            self._answer(sender, self._lineage.restart(time.monotonic()))
        elif SUCCESSOR in words:
            self._answer(sender, self._lineage.successor)

    def _answer(self, sender: bytes, text: str) -> None:
        # Who asked may be gone, or wait no more.
        with contextlib.suppress(OSError):
            self._notes.sendto(text.encode(), sender)

    def _take_signals(self, signals: socket.socket) -> None:
        try:
            numbers = signals.recv(_NOTE_BYTES_MAX)
        except BlockingIOError:
            return
        for number in numbers:
            if number in _STOPPING:
                notify(self._environ, "STOPPING=1")
                self._lineage.stop(number)
            elif number == signal.SIGHUP:
                self._lineage.send_all(number)
            elif number == signal.SIGUSR2:
                self._lineage.restart(time.monotonic())

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._lineage.ended(pid, os.waitstatus_to_exitcode(status), time.monotonic())

    def _start(self) -> int:
        parent = os.getpid()
        # A stop that comes before the server can heed it is kept for it: see `run_with_signals`.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        pid = os.fork()
        if pid == 0:
            try:
                self._become(parent)
            finally:
                os._exit(127)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        return pid

    def _become(self, parent: int) -> None:
        """The child's way from the fork to the server's program."""
        # A group of its own: Ctrl-C is for the parent, who passes it on once.
        os.setpgid(0, 0)
        # Without a parent it would keep the socket from the next one; so it drains.
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return
        # What else comes before the server can heed it must not end it.
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        # Before the socket is put where this one may be.
        address = self._notes.getsockname()
        os.dup2(self._listening.fileno(), FIRST_FD)
        os.set_inheritable(FIRST_FD, True)
        os.execve(  # noqa: S606 The same program that runs already.
            self._command[0],
            self._command,
            self._environ
            | {
                "LISTEN_PID": str(os.getpid()),
                "LISTEN_FDS": "1",
                "NOTIFY_SOCKET": "@" + os.fsdecode(address[1:]),
                "LQS_SUPERVISOR": str(parent),
            },
        )


def _ignore(*_: object) -> None:
    """The socket of `set_wakeup_fd` has it."""


def _send(pid: int, number: int) -> None:
    """A child that is gone already has not been reaped: nobody else can have its number."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
