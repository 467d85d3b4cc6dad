"""`POST /tokenize`, `/detokenize` and `/apply-template`, in llama-server's shapes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Receive, Scope, Send

from lqs.api.chat import prompt_source
from lqs.api.errors import send_json
from lqs.api.fields import TOKENS_MAX, check_unsupported
from lqs.api.intake import find_served, read_body
from lqs.api.services import Services
from lqs.api.wire import ChatBody, DetokenizeBody, TokenizeBody, read
from lqs.errors import BadRequest, BodyTooLarge

if TYPE_CHECKING:
    from lqs.engine.library import Model

TEXT_BYTES_MAX = 1_048_576
IDS_MAX = 65_536


class Tokenize:
    """Turns text into token ids, with their texts if `with_pieces`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._decoder = msgspec.json.Decoder(TokenizeBody)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        body = await read(self._decoder, await read_body(receive), services.config.server.body_depth_max)
        if len(body.content.encode(errors="replace")) > TEXT_BYTES_MAX:
            raise BodyTooLarge(f"content may have at most {TEXT_BYTES_MAX} bytes.", param="content")
        served = find_served(services.models, scope, body.model)
        async with services.fleet.use(served):
            ids = await services.gate.tokenize(
                served, body.content, add_special=body.add_special, parse_special=body.parse_special
            )
            if body.with_pieces and len(ids) > IDS_MAX:
                message = f"with_pieces tells at most {IDS_MAX} tokens; content has {len(ids)}."
                raise BodyTooLarge(message, param="content")
            answer = await services.gate.run(_tokens_json, served.loaded, ids, with_pieces=body.with_pieces)
        await send_json(send, answer)


class Detokenize:
    """Turns token ids into text."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._decoder = msgspec.json.Decoder(DetokenizeBody)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        raw = await read_body(receive)
        # Before it is read: IDS_MAX of them need no more.
        if len(raw) > TEXT_BYTES_MAX:
            raise BodyTooLarge(f"tokens may have at most {IDS_MAX} ids, in {TEXT_BYTES_MAX} bytes.", param="tokens")
        body = await read(self._decoder, raw, services.config.server.body_depth_max)
        if len(body.tokens) > IDS_MAX:
            raise BodyTooLarge(f"tokens may have at most {IDS_MAX} ids.", param="tokens")
        if not all(0 <= token <= TOKENS_MAX for token in body.tokens):
            raise BadRequest("tokens has a number that is not a token id.", param="tokens")
        served = find_served(services.models, scope, body.model)
        async with services.fleet.use(served):
            text = await services.gate.detokenize(served, array("i", body.tokens))
        await send_json(send, await services.gate.run(_content_json, text))


class ApplyTemplate:
    """Shows the prompt that a conversation comes to."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._decoder = msgspec.json.Decoder(ChatBody)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        body = await read(self._decoder, await read_body(receive), services.config.server.body_depth_max)
        check_unsupported(body)
        served = find_served(services.models, scope, body.model)
        source = prompt_source(body, served)
        assert source.render is not None
        async with services.fleet.use(served):
            segments = await services.gate.run(source.render)
        prompt = "".join(segment.text for segment in segments)
        await send_json(send, msgspec.json.encode({"prompt": prompt}))


def _tokens_json(model: Model, ids: Sequence[int], *, with_pieces: bool) -> bytes:
    """Return the answer to /tokenize; runs in the pool."""
    tokens: list[Any] = list(ids)
    if with_pieces:
        tokens = [{"id": token, "piece": piece} for token, piece in zip(ids, _pieces(model, ids), strict=True)]
    return msgspec.json.encode({"tokens": tokens})


def _content_json(text: bytes) -> bytes:
    """Return the answer to /detokenize; runs in the pool."""
    return msgspec.json.encode({"content": text.decode(errors="replace")})


def _pieces(model: Model, ids: Sequence[int]) -> list[Any]:
    """Return each token's text, or its bytes where it is a part of a character."""
    return [_text_or_bytes(model.detokenize([token])) for token in ids]


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
