"""Tokenises a rendered prompt so that control tokens come from the template alone.

A prompt arrives in segments, trusted (the template's own text) or not (what users typed). If no
control marker touches untrusted text, the whole prompt is tokenised in one call, which gives the
very tokens that llama-server would. Otherwise it is cut at the markers inside trusted text, and
only there markers become tokens: what lies between is tokenised as plain text, in one run over
neighbouring segments, so a marker that two of them would form together stays text too.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from lqs.request import Segment


class Tokenizer(Protocol):
    """What is needed of a model. `markers` finds its control texts, None if it has none."""

    @property
    def add_bos(self) -> bool: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def markers(self) -> re.Pattern[str] | None: ...
    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> array[int]: ...


def compile_markers(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for the control texts of a vocabulary, the longest first as llama.cpp takes them."""
    ordered = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def tokenize(segments: Sequence[Segment], model: Tokenizer) -> array[int]:
    """Tokens of the prompt, with exactly one start token if the model wants one."""
    ids: array[int] = array("i")
    for text, is_marked in _pieces(segments, model.markers):
        ids.extend(model.tokenize(_encode(text), add_special=False, parse_special=is_marked))
    if model.add_bos and model.bos is not None and ids[:1] != array("i", [model.bos]):
        ids.insert(0, model.bos)
    return ids


def _encode(text: str) -> bytes:
    # A lone surrogate from a JSON escape is not text; it becomes the character that says so.
    return text.encode(errors="replace")


def _pieces(segments: Sequence[Segment], markers: re.Pattern[str] | None) -> Iterator[tuple[str, bool]]:
    """Texts to tokenise one by one, and whether markers in them count."""
    if markers is None or not _touches_untrusted(segments, markers):
        yield "".join(segment.text for segment in segments), True
        return
    plain: list[str] = []
    for text, is_marker in _cut(segments, markers):
        if not is_marker:
            plain.append(text)
            continue
        yield "".join(plain), False
        yield text, True
        plain.clear()
    yield "".join(plain), False


def _touches_untrusted(segments: Sequence[Segment], markers: re.Pattern[str]) -> bool:
    """Whether a marker lies in untrusted text, or reaches out of the segment that it begins in."""
    text = "".join(segment.text for segment in segments)
    ends = iter(_trusted_spans(segments))
    start, end = next(ends, (0, 0))
    for found in markers.finditer(text):
        while end <= found.start():
            start, end = next(ends, (len(text), len(text) + 1))
        if found.start() < start or found.end() > end:
            return True
    return False


def _trusted_spans(segments: Sequence[Segment]) -> Iterator[tuple[int, int]]:
    """Where trusted text stands in the whole, neighbours as one."""
    at, start = 0, None
    for text, trusted in segments:
        if trusted and start is None:
            start = at
        if not trusted and text and start is not None:
            yield start, at
            start = None
        at += len(text)
    if start is not None:
        yield start, at


def _cut(segments: Iterable[Segment], markers: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """The prompt in order: markers of trusted text, and everything else."""
    for text, trusted in segments:
        at = 0
        for found in markers.finditer(text) if trusted else ():
            yield text[at : found.start()], False
            yield found.group(), True
            at = found.end()
        yield text[at:], False
