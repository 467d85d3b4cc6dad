"""Counts in how many ways a text may go on at any one place of a grammar.

llama.cpp walks a grammar with a stack for each way it could be read so far, and asks all of them about
every token. A sequence of parts that may all be empty, or a rule with thousands of alternatives, makes
thousands of stacks, and a step of the worker then takes seconds, for everybody in it. The number of
stacks that one place of a rule can start is its width:

    width(place)  = width(part there) + width(next place) if that part may be empty
    width(rule)   = the sum over its alternatives of the width of their first place

It is found in time linear in the grammar. A rule that begins with itself has no width.

Alternatives mostly part at their first character. Parts in a row that may all be empty do not: a token of
k characters may be spread over n of them in as many ways as k things over n places, and each is tried. How
many such parts stand in a row is the slack of a place, counted like the width but with the greatest of the
alternatives in place of their sum.
"""

from __future__ import annotations

from collections import defaultdict

# A symbol that stands for characters; all others are numbers of rules.
CHARACTER = -1

_Alternative = list[tuple[int, int]]  # Symbols, and how often each stands there in a row.


class Rules:
    """The rules of a grammar as they are read: groups and repetitions become rules without a name.

    `begin`, `alternative`, `add`, `open`, `close` and `repeat` follow the text.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._bodies: list[list[_Alternative]] = []
        self._open: list[int] = []

    def named(self, name: str) -> int:
        """The number of a rule, which may be still to come."""
        if name not in self._names:
            self._names[name] = self._make([])
        return self._names[name]

    def begin(self, name: str) -> None:
        """A rule begins; a second one of the same name replaces the first, as in llama.cpp."""
        number = self.named(name)
        self._bodies[number] = [[]]
        self._open = [number]

    def alternative(self) -> None:
        """Another alternative of the open rule or group begins."""
        self._bodies[self._open[-1]].append([])

    def add(self, symbol: int) -> None:
        """A part is added to the open alternative."""
        self._bodies[self._open[-1]][-1].append((symbol, 1))

    def open(self) -> None:
        """A group begins."""
        self._open.append(self._make([[]]))

    def close(self) -> None:
        """The group ends and is a part of what it stands in."""
        self.add(self._open.pop())

    def repeat(self, least: int, most: int | None) -> None:
        """The last part stands there `least` to `most` times."""
        alternative = self._bodies[self._open[-1]][-1]
        symbol, times = alternative.pop()
        if times != 1:
            symbol = self._make([[(symbol, times)]])
        if least > 0:
            alternative.append((symbol, least))
        if most is None or most > least:
            alternative.append((self._make([[(symbol, 1)], []]), 1))

    def width(self) -> tuple[int, int] | None:
        """The greatest width and the greatest slack of any place; None if a rule begins with itself."""
        empty = self._find_empty()
        found = self._find_widths(empty)
        if found is None:
            return None
        widths, slacks = found
        alternatives = [a for body in self._bodies for a in body]
        return (
            max(*widths, *(_width(a, empty, widths)[1] for a in alternatives)),
            max(*slacks, *(_slack(a, empty, slacks)[1] for a in alternatives)),
        )

    def _make(self, body: list[_Alternative]) -> int:
        self._bodies.append(body)
        return len(self._bodies) - 1

    def _find_empty(self) -> list[bool]:
        """Which rules may be empty. Each alternative is looked at once per symbol that may be."""
        empty = [False] * len(self._bodies)
        missing: dict[tuple[int, int], int] = {}
        users: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        found: list[int] = []
        for rule, body in enumerate(self._bodies):
            for place, alternative in enumerate(body):
                missing[rule, place] = len(alternative)
                for symbol, _ in alternative:
                    users[symbol].append((rule, place))
                if not alternative:
                    found.append(rule)
        while found:
            rule = found.pop()
            if empty[rule]:
                continue
            empty[rule] = True
            for user in users[rule]:
                missing[user] -= 1
                if missing[user] == 0:
                    found.append(user[0])
        return empty

    def _find_widths(self, empty: list[bool]) -> tuple[list[int], list[int]] | None:
        """The width and the slack of each rule, those that others begin with before the others."""
        widths, slacks = [0] * len(self._bodies), [0] * len(self._bodies)
        begun, done = set[int](), set[int]()
        for root in range(len(self._bodies)):
            waiting = [root]
            while waiting:
                rule = waiting[-1]
                if rule in done:
                    waiting.pop()
                    continue
                before = {s for a in self._bodies[rule] for s in _beginnings(a, empty)} - done
                begun.add(rule)
                if before & begun:
                    # It is on the way to itself.
                    return None
                if before:
                    waiting += before
                    continue
                widths[rule] = sum(_width(a, empty, widths)[0] for a in self._bodies[rule])
                slacks[rule] = max((_slack(a, empty, slacks)[0] for a in self._bodies[rule]), default=0)
                done.add(rule)
        return widths, slacks


def _width(alternative: _Alternative, empty: list[bool], widths: list[int]) -> tuple[int, int]:
    """The width of the first place of an alternative, and the greatest of all its places."""
    return _count(alternative, empty, widths, character=1, least=0)


def _slack(alternative: _Alternative, empty: list[bool], slacks: list[int]) -> tuple[int, int]:
    """The slack of the first place of an alternative, and the greatest of all its places."""
    return _count(alternative, empty, slacks, character=0, least=1)


def _count(
    alternative: _Alternative, empty: list[bool], counts: list[int], *, character: int, least: int
) -> tuple[int, int]:
    """Of the first place and of the greatest; a part that may be empty counts at least `least`."""
    here = greatest = 0
    for symbol, times in reversed(alternative):
        if symbol == CHARACTER:
            here = character
        elif empty[symbol]:
            here += max(counts[symbol], least) * times
        else:
            here = counts[symbol]
        greatest = max(greatest, here)
    return here, greatest


def _beginnings(alternative: _Alternative, empty: list[bool]) -> list[int]:
    """The rules that an alternative may begin with."""
    found = []
    for symbol, _ in alternative:
        if symbol == CHARACTER:
            break
        found.append(symbol)
        if not empty[symbol]:
            break
    return found
