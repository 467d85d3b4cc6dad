"""`lqs drain`: take a running server out of use, or a device slot or a model of it; or have it restarted."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any
from urllib.parse import quote

from lqs.commands.chat import KEY_VARIABLE, Client
from lqs.errors import StartError

_WAIT_S = 600.0
# How long one call waits on the server, and how often a server that ends or restarts is looked at.
_CALL_S = 20.0
_LOOK_S = 0.2
# Device slots on which nothing runs.
_NOTHING_RUNS = ("drained", "dead", "failed", "backoff", "opening", "quarantined")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is to be drained, and for how long to wait."""
    parser.epilog = f"Where the server has keys it takes an admin's: {KEY_VARIABLE}=KEY lqs drain ..."
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="where the server is (default: %(default)s)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--device-slot", metavar="N", help="only this device slot, by its number or device; the rest goes on"
    )
    what.add_argument("--model", metavar="NAME", help="only the device slots of this model")
    what.add_argument(
        "--restart", action="store_true", help="have `lqs serve --supervise` put a new server in its place"
    )
    parser.add_argument("--undrain", action="store_true", help="let a device slot or a model take requests again")
    parser.add_argument(
        "--wait",
        nargs="?",
        type=_seconds,
        const=_WAIT_S,
        metavar="SECONDS",
        help="until it is done, for so long at most (without a number: 600); 1 if it is not done by then",
    )


def run(args: argparse.Namespace) -> int:
    """Do it; 0 done (without --wait: begun), 1 not done in time. Raises StartError."""
    client = Client(args.url, os.environ.get(KEY_VARIABLE))
    is_part = args.device_slot is not None or args.model is not None
    if args.undrain and not is_part:
        print("lqs: --undrain wants --device-slot or --model: a server that drains has ended for good", file=sys.stderr)
        return 2
    end_s = time.monotonic() + (args.wait or 0)
    if args.restart:
        return _restart(client, None if args.wait is None else end_s)
    if is_part:
        return _drain_part(client, _path_of(args), end_s, is_waiting=args.wait is not None and not args.undrain)
    print(f"draining, {_requests(client.post('/admin/drain')['requests'])} inside")
    return 0 if args.wait is None or _is_gone(client, end_s) else _late("It still serves.")


def _path_of(args: argparse.Namespace) -> str:
    kind, name = ("models", args.model) if args.model is not None else ("devices", args.device_slot)
    return f"/admin/{kind}/{quote(name, safe='/')}/{'undrain' if args.undrain else 'drain'}"


def _drain_part(client: Client, path: str, end_s: float, *, is_waiting: bool) -> int:
    """Drain or open some device slots, show them, and wait until they are empty if that is wanted."""
    while True:
        left_s = max(end_s - time.monotonic(), 0.0) if is_waiting else 0.0
        answer = client.post(f"{path}?wait={min(left_s, _CALL_S):.3f}")
        slots = answer.get("data", [answer])
        is_done = all(slot["state"] in _NOTHING_RUNS for slot in slots)
        if not is_waiting or is_done or left_s <= 0:
            break
    for slot in slots:
        print(_line(slot))
    return 0 if is_done or not is_waiting else _late("Some still runs there.")


def _restart(client: Client, end_s: float | None) -> int:
    old = client.post("/admin/restart")["pid"]
    print(f"restarting the server, process {old}")
    while end_s is not None:
        try:
            said = client.get("/admin/restart")
        except StartError:
            # Its connection was the old one's last.
            said = {"pid": old, "successor": "starting"}
        if said["pid"] != old:
            print(f"process {said['pid']} serves")
            break
        if said["successor"] == "failed":
            print(
                f"lqs: the new server did not come up ({said['how']}); its log says why. The old one serves on.",
                file=sys.stderr,
            )
            return 1
        if time.monotonic() > end_s:
            return _late("The old one still serves.")
        time.sleep(_LOOK_S)
    return 0


def _is_gone(client: Client, end_s: float) -> bool:
    while time.monotonic() < end_s:
        try:
            client.get("/livez")
        except StartError:
            return True
        time.sleep(_LOOK_S)
    return False


def _line(slot: dict[str, Any]) -> str:
    """One device slot in a line."""
    running, waiting = _requests(slot["running"]), slot["waiting"]
    return (
        f"{slot['slot']:>3} {slot['device']:<12} {slot['model']:<24} {slot['state']:<11} {running} run, {waiting} wait"
    )


def _requests(num: int) -> str:
    return f"{num} request{'' if num == 1 else 's'}"


def _late(what: str) -> int:
    print(f"lqs: the time to wait is over. {what}", file=sys.stderr)
    return 1


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError("seconds, at most 86400")
    return seconds
