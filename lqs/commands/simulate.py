"""`lqs simulate`: the same scheduler under a virtual clock, on a trace, with device slots that are models."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lqs.commands.calibrated import calibrated, of_config
from lqs.commands.flags import add_config_flag, load_config
from lqs.config import Config, QueueConfig
from lqs.errors import ConfigError
from lqs.simulate.cost import EXAMPLE, Calibration
from lqs.simulate.generate import generate, spread
from lqs.simulate.picture import Panel, bars, svg
from lqs.simulate.play import Devices, Played, capacity_of, play
from lqs.simulate.policy import POLICIES, Policy
from lqs.simulate.read import read_trace
from lqs.simulate.summary import Slo, groups_of, rows, table
from lqs.simulate.trace import Trace

_EXAMPLE_RECIPE = "gamma cv=3 requests=4000 prompt=lognormal:200:0.8 answer=lognormal:64:0.6"
_EXAMPLE_CLASSES = "critical=0.1,normal=0.6,background=0.3"
_EXAMPLE_KEYS = 3
_LOOK_EVERY = 200_000
_SLO_S_MAX = 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is played, on what, and what is shown of it."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--trace", metavar="FILE", help="requests: lqs's own CSV or JSON lines, Azure, BurstGPT, Mooncake"
    )
    source.add_argument("--generate", metavar="RECIPE", help=f"requests made up, such as {_EXAMPLE_RECIPE!r}")
    parser.add_argument("--requests", type=int, metavar="N", help="of the trace only the first N")
    parser.add_argument("--scale", type=float, metavar="X", help="make prompts and answers X times as long")
    parser.add_argument("--classes", metavar="NAME=SHARE,...", help="give the requests classes by chance")
    parser.add_argument("--keys", type=int, default=0, metavar="N", help="give the requests N keys by chance")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: %(default)s)")
    parser.add_argument(
        "--load",
        type=float,
        action="append",
        metavar="X",
        help="play it at X of the capacity; repeat (default: as it is)",
    )
    parser.add_argument("--policy", action="append", choices=POLICIES, help="repeat (default: all)")
    parser.add_argument("--devices", type=int, metavar="N", help="device slots (default: as calibrated)")
    parser.add_argument(
        "--cost",
        metavar="FILE",
        help="what `lqs check --calibrate` wrote (default: of the config's model, else an example)",
    )
    parser.add_argument(
        "--slo-ttft", type=float, default=2.0, metavar="S", help="good: first token by then (default: %(default)s)"
    )
    parser.add_argument(
        "--slo-token",
        type=float,
        default=0.5,
        metavar="S",
        help="good: and so long per further token (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures as rows")
    parser.add_argument("--picture", metavar="FILE", help="draw them as an SVG")
    add_config_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Play, print, write; the exit code. Raises StartError."""
    config = load_config(args)
    _check(args)
    calibration = (calibrated(Path(args.cost), given=True) if args.cost else of_config(config)) or EXAMPLE
    devices = Devices.of(calibration, config, args.devices)
    trace = _trace(args, config)
    for line in _opening(args, config, calibration, devices, trace):
        print(line)
    slo = Slo(args.slo_ttft, args.slo_token)
    found: list[dict[str, Any]] = []
    panels = []
    for label, scaled in _loads(args, trace, devices):
        played = [_play(scaled, Policy.named(name, config), devices) for name in args.policy or POLICIES]
        found += _show(label, played, config.queue, slo)
        panels.append([Panel(f"{one.policy}, {label}", one) for one in played])
    if args.json:
        _write(args.json, json.dumps(found, indent=1) + "\n")
    if args.picture:
        _write(args.picture, svg(panels, config.queue.levels))
        print(f"\npicture: {args.picture}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """What argparse does not look at."""
    bounds = (("devices", 1, 64), ("requests", 2, None), ("keys", 0, 10_000))
    for name, least, most in bounds:
        value = getattr(args, name)
        if value is not None and (value < least or (most is not None and value > most)):
            raise ConfigError(
                f"--{name}: {value} is out of bounds; at least {least}" + (f", at most {most}." if most else ".")
            )
    factors = [("scale", args.scale), *(("load", load) for load in args.load or ())]
    for name, limit_s in (("slo-ttft", args.slo_ttft), ("slo-token", args.slo_token)):
        if not 0 < limit_s <= _SLO_S_MAX:
            raise ConfigError(f"--{name}: {limit_s:g} is out of bounds; above 0, at most {_SLO_S_MAX} s.")
    for name, factor in factors:
        if factor is not None and not 0 < factor <= 100:
            raise ConfigError(f"--{name}: {factor:g} is out of bounds; above 0, at most 100.")


def _trace(args: argparse.Namespace, config: Config) -> Trace:
    """What is to be played, with classes and keys."""
    levels = config.queue.levels
    default_level = config.tiers[config.keys.anonymous_tier].level
    classes, num_keys = args.classes, args.keys
    if args.trace:
        trace = read_trace(args.trace, levels, default_level=default_level, num_max=args.requests)
    else:
        trace = generate(args.generate or _EXAMPLE_RECIPE, seed=args.seed, default_level=default_level)
        trace = trace.first(args.requests or len(trace))
        if args.generate is None and classes is None and config.queue.levels == Config().queue.levels:
            classes, num_keys = _EXAMPLE_CLASSES, num_keys or _EXAMPLE_KEYS
    spread(trace, _shares(classes, levels), num_keys, seed=args.seed)
    return trace.with_lengths(args.scale) if args.scale else trace


def _shares(text: str | None, levels: Sequence[str]) -> dict[int, float]:
    """`critical=0.1,low=0.9` by the number of the class."""
    found = {}
    for word in text.split(",") if text else ():
        name, _, number = word.partition("=")
        if name not in levels or not number.replace(".", "", 1).isdecimal():
            raise ConfigError(f"--classes: {word!r} is not understood; write NAME=SHARE of {', '.join(levels)}.")
        found[levels.index(name)] = float(number)
    if found and not any(found.values()):
        raise ConfigError("--classes: at least one share must be above 0.")
    return found


def _opening(
    args: argparse.Namespace, config: Config, calibration: Calibration, devices: Devices, trace: Trace
) -> Iterator[str]:
    """What is played, and on what."""
    skipped = f", {trace.num_skipped} without an answer left out" if trace.num_skipped else ""
    source = args.trace or args.generate or f"{_EXAMPLE_RECIPE} (an example)"
    scaled = f", lengths x {args.scale:g}" if args.scale else ""
    yield f"trace    {source}: {len(trace)} requests in {trace.span_s:.0f} s{skipped}{scaled}"
    cost, shape = calibration.cost, calibration.shape
    yield (
        f"devices  {devices.num} x {shape.num_sequences} sequences, {shape.kv_tokens} KV tokens, "
        f"{shape.budget} tokens a step: {calibration.model}, {calibration.machine}"
    )
    yield (
        f"step     {cost.fixed_ns / 1e6:.2f} ms + {cost.decode_ns / 1e6:.2f} ms a drawn token "
        f"+ {cost.prefill_ns / 1e6:.3f} ms a prompt token + {cost.context_ns:.0f} ns per token of context"
    )
    if calibration is EXAMPLE:
        yield "         an example; `lqs check --calibrate` measures yours"
    elif shape.num_sequences != config.engine.parallel:
        other = f"{shape.num_sequences} sequences, and the config has {config.engine.parallel}"
        yield f"         measured with {other}: calibrate again"


def _loads(args: argparse.Namespace, trace: Trace, devices: Devices) -> Iterator[tuple[str, Trace]]:
    """The trace at each load that is asked for, under its name."""
    capacity = capacity_of(trace, devices)
    if capacity <= 0:
        raise ConfigError(
            "no request of the trace fits a device slot: it has too few KV tokens, or too short a context."
        )
    print(f"capacity {capacity:.2f} requests/s of this trace")
    if not args.load and not trace.rate:
        raise ConfigError("all requests of the trace come at one moment: there is no load to speak of; give --load.")
    for load in args.load or ():
        yield f"load {load:g}", trace.at_rate(load * capacity)
    if not args.load:
        yield f"as it is (load {trace.rate / capacity:.2f})", trace


def _play(trace: Trace, policy: Policy, devices: Devices) -> Played:
    """Play one policy; a long one says on a terminal how far it is."""

    def look(num_arrived: int, num_all: int) -> None:
        if num_all > _LOOK_EVERY and sys.stderr.isatty():
            sys.stderr.write(f"\r{policy.name}: {num_arrived / num_all:4.0%}\r")

    return play(trace, policy, devices, look=look)


def _show(label: str, played: Sequence[Played], queue: QueueConfig, slo: Slo) -> list[dict[str, Any]]:
    """Print one load's table and drawing; its rows."""
    groups = [group for one in played for group in groups_of(one, queue, slo)]
    busy = ", ".join(f"{one.policy} {one.busy:.0%}" for one in played)
    good = f"first token in {slo.first_token_s:g} s and {slo.per_token_s:g} s a token"
    print(f"\n{label}; times in s; good: {good}; busy: {busy}")
    for line in table(groups):
        print(line)
    print()
    for line in bars(groups):
        print(line)
    return list(rows(groups, label))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}.") from None
