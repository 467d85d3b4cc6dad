"""The listening socket: bound here, or passed by whoever started this process.

A socket is passed as systemd does it: LISTEN_FDS says how many from descriptor 3 on, LISTEN_PID for whom. `lqs
serve --supervise` passes its own to its children in the same way.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

import msgspec

from lqs.config import Config, ServerConfig
from lqs.errors import StartError

# Where passed sockets begin.
FIRST_FD = 3


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket on the configured address. Raises StartError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((config.host, config.port))
        listening.listen(config.backlog)
    except OSError as error:
        listening.close()
        raise StartError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}. Choose another with --host and --port."
        ) from None
    return listening


def take_socket(environ: MutableMapping[str, str], first_fd: int = FIRST_FD) -> socket.socket | None:
    """The listening socket that was passed to this process; None if none was. Raises StartError.

    The variables are taken out: they are meant for nobody that this process starts.
    """
    pid, num = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()):
        return None
    if num != "1":
        raise StartError(f"LISTEN_FDS is {num!r}: lqs takes one socket; leave one ListenStream in the socket unit.")
    try:
        passed = socket.socket(fileno=first_fd)
        is_tcp = passed.family in (socket.AF_INET, socket.AF_INET6) and passed.type == socket.SOCK_STREAM
        is_listening = bool(passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError as error:
        raise StartError(f"LISTEN_FDS says that a socket was passed: {error.strerror}.") from None
    if not is_tcp or not is_listening:
        passed.close()
        raise StartError("the socket that was passed does not listen on a TCP address.")
    os.set_inheritable(first_fd, False)
    return passed


def with_address(config: Config, passed: socket.socket | None) -> Config:
    """The config with the address on which it really listens."""
    if passed is None:
        return config
    host, port, *_ = passed.getsockname()
    return msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, host=host, port=port))
