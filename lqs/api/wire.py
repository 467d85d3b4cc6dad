"""The request bodies that clients send, as structs; what cannot be read is a 400 that names the field.

A field that is not here is ignored: SDKs add new ones all the time. One that is here and cannot be
honoured is refused by name, see fields.py. A key that occurs twice counts as its last occurrence; a
byte order mark is refused, as is everything else that is not strict JSON in UTF-8.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from lqs.api.depth import depths, is_surely_flat
from lqs.errors import BadRequest

T = TypeVar("T", bound=Struct)

# A high surrogate so near the end that its other half cannot follow, which reads like a body that was cut.
_CUT_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u).{0,8}\Z", re.DOTALL)
_CUT_PAIR_BYTES = 16


class StreamOptions(Struct):
    """How a stream ends."""

    include_usage: bool | None = None


class Unsupported(Struct):
    """Fields that lqs knows and honours only where they ask for what it does anyway."""

    tools: Raw | UnsetType = UNSET
    tool_choice: Raw | UnsetType = UNSET
    functions: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    response_format: Raw | UnsetType = UNSET
    json_schema: Raw | UnsetType = UNSET
    guided_json: Raw | UnsetType = UNSET
    guided_regex: Raw | UnsetType = UNSET
    guided_choice: Raw | UnsetType = UNSET
    guided_grammar: Raw | UnsetType = UNSET
    structured_outputs: Raw | UnsetType = UNSET
    n: Raw | UnsetType = UNSET
    best_of: Raw | UnsetType = UNSET
    use_beam_search: Raw | UnsetType = UNSET
    echo: Raw | UnsetType = UNSET
    suffix: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET
    modalities: Raw | UnsetType = UNSET
    prediction: Raw | UnsetType = UNSET
    web_search_options: Raw | UnsetType = UNSET
    store: Raw | UnsetType = UNSET
    chat_template: Raw | UnsetType = UNSET
    prompt_logprobs: Raw | UnsetType = UNSET
    n_probs: Raw | UnsetType = UNSET
    min_tokens: Raw | UnsetType = UNSET
    stop_token_ids: Raw | UnsetType = UNSET
    bad_words: Raw | UnsetType = UNSET
    mirostat: Raw | UnsetType = UNSET
    dynatemp_range: Raw | UnsetType = UNSET
    dry_multiplier: Raw | UnsetType = UNSET
    xtc_probability: Raw | UnsetType = UNSET
    top_n_sigma: Raw | UnsetType = UNSET
    samplers: Raw | UnsetType = UNSET
    image_data: Raw | UnsetType = UNSET
    lora: Raw | UnsetType = UNSET
    id_slot: Raw | UnsetType = UNSET
    n_keep: Raw | UnsetType = UNSET
    t_max_predict_ms: Raw | UnsetType = UNSET


class Common(Unsupported):
    """What chat and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | list[tuple[int, float | bool]] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    grammar: str | None = None
    cache_prompt: bool | None = None
    priority: int | None = None
    service_tier: str | None = None
    task_type: str | None = None
    allow_degrade: bool | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    user: str | None = None


class Part(Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct):
    """The function of a tool call; `arguments` is JSON as text."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A call that the assistant made earlier in the conversation."""

    function: FunctionCall
    id: str = ""
    type: str = "function"


class Message(Struct):
    """One message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    function_call: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET


class ChatBody(Common, kw_only=True):
    """`POST /v1/chat/completions`, and `/apply-template`, which stops at the prompt."""

    messages: list[Message]
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(Common, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: int | bool | None = None


class TokenizeBody(Struct):
    """`POST /tokenize`."""

    content: str
    model: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Struct):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


async def read(decoder: msgspec.json.Decoder[T], body: bytes, depth_max: int) -> T:
    """Turn a body into its struct. Raises BadRequest; what the client sent is never in the message."""
    await _check_depth(body, depth_max)
    try:
        # Parts that nobody reads are skipped unread by the decoder, so it would not notice.
        body.decode()
        return decoder.decode(body)
    except UnicodeDecodeError:
        raise BadRequest("The body is not UTF-8.", code="invalid_json") from None
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(_unreadable(body, error), code="invalid_json") from None


def _unreadable(body: bytes, error: Exception) -> str:
    """Say why; a surrogate without its other half is not always told as one."""
    if "surrogate" in str(error) or ("truncated" in str(error) and _CUT_PAIR.search(body[-_CUT_PAIR_BYTES:])):
        return "The body is not JSON: a string has half of a surrogate pair (\\ud800 to \\udfff)."
    return f"The body is not JSON: {error}."


async def _check_depth(body: bytes, depth_max: int) -> None:
    if is_surely_flat(body, depth_max):
        return
    for depth in depths(body):
        if depth > depth_max:
            raise BadRequest(f"The body is nested deeper than {depth_max} levels.", code="too_deep")
        # A large body is measured in slices, with a turn for everybody else after each.
        await asyncio.sleep(0)


def _misfit(message: str) -> BadRequest:
    """Name the field of a msgspec message: 'Expected `int`, got `str` - at `$.seed`'."""
    what, _, where = message.partition(" - at ")
    param = where.strip("`").removeprefix("$").removeprefix(".")
    if not param or "[...]" in param:
        return BadRequest(f"{what}.", param=param.partition("[...]")[0] or None, code="invalid_type")
    return BadRequest(f"{param}: {what}.", param=param, code="invalid_type")
