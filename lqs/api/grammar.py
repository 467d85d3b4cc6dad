"""Looks at a GBNF grammar before the native parser does.

The native parser recurses per nested group and unrolls repetitions, so a short text can overflow its
stack or its memory; and what it makes is walked for every token, on the thread that makes everybody's
tokens. So a grammar is read here first, in one pass without recursion. What is too large, too deep or too
ambiguous is refused. The native parser is then given a text made of the tokens that were read here, and
no others: nothing can hide from this reader in what the two take for a comment or a space. What is wrong
in other ways is left to the parser to find.
"""

from __future__ import annotations

import re

from lqs.api.ambiguity import CHARACTER, Rules
from lqs.errors import BadRequest

NUM_BYTES_MAX = 65_536
NUM_RULES_MAX = 1000
DEPTH_MAX = 64
REPETITION_MAX = 1000
NUM_ELEMENTS_MAX = 50_000  # After repetitions are unrolled.
# Ways in which a text may go on at one place. Each is tried for every token that is drawn.
WIDTH_MAX = 256
# Parts in a row that may all be empty.
SLACK_MAX = 12

# Possessive throughout: no part of a text is looked at twice.
_TOKEN = re.compile(
    r"""(?P<skip>\s++|\#[^\r\n]*+)
    | (?P<rule>[A-Za-z0-9-]++(?=\s*+::=))\s*+::=
    | (?P<item>"(?:[^"\\\r\n]|\\.)*+" | \[(?:[^\]\\\r\n]|\\.)*+\] | !?<[^>\s]*+> | \.)
    | (?P<name>[A-Za-z0-9-]++)
    | (?P<open>\()
    | (?P<close>\))
    | (?P<repeat>[*+?] | \{\s*+(?P<least>\d*+)\s*+(?P<comma>,)?+\s*+(?P<most>\d*+)\s*+\})
    | (?P<bar>\|)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)


def check_grammar(text: str) -> str:
    """Return the grammar as the native parser may read it.

    Raises BadRequest if `text` is too large, deep or ambiguous, or no grammar at all.
    """
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
    return scan.finish()


class _Scan:
    """The state of one pass: a stack of open groups with the size of each so far."""

    def __init__(self) -> None:
        self._sizes = [0]
        self._last: int | None = None  # The size of the item that a repetition would repeat.
        self._num_rules = 0
        self._num_elements = 0
        self._rules = Rules()
        self._read: list[str] = []

    def take(self, token: re.Match[str]) -> None:
        """Look at the next token."""
        kind = token.lastgroup
        if kind == "skip":
            return
        self._read.append(f"\n{token['rule']} ::=" if kind == "rule" else token[0])
        if kind == "rule":
            self._begin_rule(token["rule"])
        elif self._num_rules == 0:
            raise _refusal("it does not begin with a rule")
        elif kind == "item":
            self._add_item(CHARACTER)
        elif kind == "name":
            self._add_item(self._rules.named(token[0]))
        elif kind == "open":
            self._open()
        elif kind == "close":
            self._close()
        elif kind == "bar":
            self._last = None
            self._rules.alternative()
        else:
            self._repeat(token)

    def finish(self) -> str:
        """Look at the whole after the last token; the text that was read."""
        self._end_rule()
        if self._num_rules == 0:
            raise _refusal("it has no rule")
        found = self._rules.width()
        if found is None:
            raise _refusal("a rule begins with itself")
        width, slack = found
        if slack > SLACK_MAX:
            raise _refusal(f"more than {SLACK_MAX} parts that may be empty follow one another")
        if width > WIDTH_MAX:
            raise _refusal(f"a text could go on in more than {WIDTH_MAX} ways at one place")
        return " ".join(self._read) + "\n"

    def _begin_rule(self, name: str) -> None:
        self._end_rule()
        self._rules.begin(name)
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
        self._rules.open()
        if len(self._sizes) > DEPTH_MAX:
            raise _refusal(f"groups are nested deeper than {DEPTH_MAX}")

    def _close(self) -> None:
        if len(self._sizes) == 1:
            raise _refusal("a group is closed that is not open")
        self._rules.close()
        self._add(self._sizes.pop() + 1)

    def _add_item(self, symbol: int) -> None:
        self._rules.add(symbol)
        self._add(1)

    def _add(self, size: int) -> None:
        self._sizes[-1] += size
        self._last = size
        if self._sizes[-1] > NUM_ELEMENTS_MAX:
            raise _refusal(f"it unrolls to more than {NUM_ELEMENTS_MAX} elements")

    def _repeat(self, token: re.Match[str]) -> None:
        if self._last is None:
            raise _refusal("a repetition has nothing to repeat")
        least, most = _bounds(token)
        times = max(least, most or 0, 1)
        if times > REPETITION_MAX:
            raise _refusal(f"a repetition is above {REPETITION_MAX}")
        self._rules.repeat(least, most)
        size = self._last
        self._add(size * (times - 1))
        # A repetition of a repetition repeats all of it.
        self._last = size * times


def _bounds(token: re.Match[str]) -> tuple[int, int | None]:
    """How often a repetition repeats: at least, and at most (None: without end)."""
    if token[0] in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[token[0]]
    # Longer numbers are too large anyway, and Python would not read them.
    least, most = (int(number[:9]) if number else None for number in (token["least"], token["most"]))
    if token["comma"] is None:
        return least or 0, least or 0
    return least or 0, most


def _refusal(what: str) -> BadRequest:
    return BadRequest(f"The grammar is refused: {what}.", param="grammar", code="invalid_grammar")
