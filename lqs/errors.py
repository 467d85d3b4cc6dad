"""What can go wrong, named by who is to blame and what to do.

Everything that reaches a client is an `LqsError`: a status, a machine-readable code, a sentence,
and for a refusal when to come back. What stops `lqs` at its start is a `StartError`; the command
line prints its sentence and leaves with its exit code.
"""

from __future__ import annotations

import math
import os
import traceback

RETRY_AFTER_S_MIN = 1.0
# The stock OpenAI client does not wait for longer than this, it gives up instead.
RETRY_AFTER_S_MAX = 120.0

_STATUS_OF_REASON = {
    "rate_limit_exceeded": 429,
    "queue_full": 429,
    "evicted": 429,
    "kv_budget": 429,
    "breaker_open": 429,
    "queue_timeout": 503,
    "draining": 503,
    "no_device": 503,
    "model_loading": 503,
}


class LqsError(Exception):
    """An answer to a client that is not the one it asked for.

    `message` may quote the client's own field names and numbers, never a prompt, an answer, a key
    or a path of the machine.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.retry_after_s = retry_after_s
        self.headers = _headers(self.reason, retry_after_s) | (headers or {})

    @property
    def reason(self) -> str | None:
        """The refusal's name for `x-lqs-reason`; None for what is not a refusal."""
        return None


class BadRequest(LqsError):
    """The client's fault: the body, a field's type or its range."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class Unauthorized(LqsError):
    """No key, or none that is known."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"

    def __init__(self, message: str = "A valid API key is needed: Authorization: Bearer KEY.") -> None:
        super().__init__(message, headers={"WWW-Authenticate": 'Bearer realm="lqs"'})


class Forbidden(LqsError):
    """The key is known and may not do this."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(LqsError):
    """A path, a model or a request that does not exist, or not for this key."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(LqsError):
    """The path exists, the method on it does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class Conflict(LqsError):
    """It cannot be done with the server as it runs."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class BodyTimedOut(LqsError):
    """The client did not send its body in time."""

    status = 408
    type = "timeout_error"
    code = "body_timeout"


class BodyTooLarge(LqsError):
    """More bytes than `server.body_bytes_max`."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedMediaType(LqsError):
    """A body that does not say it is JSON."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class PromptTooLong(LqsError):
    """The prompt can never run on any device that serves the model, whatever the load.

    `num_prompt_tokens` may be a proven lower bound instead of the exact count (`is_exact` False):
    then the prompt was refused before it was tokenised.
    """

    status = 400
    type = "invalid_request_error"
    code = "context_length_exceeded"

    def __init__(self, num_prompt_tokens: int, limit: int, *, is_exact: bool = True) -> None:
        count = f"{num_prompt_tokens}" if is_exact else f"at least {num_prompt_tokens}"
        super().__init__(
            f"The model takes at most {limit} tokens, prompt and answer together; this prompt has "
            f"{count} and leaves no room for an answer. Shorten it.",
            param="messages",
            headers={"x-should-retry": "false"},
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.limit = limit


class LimitTooSmall(LqsError):
    """The request costs more than a limit ever allows, whatever else goes on."""

    status = 400
    type = "invalid_request_error"
    code = "limit_too_small"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, headers={"x-should-retry": "false"})

    @property
    def reason(self) -> str | None:
        return self.code


class RequestRefused(LqsError):
    """Not now: `reason` says why, `retry_after_s` when to come back."""

    def __init__(self, reason: str, message: str, *, retry_after_s: float) -> None:
        self.status = _STATUS_OF_REASON[reason]
        self.type = "rate_limit_error" if self.status == 429 else "overloaded_error"
        self._reason = reason
        # A connection that survives would keep its client on a server that is about to end.
        headers = {"Connection": "close"} if reason == "draining" else None
        super().__init__(message, code=reason, retry_after_s=retry_after_s, headers=headers)

    @property
    def reason(self) -> str | None:
        return self._reason


class RequestTimedOut(LqsError):
    """The request ran longer than it may."""

    status = 504
    type = "timeout_error"
    code = "timeout"


class RequestCancelled(LqsError):
    """Somebody with the right to do so cancelled it, or its client left."""

    status = 499
    type = "invalid_request_error"
    code = "cancelled"


class EngineFailed(LqsError):
    """The engine could not do it; the client did nothing wrong and may try again."""

    status = 500
    type = "server_error"
    code = "engine_error"


class StartError(Exception):
    """Something that keeps `lqs` from starting; the message says what to do.

    `exit_code`: 1 for a failure, 2 for wrong use.
    """

    exit_code = 1


def reason_of(error: Exception) -> str:
    """What is told of a load that failed: the words of what was foreseen, else the place."""
    return str(error) if isinstance(error, StartError) else place_of(error)


class ConfigError(StartError):
    """A setting is wrong; the message names it as `section.key`."""

    exit_code = 2


class ModelFileError(StartError):
    """A model file cannot be used; the message names the file and the reason."""


class DeviceError(StartError):
    """A device slot cannot be opened; the message names it and the reason."""


class NoRoom(DeviceError):
    """A device slot cannot be opened for want of memory; a smaller context may fit."""


def is_overload(reason: str) -> bool:
    """Whether a refusal for this reason says that there is more than the server can do; a key's limit does not."""
    return _STATUS_OF_REASON.get(reason) == 429 and reason != "rate_limit_exceeded"


def place_of(error: BaseException) -> str:
    """The kind of an error and where it came from. Not what it says: that may quote anything."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {last.name}, {os.path.basename(last.filename)}:{last.lineno}"


def clamp_retry_after(seconds: float) -> float:
    """Seconds to wait, within the bounds that clients honour."""
    return min(max(seconds, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)


def _headers(reason: str | None, retry_after_s: float | None) -> dict[str, str]:
    headers = {}
    if reason is not None:
        headers["x-lqs-reason"] = reason
    if retry_after_s is not None:
        seconds = clamp_retry_after(retry_after_s)
        headers["Retry-After"] = str(math.ceil(seconds))
        headers["retry-after-ms"] = str(math.ceil(seconds * 1000))
    return headers
