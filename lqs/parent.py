"""What a server says to whoever started it: how it is, and that it wants a successor.

In systemd's words (NOTIFY_SOCKET), so that it may be systemd; `lqs serve --supervise` listens to the same from
its children, and names itself to them in LQS_SUPERVISOR.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

# What a server may ask a supervisor, who answers: empty or why not; and what `Lineage.successor` says.
RESTART, SUCCESSOR = "X_LQS_RESTART=1", "X_LQS_SUCCESSOR=1"
_ANSWER_S = 5.0
_ANSWER_BYTES_MAX = 4096


def notify(environ: Mapping[str, str], state: str) -> None:
    """Tell who started this process how it is, such as "READY=1"; nobody listens, nothing happens."""
    address = _address(environ)
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(state.encode(), address)


def ask_restart(environ: Mapping[str, str]) -> str:
    """Ask the supervisor for a successor of this process, and wait for its word; why there will be none, or empty."""
    if not has_supervisor(environ):
        return "nothing keeps the socket for a successor; start it with `lqs serve --supervise`"
    return _ask(environ, RESTART, "the supervisor does not answer")


def ask_successor(environ: Mapping[str, str]) -> str:
    """What became of the last restart, as `Lineage.successor` has it."""
    return _ask(environ, SUCCESSOR, "none") if has_supervisor(environ) else "none"


def has_supervisor(environ: Mapping[str, str]) -> bool:
    """Whether the parent of this process is a supervisor."""
    return environ.get("LQS_SUPERVISOR") == str(os.getppid())


def _ask(environ: Mapping[str, str], what: str, otherwise: str) -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        asking.settimeout(_ANSWER_S)
        # An address to answer to; connected, so that the kernel takes nobody else's answer.
        asking.bind("")
        asking.connect(_address(environ))
        asking.send(what.encode())
        return asking.recv(_ANSWER_BYTES_MAX).decode()
    return otherwise


def _address(environ: Mapping[str, str]) -> str:
    """Where who started this process listens; empty if nowhere."""
    address = environ.get("NOTIFY_SOCKET", "")
    return "\0" + address[1:] if address.startswith("@") else address
