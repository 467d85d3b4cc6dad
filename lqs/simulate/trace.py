"""A trace: when requests come, how long they are, in which class and for whom."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lqs.errors import ConfigError
from lqs.request import NS_PER_S

TOKENS_MAX = 1_000_000_000
ARRIVAL_S_MAX = 1e9


class TraceInvalid(ConfigError):
    """A trace that cannot be read; the message names the file, the line and what is wrong."""


class Item(NamedTuple):
    """One request of a trace. `max_tokens` 0: as long as its answer is."""

    arrival_s: float
    prompt_tokens: int
    completion_tokens: int
    max_tokens: int = 0
    level: int | None = None
    key: str = ""


@dataclass(slots=True)
class Trace:
    """Requests in columns, in the order of arrival; `arrival_ns` begins at 0.

    `key` counts into `keys`. `num_skipped` were in the file and made no answer.
    """

    arrival_ns: array[int] = field(default_factory=lambda: array("q"))
    prompt_tokens: array[int] = field(default_factory=lambda: array("I"))
    completion_tokens: array[int] = field(default_factory=lambda: array("I"))
    max_tokens: array[int] = field(default_factory=lambda: array("I"))
    level: array[int] = field(default_factory=lambda: array("B"))
    key: array[int] = field(default_factory=lambda: array("I"))
    keys: list[str] = field(default_factory=list)
    num_skipped: int = 0

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return self.arrival_ns[-1] / NS_PER_S if self.arrival_ns else 0.0

    @property
    def rate(self) -> float:
        """Arrivals per second, on the average."""
        return (len(self) - 1) / self.span_s if self.span_s > 0 else 0.0

    def append(self, item: Item, key: int, level: int) -> None:
        """Add one at its end; it came no earlier than the last."""
        self.arrival_ns.append(int(item.arrival_s * NS_PER_S))
        self.prompt_tokens.append(item.prompt_tokens)
        self.completion_tokens.append(item.completion_tokens)
        self.max_tokens.append(item.max_tokens or item.completion_tokens)
        self.level.append(level)
        self.key.append(key)

    def at_rate(self, rate: float) -> Trace:
        """The same requests, in the same rhythm, at another rate per second."""
        factor = self.rate / rate if self.rate > 0 else 0.0
        _check_span(self.span_s * factor)
        return replace(self, arrival_ns=array("q", (int(at_ns * factor) for at_ns in self.arrival_ns)))

    def with_lengths(self, factor: float) -> Trace:
        """The same requests with prompts and answers so many times as long, of at least a token."""

        def times(column: array[int]) -> array[int]:
            return array("I", (min(max(round(value * factor), 1), TOKENS_MAX) for value in column))

        return replace(
            self,
            prompt_tokens=times(self.prompt_tokens),
            completion_tokens=times(self.completion_tokens),
            max_tokens=times(self.max_tokens),
        )

    def sampled(self, num_max: int) -> Trace:
        """Every so many-th request of the trace, at most that many, all there at once."""
        part = self._part(slice(None, None, -(-len(self) // num_max)))
        return replace(part, arrival_ns=array("q", bytes(8 * len(part))))

    def first(self, num_max: int) -> Trace:
        """The requests that come first, at most that many."""
        return self._part(slice(num_max))

    def _part(self, part: slice) -> Trace:
        return replace(
            self,
            arrival_ns=self.arrival_ns[part],
            prompt_tokens=self.prompt_tokens[part],
            completion_tokens=self.completion_tokens[part],
            max_tokens=self.max_tokens[part],
            level=self.level[part],
            key=self.key[part],
        )


def make_trace(items: list[Item], *, default_level: int, num_skipped: int = 0) -> Trace:
    """The items as a trace, by arrival; those of one moment in their order. Raises TraceInvalid."""
    items.sort(key=lambda item: item.arrival_s)
    begin_s = items[0].arrival_s
    _check_span(items[-1].arrival_s - begin_s)
    trace = Trace(num_skipped=num_skipped)
    numbers: dict[str, int] = {}
    for item in items:
        key = numbers.setdefault(item.key, len(numbers))
        level = default_level if item.level is None else item.level
        trace.append(item._replace(arrival_s=item.arrival_s - begin_s), key, level)
    trace.keys = list(numbers)
    return trace


def _check_span(span_s: float) -> None:
    """Raises TraceInvalid for more time than the virtual clock has."""
    if not span_s <= ARRIVAL_S_MAX:
        raise TraceInvalid(f"the requests come over {span_s:.3g} s; at most {ARRIVAL_S_MAX:.0e} s can be played.")


def at_once(num: int, prompt_tokens: int, completion_tokens: int) -> Trace:
    """That many equal requests, all there at once."""
    return make_trace([Item(0.0, prompt_tokens, completion_tokens)] * num, default_level=0)
