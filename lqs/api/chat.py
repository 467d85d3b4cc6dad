"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from starlette.types import Receive, Scope, Send

from lqs.api.fields import num_logprobs_of_chat, sampling_of
from lqs.api.generate import Generator, Job
from lqs.api.intake import find_served, read_body, request_of
from lqs.api.messages import continues_final, messages_of, num_text_bytes_min, variables_of
from lqs.api.replies import chat_reply
from lqs.api.services import Services
from lqs.api.wire import ChatBody, read
from lqs.errors import BadRequest, RequestRefused
from lqs.request import PromptSource, Segment
from lqs.streaming.sse import ChatFrames

if TYPE_CHECKING:
    from lqs.engine.served import Served
    from lqs.engine.template import ChatTemplate

_LOADING_RETRY_S = 5.0


class Chat:
    """Reads a conversation and has it answered."""

    def __init__(self, services: Services, generator: Generator) -> None:
        self._services = services
        self._generator = generator
        self._decoder = msgspec.json.Decoder(ChatBody)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        depth_max = self._services.config.server.body_depth_max
        body = await read(self._decoder, await read_body(receive), depth_max)
        await self._generator.answer(self._job(scope, body), scope, receive, send)

    def _job(self, scope: Scope, body: ChatBody) -> Job:
        served = find_served(self._services.models, scope, body.model)
        sampling = sampling_of(body, num_logprobs=num_logprobs_of_chat(body))
        request = request_of(scope, body, sampling, served.name)
        answer_id, created_s = f"chatcmpl-{request.id}", int(time.time())
        return Job(
            request=request,
            source=prompt_source(body, served),
            answer_id=answer_id,
            created_s=created_s,
            reply=chat_reply,
            make_frames=partial(ChatFrames, answer_id, created_s),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
        )


def prompt_source(body: ChatBody, served: Served) -> PromptSource:
    """Return how to make the prompt of a conversation; the template itself runs in the pool.

    Raises BadRequest for messages that are wrong, and where the model has no usable template.
    """
    messages = messages_of(body)
    # Of one that is absent, or comes just now, the template is not known yet; the door says who waits for it.
    template = None if served.is_loading else template_of(served)
    continue_final, variables = continues_final(body), variables_of(body)

    def render() -> Sequence[Segment]:
        known = template or template_of(served)
        return known.render(messages, continue_final=continue_final, variables=variables)

    return PromptSource(render=render, num_bytes_min=num_text_bytes_min(messages), remake=partial(prompt_source, body))


def template_of(served: Served) -> ChatTemplate:
    """Return the model's chat template, or raise why there is none."""
    if served.is_loading:
        raise RequestRefused("model_loading", "The model is loading.", retry_after_s=_LOADING_RETRY_S)
    if served.template is not None:
        return served.template
    what = f"cannot be used: {served.template_error}" if served.template_error is not None else "is missing"
    raise BadRequest(
        f"The model's chat template {what}. /v1/completions works without one.",
        param="messages",
        code="no_chat_template",
    )
