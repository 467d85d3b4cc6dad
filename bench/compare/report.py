"""Rows of a comparison: how they are judged, printed and written."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load.stats import Spread


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result.

    `ratio` is always value / peer_value. `passed` is None where no goal applies or where a run was
    disturbed. Values of the single runs stand in `values` and `peer_values`, in their order.
    """

    goal: str | None
    what: str
    unit: str
    values: tuple[float, ...]
    peer: str | None = None
    peer_values: tuple[float, ...] = ()
    passed: bool | None = None
    disturbed: tuple[str, ...] = ()
    note: str = ""

    @property
    def value(self) -> float:
        """The median of the runs."""
        return Spread.of(self.values).median

    @property
    def peer_value(self) -> float:
        """The median of the peer's runs."""
        return Spread.of(self.peer_values).median

    @property
    def ratio(self) -> float:
        """Value over the peer's value; NaN without a peer."""
        return self.value / self.peer_value if self.peer_value else math.nan

    def as_json(self) -> dict[str, Any]:
        """Return the row with the keys that all benches write; no number is null."""
        return {
            "goal": self.goal,
            "what": self.what,
            "value": _number(self.value),
            "unit": self.unit,
            "peer": self.peer,
            "peer_value": _number(self.peer_value),
            "ratio": _number(self.ratio),
            "pass": self.passed,
            "runs": {
                "value": [_number(value) for value in self.values],
                "peer_value": [_number(value) for value in self.peer_values],
                "disturbed": list(self.disturbed),
                "note": self.note,
            },
        }


def fact(what: str, text: str) -> dict[str, Any]:
    """Return a row that holds no measurement: the flags of a server, the machine."""
    keys = ("goal", "what", "value", "unit", "peer", "peer_value", "ratio", "pass", "runs")
    return dict.fromkeys(keys) | {"what": what, "value": text}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.5g}")


def write_json(path: Path, facts: Sequence[dict[str, Any]], rows: Sequence[Row]) -> None:
    """Write facts and rows as one list."""
    content = [*facts, *(row.as_json() for row in rows)]
    path.write_text(json.dumps(content, indent=1) + "\n")


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table for a terminal; notes and disturbances follow below it."""
    head = ("goal", "what", "value (min..max)", "peer", "peer value (min..max)", "ratio", "pass")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    printed = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    printed.insert(1, "  ".join("-" * width for width in widths))
    for row in rows:
        if row.note:
            printed.append(f"{row.what}: {row.note}")
    for text in sorted({text for row in rows for text in row.disturbed}):
        printed.append(f"DISTURBED {text}")
    return "\n".join(line.rstrip() for line in printed)


def _cells(row: Row) -> tuple[str, ...]:
    verdict = {True: "yes", False: "NO", None: "-"}[row.passed]
    if row.disturbed:
        verdict += " (disturbed)"
    return (
        row.goal or "-",
        row.what,
        _shown(row.values, row.unit),
        row.peer or "-",
        _shown(row.peer_values, row.unit) if row.peer_values else "-",
        "-" if math.isnan(row.ratio) else f"{row.ratio:.3g}",
        verdict,
    )


def _shown(values: Sequence[float], unit: str) -> str:
    spread = Spread.of(values)
    if math.isnan(spread.median):
        return "none"
    shown = f"{spread.median:.4g} {unit}"
    if len(values) > 1:
        shown += f" ({spread.min:.4g}..{spread.max:.4g})"
    return shown
