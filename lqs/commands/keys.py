"""`lqs keys`: add, list and revoke API keys. A running server takes changes over on SIGHUP."""

from __future__ import annotations

import argparse
import datetime
import os

from lqs.admission.keys import KeyFile
from lqs.commands.flags import add_config_flag
from lqs.config import Config
from lqs.errors import ConfigError, StartError
from lqs.settings import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands add, list and revoke."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|list|revoke")
    add = actions.add_parser("add", help="make a key and show it once")
    add.add_argument("--name", required=True, help="who will use it; names are unique")
    add.add_argument("--tier", default="normal", help="one of the config's (default: %(default)s)")
    add.add_argument("--admin", action="store_true", help="may use /admin")
    listing = actions.add_parser("list", help="names and tiers; keys themselves are not known")
    revoke = actions.add_parser("revoke", help="take a key out of the file")
    revoke.add_argument("name", help="the name it was added under")
    for action in (add, listing, revoke):
        add_config_flag(action)
        action.add_argument("--file", help="key file (default: keys.file of the config)")


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say; the exit code. Raises StartError."""
    config = load(args.config, os.environ)
    path = args.file or config.keys.file
    if not path:
        raise ConfigError("keys.file: no key file is set. Set it in the config, or name one with --file.")
    actions = {"add": _add, "list": _list, "revoke": _revoke}
    return actions[args.action](args, config, KeyFile(path))


def _add(args: argparse.Namespace, config: Config, keys: KeyFile) -> int:
    if args.tier not in config.tiers:
        raise ConfigError(f"there is no tier {args.tier!r}; there are {', '.join(config.tiers)}.")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    print(keys.add(args.name, args.tier, is_admin=args.admin, created=today))
    return 0


def _list(_: argparse.Namespace, __: Config, keys: KeyFile) -> int:
    for record in keys.read():
        admin = "admin" if record.is_admin else ""
        print(f"{record.name:<24} {record.tier:<10} {record.created:<12} {admin}".rstrip())
    return 0


def _revoke(args: argparse.Namespace, _: Config, keys: KeyFile) -> int:
    if not keys.revoke(args.name):
        raise StartError(f"there is no key named {args.name!r}; `lqs keys list` shows them.")
    return 0
