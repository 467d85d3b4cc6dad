"""Turns the messages of a chat body into what a template reads.

The rules: `content` null, absent or an empty list is the same, and allowed only for an assistant's
message that has tool calls or a refusal; the texts of several parts are joined by a newline, as
llama-server does; only text parts are taken.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lqs.api.depth import depths
from lqs.api.fields import refuse_unless_neutral
from lqs.api.wire import ChatBody, Message, Part, ToolCall
from lqs.errors import BadRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ARGUMENTS_DEPTH_MAX = 64

_MULTIMODAL = ("image_url", "input_image", "input_audio", "video_url", "file")


def messages_of(body: ChatBody) -> list[dict[str, Any]]:
    """Return plain data for the template. Raises BadRequest with the message's place."""
    if not body.messages:
        raise BadRequest("messages must have at least one message.", param="messages")
    messages = [_message(message, f"messages[{n}]") for n, message in enumerate(body.messages)]
    if continues_final(body) and messages[-1]["role"] != "assistant":
        raise BadRequest(
            "continue_final_message needs an assistant message at the end.", param="continue_final_message"
        )
    return messages


def continues_final(body: ChatBody) -> bool:
    """Tell if the answer goes on from the last message instead of beginning a new one.

    Only where the body says so; an assistant message at the end alone does not.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
        )
    return bool(body.continue_final_message) or body.add_generation_prompt is False


def variables_of(body: ChatBody) -> dict[str, Any]:
    """Return what the client wants the template to know."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return variables


def num_text_bytes_min(messages: list[dict[str, Any]]) -> int:
    """Count the UTF-8 bytes that every template shows: what users said, but for white space around it."""
    return sum(
        len(message["content"].strip().encode(errors="replace")) for message in messages if message["role"] == "user"
    )


def _message(message: Message, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    refuse_unless_neutral(f"{where}.function_call", message.function_call)
    refuse_unless_neutral(f"{where}.audio", message.audio)
    shown: dict[str, Any] = {"role": message.role, "content": _content(message, where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            shown[name] = value
    if message.tool_calls:
        shown["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls)
        ]
    return shown


def _content(message: Message, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content:
        return "\n".join(_text(part, f"{where}.content[{n}]") for n, part in enumerate(message.content))
    if message.role == "assistant" and (message.tool_calls or message.refusal):
        return message.refusal or ""
    raise BadRequest(f"{where}.content is missing.", param=f"{where}.content")


def _text(part: Part, where: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in _MULTIMODAL:
        raise BadRequest(f"{where}: the model takes text only.", param=where, code="unsupported_content")
    if part.type in ("text", "refusal"):
        raise BadRequest(f"{where}.{part.type} is missing.", param=f"{where}.{part.type}")
    raise BadRequest(f"{where}.type is not known.", param=f"{where}.type")


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    if call.type != "function":
        raise BadRequest(f"{where}.type must be function.", param=f"{where}.type")
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> Any:
    """Return the arguments as templates expect them: an object if the text is one, else the text."""
    data = text.encode(errors="replace")
    if max(depths(data), default=0) > ARGUMENTS_DEPTH_MAX:
        return text
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return text
    return value if isinstance(value, dict) else text
