"""What is wrong with a value, in an operator's words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import Meta

from lqs import settings
from lqs.describe import CORES, NAME
from lqs.wording import in_words, offer, pattern_in_words


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Expected `int`, got `str`", "must be a whole number, not text"),
        ("Expected `array` of length >= 1", "must be a list of length >= 1"),
        ("Object missing required field `level`", "level is missing"),
        ("Expected `str` matching regex '^(text|json)$'", "must be one of text, json"),
        ("Expected `datetime`", "must be `datetime`"),
    ],
)
def test_types_become_words(said: str, words: str) -> None:
    assert in_words(said) == words


def patterns_of(hint: Any) -> Iterator[str]:
    """Those of a key, or of what a key holds."""
    for part in get_args(hint):
        if isinstance(part, Meta):
            yield from [part.pattern] if part.pattern else []
        else:
            yield from patterns_of(part)


def test_every_pattern_has_words_of_its_own() -> None:
    hints = [
        hint
        for struct in settings._sections().values()
        for hint in get_type_hints(struct, include_extras=True).values()
    ]
    words = {pattern: pattern_in_words(pattern) for hint in hints for pattern in patterns_of(hint)}
    assert words[CORES] != words[NAME]
    assert all(said.startswith("one of ") for pattern, said in words.items() if pattern not in (CORES, NAME))


def test_an_offer_is_a_question_or_a_full_stop() -> None:
    assert offer(["a", "b"]) == "; did you mean a or b?"
    assert offer([]) == "."
