"""Turns the workers' logprob records into OpenAI's two shapes.

A record is little endian: int32 token, float32 logprob, uint16 number of alternatives, uint16 length of
the token's text, the text; then for each alternative int32 token, float32 logprob, uint16 length, text.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

# JSON has no infinity; OpenAI sends this number for a token that cannot come.
LOGPROB_MIN = -9999.0

_TOKEN = struct.Struct("<ifHH")
_ALTERNATIVE = struct.Struct("<ifH")


class Alternative(NamedTuple):
    """A token that could have been chosen."""

    piece: bytes
    logprob: float


class Choice(NamedTuple):
    """A token that was chosen, and the most likely ones at its place."""

    piece: bytes
    logprob: float
    alternatives: list[Alternative]


def choices(records: bytes) -> Iterator[Choice]:
    """Read the records of some tokens, in order."""
    at = 0
    while at < len(records):
        _, logprob, num_alternatives, size = _TOKEN.unpack_from(records, at)
        at += _TOKEN.size
        piece = records[at : at + size]
        at += size
        alternatives = []
        for _ in range(num_alternatives):
            _, alternative_logprob, size = _ALTERNATIVE.unpack_from(records, at)
            at += _ALTERNATIVE.size
            alternatives.append(Alternative(records[at : at + size], _finite(alternative_logprob)))
            at += size
        yield Choice(piece, _finite(logprob), alternatives)


def chat_logprobs(records: bytes) -> dict[str, Any]:
    """Build the `logprobs` of a chat choice."""
    content = [
        _entry(choice.piece, choice.logprob)
        | {"top_logprobs": [_entry(*alternative) for alternative in choice.alternatives]}
        for choice in choices(records)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(records: bytes, offset: int) -> tuple[dict[str, Any], int]:
    """Build the `logprobs` of a completion choice.

    `offset` is the number of characters of the answer before these tokens; returns the one after.
    """
    shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in choices(records):
        token = _text(choice.piece)
        shape["tokens"].append(token)
        shape["token_logprobs"].append(choice.logprob)
        shape["top_logprobs"].append({_text(piece): logprob for piece, logprob in choice.alternatives})
        shape["text_offset"].append(offset)
        offset += len(token)
    return shape, offset


def _entry(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(piece), "logprob": logprob, "bytes": list(piece)}


def _text(piece: bytes) -> str:
    """Return a token's text; half a character is shown as U+FFFD, its bytes tell the rest."""
    return piece.decode(errors="replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LOGPROB_MIN else LOGPROB_MIN
