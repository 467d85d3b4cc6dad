"""`lqs serve`: serve a model until a signal, with --supervise under a parent that keeps the socket."""

from __future__ import annotations

import argparse
import os
import sys

from lqs.commands.flags import add_setting_flags, load_config
from lqs.config import Config
from lqs.engine.drill import parse_drill
from lqs.lineage import Rules
from lqs.observe.log import Log
from lqs.process import Hangup
from lqs.sockets import bind, take_socket, with_address
from lqs.supervise import Supervisor

# Beyond the time for a drain and for threads to end, how long an old server may still take.
_PATIENCE_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the flags that override settings, and --supervise."""
    add_setting_flags(parser)
    parser.add_argument(
        "--supervise",
        action="store_true",
        help="keep the listening socket in a small parent that starts the server again when it dies, "
        "and replaces it without a lost request on SIGUSR2 or `lqs drain --restart`",
    )
    parser.add_argument(
        "--chaos", default="", metavar="DRILL", help="break device slots on purpose, for drills: see docs/devices.md"
    )


def run(args: argparse.Namespace) -> int:
    """Serve; the exit code. Raises StartError."""
    if args.supervise and os.environ.get("LQS_SUPERVISOR") != str(os.getppid()):
        return _supervise(load_config(args))
    hangup = Hangup()
    drill = parse_drill(args.chaos)
    passed = take_socket(os.environ)

    def read() -> Config:
        return with_address(load_config(args), passed)

    # It brings libllama along, which the parent has no use for.
    from lqs.serve import run as run_server  # noqa: PLC0415

    return run_server(read(), read, hangup, drill=drill, passed=passed)


def _supervise(config: Config) -> int:
    server = config.server
    listening = take_socket(os.environ) or bind(server)
    rules = Rules(
        overlap={"overlap": True, "hold": False}.get(server.restart),
        leave_s=server.drain_s + server.close_s + _PATIENCE_S,
    )
    # What was typed, so that the child reads the config anew and finds the parent in LQS_SUPERVISOR.
    return Supervisor(listening, [sys.executable, *sys.orig_argv[1:]], rules, Log(config.log)).run()
