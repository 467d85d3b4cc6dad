"""What a server says to whoever started it: how it is, and that it wants a successor.

In systemd's words (NOTIFY_SOCKET), so that it may be systemd; `lqs serve --supervise` listens to the same from
its children, and names itself to them in LQS_SUPERVISOR.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping


def notify(environ: Mapping[str, str], state: str) -> None:
    """Tell who started this process how it is, such as "READY=1"; nobody listens, nothing happens."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(state.encode(), address)


def ask_restart(environ: Mapping[str, str]) -> bool:
    """Ask the supervisor for a successor of this process; False if there is none."""
    parent = os.getppid()
    if environ.get("LQS_SUPERVISOR") != str(parent):
        return False
    os.kill(parent, signal.SIGUSR2)
    return True
