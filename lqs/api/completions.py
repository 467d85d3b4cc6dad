"""`POST /v1/completions`."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Receive, Scope, Send

from lqs.api.fields import TOKENS_MAX, num_logprobs_of_completion, sampling_of
from lqs.api.generate import Generator, Job
from lqs.api.intake import find_served, read_body, request_of
from lqs.api.replies import completion_reply
from lqs.api.services import Services
from lqs.api.wire import CompletionBody, read
from lqs.errors import BadRequest
from lqs.request import PromptSource, Segment
from lqs.streaming.sse import CompletionFrames

if TYPE_CHECKING:
    from lqs.engine.served import Served


class Completions:
    """Reads a prompt and has it completed."""

    def __init__(self, services: Services, generator: Generator) -> None:
        self._services = services
        self._generator = generator
        self._decoder = msgspec.json.Decoder(CompletionBody)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        depth_max = self._services.config.server.body_depth_max
        body = await read(self._decoder, await read_body(receive), depth_max)
        await self._generator.answer(self._job(scope, body), scope, receive, send)

    def _job(self, scope: Scope, body: CompletionBody) -> Job:
        served = find_served(self._services.models, scope, body.model)
        sampling = sampling_of(body, num_logprobs=num_logprobs_of_completion(body))
        request = request_of(scope, body, sampling, served.name)
        answer_id, created_s = f"cmpl-{request.id}", int(time.time())
        return Job(
            request=request,
            source=prompt_source(body.prompt),
            answer_id=answer_id,
            created_s=created_s,
            reply=completion_reply,
            make_frames=partial(CompletionFrames, answer_id, created_s),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
        )


def prompt_source(prompt: str | list[Any] | None, served: Served | None = None) -> PromptSource:
    """Return where the prompt comes from: text, token ids, or a list of exactly one of these.

    Text is the same for every model, `served` or another. An empty list is an empty prompt. Control
    markers in the text are control tokens: here the client writes the whole prompt. Raises BadRequest.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise BadRequest("prompt: one prompt per request is supported, send several requests.", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        text = prompt
        return PromptSource(
            render=lambda: [Segment(text, True)],
            num_bytes_min=len(text.encode()),
            remake=partial(prompt_source, text),
        )
    if prompt is None:
        raise BadRequest("prompt is missing.", param="prompt")
    for n, token in enumerate(prompt):
        # type() because a bool is an int to isinstance().
        if type(token) is not int or not 0 <= token <= TOKENS_MAX:
            raise BadRequest(f"prompt[{n}] is not a token id.", param="prompt")
    return PromptSource(ids=prompt)
