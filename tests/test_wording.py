"""What is wrong with a value, in an operator's words."""

from __future__ import annotations

import pytest

from lqs.wording import in_words, offer


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


def test_an_offer_is_a_question_or_a_full_stop() -> None:
    assert offer(["a", "b"]) == "; did you mean a or b?"
    assert offer([]) == "."
