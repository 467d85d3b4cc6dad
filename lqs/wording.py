"""Says in an operator's words what is wrong with a value, where msgspec speaks of types."""

from __future__ import annotations

import difflib
import re

from lqs.describe import CORES, NAME

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
_PATTERNS = {
    NAME: "small letters, digits and _, a letter first",
    CORES: "numbers of cores, such as 0-3 or 0,2,4-5",
}
_PATTERN = re.compile(r"Expected `str` matching regex '(.+)'")


def offer(close: list[str]) -> str:
    """`; did you mean X or Y?` or a full stop."""
    return f"; did you mean {' or '.join(close)}?" if close else "."


def in_words(what: str) -> str:
    """What msgspec says of a value, without the place."""
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
        return f"{missing[1]} is missing"
    if pattern := _PATTERN.fullmatch(what):
        return f"must be {pattern_in_words(pattern[1])}"
    what = re.sub(r"`(\w+)`", lambda kind: _KINDS.get(kind[1], kind[0]), what)
    return what.replace("Expected ", "must be ", 1).replace(", got ", ", not ", 1)


def complaint(what: str, value: object = None) -> str:
    """The same as a sentence; where `value` is nearly one of a choice, with the question whether that was meant."""
    pattern = _PATTERN.fullmatch(what)
    words = _choice(pattern[1]) if pattern else []
    close = difflib.get_close_matches(value.lower(), words, n=1, cutoff=0.65) if isinstance(value, str) else []
    return in_words(what) + offer(close)


def pattern_in_words(pattern: str) -> str:
    """A choice, or one of the other patterns that there are."""
    words = _choice(pattern)
    return f"one of {', '.join(words)}" if words else _PATTERNS[pattern]


def _choice(pattern: str) -> list[str]:
    """What may be chosen; empty if the pattern is no choice."""
    choice = re.fullmatch(r"\^\(([\w|]+)\)\$", pattern)
    return choice[1].split("|") if choice else []
