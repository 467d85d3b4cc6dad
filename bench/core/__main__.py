"""Measure the core: python -m bench.core [--quick] [--json FILE]."""

import argparse
import json
import platform
from pathlib import Path

from . import parts
from .measure import Row


def measure(*, is_quick: bool) -> list[Row]:
    """All rows, in the order of the table."""
    n, rounds = (50_000, 3) if is_quick else (400_000, 7)
    return [
        *parts.rings(n, rounds),
        *parts.backlog(n, rounds),
        *parts.ledger(n, rounds),
        *parts.limiters(n // 4, rounds),
        *parts.decisions(rounds),
        *parts.admission(10_000 if is_quick else 100_000),
        *parts.hand_over(n // 50, rounds),
        *parts.memory(),
    ]


def line(row: Row) -> str:
    """One line of the table."""
    verdict = {None: "", True: "pass", False: "FAIL"}[row.passed]
    spread = f"{min(row.runs):,.0f}..{max(row.runs):,.0f}" if row.runs else ""
    peer = f"{row.peer} {row.peer_value:,.0f}" if row.peer else ""
    ratio = f"{row.ratio:.2f} x" if row.ratio else ""
    figure = f"{row.value:,.2f} {row.unit}"
    return f"{row.goal or '':4} {row.what:68} {figure:>16} {spread:>18}  {peer:34} {ratio:>10} {verdict}"


def main() -> None:
    """Print the table, and write the rows where asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.core", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer operations: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    print(f"bench.core --quick={options.quick}; Python {platform.python_version()}, {platform.machine()}")
    rows = measure(is_quick=options.quick)
    for row in rows:
        print(line(row))
    if options.json:
        options.json.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
