"""`lqs keys`: add, list and revoke API keys. A running server takes changes over on SIGHUP.

What a program wants, the key or the list, goes to stdout; what only people read goes to stderr.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys

from lqs.admission.key_file import KeyFile
from lqs.commands.flags import add_config_flag
from lqs.config import Config
from lqs.errors import ConfigError, StartError
from lqs.settings import load

_TAKEN_OVER = "A running server takes the change over on SIGHUP."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands add, list and revoke."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|list|revoke")
    add = actions.add_parser("add", help="make a key and show it once")
    add.add_argument("--name", required=True, help="who will use it; names are unique")
    add.add_argument("--tier", default="normal", help="one of the config's (default: %(default)s)")
    add.add_argument("--admin", action="store_true", help="it may also see and do what is under /admin")
    listing = actions.add_parser("list", help="names, tiers and how each begins; keys themselves are not known")
    revoke = actions.add_parser("revoke", help="take a key out of the file")
    name = revoke.add_mutually_exclusive_group(required=True)
    name.add_argument("name", nargs="?", metavar="NAME", help="the name it was added under")
    name.add_argument("--name", dest="named", metavar="NAME", help="the same, as `lqs keys add` calls it")
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
    print(keys.add(args.name, args.tier, is_admin=args.admin, created=today), flush=True)
    print(f"This is the only time the key is shown; {keys.path} keeps its hash. {_TAKEN_OVER}", file=sys.stderr)
    return 0


def _list(_: argparse.Namespace, __: Config, keys: KeyFile) -> int:
    for record in keys.read():
        print(f"{record.name:<24} {record.tier:<10} {record.prefix:<9} {record.created}".rstrip())
    return 0


def _revoke(args: argparse.Namespace, _: Config, keys: KeyFile) -> int:
    name = args.name or args.named
    if not keys.revoke(name):
        raise StartError(f"there is no key named {name!r} in {keys.path}; `lqs keys list` shows them.")
    print(f"{name} is revoked. {_TAKEN_OVER}", file=sys.stderr)
    return 0
