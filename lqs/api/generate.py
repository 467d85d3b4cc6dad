"""Answers one completion request, streamed or whole: admit, wait, pass on, account for the end.

Whatever ends the answer early (the client leaves, an error, the server stops) cancels the request.

While a stream's request waits, its status line is held back, so that a refusal is still a status. After
`queue.hold_s` the stream opens, says in comments how far it is, and a refusal becomes its last event (api/head.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from starlette.types import Receive, Scope, Send

from lqs.api.errors import error_body, send_error, send_json
from lqs.api.head import COMMENT_EVERY_S, Head
from lqs.api.live import Live
from lqs.api.middleware.trace import Trace, trace_of
from lqs.api.replies import NS_PER_MS, Reply, timings_of, usage_of
from lqs.api.services import Services
from lqs.api.watch import ClientWatch
from lqs.errors import BadRequest, EngineFailed, LqsError, RequestCancelled, RequestRefused, RequestTimedOut
from lqs.request import FINISH_REASONS, NS_PER_S, FinishReason, PromptSource, Request
from lqs.streaming.outlet import Outlet
from lqs.streaming.sse import DONE, Frames, error_frame

# Outcome.error_code: ERROR_SAMPLING minus DRAW_NO_CANDIDATE or DRAW_GRAMMAR, see _engine.pyx.
_GRAMMAR_ERRORS = (-302, -303)
_DEVICE_RETRY_S = 5.0
# A worker ends what is overdue between two steps. One that stands still in a step says nothing, and is not waited for.
OVERDUE_S = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """A completion request as its endpoint has read it.

    `make_frames` takes the name of the model that answers, which is known once it is admitted.
    """

    request: Request
    source: PromptSource
    answer_id: str
    created_s: int
    reply: Reply
    make_frames: Callable[[str], Frames]
    include_usage: bool


class Generator:
    """Makes the answers of both completion endpoints.

    Owner: the event loop.
    """

    def __init__(self, services: Services, live: Live) -> None:
        self._services = services
        self._live = live

    async def answer(self, job: Job, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `job`. Raises LqsError as long as no status has been sent, or ClientLeft."""
        request = job.request
        outlet = Outlet(request, valve=self._services.desk)
        stall_s = self._services.config.server.write_stall_s
        async with ClientWatch(scope, receive, send, stall_s) as watch:
            self._live.add(request, watch)
            overdue: asyncio.TimerHandle | None = None
            head = self._head(request, outlet, watch) if request.is_stream else None
            try:
                await self._services.gate.admit(request, job.source, outlet)
                if request.stop_ns:
                    left_s = (request.stop_ns - time.monotonic_ns()) / NS_PER_S
                    overdue = asyncio.get_running_loop().call_later(left_s + OVERDUE_S, outlet.give_up)
                if head is not None:
                    await head.admitted()
                    await self._stream(job, outlet, watch, trace_of(scope), head)
                else:
                    await self._whole(job, outlet, watch, trace_of(scope))
            finally:
                if overdue is not None:
                    overdue.cancel()
                if head is not None:
                    await head.close()
                self._live.discard(request)
                if outlet.is_overdue or not outlet.is_over:
                    self._services.desk.cancel(request)

    async def _whole(self, job: Job, outlet: Outlet, watch: ClientWatch, trace: Trace) -> None:
        texts, records = [], []
        async for piece in outlet.pieces():
            texts.append(piece.text)
            records.append(piece.logprobs)
        failure = self._failure(job.request, outlet)
        if failure is not None:
            trace.failed(failure)
            await send_error(watch.send, failure, self._headers(job.request, outlet))
            return
        assert outlet.outcome is not None
        head = {"id": job.answer_id, "created": job.created_s, "model": job.request.model}
        logprobs = b"".join(records) if job.request.sampling.num_logprobs >= 0 else None
        text = b"".join(texts).decode(errors="replace")
        answer = job.reply(head, text, logprobs, FINISH_REASONS[outlet.outcome.finish])
        answer["usage"] = usage_of(job.request, outlet.outcome)
        answer["timings"] = timings_of(job.request, outlet.outcome)
        await send_json(watch.send, msgspec.json.encode(answer), 200, self._headers(job.request, outlet))

    def _head(self, request: Request, outlet: Outlet, watch: ClientWatch) -> Head:
        gate = self._services.gate
        return Head(
            watch,
            gate.config.queue.hold_s,
            headers=lambda: self._headers(request, outlet),
            place=lambda: gate.place_for_model(request),
        )

    async def _stream(self, job: Job, outlet: Outlet, watch: ClientWatch, trace: Trace, head: Head) -> None:
        if not head.is_open:
            await outlet.wait_begun(head.hold_left_s)
            failure = self._failure(job.request, outlet) if outlet.is_over and outlet.is_empty else None
            if failure is not None:
                trace.failed(failure)
                await send_error(watch.send, failure, self._headers(job.request, outlet))
                return
            await head.open()
        try:
            await self._events(job, outlet, watch, trace, head)
        except Exception:
            crash = EngineFailed("The answer could not be made.")
            trace.failed(crash)
            await _send_last(watch, error_frame(error_body(crash)))
            raise

    async def _events(self, job: Job, outlet: Outlet, watch: ClientWatch, trace: Trace, head: Head) -> None:
        while not outlet.has_begun:
            desk = self._services.desk
            await head.comment(desk.position(job.request), desk.eta_s(job.request))
            await outlet.wait_begun(COMMENT_EVERY_S)
        frames = job.make_frames(job.request.model)
        begun = frames.first() if outlet.end_reason is None else b""
        async for piece in outlet.pieces():
            await _send_more(watch, begun + frames.text(piece))
            begun = b""
        failure = self._failure(job.request, outlet)
        if failure is not None:
            trace.failed(failure)
        ending = error_frame(error_body(failure)) if failure else _ending(job, frames, outlet)
        await _send_last(watch, begun + ending)

    def _failure(self, request: Request, outlet: Outlet) -> LqsError | None:
        """Return what the client is told if the request did not come to a normal end."""
        if outlet.is_overdue:
            return RequestTimedOut("The request ran longer than it may.")
        if outlet.outcome is None:
            return self._unserved(request, outlet.end_reason)
        finish = FINISH_REASONS.get(outlet.outcome.finish)
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            return None
        if finish is FinishReason.TIMEOUT:
            return RequestTimedOut("The request ran longer than it may.")
        if finish is FinishReason.CANCELLED:
            return self._cancelled(request)
        if finish is FinishReason.DEVICE:
            message = "The device that ran the request has failed."
            return RequestRefused("no_device", message, retry_after_s=_DEVICE_RETRY_S)
        if request.sampling.grammar is not None and outlet.outcome.error_code in _GRAMMAR_ERRORS:
            message = "The grammar allows no further token."
            return BadRequest(message, param="grammar", code="grammar_dead_end")
        return EngineFailed("The engine failed while it made the answer.")

    def _unserved(self, request: Request, reason: str | None) -> LqsError:
        """Return why it left the queue; nothing was computed."""
        if reason == "cancelled":
            return self._cancelled(request)
        wait_s = self._services.desk.retry_after_s(request)
        if reason == "expired":
            message = "The request waited longer in the queue than it may; nothing was computed."
            return RequestRefused("queue_timeout", message, retry_after_s=wait_s)
        if reason == "no_kv":
            message = (
                "No device had the memory for it in time; nothing was computed. A smaller max_tokens may fit sooner."
            )
            return RequestRefused("kv_budget", message, retry_after_s=wait_s)
        if reason == "evicted":
            message = "Its place in the queue went to a request of a better class; nothing was computed."
            return RequestRefused("evicted", message, retry_after_s=wait_s)
        return RequestRefused("no_device", "No device can serve the request any more.", retry_after_s=wait_s)

    def _cancelled(self, request: Request) -> LqsError:
        if request.reason == "draining":
            return self._services.gate.refuse_rest(request)
        return RequestCancelled("The request was cancelled.")

    def _headers(self, request: Request, outlet: Outlet) -> list[tuple[bytes, bytes]]:
        """Return what is known of its way so far."""
        headers = []
        queue_ns = outlet.queue_ns
        if outlet.end_reason is not None:
            queue_ns = time.monotonic_ns() - request.arrival_ns
        if queue_ns is not None:
            headers.append((b"x-lqs-queue-ms", f"{queue_ns / NS_PER_MS:.1f}".encode()))
        if request.degraded_from is not None:
            headers.append((b"x-lqs-degraded-from", request.degraded_from.encode("ascii", "backslashreplace")))
        if request.is_clamped:
            headers.append((b"x-lqs-priority", str(request.level).encode()))
        limits = self._services.gate.limit_headers(request)
        headers.extend((name.encode(), value.encode()) for name, value in limits.items())
        return headers


def _ending(job: Job, frames: Frames, outlet: Outlet) -> bytes:
    """Return the last events of a stream that went well."""
    assert outlet.outcome is not None
    last = frames.last(FINISH_REASONS[outlet.outcome.finish], timings_of(job.request, outlet.outcome))
    usage = frames.usage(usage_of(job.request, outlet.outcome)) if job.include_usage else b""
    return last + usage + DONE


async def _send_more(watch: ClientWatch, body: bytes) -> None:
    await watch.send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_last(watch: ClientWatch, body: bytes) -> None:
    await watch.send({"type": "http.response.body", "body": body})
