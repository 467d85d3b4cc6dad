"""Checks what a body asks for and turns it into Sampling, before anything is queued.

Each check raises BadRequest with the field's name. Ranges are written so that a number is refused
unless it is inside: no comparison lets a NaN pass.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from lqs.api.grammar import check_grammar
from lqs.api.wire import ChatBody, Common, CompletionBody, Unsupported
from lqs.errors import BadRequest
from lqs.request import Sampling

STOPS_MAX = 16
STOP_BYTES_MAX = 1024
# The engine takes 1024; the rest is for the tokens that it bans itself, such as with ignore_eos.
LOGIT_BIAS_MAX = 960
REPEAT_LAST_N_MAX = 4096  # The engine's; -1 stands for it.
TOP_LOGPROBS_MAX = 20
TOKENS_MAX = 2**31 - 1
TIMEOUT_S_MAX = 86_400.0

# What each field that cannot be honoured may say: null, or what lqs does anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "store": (False,),
    "n_probs": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "top_n_sigma": (-1,),
    "image_data": ([],),
    "lora": ([],),
    "id_slot": (-1,),
    "n_keep": (0,),
    "t_max_predict_ms": (0, -1),
}
_NEUTRAL_BYTES_MAX = 64

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repeat_penalty": (0.01, 100),
    "repeat_last_n": (-1, REPEAT_LAST_N_MAX),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
_SERVICE_TIERS = ("auto", "default", "flex", "priority")
_TASK_TYPES = ("short", "long")


def check_unsupported(body: Unsupported) -> None:
    """Refuse the first field that asks for something lqs cannot do."""
    for name in Unsupported.__struct_fields__:
        refuse_unless_neutral(name, getattr(body, name), _NEUTRAL.get(name, ()))


def refuse_unless_neutral(name: str, raw: Any, neutral: tuple[Any, ...] = ()) -> None:
    """Refuse a field of raw JSON unless it is absent, null or one of `neutral`."""
    if raw is UNSET:
        return
    data = bytes(raw)
    value = msgspec.json.decode(data) if len(data) <= _NEUTRAL_BYTES_MAX else UNSET
    # 1 == True in Python, but not in JSON.
    if value is None or any(value == one and type(value) is type(one) for one in neutral):
        return
    raise BadRequest(f"{name} is not supported by this server.", param=name, code="unsupported_field")


def sampling_of(body: Common, *, num_logprobs: int) -> Sampling:
    """Collect how tokens are chosen; what the body leaves out keeps its default."""
    asked: dict[str, Any] = {
        name: _within(name, value) for name in _RANGES if (value := getattr(body, name)) is not None
    }
    if asked.get("repeat_last_n") == -1:
        asked["repeat_last_n"] = REPEAT_LAST_N_MAX
    for name in ("ignore_eos", "cache_prompt"):
        if getattr(body, name) is not None:
            asked[name] = getattr(body, name)
    if body.grammar:
        asked["grammar"] = check_grammar(body.grammar)
    return Sampling(
        logit_bias=_logit_bias(body.logit_bias),
        seed=_seed(body.seed),
        stop=_stops(body.stop),
        num_logprobs=num_logprobs,
        **asked,
    )


def max_tokens_of(body: ChatBody | CompletionBody) -> int | None:
    """Return how many tokens the answer may have at most; None where the body does not say."""
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        value: int | None = getattr(body, name)
        if value is None:
            continue
        if value == -1:
            return None
        if not 1 <= value <= TOKENS_MAX:
            raise _out_of_range(name, 1, TOKENS_MAX, "; -1 is as if it were absent")
        return value
    return None


def num_logprobs_of_chat(body: ChatBody) -> int:
    """Return how many alternatives to report for each token, -1 for no logprobs at all."""
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= TOP_LOGPROBS_MAX:
        raise _out_of_range("top_logprobs", 0, TOP_LOGPROBS_MAX)
    if not body.logprobs:
        if body.top_logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        return -1
    return body.top_logprobs or 0


def num_logprobs_of_completion(body: CompletionBody) -> int:
    """Return the same for completions, where `logprobs` is the number."""
    if body.logprobs is None or body.logprobs is False:
        return -1
    if body.logprobs is True or not 0 <= body.logprobs <= TOP_LOGPROBS_MAX:
        raise _out_of_range("logprobs", 0, TOP_LOGPROBS_MAX)
    return body.logprobs


def check_waiting(body: Common) -> None:
    """Look at the fields that say how urgent it is and how long it may take, in seconds."""
    for name in ("timeout", "queue_timeout"):
        value: float | None = getattr(body, name)
        if value is not None and not 0 < value <= TIMEOUT_S_MAX:
            raise BadRequest(f"{name} must be above 0 and at most {TIMEOUT_S_MAX:.0f} s.", param=name)
    if body.priority is not None and not abs(body.priority) <= TOKENS_MAX:
        raise _out_of_range("priority", -TOKENS_MAX, TOKENS_MAX)
    _one_of("service_tier", body.service_tier, _SERVICE_TIERS)
    _one_of("task_type", body.task_type, _TASK_TYPES)
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream to be true.", param="stream_options")


def _within(name: str, value: float) -> float:
    least, most = _RANGES[name]
    if not least <= value <= most:
        raise _out_of_range(name, least, most)
    return value


def _seed(seed: int | None) -> int | None:
    if seed is None or seed == -1:
        return None
    if not -(2**63) <= seed < 2**64:
        raise BadRequest("seed must fit in 64 bits.", param="seed")
    return seed % 2**64


def _stops(stop: str | list[str] | None) -> tuple[bytes, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > STOPS_MAX:
        raise BadRequest(f"stop may have at most {STOPS_MAX} entries.", param="stop")
    encoded = tuple(text.encode() for text in stops)
    if any(not 1 <= len(text) <= STOP_BYTES_MAX for text in encoded):
        raise BadRequest(f"A stop string must have 1 to {STOP_BYTES_MAX} bytes.", param="stop")
    return encoded


def _logit_bias(
    bias: dict[str, float] | list[tuple[int, float | bool]] | None,
) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    if len(bias) > LOGIT_BIAS_MAX:
        raise BadRequest(f"logit_bias may have at most {LOGIT_BIAS_MAX} entries.", param="logit_bias")
    pairs = bias.items() if isinstance(bias, dict) else bias
    return tuple((_token_id(token), _bias(value)) for token, value in pairs)


def _token_id(token: str | int) -> int:
    # isdecimal() alone would let other scripts' digits in; ten digits are more than any id has.
    text = str(token)
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= TOKENS_MAX):
        raise BadRequest("A key of logit_bias is not a token id.", param="logit_bias")
    return int(text)


def _bias(value: float | bool) -> float:
    """Return the bias; false, as llama.cpp has it, is never."""
    if value is False:
        return -100.0
    if value is True or not -100 <= value <= 100:
        raise _out_of_range("logit_bias", -100, 100)
    return float(value)


def _one_of(name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise BadRequest(f"{name} must be one of {', '.join(known)}.", param=name)


def _out_of_range(name: str, least: float, most: float, note: str = "") -> BadRequest:
    return BadRequest(f"{name} must be from {least} to {most}{note}.", param=name, code="out_of_range")
