"""What an operator can say about limits: a table `[limits.NAME]` for each."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated

from msgspec import Meta, Struct

from lqs.describe import key as _key

# Limits that there may be; the core lets one request be charged by a few more.
_NUM_LIMITS_MAX = 24
_NAME = re.compile("[a-z][a-z0-9_]{0,31}")
_BUCKETS = ("token_bucket", "leaky_bucket")
# Bounds of the core: 2**40 microseconds, and 2**60 nanoseconds.
_COMPUTE_S_MAX = 1_000_000
_FILL_S_MAX = 1_000_000_000


class LimitConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One limit: what it counts, for whom, and how much of it passes."""

    of: Annotated[
        str,
        _key(
            "What it counts: requests, tokens (prompt and answer), seconds on a device, requests at once.",
            pattern="^(requests|tokens|compute_s|parallel)$",
        ),
    ]
    amount: Annotated[int, _key("How much of it passes in each period; of parallel, at once.", ge=1, le=1_000_000_000)]
    per: Annotated[
        str,
        _key("For each of these on its own; server: for all together.", pattern="^(key|tier|model|route|server)$"),
    ] = "key"
    kind: Annotated[
        str,
        _key("How it is counted.", pattern="^(token_bucket|leaky_bucket|fixed_window|sliding_window)$"),
    ] = "token_bucket"
    period_s: Annotated[float, _key("The period.", "s", ge=0.001, le=2_678_400)] = 60.0
    burst: Annotated[
        int,
        _key(
            "What a token bucket holds, or a leaky bucket's line; 0: as much as amount.",
            ge=0,
            le=1_000_000_000,
        ),
    ] = 0
    tiers: Annotated[tuple[str, ...], _key("Only keys of these tiers; empty: all.", min_length=0, max_length=64)] = ()
    models: Annotated[tuple[str, ...], _key("Only these models; empty: all.", min_length=0, max_length=64)] = ()
    routes: Annotated[
        tuple[Annotated[str, Meta(pattern="^(chat|completions)$")], ...],
        _key("Only chat, or only completions; empty: all.", min_length=0, max_length=2),
    ] = ()

    @property
    def capacity(self) -> int:
        """The most that may pass at once."""
        return self.burst or self.amount

    @property
    def is_bucket(self) -> bool:
        """Whether it lets through at a rate, with a burst of its own."""
        return self.of != "parallel" and self.kind in _BUCKETS


def limit_rules(limits: Mapping[str, LimitConfig], tiers: Collection[str]) -> Iterator[tuple[bool, str]]:
    """What no key of a limit alone can show: whether it holds, and what to say if not."""
    yield len(limits) <= _NUM_LIMITS_MAX, f"limits: there may be at most {_NUM_LIMITS_MAX}."
    for name, limit in limits.items():
        where = f"limits.{name}"
        unknown = ", ".join(tier for tier in limit.tiers if tier not in tiers)
        yield (
            _NAME.fullmatch(name) is not None,
            f"{where}: a name is small letters, digits and _, a letter first.",
        )
        yield name != "entry", f"{where}: queue.entry_per_s is the limit of that name."
        is_small = limit.of != "compute_s" or max(limit.amount, limit.burst) <= _COMPUTE_S_MAX
        yield is_small, f"{where}.amount: at most {_COMPUTE_S_MAX} s of compute."
        yield limit.is_bucket or not limit.burst, f"{where}.burst: only buckets have one."
        is_back = limit.capacity * limit.period_s <= limit.amount * _FILL_S_MAX
        yield is_back, f"{where}.burst: it would take more than 30 years to come back."
        yield not unknown, f"{where}.tiers: there is no tier {unknown}."
