"""Looks at a GBNF grammar before the native parser does.

The native parser recurses per nested group and unrolls repetitions, so a short text can overflow its
stack or its memory. This reads the same tokens in one pass without recursion and refuses what is too
large. What is wrong in other ways is left to the parser to find.
"""

from __future__ import annotations

import re

from lqs.errors import BadRequest

NUM_BYTES_MAX = 65_536
NUM_RULES_MAX = 1000
DEPTH_MAX = 64
REPETITION_MAX = 1000
NUM_ELEMENTS_MAX = 50_000  # After repetitions are unrolled.

_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)
    | (?P<rule>[A-Za-z0-9-]+\s*::=)
    | (?P<item>"(?:[^"\\\n]|\\.)*" | \[(?:[^\]\\\n]|\\.)*\] | <[^>\s]*> | !<[^>\s]*> | [A-Za-z0-9-]+ | \.)
    | (?P<open>\()
    | (?P<close>\))
    | (?P<repeat>[*+?] | \{\s*(?P<least>\d*)\s*(?:,\s*(?P<most>\d*)\s*)?\})
    | (?P<bar>\|)""",
    re.VERBOSE | re.DOTALL,
)


def check_grammar(text: str) -> None:
    """Raise BadRequest if `text` is too large or deep for the native parser, or no grammar at all."""
    if len(text.encode(errors="replace")) > NUM_BYTES_MAX:
        raise _refusal(f"it has more than {NUM_BYTES_MAX} bytes")
    scan = _Scan()
    end = 0
    while end < len(text):
        token = _TOKEN.match(text, end)
        if token is None:
            raise _refusal(f"character {end} begins nothing that is known")
        scan.take(token)
        end = token.end()
    scan.finish()


class _Scan:
    """The state of one pass: a stack of open groups with the size of each so far."""

    def __init__(self) -> None:
        self._sizes = [0]
        self._last: int | None = None  # The size of the item that a repetition would repeat.
        self._num_rules = 0
        self._num_elements = 0

    def take(self, token: re.Match[str]) -> None:
        """Look at the next token."""
        match token.lastgroup:
            case "rule":
                self._begin_rule()
            case "item":
                self._add(1)
            case "open":
                self._open()
            case "close":
                self._close()
            case "bar":
                self._last = None
            case "skip":
                pass
            case _:
                self._repeat(token)

    def finish(self) -> None:
        """Look at the whole after the last token."""
        self._end_rule()
        if self._num_rules == 0:
            raise _refusal("it has no rule")

    def _begin_rule(self) -> None:
        self._end_rule()
        self._num_rules += 1
        self._last = None
        if self._num_rules > NUM_RULES_MAX:
            raise _refusal(f"it has more than {NUM_RULES_MAX} rules")

    def _end_rule(self) -> None:
        if len(self._sizes) != 1:
            raise _refusal("a group is not closed")
        self._num_elements += self._sizes[0]
        self._sizes[0] = 0
        if self._num_elements > NUM_ELEMENTS_MAX:
            raise _refusal(f"it unrolls to more than {NUM_ELEMENTS_MAX} elements")

    def _open(self) -> None:
        self._sizes.append(0)
        self._last = None
        if len(self._sizes) > DEPTH_MAX:
            raise _refusal(f"groups are nested deeper than {DEPTH_MAX}")

    def _close(self) -> None:
        if len(self._sizes) == 1:
            raise _refusal("a group is closed that is not open")
        self._add(self._sizes.pop() + 1)

    def _add(self, size: int) -> None:
        self._sizes[-1] += size
        self._last = size
        if self._sizes[-1] > NUM_ELEMENTS_MAX:
            raise _refusal(f"it unrolls to more than {NUM_ELEMENTS_MAX} elements")

    def _repeat(self, token: re.Match[str]) -> None:
        if self._last is None:
            raise _refusal("a repetition has nothing to repeat")
        # Longer numbers are too large anyway, and Python would not read them.
        bounds = [number[:9] for number in (token["least"], token["most"]) if number]
        times = max(map(int, bounds), default=1)
        if times > REPETITION_MAX:
            raise _refusal(f"a repetition is above {REPETITION_MAX}")
        size = self._last
        self._add(size * max(times - 1, 0))
        # A repetition of a repetition repeats all of it.
        self._last = size * max(times, 1)


def _refusal(what: str) -> BadRequest:
    return BadRequest(f"The grammar is refused: {what}.", param="grammar", code="invalid_grammar")
