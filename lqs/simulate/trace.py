"""A trace: when requests come, how long they are, in which class and for whom. And how to read one.

Four formats are known by their first line:

    lqs         CSV or JSON lines: arrival (s), prompt_tokens, completion_tokens, and if wanted
                max_tokens, class (name or number), key (any name)
    Azure       CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens
    BurstGPT    CSV: Timestamp (s), Request tokens, Response tokens, ...
    Mooncake    JSON lines: timestamp (ms), input_length, output_length, ...

A request whose answer has no token, which is how BurstGPT tells a failure, is left out and counted.
"""

from __future__ import annotations

import csv
import datetime
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

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


def read_trace(path: str, levels: Sequence[str], *, default_level: int = 0, num_max: int | None = None) -> Trace:
    """Read a file; of it the first `num_max` that made an answer. Raises TraceInvalid.

    `levels` are the names of the classes; a request that names none has `default_level`.
    """
    reader = _Reader(path, levels)
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            items = list(reader.items(file, num_max))
    except OSError as error:
        raise TraceInvalid(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise TraceInvalid(f"{path}: is not text in UTF-8.") from None
    if not items:
        raise TraceInvalid(f"{path}: holds no request.")
    return make_trace(items, default_level=default_level, num_skipped=reader.num_skipped)


def make_trace(items: list[Item], *, default_level: int, num_skipped: int = 0) -> Trace:
    """The items as a trace, by arrival; those of one moment in their order."""
    items.sort(key=lambda item: item.arrival_s)
    begin_s = items[0].arrival_s
    trace = Trace(num_skipped=num_skipped)
    numbers: dict[str, int] = {}
    for item in items:
        key = numbers.setdefault(item.key, len(numbers))
        level = default_level if item.level is None else item.level
        trace.append(item._replace(arrival_s=item.arrival_s - begin_s), key, level)
    trace.keys = list(numbers)
    return trace


def at_once(num: int, prompt_tokens: int, completion_tokens: int) -> Trace:
    """That many equal requests, all there at once."""
    return make_trace([Item(0.0, prompt_tokens, completion_tokens)] * num, default_level=0)


class _Reader:
    """Turns the lines of one file into items. Knows where it is, for the messages."""

    def __init__(self, path: str, levels: Sequence[str]) -> None:
        self._path = path
        self._line = 0
        self._levels = {name: number for number, name in enumerate(levels)}
        self._levels |= {str(number): number for number in range(len(levels))}
        self.num_skipped = 0

    def items(self, file: Iterator[str], num_max: int | None) -> Iterator[Item]:
        num_found = 0
        for item in self._all(file):
            if item.completion_tokens == 0:
                self.num_skipped += 1
                continue
            yield item
            num_found += 1
            if num_found == num_max:
                return

    def _all(self, file: Iterator[str]) -> Iterator[Item]:
        """Every line as an item, by the format that the first line shows."""
        first = next(file, "")
        self._line = 1
        if first.lstrip().startswith("{"):
            yield from self._json_lines(first, file)
        else:
            yield from self._csv_rows(first, file)

    def _csv_rows(self, first: str, file: Iterator[str]) -> Iterator[Item]:
        names = [name.strip() for name in next(csv.reader([first]), [])]
        convert = self._converter(names)
        for cells in csv.reader(file):
            self._line += 1
            if not cells:
                continue
            if len(cells) < len(names):
                raise self._wrong(f"has {len(cells)} columns, the first line names {len(names)}")
            yield convert(dict(zip(names, cells, strict=False)))

    def _json_lines(self, first: str, file: Iterator[str]) -> Iterator[Item]:
        row = self._json(first)
        convert = self._converter(list(row))
        yield convert(row)
        for line in file:
            self._line += 1
            if line.strip():
                yield convert(self._json(line))

    def _json(self, line: str) -> dict[str, Any]:
        try:
            return msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise self._wrong(f"is not a JSON object: {error}") from None

    def _converter(self, names: Sequence[str]) -> Callable[[Mapping[str, Any]], Item]:
        """What turns a row with these names into an item."""
        known: tuple[tuple[set[str], Callable[[Mapping[str, Any]], Item]], ...] = (
            ({"arrival", "prompt_tokens", "completion_tokens"}, self._own),
            ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, self._azure),
            ({"timestamp", "input_length", "output_length"}, self._mooncake),
            ({"Timestamp", "Request tokens", "Response tokens"}, self._burst_gpt),
        )
        for wanted, convert in known:
            if wanted <= set(names):
                return convert
        raise self._wrong(
            "is of no known format; lqs's own has arrival,prompt_tokens,completion_tokens and, if wanted, "
            "max_tokens, class and key"
        )

    def _own(self, row: Mapping[str, Any]) -> Item:
        max_tokens = row.get("max_tokens") or 0
        return Item(
            self._seconds(row, "arrival"),
            self._tokens(row, "prompt_tokens"),
            self._tokens(row, "completion_tokens"),
            self._tokens(row, "max_tokens") if max_tokens else 0,
            self._level(row.get("class", "")),
            str(row.get("key") or ""),
        )

    def _azure(self, row: Mapping[str, Any]) -> Item:
        try:
            # Seven digits of a second are written there; Python reads six.
            arrived = datetime.datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
        except ValueError:
            raise self._wrong(f"TIMESTAMP is no date and time: {row['TIMESTAMP'][:40]!r}") from None
        arrival_s = arrived.replace(tzinfo=datetime.UTC).timestamp()
        return Item(arrival_s, self._tokens(row, "ContextTokens"), self._tokens(row, "GeneratedTokens"))

    def _mooncake(self, row: Mapping[str, Any]) -> Item:
        arrival_s = self._seconds(row, "timestamp", unit_s=1e-3)
        return Item(arrival_s, self._tokens(row, "input_length"), self._tokens(row, "output_length"))

    def _burst_gpt(self, row: Mapping[str, Any]) -> Item:
        arrival_s = self._seconds(row, "Timestamp")
        return Item(arrival_s, self._tokens(row, "Request tokens"), self._tokens(row, "Response tokens"))

    def _seconds(self, row: Mapping[str, Any], name: str, unit_s: float = 1.0) -> float:
        try:
            value = float(row[name]) * unit_s
        except (KeyError, TypeError, ValueError):
            value = -1.0
        if not 0 <= value <= ARRIVAL_S_MAX:
            raise self._wrong(f"{name} is no time: {str(row.get(name))[:40]!r}")
        return value

    def _tokens(self, row: Mapping[str, Any], name: str) -> int:
        try:
            number = float(row[name])
        except (KeyError, TypeError, ValueError):
            number = -1.0
        if not 0 <= number <= TOKENS_MAX or number != int(number):
            raise self._wrong(f"{name} is no number of tokens: {str(row.get(name))[:40]!r}")
        return int(number)

    def _level(self, name: Any) -> int | None:
        text = "" if name is None else str(name).strip()
        if not text:
            return None
        if text not in self._levels:
            known = ", ".join(word for word in self._levels if not word.isdecimal())
            raise self._wrong(f"there is no class {text[:40]!r}; there are {known}")
        return self._levels[text]

    def _wrong(self, what: str) -> TraceInvalid:
        return TraceInvalid(f"{self._path}, line {self._line}: {what}.")
