"""`lqs serve`: serve a model until a signal."""

from __future__ import annotations

import argparse

from lqs.commands.flags import add_setting_flags, load_config
from lqs.engine.drill import parse_drill
from lqs.serve import run as run_server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the flags that override settings."""
    add_setting_flags(parser)
    # For drills only, so the help does not offer it.
    parser.add_argument("--chaos", default="", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Serve; the exit code. Raises StartError."""
    drill = parse_drill(args.chaos)
    return run_server(load_config(args), reload_config=lambda: load_config(args), drill=drill)
