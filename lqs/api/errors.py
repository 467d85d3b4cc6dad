"""Says what went wrong, in the one shape that every error has."""

from __future__ import annotations

import msgspec
from starlette.types import Send

from lqs.errors import BodyTimedOut, BodyTooLarge, LqsError, Unauthorized, UnsupportedMediaType

JSON_TYPE = (b"content-type", b"application/json")

# These leave a body unread, so the connection cannot be used for another request.
_ENDS_CONNECTION = (Unauthorized, BodyTooLarge, BodyTimedOut, UnsupportedMediaType)


def error_body(error: LqsError) -> bytes:
    """Return the JSON of an error."""
    shape = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": shape})


def error_headers(error: LqsError) -> list[tuple[bytes, bytes]]:
    """Return the headers that say the same and when to come back."""
    headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if isinstance(error, _ENDS_CONNECTION):
        headers.append((b"connection", b"close"))
    return headers


async def send_error(send: Send, error: LqsError, extra: list[tuple[bytes, bytes]] | None = None) -> None:
    """Answer with an error."""
    await send_json(send, error_body(error), error.status, error_headers(error) + (extra or []))


async def send_json(
    send: Send, body: bytes, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Answer with JSON."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [JSON_TYPE, length, *(headers or [])]})
    await send({"type": "http.response.body", "body": body})
