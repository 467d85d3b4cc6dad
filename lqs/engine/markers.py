"""Keeps control markers that a client typed from becoming control tokens.

A rendered prompt is tokenised with its markers (`<|im_end|>` and the like) read as control tokens, so
marker text inside a message would forge a turn. Before the render each marker in a client's string is
replaced by one character that occurs neither in what the client sent nor in the template; after it the
prompt is split there, and the marker's text goes in as plain text.

A marker can also come together across a border: `<|im_` at the end of one string and `end|>` at the
start of the next. So what could be a marker's beginning at a string's end, or its end at a string's
beginning, is replaced as well, and put back as ordinary text if nothing came together around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from lqs.request import Segment

# The last private-use plane of Unicode: nobody's text, no case, no white space.
_FIRST_STAND_IN, _LAST_STAND_IN = 0x100000, 0x10FFFD


class Markers:
    """The texts of a model's control tokens, ready to be looked for. Immutable."""

    def __init__(self, texts: Iterable[str]) -> None:
        # The longest first: a regular expression takes the first alternative that fits.
        self._texts = sorted({text for text in texts if text.strip()}, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, self._texts)) or "(?!)"
        self.pattern = re.compile(f"({alternatives})")
        self._pattern_anywhere = re.compile(f"(?=({alternatives}))")
        self._beginnings = {text[:end] for text in self._texts for end in range(1, len(text))}
        self._endings = {text[start:] for text in self._texts for start in range(1, len(text))}
        self.length_max = len(self._texts[0]) if self._texts else 0

    def is_inside(self, text: str) -> bool:
        """Tell if the whole of `text` is a part of a marker."""
        return 0 < len(text) < self.length_max and any(text in marker for marker in self._texts)

    def num_ending_chars(self, text: str) -> int:
        """Count the characters at the start of `text` that could end a marker."""
        sizes = range(min(len(text), self.length_max), 0, -1)
        return next((size for size in sizes if text[:size] in self._endings), 0)

    def num_beginning_chars(self, text: str) -> int:
        """Count the characters at the end of `text` that could begin a marker."""
        sizes = range(min(len(text), self.length_max), 0, -1)
        return next((size for size in sizes if text[-size:] in self._beginnings), 0)

    def touch(self, text: str, start: int, end: int) -> bool:
        """Tell if a marker stands in `text` that has a character in [start, end)."""
        first = max(0, start - self.length_max)
        around = text[first : end + self.length_max]
        return any(
            first + found.start() < end and first + found.end(1) > start
            for found in self._pattern_anywhere.finditer(around)
        )


class Guard:
    """The stand-ins of one render.

    Owner: the thread that renders. `taken` are characters that may not be used: all that the client
    sent and the template's own.
    """

    def __init__(self, markers: Markers, taken: set[str]) -> None:
        self._markers = markers
        self._free = (chr(c) for c in range(_FIRST_STAND_IN, _LAST_STAND_IN) if chr(c) not in taken)
        self._stand_ins: dict[str, str] = {}

    def protect(self, value: Any) -> Any:
        """Return a copy of plain data in which no string holds a marker or a part at its edge."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, dict):
            return {self._protect_text(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.protect(item) for item in value]
        return value

    def stand_in(self, text: str) -> str:
        """Return the character that stands for `text`."""
        if text not in self._stand_ins:
            self._stand_ins[text] = next(self._free)
        return self._stand_ins[text]

    def restore(self, text: str) -> str:
        """Put the texts back where their stand-ins are."""
        return "".join(piece for piece, _ in self._pieces(text))

    def split(self, rendered: str) -> list[Segment]:
        """Cut a rendered prompt into what is to be read with control tokens and what is not."""
        pieces = list(self._pieces(rendered))
        whole = "".join(piece for piece, _ in pieces)
        segments: list[Segment] = []
        start = 0
        for piece, is_stand_in in pieces:
            end = start + len(piece)
            trusted = not is_stand_in or not self._markers.touch(whole, start, end)
            _append(segments, piece, trusted)
            start = end
        return segments

    def _protect_text(self, text: str) -> str:
        if self._markers.is_inside(text):
            return self.stand_in(text)
        # The pattern's group makes every second piece a marker.
        pieces = self._markers.pattern.split(text)
        tail = self._markers.num_beginning_chars(pieces[-1])
        if tail:
            pieces[-1:] = [pieces[-1][:-tail], pieces[-1][-tail:]]
        head = self._markers.num_ending_chars(pieces[0])
        if head:
            pieces[:1] = ["", pieces[0][:head], pieces[0][head:]]
        return "".join(self.stand_in(piece) if n % 2 else piece for n, piece in enumerate(pieces))

    def _pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        if not self._stand_ins:
            yield text, False
            return
        text_of = {stand_in: text for text, stand_in in self._stand_ins.items()}
        cuts = re.compile(f"([{''.join(text_of)}])")
        for piece in cuts.split(text):
            yield text_of.get(piece, piece), piece in text_of


def _append(segments: list[Segment], text: str, trusted: bool) -> None:
    """Add a piece, joined to the one before if both are read alike."""
    if not text:
        return
    if segments and segments[-1].trusted == trusted:
        text = segments.pop().text + text
    segments.append(Segment(text, trusted))
