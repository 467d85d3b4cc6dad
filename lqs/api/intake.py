"""What every endpoint does first: read the body, find the model, note who asks."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope

from lqs.api.fields import check_unsupported, check_waiting, max_tokens_of
from lqs.api.middleware.auth import tenant_of
from lqs.api.middleware.trace import trace_of
from lqs.api.watch import ClientLeftEarly
from lqs.api.wire import ChatBody, CompletionBody
from lqs.errors import NotFound
from lqs.request import Request, Sampling

if TYPE_CHECKING:
    from lqs.engine.served import Served
    from lqs.engine.slots import Models

MODEL_CHARS_SHOWN = 100
RETRY_COUNT_DIGITS_MAX = 4
_SECONDS = re.compile(r"[0-9]{1,7}(\.[0-9]{1,9})?")


async def read_body(receive: Receive) -> bytes:
    """Return the whole body. Its size is bounded by the middleware. Raises ClientLeftEarly."""
    chunks = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftEarly
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


def find_served(models: Models, scope: Scope, name: str | None) -> Served:
    """Return the model that is asked for: by path, else by the body, else the first. Raises NotFound.

    Of several versions behind a name it is the one whose turn it is, unless `x-lqs-model-version` names one.
    """
    wanted = _named_in_path(scope) or name
    version = _version_of(scope)
    served = models.route(wanted, version)
    if served is None:
        raise no_such_model((wanted or models.names()[0]) + (f"@{version}" if version else ""))
    return served


def find_models(models: Models, name: str) -> list[Served]:
    """The model of that name, or all versions that are behind it. Raises NotFound."""
    if not (found := models.find_all(name)):
        raise no_such_model(name)
    return found


def no_such_model(name: str) -> NotFound:
    """Return what is raised for a model that is not served."""
    return NotFound(
        f"There is no model {name[:MODEL_CHARS_SHOWN]!r} here; GET /v1/models lists them.",
        param="model",
        code="model_not_found",
    )


def _named_in_path(scope: Scope) -> str | None:
    name: str | None = scope.get("path_params", {}).get("model")
    return name


def _version_of(scope: Scope) -> str:
    """Return the version that the header asks for; empty if there is none, or more than one header."""
    values = [value for name, value in scope["headers"] if name == b"x-lqs-model-version"]
    return values[0].decode("latin-1")[:MODEL_CHARS_SHOWN] if len(values) == 1 else ""


def read_timeout_of(scope: Scope) -> float | None:
    """Return how many seconds the client waits for bytes, as the stock SDK tells it; None if it does not."""
    for name, value in scope["headers"]:
        if name == b"x-stainless-read-timeout":
            # A number without a sign, or it is no use to us: the header is nobody's promise.
            text = value.decode("latin-1")
            return float(text) if _SECONDS.fullmatch(text) else None
    return None


def request_of(scope: Scope, body: ChatBody | CompletionBody, sampling: Sampling, model: str) -> Request:
    """Turn a body into a request, its fields checked. Raises BadRequest."""
    check_unsupported(body)
    check_waiting(body)
    return Request(
        id=trace_of(scope).request_id,
        tenant=tenant_of(scope),
        model=model,
        arrival_ns=time.monotonic_ns(),
        sampling=sampling,
        max_tokens=max_tokens_of(body),
        priority=body.priority,
        service_tier=body.service_tier,
        task_type=body.task_type,
        timeout_s=body.timeout,
        queue_timeout_s=body.queue_timeout,
        read_timeout_s=read_timeout_of(scope),
        is_stream=bool(body.stream),
        retry_count=_retry_count(scope),
        allow_degrade=body.allow_degrade,
        route="chat" if isinstance(body, ChatBody) else "completions",
    )


def _retry_count(scope: Scope) -> int | None:
    """Tries before this one, as the official SDKs count them; None for other clients."""
    for name, value in scope["headers"]:
        if name == b"x-stainless-retry-count" and value.isdigit() and len(value) <= RETRY_COUNT_DIGITS_MAX:
            return int(value)
    return None
