"""From what became of each request to figures per class and key, as a table and as rows."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lqs._core import Ending
from lqs.config import QueueConfig
from lqs.request import NS_PER_S
from lqs.simulate.play import Played

KEYS_SHOWN = 8

ENDED_UNSERVED: Mapping[int, str] = {
    Ending.ENDING_REFUSED: "refused",
    Ending.ENDING_BREAKER: "breaker",
    Ending.ENDING_EVICTED: "evicted",
    Ending.ENDING_EXPIRED: "expired",
    Ending.ENDING_TIMED_OUT: "timed out",
    Ending.ENDING_NEVER_FITS: "too long",
}


@dataclass(frozen=True, slots=True)
class Slo:
    """What counts as good: the first token by then, and each further one within that, on the average."""

    first_token_s: float
    per_token_s: float


@dataclass(slots=True)
class Group:
    """The figures of some requests of one run. Times in seconds; NaN where nobody got so far."""

    policy: str
    name: str
    num: int = 0
    num_good: int = 0
    span_s: float = 0.0
    unserved: Counter[str] = field(default_factory=Counter)
    first_token_s: array[float] = field(default_factory=lambda: array("d"))
    wait_s: array[float] = field(default_factory=lambda: array("d"))

    def first_token(self, share: float) -> float:
        """The time to the first token that this share of the served did not exceed."""
        return percentile(self.first_token_s, share)

    def wait(self, share: float) -> float:
        """The same of the time in the queue, over all that started."""
        return percentile(self.wait_s, share)

    @property
    def num_unserved(self) -> int:
        """Requests without a whole answer."""
        return sum(self.unserved.values())

    @property
    def goodput(self) -> float:
        """Requests per second that met the SLO."""
        return self.num_good / self.span_s if self.span_s else 0.0


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least of rising values that this share of them does not exceed; NaN of none."""
    if not ordered:
        return math.nan
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def groups_of(played: Played, queue: QueueConfig, slo: Slo) -> list[Group]:
    """All requests together; those of each class, of each lane and of the busiest keys, where there are several.

    A lane is told by the border where it begins, whatever the policy made of it.
    """
    trace, levels = played.trace, queue.levels
    whole = Group(played.policy, "all")
    by_level = {level: Group(played.policy, levels[level]) for level in sorted(set(trace.level))}
    busiest = Counter(trace.key).most_common(KEYS_SHOWN) if len(trace.keys) > 1 else []
    by_key = {key: Group(played.policy, f"key {trace.keys[key] or '-'}") for key, _ in sorted(busiest)}
    by_lane = [Group(played.policy, name) for name in ("short", "long")]
    for number in range(len(trace)):
        num_tokens = trace.prompt_tokens[number] + trace.max_tokens[number]
        homes = [whole, by_level[trace.level[number]], by_lane[num_tokens > queue.short_tokens_max]]
        if trace.key[number] in by_key:
            homes.append(by_key[trace.key[number]])
        _add(played, number, homes, slo)
    lanes = by_lane if all(lane.num for lane in by_lane) else []
    groups = [whole, *by_level.values(), *lanes, *by_key.values()]
    for group in groups:
        group.span_s = played.span_s
        group.first_token_s = array("d", sorted(group.first_token_s))
        group.wait_s = array("d", sorted(group.wait_s))
    return groups


def _add(played: Played, number: int, homes: Iterable[Group], slo: Slo) -> None:
    """Count one request in its groups."""
    arrival_ns = played.trace.arrival_ns[number]
    wait_s = (played.started_ns[number] - arrival_ns) / NS_PER_S
    has_first = played.first_token_ns[number] > 0
    first_s = (played.first_token_ns[number] - arrival_ns) / NS_PER_S
    unserved = ENDED_UNSERVED.get(played.ending[number])
    is_good = unserved is None and first_s <= slo.first_token_s and _per_token_s(played, number) <= slo.per_token_s
    has_started = unserved in (None, "timed out") and played.started_ns[number] >= arrival_ns
    for group in homes:
        group.num += 1
        group.num_good += is_good
        if unserved is not None:
            group.unserved[unserved] += 1
        if has_first:
            group.first_token_s.append(first_s)
        if has_started:
            group.wait_s.append(wait_s)


def _per_token_s(played: Played, number: int) -> float:
    num_more = min(played.trace.completion_tokens[number], played.trace.max_tokens[number]) - 1
    if num_more <= 0:
        return 0.0
    return (played.ended_ns[number] - played.first_token_ns[number]) / num_more / NS_PER_S


HEAD = ("policy", "who", "requests", "TTFT p50", "p90", "p99", "wait p50", "p99", "longest", "good/s", "not served")


def table(groups: Sequence[Group]) -> Iterator[str]:
    """The groups in lines, times in seconds."""
    rows = [HEAD, *(_cells(group) for group in groups)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), row[1].ljust(widths[1])]
        cells += [cell.rjust(width) for cell, width in zip(row[2:-1], widths[2:-1], strict=True)]
        yield "  ".join([*cells, row[-1]]).rstrip()


def _cells(group: Group) -> tuple[str, ...]:
    times = (*(group.first_token(share) for share in (0.5, 0.9, 0.99)), group.wait(0.5), group.wait(0.99))
    unserved = ", ".join(f"{num} {what}" for what, num in group.unserved.most_common())
    return (
        *(group.policy, group.name, f"{group.num}"),
        *(_time(value) for value in (*times, group.wait(1.0))),
        *(f"{group.goodput:.2f}", unserved or "-"),
    )


def _time(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def rows(groups: Sequence[Group], load: str) -> Iterator[dict[str, Any]]:
    """The figures as the bench commands write theirs; the peer is the same group under the first policy."""
    first = {group.name: _figures(group) for group in groups if group.policy == groups[0].policy}
    for group in groups:
        peer = None if group.policy == groups[0].policy else groups[0].policy
        for (what, unit), value in _figures(group).items():
            peer_value = first[group.name][what, unit] if peer else None
            yield {
                "goal": None,
                "what": f"{load}, {group.policy}, {group.name}: {what}",
                "value": _or_none(value),
                "unit": unit,
                "peer": peer,
                "peer_value": _or_none(peer_value),
                "ratio": value / peer_value if peer_value and not math.isnan(value / peer_value) else None,
                "pass": None,
                "runs": None,
            }


def _figures(group: Group) -> dict[tuple[str, str], float]:
    found = {(f"TTFT P{share}", "s"): group.first_token(share / 100) for share in (50, 90, 99)}
    found |= {(f"wait P{share}", "s"): group.wait(share / 100) for share in (50, 90, 99)}
    found["longest wait", "s"] = group.wait(1.0)
    found["goodput", "requests/s"] = group.goodput
    found["requests", ""] = group.num
    found |= {(what, "requests"): group.unserved[what] for what in ENDED_UNSERVED.values()}
    return found


def _or_none(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
