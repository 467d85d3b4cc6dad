"""`lqs check`: what `lqs serve` would do on this machine, without doing it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from lqs.admission.keys import KeyRing
from lqs.admission.limit_words import in_short
from lqs.commands.flags import add_setting_flags, load_config
from lqs.config import Config, is_loopback
from lqs.engine.plan import Plan, check_fits, make_plan
from lqs.engine.store import DEFAULT_MODEL, Store, store_folder
from lqs.errors import ConfigError, StartError
from lqs.settings import check_exposure

_MB = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the flags that override settings."""
    add_setting_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan; 1 if it does not fit, 2 if `lqs serve` would refuse it.

    Raises StartError for what leaves nothing to plan.
    """
    config = load_config(args)
    keys = KeyRing(config)
    path = Store(store_folder(os.environ)).resolve(config.model.path or DEFAULT_MODEL.name)
    plan = make_plan(config, path)
    for line in report(config, path, plan, keys.num_keys):
        print(line)
    return _verdict(config, plan, keys.num_keys)


def _verdict(config: Config, plan: Plan, num_keys: int) -> int:
    """The exit code, and a line for what stands in the way."""
    try:
        check_fits(config, plan)
    except StartError as error:
        print(error)
        return error.exit_code
    try:
        check_exposure(config, num_keys)
    except ConfigError as error:
        print(f"`lqs serve` will not start so: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def report(config: Config, path: Path, plan: Plan, num_keys: int) -> Iterator[str]:
    """The plan in lines."""
    engine, queue, machine = config.engine, config.queue, plan.machine
    slots = len(plan.devices)
    yield f"machine    {machine.num_cores} cores, {machine.memory_free_bytes // _MB} MB free"
    yield f"model      {path.name}, context {plan.n_ctx_train} tokens"
    yield f"devices    {', '.join(plan.devices)}, {plan.threads} threads each"
    yield f"weights    {plan.weights_bytes // _MB} MB, shared by the device slots"
    yield (
        f"KV         {plan.kv_tokens} tokens x {plan.kv_bytes_per_token} bytes x {slots} = {plan.kv_bytes // _MB} MB"
    )
    yield f"margin     {engine.kv_margin_mb} MB"
    yield f"promised   {_promise(config)}"
    yield f"sequences  {engine.parallel} per device slot, {engine.parallel * slots} in all"
    yield f"a request  at most {plan.request_tokens_max} tokens, prompt and answer together"
    yield from _default_length(config, plan)
    classes = zip(queue.levels, config.level_caps, strict=True)
    caps = ", ".join(f"{name} {cap}" for name, cap in classes)
    yield f"queue      {queue.total} in all; {caps}"
    yield f"keys       {num_keys or _who_without_keys(config)}"
    for number, (name, limit) in enumerate(config.limits.items()):
        yield f"{'' if number else 'limits':11}{name}: {in_short(limit)}"


def _promise(config: Config) -> str:
    """What a request is promised of the KV."""
    engine = config.engine
    if engine.kv_mode == "expected" and engine.kv_unified:
        return f"as answers come out, in blocks of {engine.kv_block_tokens} tokens; {engine.swap_mb} MB to swap"
    return "prompt and longest answer"


def _who_without_keys(config: Config) -> str:
    """Who may come while there is no key."""
    if is_loopback(config.server.host):
        return "none: this machine only"
    return "none: open to everybody" if config.server.insecure else "none yet"


def _default_length(config: Config, plan: Plan) -> Iterator[str]:
    """A line if requests that name no max_tokens are promised so much that they cannot fill the sequences."""
    if config.engine.kv_mode == "expected" and config.engine.kv_unified:
        return
    model, parallel = config.model, config.engine.parallel
    bounds = [bound for bound in (model.default_max_tokens, model.max_tokens_max) if bound]
    promised = min(plan.request_tokens_max, *bounds) if bounds else plan.request_tokens_max
    at_once = plan.kv_tokens // promised if config.engine.kv_unified else parallel
    if at_once < parallel:
        advice = "lower" if model.default_max_tokens else "set"
        yield (
            f"           without max_tokens: {at_once} at once, {promised} tokens are kept for each; "
            f"{advice} model.default_max_tokens"
        )
