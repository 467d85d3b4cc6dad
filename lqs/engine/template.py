"""Turns a conversation into a prompt by the chat template of a model.

The template is compiled at load, so a broken one is known before the first request. A render is bounded
(see sandbox.py), and what a client typed can never become a control token (see markers.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from lqs.engine.allowance import RENDER_S_MAX, TemplateLimitError
from lqs.engine.markers import Guard, Markers
from lqs.engine.sandbox import SandboxEnvironment, TemplateRaised
from lqs.errors import BadRequest, StartError
from lqs.request import Segment

SOURCE_CHARS_MAX = 262_144
MESSAGE_CHARS_MAX = 300

_CONTROL_CHARS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_LOADS = re.compile(r"\{%-?\s*(include|import|from|extends)\b")


class TemplateInvalid(Exception):
    """The template cannot be compiled; the message says why, in one line."""


class ChatTemplate:
    """A model's chat template, compiled.

    Owner: immutable; renders in any number of threads at once.
    """

    def __init__(
        self,
        source: str,
        *,
        special_texts: Iterable[str],
        bos_text: str = "",
        eos_text: str = "",
        clock: Callable[[], float] = time.monotonic,
        render_s_max: float = RENDER_S_MAX,
    ) -> None:
        """Compile `source`, or raise TemplateInvalid.

        `special_texts` are the texts of the model's control tokens, `clock` counts seconds.
        """
        if len(source) > SOURCE_CHARS_MAX:
            raise TemplateInvalid(f"the template is longer than {SOURCE_CHARS_MAX} characters")
        if loads := _LOADS.search(source):
            raise TemplateInvalid(f"the template loads another one: {loads[1]} is not supported")
        self._markers = Markers(special_texts)
        self._chars = set(source)
        self._tokens = {"bos_token": bos_text, "eos_token": eos_text}
        self._environment = SandboxEnvironment(clock, render_s_max)
        self._template = _compile(self._environment, source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """Render a conversation; control tokens may come only from the trusted segments.

        The template is asked to open the assistant's turn. With `continue_final` it is not: the
        prompt then ends where the last message's text ends, for the model to go on from there.
        `variables` are the client's own and cannot replace a name that lqs or Jinja defines.
        Raises BadRequest with the template's own message if it refuses the conversation.
        """
        guard = Guard(self._markers, self._chars | _chars_of([messages, tools, variables]))
        shown = [_keep_role(message, guard.protect(message)) for message in messages]
        mark = guard.stand_in("") if continue_final else None
        if mark is not None:
            shown[-1]["content"] += mark
        rendered = self._render(
            guard,
            self._checked(variables or {}, guard)
            | self._tokens
            | {
                "messages": shown,
                "tools": guard.protect(tools),
                "documents": None,
                "add_generation_prompt": not continue_final,
            },
        )
        return guard.split(rendered if mark is None else _cut(rendered, mark))

    def _checked(self, variables: Mapping[str, Any], guard: Guard) -> dict[str, Any]:
        for name in variables:
            if not name.isidentifier() or name.startswith("_") or name in self._environment.globals:
                raise BadRequest("A name in chat_template_kwargs is not allowed.", param="chat_template_kwargs")
        return {name: guard.protect(value) for name, value in variables.items()}

    def _render(self, guard: Guard, variables: Mapping[str, Any]) -> str:
        try:
            return self._environment.render_bounded(self._template, variables)
        except TemplateRaised as refusal:
            reason = _one_line(guard.restore(str(refusal)))
            raise BadRequest(
                f"The model's chat template refuses the conversation: {reason}",
                param="messages",
                code="template_refused",
            ) from None
        except TemplateLimitError as limit:
            raise BadRequest(
                f"The model's chat template was stopped: {limit}.", param="messages", code="template_stopped"
            ) from None
        except (Exception, RecursionError):
            # A template can fail in any way that Python code can. What it says may hold the prompt.
            raise BadRequest(
                "The model's chat template failed on this conversation.", param="messages", code="template_failed"
            ) from None


def _compile(environment: SandboxEnvironment, source: str) -> Any:
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise TemplateInvalid(f"line {error.lineno}: {_one_line(error.message or 'syntax error')}") from None
    except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise TemplateInvalid(f"it does not compile: {_one_line(type(error).__name__)}") from None


def _keep_role(message: Mapping[str, Any], protected: dict[str, Any]) -> dict[str, Any]:
    """Leave the role as it is: it is one of a few known words, and templates build markers from it."""
    return protected | {"role": message["role"]}


def _chars_of(value: Any) -> set[str]:
    """Collect the characters of all strings in plain data."""
    chars: set[str] = set()
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            chars.update(part)
        elif isinstance(part, Mapping):
            pending.extend(part)
            pending.extend(part.values())
        elif isinstance(part, (list, tuple)):
            pending.extend(part)
    return chars


def read_template(path: str) -> str:
    """The text of the file that `model.chat_template` names. Raises StartError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"model.chat_template: {path}: {error}.") from None


def _cut(rendered: str, mark: str) -> str:
    before, found, _ = rendered.rpartition(mark)
    if not found:
        raise BadRequest("The model's chat template cannot continue an answer.", param="continue_final_message")
    return before


def _one_line(text: str) -> str:
    """Make text from a template fit for an error message: no control characters, a sane length."""
    line = _CONTROL_CHARS.sub(" ", text)
    return line if len(line) <= MESSAGE_CHARS_MAX else line[:MESSAGE_CHARS_MAX] + "..."
