"""`lqs check`: what `lqs serve` would do on this machine, without doing it; with --calibrate also how fast."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lqs.admission.keys import KeyRing
from lqs.admission.limit_words import in_short
from lqs.cards import read_once
from lqs.commands.calibrated import calibrated, cost_path
from lqs.commands.flags import add_setting_flags, load_config
from lqs.commands.gpu_lines import gpu_lines
from lqs.commands.model_lines import memory_lines, model_lines
from lqs.config import Config, is_loopback
from lqs.engine import plan as planning
from lqs.engine.backends import has_cuda
from lqs.engine.budget import check_budget
from lqs.engine.catalog import Entry, catalog_of, check_all, plan_all
from lqs.engine.plan import Machine, Plan
from lqs.engine.remarks import remarks_on
from lqs.engine.store import Store, store_folder
from lqs.errors import ConfigError, StartError
from lqs.placement.cuda import pin_order
from lqs.placement.survey import survey_of
from lqs.settings import check_exposure
from lqs.simulate.cost import Calibration, save_calibration
from lqs.simulate.propose import Lengths, proposal_lines

_MB = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the flags that override settings."""
    add_setting_flags(parser)
    parser.add_argument(
        "--calibrate", action="store_true", help="open the device slots and measure them: a minute or so"
    )
    parser.add_argument("--cost", metavar="FILE", help="where the measured lies (default: beside the models)")
    parser.add_argument(
        "--lengths",
        default="256,128",
        metavar="IN,OUT",
        help="tokens of the requests to propose for (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan; 1 if it does not fit, 2 if `lqs serve` would refuse it.

    Raises StartError for what leaves nothing to plan.
    """
    config = load_config(args)
    lengths = _lengths(args.lengths)
    keys = KeyRing(config)
    store = Store(store_folder(os.environ))
    entries = catalog_of(config, store)
    plans = plan_all(entries, _machine())
    for line in report(config, entries, plans, keys.num_keys):
        print(line, flush=True)
    code = _verdict(config, entries, plans, keys.num_keys)
    if code == 1:
        return code
    # The first model is the one that is measured.
    config, path, plan = entries[0].config, entries[0].path, plans[0]
    cost = Path(args.cost) if args.cost else cost_path(path)
    calibration = _calibrate(entries[0], cost) if args.calibrate else calibrated(cost, given=bool(args.cost))
    for line in _proposals(calibration, config, plan, lengths, keys.num_keys):
        print(line)
    return code


def _machine() -> Machine:
    """What there is to use, GPUs as CUDA will count them included. Raises DeviceError."""
    pin_order(os.environ)
    survey = survey_of(read_once(), os.environ, has_cuda=has_cuda())
    return replace(planning.probe_machine(), survey=survey)


def _lengths(text: str) -> Lengths:
    """`256,128` as lengths. Raises ConfigError."""
    numbers = text.split(",")
    if len(numbers) != 2 or not all(number.isdecimal() and 0 < int(number) <= 1_000_000 for number in numbers):
        raise ConfigError(f"--lengths: {text!r} is not understood; write IN,OUT, two numbers of tokens.")
    return Lengths(*map(int, numbers))


def _calibrate(entry: Entry, cost: Path) -> Calibration:
    """Measure, and keep what came of it. Raises StartError."""
    # libllama is loaded only where something is to be measured.
    from lqs.simulate.calibrate import calibrate  # noqa: PLC0415

    calibration = calibrate(
        entry.config, entry.path, lambda what: print(f"calibrate: {what}", file=sys.stderr, flush=True)
    )
    save_calibration(cost, calibration)
    print(f"calibrated {cost}", flush=True)
    return calibration


def _proposals(
    calibration: Calibration | None, config: Config, plan: Plan, lengths: Lengths, num_keys: int
) -> Iterator[str]:
    """Limits and bounds from what was measured, or how to get them."""
    if calibration is None:
        yield "proposals  none: nothing is measured here yet; `lqs check --calibrate` does it, in a minute or so"
        return
    measured = (calibration.threads, calibration.devices, calibration.shape.num_sequences, calibration.shape.kv_tokens)
    if measured != (plan.threads, len(plan.devices), plan.slots[0].num_sequences, plan.kv_tokens):
        yield "measured   with other threads, device slots, sequences or KV than these; calibrate again"
    cost = calibration.cost
    yield (
        f"step       {cost.fixed_ns / 1e6:.2f} ms + {cost.decode_ns / 1e6:.3f} ms a drawn token "
        f"+ {cost.prefill_ns / 1e6:.3f} ms a prompt token + {cost.context_ns:.1f} ns per token of context; "
        f"chunks of {calibration.shape.budget}; off by {calibration.error_p50:.0%}, at most {calibration.error_max:.0%}"
    )
    if calibration.swap_tokens:
        yield (
            f"swap       {calibration.swap_tokens} KV tokens: {calibration.swap_ms:.2f} ms to host memory and back, "
            f"{calibration.recompute_ms:.2f} ms to compute again"
        )
    yield from proposal_lines(calibration, config, lengths, num_keys)


def _verdict(config: Config, entries: Sequence[Entry], plans: Sequence[Plan], num_keys: int) -> int:
    """The exit code, and a line for what stands in the way."""
    try:
        check_all(entries, plans)
        check_budget(entries, plans)
    except StartError as error:
        print(error)
        return error.exit_code
    try:
        check_exposure(config, num_keys)
    except ConfigError as error:
        print(f"`lqs serve` will not start so: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def report(config: Config, entries: Sequence[Entry], plans: Sequence[Plan], num_keys: int) -> Iterator[str]:
    """The plan in lines."""
    queue, machine = config.queue, plans[0].machine
    yield f"machine    {machine.num_cores} cores, {machine.memory_free_bytes // _MB} MB free"
    yield from gpu_lines(lambda: machine.memory_free_bytes, dict(os.environ))
    for entry, plan in zip(entries, plans, strict=True):
        yield from model_lines(entry, plan)
    yield from memory_lines(plans, entries)
    yield f"promised   {_promise(config)}"
    yield from _default_length(config, plans[0])
    classes = zip(queue.levels, config.level_caps, strict=True)
    caps = ", ".join(f"{name} {cap}" for name, cap in classes)
    yield f"queue      {queue.total} in all; {caps}"
    yield f"keys       {num_keys or _who_without_keys(config)}"
    for number, (name, limit) in enumerate(config.limits.items()):
        yield f"{'' if number else 'limits':11}{name}: {in_short(limit)}"
    for remark in remarks_on(entries, plans):
        yield f"remark     {remark}"


def _promise(config: Config) -> str:
    """What a request is promised of the KV."""
    engine = config.engine
    if engine.grows_kv:
        return f"as answers come out, in blocks of {engine.kv_block_tokens} tokens; {engine.swap_mb} MB to swap"
    return "prompt and longest answer"


def _who_without_keys(config: Config) -> str:
    """Who may come while there is no key."""
    if is_loopback(config.server.host):
        return "none: this machine only"
    return "none: open to everybody" if config.server.insecure else "none yet"


def _default_length(config: Config, plan: Plan) -> Iterator[str]:
    """A line if requests that name no max_tokens are promised so much that they cannot fill the sequences."""
    if config.engine.grows_kv:
        return
    model, parallel = config.model, plan.slots[0].num_sequences
    bounds = [bound for bound in (model.default_max_tokens, model.max_tokens_max) if bound]
    promised = min(plan.request_tokens_max, *bounds) if bounds else plan.request_tokens_max
    at_once = plan.kv_tokens // promised if config.engine.kv_unified else parallel
    if at_once < parallel:
        advice = "lower" if model.default_max_tokens else "set"
        yield (
            f"           without max_tokens: {at_once} at once, {promised} tokens are kept for each; "
            f"{advice} model.default_max_tokens"
        )
