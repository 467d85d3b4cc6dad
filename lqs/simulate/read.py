"""Reads a trace from a file.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lqs.simulate.trace import ARRIVAL_S_MAX, TOKENS_MAX, Item, Trace, TraceInvalid, make_trace


def read_trace(path: str, levels: Sequence[str], *, default_level: int = 0, num_max: int | None = None) -> Trace:
    """Read a file; of it the first `num_max` that made an answer. Raises TraceInvalid.

    `levels` are the names of the classes; a request that names none has `default_level`.
    """
    reader = _Reader(path, levels)
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            items = list(reader.items(file, num_max))
    except csv.Error as error:
        raise reader.wrong(f"is not CSV: {error}") from None
    except OSError as error:
        raise TraceInvalid(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise TraceInvalid(f"{path}: is not text in UTF-8.") from None
    if not items:
        raise TraceInvalid(f"{path}: holds no request.")
    return make_trace(items, default_level=default_level, num_skipped=reader.num_skipped)


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
                raise self.wrong(f"has {len(cells)} columns, the first line names {len(names)}")
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
        except (msgspec.DecodeError, RecursionError) as error:
            raise self.wrong(f"is not a JSON object: {error}") from None

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
        raise self.wrong(
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
        text = str(row.get("TIMESTAMP"))
        try:
            # Seven digits of a second are written there; Python reads six.
            arrived = datetime.datetime.fromisoformat(text.strip()[:26])
        except ValueError:
            raise self.wrong(f"TIMESTAMP is no date and time: {text[:40]!r}") from None
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
            raise self.wrong(f"{name} is no time: {str(row.get(name))[:40]!r}")
        return value

    def _tokens(self, row: Mapping[str, Any], name: str) -> int:
        try:
            number = float(row[name])
        except (KeyError, TypeError, ValueError):
            number = -1.0
        if not 0 <= number <= TOKENS_MAX or number != int(number):
            raise self.wrong(f"{name} is no number of tokens: {str(row.get(name))[:40]!r}")
        return int(number)

    def _level(self, name: Any) -> int | None:
        text = "" if name is None else str(name).strip()
        if not text:
            return None
        if text not in self._levels:
            known = ", ".join(word for word in self._levels if not word.isdecimal())
            raise self.wrong(f"there is no class {text[:40]!r}; there are {known}")
        return self._levels[text]

    def wrong(self, what: str) -> TraceInvalid:
        """What is wrong with the line that is read."""
        return TraceInvalid(f"{self._path}, line {self._line}: {what}.")
