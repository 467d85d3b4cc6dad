"""The method: A B A B, each server alone on the box, disturbed runs repeated once and said."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.compare.quiet import Watch
from bench.compare.report import Row
from bench.compare.server import Live, Server, Setup, running
from bench.load.reply import Exchange, Reply, read_reply

Values = dict[str, float]
Measure = Callable[[Live], Awaitable[Values]]


class LoadFailed(Exception):
    """A server refused or broke a request that it had to serve. Blames the server."""


@dataclass(slots=True)
class Runs:
    """What the runs of one server brought: for each measured thing a value per run."""

    server: Server
    values: dict[str, list[float]] = field(default_factory=dict)
    disturbed: list[str] = field(default_factory=list)

    def add(self, values: Values) -> None:
        """Append the values of one run."""
        for key, value in values.items():
            self.values.setdefault(key, []).append(value)

    def of(self, key: str) -> tuple[float, ...]:
        """Return the values of one measured thing, in the order of the runs."""
        return tuple(self.values.get(key, ()))


@dataclass(slots=True)
class Bench:
    """One comparison: the subject, its peers, and how thoroughly they are measured.

    `flags` collects the command lines that were used, for the report.
    """

    subject: Server
    peers: tuple[Server, ...]
    model: Path
    threads: int
    quick: bool
    num_rounds: int
    flags: dict[str, str] = field(default_factory=dict)

    def setup(self, parallel: int, ctx: int, unified: bool = True) -> Setup:
        """Return settings that all servers of a comparison share."""
        return Setup(self.model, self.threads, parallel, ctx, unified)

    def everyone(self, measure: Measure) -> list[tuple[Server, Measure]]:
        """Return the subject and all its peers, to be measured alike."""
        return [(server, measure) for server in (self.subject, *self.peers)]

    async def alternate(self, title: str, setup: Setup, contestants: Sequence[tuple[Server, Measure]]) -> list[Runs]:
        """Measure all contestants in turn, once a round; the runs come in their order."""
        all_runs = [Runs(server) for server, _ in contestants]
        for number in range(self.num_rounds):
            for (server, measure), runs in zip(contestants, all_runs, strict=True):
                name = f"{title}: {server.name}"
                self.flags.setdefault(name, server.flags(setup))
                say(f"{name}, round {number + 1} of {self.num_rounds}")
                values, disturbers = await self._measure_quietly(server, setup, measure)
                runs.add(values)
                if disturbers:
                    runs.disturbed.append(f"{name} round {number + 1}: {', '.join(disturbers)}")
        return all_runs

    async def _measure_quietly(self, server: Server, setup: Setup, measure: Measure) -> tuple[Values, list[str]]:
        """Measure once, and once more if somebody else was busy; return who disturbed the last."""
        for last in (self.quick, True):
            async with running(server, setup) as live, Watch(live.pid) as watch:
                values = await measure(live)
            disturbers = watch.disturbers()
            if not disturbers or last:
                return values, disturbers
            say(f"  disturbed by {', '.join(disturbers)}: once more")
        raise AssertionError("the second try is the last")


def say(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


def compare(
    goal: str | None,
    what: str,
    unit: str,
    key: str,
    mine: Runs,
    peer: Runs | None = None,
    bar: Callable[[Row], bool] | None = None,
    note: str = "",
) -> Row:
    """Build a row from the runs of the subject and of one peer, and judge it.

    A disturbed row is not judged.
    """
    disturbed = (*mine.disturbed, *(peer.disturbed if peer else ()))
    row = Row(
        goal=goal,
        what=what,
        unit=unit,
        values=mine.of(key),
        peer=peer.server.name if peer else None,
        peer_values=peer.of(key) if peer else (),
        disturbed=disturbed,
        note=note,
    )
    if bar is None or disturbed:
        return row
    return replace(row, passed=bar(row))


def answers(exchanges: Sequence[Exchange]) -> list[Reply]:
    """Read the replies of requests that all had to succeed.

    Raises LoadFailed for the first that did not.
    """
    replies = [read_reply(exchange) for exchange in exchanges]
    for reply in replies:
        if not reply.ok or not reply.num_completion_tokens:
            raise LoadFailed(f"status {reply.status}: {reply.error or reply.text[:300]}")
    return replies
