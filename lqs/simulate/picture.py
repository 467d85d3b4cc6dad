"""Draws what was played: bars for a terminal, and an SVG of the time to the first token as time goes on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from lqs.request import NS_PER_S
from lqs.simulate.play import Played
from lqs.simulate.summary import Group, percentile

_BAR_WIDTH = 48
_NUM_BINS = 60
_PANEL_W, _PANEL_H, _GAP = 320, 170, 26
# Left of a panel stand its times.
_MARGIN = 56
_COLORS = ("#c0392b", "#e67e22", "#2471a3", "#7d8a2e", "#7d3c98", "#148f77", "#616a6b", "#1b2631")
_FLOOR_S = 1e-3


@dataclass(frozen=True, slots=True)
class Panel:
    """One drawing of the picture: a run under its title."""

    title: str
    played: Played


def bars(groups: Sequence[Group]) -> Iterator[str]:
    """The time to the first token of each class: `-` from P50 on, `=` from P90 to P99, on one logarithmic scale."""
    shown = [group for group in groups if group.first_token_s and not group.name.startswith("key ")]
    if not shown:
        return
    low = max(min(group.first_token(0.5) for group in shown), _FLOOR_S)
    high = max(*(group.first_token(0.99) for group in shown), low * 1.01)
    name_width = max(len(group.name) for group in shown)
    policy_width = max(len(group.policy) for group in shown)

    def place(value: float) -> int:
        share = math.log(max(value, low) / low) / math.log(high / low)
        return round(share * (_BAR_WIDTH - 1))

    yield f"TTFT, P50 - P90 = P99, from {low:.3g} s to {high:.3g} s"
    for group in sorted(shown, key=lambda group: (group.name != "all", shown.index(group))):
        p50, p90, p99 = (place(group.first_token(share)) for share in (0.5, 0.9, 0.99))
        line = " " * p50 + "-" * max(p90 - p50, 1) + "=" * (p99 - p90)
        yield f"{group.name:<{name_width}}  {group.policy:<{policy_width}}  |{line:<{_BAR_WIDTH}}|"


def svg(rows_of_panels: Sequence[Sequence[Panel]], levels: Sequence[str]) -> str:
    """The picture: a row of panels for each load, a column for each policy.

    Each panel shows, by time of arrival, the P99 of the time to the first token of every class;
    all share one logarithmic scale.
    """
    panels = [panel for row in rows_of_panels for panel in row]
    lines = {id(panel): _lines_of(panel.played) for panel in panels}
    values = [y for found in lines.values() for points in found.values() for _, y in points]
    low, high = max(min(values, default=0.1), _FLOOR_S), max(max(values, default=1.0), _FLOOR_S * 10)
    shown = sorted({level for found in lines.values() for level in found})
    width = max(len(row) for row in rows_of_panels) * (_PANEL_W + _MARGIN) + _GAP
    height = len(rows_of_panels) * (_PANEL_H + 2 * _GAP) + 2 * _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for row, panels_of_row in enumerate(rows_of_panels):
        for column, panel in enumerate(panels_of_row):
            left, top = _MARGIN + column * (_PANEL_W + _MARGIN), _GAP + row * (_PANEL_H + 2 * _GAP)
            parts += _panel(panel, lines[id(panel)], left, top, (low, high))
    parts += _legend([(levels[level], _COLORS[level % len(_COLORS)]) for level in shown], height - _GAP / 2)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lines_of(played: Played) -> dict[int, list[tuple[float, float]]]:
    """By class: (share of the time, P99 of the time to the first token in seconds) of each bin with arrivals."""
    trace = played.trace
    span_ns = max(trace.arrival_ns[-1], 1)
    bins: dict[int, list[list[float]]] = {}
    for number, first_ns in enumerate(played.first_token_ns):
        if first_ns:
            place = min(trace.arrival_ns[number] * _NUM_BINS // span_ns, _NUM_BINS - 1)
            own = bins.setdefault(trace.level[number], [[] for _ in range(_NUM_BINS)])
            own[place].append((first_ns - trace.arrival_ns[number]) / NS_PER_S)
    return {
        level: [
            ((place + 0.5) / _NUM_BINS, percentile(sorted(times), 0.99)) for place, times in enumerate(own) if times
        ]
        for level, own in bins.items()
    }


def _panel(
    panel: Panel, lines: dict[int, list[tuple[float, float]]], left: float, top: float, scale: tuple[float, float]
) -> Iterator[str]:
    low, high = scale
    span = math.log(high / low) or 1.0

    def y_of(value: float) -> float:
        return top + _PANEL_H * (1 - math.log(max(value, low) / low) / span)

    yield f'<text x="{left}" y="{top - 6}" font-weight="bold">{escape(panel.title)}</text>'
    yield f'<rect x="{left}" y="{top}" width="{_PANEL_W}" height="{_PANEL_H}" fill="none" stroke="#999"/>'
    for value in _ticks(low, high):
        y = y_of(value)
        yield f'<line x1="{left}" x2="{left + _PANEL_W}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>'
        yield f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{value:g} s</text>'
    for level, points in sorted(lines.items()):
        drawn = " ".join(f"{left + x * _PANEL_W:.1f},{y_of(y):.1f}" for x, y in points)
        color = _COLORS[level % len(_COLORS)]
        yield f'<polyline points="{drawn}" fill="none" stroke="{color}" stroke-width="1.5"/>'
    span_s = panel.played.trace.span_s
    yield f'<text x="{left + _PANEL_W}" y="{top + _PANEL_H + 13}" text-anchor="end">{span_s:.0f} s</text>'


def _ticks(low: float, high: float) -> Iterable[float]:
    """The powers of ten between the ends of the scale."""
    return (10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1))


def _legend(entries: Sequence[tuple[str, str]], y: float) -> Iterator[str]:
    yield f'<text x="{_MARGIN}" y="{y}">P99 of the time to the first token, by arrival:</text>'
    for number, (name, color) in enumerate(entries):
        x = _MARGIN + 250 + number * 110
        yield f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{color}"/>'
        yield f'<text x="{x + 14}" y="{y}">{escape(name)}</text>'
