"""What limits say to people and to clients' programs. Never a key: limits go by their names in the config."""

from __future__ import annotations

from lqs.config import QueueConfig
from lqs.config_limits import LimitConfig
from lqs.request import NS_PER_S

_NS_PER_MS = 1_000_000
_COUNTED = {"requests": "requests", "tokens": "tokens", "compute_s": "seconds of compute"}


def duration(time_ns: int) -> str:
    """A time as OpenAI's headers write it, rounded up: 12ms, 1.5s, 6m0s, 1h0m30s."""
    num_ms = -(-time_ns // _NS_PER_MS)
    if 0 < num_ms < 1000:
        return f"{num_ms}ms"
    if num_ms < 60_000:
        return f"{num_ms / 1000:g}s"
    minutes, seconds = divmod(-(-num_ms // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}s" if hours else f"{minutes}m{seconds}s"


def in_short(limit: LimitConfig) -> str:
    """A limit in a few words: `100 tokens in 1m0s for each key`."""
    whom = "for all together" if limit.per == "server" else f"for each {limit.per}"
    chosen = [*limit.tiers, *limit.models, *limit.routes]
    if chosen:
        whom += f" of {', '.join(chosen)}"
    if limit.of == "parallel":
        return f"{limit.amount} at once {whom}"
    return f"{limit.amount} {_COUNTED[limit.of]} in {duration(round(limit.period_s * NS_PER_S))} {whom}"


def used_up(name: str, limit: LimitConfig, wait_ns: int | None) -> str:
    """Why a request is refused that could pass in `wait_ns`, None if that depends on others."""
    when = f"this one could pass in {duration(wait_ns)}" if wait_ns is not None else "wait until one has ended"
    return f"The limit {name} ({in_short(limit)}) is used up; {when}."


def too_busy(queue: QueueConfig, wait_ns: int) -> str:
    """Why a request is refused while the load is high."""
    return (
        f"The load is high and only {queue.entry_per_s:g} requests a second are let in; "
        f"this one could pass in {duration(wait_ns)}."
    )


def too_small(name: str, limit: LimitConfig, num_tokens: int) -> str:
    """Why a request can never pass. Only tokens can ask for too much: the rest is one, or a guess."""
    return (
        f"The request may take {num_tokens} tokens or more, prompt and answer together; the limit {name} "
        f"({in_short(limit)}) never lets more than {limit.capacity} pass at once. Ask for a smaller max_tokens, or "
        f"shorten the prompt."
    )
