"""Prompts of a given length that share nothing, the same ones in every run."""

from __future__ import annotations

import random

# Common words; most tokenisers have one token for each, with the space before it.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
)
WORDS = tuple(_TEXT.split())


class Prompts:
    """An endless supply of prompts, each of `num_words` words drawn by a seeded generator."""

    def __init__(self, num_words: int, seed: int) -> None:
        self._num_words = num_words
        self._draw = random.Random(seed)

    def next(self) -> str:
        """Return the next prompt."""
        return " ".join(self._draw.choices(WORDS, k=self._num_words))
