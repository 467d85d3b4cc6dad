"""The command line: finds the command, parses its arguments, turns errors into exit codes.

A command is a module in `lqs.commands` with `add_arguments(parser)` and `run(args)`. Only the one
that is asked for is imported, so that `lqs --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast

from lqs.errors import StartError

COMMANDS = {
    "serve": "serve a model over HTTP",
    "check": "read the config, look at the machine, print the plan; start nothing",
    "simulate": "play a trace through the scheduler under a virtual clock",
    "chat": "talk to a running server",
    "drain": "take a running server, or a part of it, out of use; or restart it",
    "keys": "add, list and revoke API keys",
    "models": "fetch, list and make model files",
}


class Command(Protocol):
    """What a command's module offers. `run` gives the exit code, or raises StartError."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0, 1 for a failure, 2 for wrong use."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        name = _choose(args[:1])
        if name == "serve":
            # It reads its config again on a hangup, and has read nothing yet. The imports below take a while.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        command = cast(Command, importlib.import_module(f"lqs.commands.{name}"))
        parser = argparse.ArgumentParser(prog=f"lqs {name}", description=f"{COMMANDS[name]}.")
        command.add_arguments(parser)
        return command.run(parser.parse_args(args[1:]))
    except StartError as error:
        print(f"lqs: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as error:
        # argparse has printed what it wants; --help is 0, wrong use is 2.
        return int(error.code or 0)
    except KeyboardInterrupt:
        return 1
    except BrokenPipeError:
        # The reader of our output has left; the interpreter must not complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Version(argparse.Action):
    """Prints the version that is installed; looked up only when it is asked for."""

    def __call__(self, *_: object) -> NoReturn:
        """Print it and leave."""
        # Costs more than the rest of `lqs --help`.
        from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

        try:
            print(f"lqs {version('lqs')}")
        except PackageNotFoundError:
            print("lqs, from sources that are not installed")
        raise SystemExit(0)


def _choose(first: Sequence[str]) -> str:
    """The command's name. Leaves with help or an error where there is none."""
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {about}" for name, about in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="lqs",
        description="A queue server for local language models.",
        epilog=f"commands:\n{listing}\n\n`lqs COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", nargs=0, action=_Version, help="show the version and leave")
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of those below")
    if not first:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    name: str = parser.parse_args(first).command
    return name
