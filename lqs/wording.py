"""Says in an operator's words what is wrong with a value, where msgspec speaks of types."""

from __future__ import annotations

import re

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


def offer(close: list[str]) -> str:
    """`; did you mean X or Y?` or a full stop."""
    return f"; did you mean {' or '.join(close)}?" if close else "."


def in_words(what: str) -> str:
    """What msgspec says of a value, without the place."""
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
        return f"{missing[1]} is missing"
    if pattern := re.fullmatch(r"Expected `str` matching regex '(.+)'", what):
        return f"must be {pattern_in_words(pattern[1])}"
    what = re.sub(r"`(\w+)`", lambda kind: _KINDS.get(kind[1], kind[0]), what)
    return what.replace("Expected ", "must be ", 1).replace(", got ", ", not ", 1)


def pattern_in_words(pattern: str) -> str:
    """The two kinds of pattern that there are: a choice, and a name."""
    choice = re.fullmatch(r"\^\((.+)\)\$", pattern)
    return f"one of {choice[1].replace('|', ', ')}" if choice else "small letters, digits and _, a letter first"
