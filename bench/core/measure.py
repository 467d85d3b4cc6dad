"""How a figure is taken: in turns with its peer, medians, and all runs shown."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass
class Row:
    """One line of the table, and one row of the JSON file."""

    goal: str | None
    what: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    passed: bool | None = None
    runs: list[float] | None = None

    def as_json(self) -> dict[str, object]:
        """The row under its keys in the file."""
        row = asdict(self)
        row["pass"] = row.pop("passed")
        return row


def timed_ns(call: Callable[[], object], num_ops: int) -> float:
    """Nanoseconds per operation of one call that does `num_ops`."""
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / num_ops


def in_turns(calls: dict[str, tuple[Callable[[], object], int]], rounds: int) -> dict[str, list[float]]:
    """Time each of (call, operations in it) once per round, A B A B."""
    runs: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, num_ops) in calls.items():
            runs[name].append(timed_ns(call, num_ops))
    return runs


def beside(runs: dict[str, list[float]], peer: str, *, what: str, goal: str | None, at_least: float | None) -> Row:
    """The first of the runs beside a peer: how many times faster it is."""
    own = next(iter(runs))
    value, peer_value = statistics.median(runs[own]), statistics.median(runs[peer])
    ratio = peer_value / value
    passed = None if at_least is None else ratio >= at_least
    return Row(goal, what, value, "ns", peer, peer_value, ratio, passed, runs[own])


def alone(runs: list[float], *, what: str, goal: str | None = None, at_most: float | None = None) -> Row:
    """A figure with a limit of its own, or none."""
    value = statistics.median(runs)
    return Row(goal, what, value, "ns", passed=None if at_most is None else value <= at_most, runs=runs)
