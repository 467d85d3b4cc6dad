"""The bytes of a stream: server-sent events in OpenAI's chunk shapes.

A chunk differs from the one before only in its text, so everything around it is encoded once per
request and each chunk is put together from bytes.

A stream ends in one of two ways: the chunk with finish_reason, the usage chunk if it was asked for, and
`data: [DONE]`; or, if it fails, one `data: {"error": ...}` and nothing after it, no [DONE] either.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec.json import encode

from lqs.streaming.logprobs import chat_logprobs, completion_logprobs
from lqs.streaming.outlet import Piece

DONE = b"data: [DONE]\n\n"


class Frames(Protocol):
    """The events of one stream, in one of the two shapes."""

    def first(self) -> bytes: ...
    def text(self, piece: Piece) -> bytes: ...
    def last(self, finish_reason: str, timings: dict[str, float]) -> bytes: ...
    def usage(self, usage: dict[str, Any]) -> bytes: ...


class _Chunks:
    """What both shapes have in common: the head of each chunk, encoded once."""

    def __init__(self, id: str, kind: str, created_s: int, model: str) -> None:
        head = encode({"id": id, "object": kind, "created": created_s, "model": model})
        self._head = b"data: " + head[:-1]

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk that says how many tokens it was; it has no choice."""
        return self._head + b',"choices":[],"usage":' + encode(usage) + b"}\n\n"

    def _last(self, choice: dict[str, Any], timings: dict[str, float]) -> bytes:
        return self._head + b',"choices":[' + encode(choice) + b'],"timings":' + encode(timings) + b"}\n\n"


class ChatFrames(_Chunks):
    """The chunks of a chat completion. Owner: the coroutine that answers."""

    def __init__(self, id: str, created_s: int, model: str) -> None:
        super().__init__(id, "chat.completion.chunk", created_s, model)
        self._before = self._head + b',"choices":[{"index":0,"delta":{"content":'
        self._after = b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def first(self) -> bytes:
        """The chunk that says who speaks."""
        delta = b'{"role":"assistant","content":""}'
        return self._head + b',"choices":[{"index":0,"delta":' + delta + b',"logprobs":null,"finish_reason":null}]}\n\n'

    def text(self, piece: Piece) -> bytes:
        """The chunk with new text."""
        if not piece.logprobs:
            return self._before + escape(piece.text) + self._after
        logprobs = encode(chat_logprobs(piece.logprobs))
        return self._before + escape(piece.text) + b'},"logprobs":' + logprobs + b',"finish_reason":null}]}\n\n'

    def last(self, finish_reason: str, timings: dict[str, float]) -> bytes:
        """The chunk that says why it ends."""
        return self._last({"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish_reason}, timings)


class CompletionFrames(_Chunks):
    """The chunks of a text completion. Owner: the coroutine that answers."""

    def __init__(self, id: str, created_s: int, model: str) -> None:
        super().__init__(id, "text_completion", created_s, model)
        self._before = self._head + b',"choices":[{"index":0,"text":'
        self._after = b',"logprobs":null,"finish_reason":null}]}\n\n'
        self._num_chars = 0

    def first(self) -> bytes:
        """Nothing: a completion has no role."""
        return b""

    def text(self, piece: Piece) -> bytes:
        """The chunk with new text."""
        if not piece.logprobs:
            return self._before + escape(piece.text) + self._after
        shape, self._num_chars = completion_logprobs(piece.logprobs, self._num_chars)
        return self._before + escape(piece.text) + b',"logprobs":' + encode(shape) + b',"finish_reason":null}]}\n\n'

    def last(self, finish_reason: str, timings: dict[str, float]) -> bytes:
        """The chunk that says why it ends."""
        return self._last({"index": 0, "text": "", "logprobs": None, "finish_reason": finish_reason}, timings)


def escape(text: bytes) -> bytes:
    """Return UTF-8 text as a JSON string."""
    return encode(text.decode(errors="replace"))


def error_frame(body: bytes) -> bytes:
    """The event that ends a stream which failed; `body` is the JSON that a status would have had."""
    return b"data: " + body + b"\n\n"


def waiting_comment(position: int | None, eta_s: float | None) -> bytes:
    """A comment, which clients skip, that says how far a queued request is."""
    fields = []
    if position is not None:
        fields.append(f"position={position}")
    if eta_s is not None:
        fields.append(f"eta_s={eta_s:.1f}")
    return f": queue {' '.join(fields)}".rstrip().encode() + b"\n\n"
