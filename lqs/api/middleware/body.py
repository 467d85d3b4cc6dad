"""Bounds the size of a request's body and the time it may take to come."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lqs.errors import BodyTimedOut, BodyTooLarge, UnsupportedMediaType

_JSON_TYPES = (b"application/json", b"text/json")


class BodyMiddleware:
    """Raises from `receive` as soon as a bound is passed; once the body is there it steps aside.

    `timeout_s` is for the whole body, so that one that trickles ends as well. Nothing is kept here:
    what is over the bound is never read.
    """

    def __init__(self, app: ASGIApp, *, num_bytes_max: int, timeout_s: float) -> None:
        self._app = app
        self._num_bytes_max = num_bytes_max
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        self._check_length(headers.get(b"content-length"))
        if scope["method"] == "POST":
            _check_type(headers.get(b"content-type"))
        await self._app(scope, self._bounded(receive), send)

    def _check_length(self, length: bytes | None) -> None:
        """Refuse by the header alone. A length of more digits than the bound has is above it."""
        if length is None or not length.isdigit():
            return
        digits = length.lstrip(b"0")
        if len(digits) > len(str(self._num_bytes_max)) or int(digits or b"0") > self._num_bytes_max:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        num_bytes = 0
        is_complete = False

        async def receive_bounded() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError:
                raise BodyTimedOut(f"The body did not come within {self._timeout_s:g} s.") from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._num_bytes_max:
                raise self._too_large()
            is_complete = not message.get("more_body", False)
            return message

        return receive_bounded

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The body has more than {self._num_bytes_max} bytes.")


def _check_type(content_type: bytes | None) -> None:
    """Refuse a body that says it is something else than JSON; one that says nothing is taken as JSON."""
    if content_type is None:
        return
    kind = content_type.partition(b";")[0].strip().lower()
    if kind not in _JSON_TYPES and not kind.endswith(b"+json"):
        raise UnsupportedMediaType("The body must be application/json.")
