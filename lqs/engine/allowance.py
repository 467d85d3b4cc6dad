"""What one render of an untrusted template may use up: steps, characters and seconds.

The checks here are made before something is built, by what it would come to; `Allowance.weigh` looks
at what has been built. Both raise TemplateLimitError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

NUM_STEPS_MAX = 1_000_000
NUM_CHARS_MAX = 16 * 1024 * 1024
RENDER_S_MAX = 2.0
WIDTH_MAX = 1000  # Columns of an indent or a padding.
RANGE_MAX = 100_000
NUMBER_BITS_MAX = 4096

_CHARS_OF_A_PART = 32  # What a number, a comma or a bracket comes to in text, generously.
# A format's field width of three digits, one taken from an argument, or one nested in a field.
_WIDE_FORMAT = re.compile(r"\d{3}|\*|\{[^{}]*\{")


class TemplateLimitError(SecurityError):
    """The template wanted more time, steps or memory than a render may take."""


class Allowance:
    """What one render may still use up.

    Owner: the thread that renders.
    """

    def __init__(self, clock: Callable[[], float], render_s_max: float) -> None:
        self._clock = clock
        self._end_s = clock() + render_s_max
        self._num_steps = NUM_STEPS_MAX

    def spend(self, num_steps: int = 1) -> None:
        """Count steps and look at the clock."""
        self._num_steps -= num_steps
        if self._num_steps < 0:
            raise TemplateLimitError("the template takes too many steps")
        if self._clock() > self._end_s:
            raise TemplateLimitError("the template takes too long")

    def weigh(self, value: Any) -> int:
        """Return about how many characters `value` comes to in text.

        A part is counted each time it occurs, so that a list of two equal lists of two equal lists
        and so on is found to be large although it takes no memory yet.
        """
        num_chars = num_parts = 0
        pending = [value]
        while pending:
            part = pending.pop()
            num_parts += 1
            if isinstance(part, str):
                num_chars += len(part)
            elif isinstance(part, (list, tuple)):
                pending.extend(part)
            elif isinstance(part, Mapping):
                pending.extend(part.keys())
                pending.extend(part.values())
            elif isinstance(part, Namespace):
                # It can be changed later, so what it weighs now says nothing.
                raise SecurityError("a namespace cannot be part of a value")
            if num_chars > NUM_CHARS_MAX or num_parts + len(pending) > NUM_STEPS_MAX:
                raise TemplateLimitError("the template builds too large a value")
        self.spend(1 + num_parts // 64)
        return num_chars + num_parts * _CHARS_OF_A_PART


class Steps:
    """The items of a loop; each one taken is a step of the allowance."""

    def __init__(self, items: Sized, allowance: Allowance) -> None:
        self._items = items
        self._allowance = allowance

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:  # type: ignore[attr-defined]
            self._allowance.spend()
            yield item


def bounded_range(*args: int) -> range:
    """Be `range` for up to RANGE_MAX items."""
    numbers = range(*args)
    if len(numbers) > RANGE_MAX:
        raise TemplateLimitError(f"range() has more than {RANGE_MAX} items")
    return numbers


def check_repeat(left: Any, right: Any) -> None:
    """Look at both sides of a `*`."""
    for value, times in ((left, right), (right, left)):
        if isinstance(value, Sized) and isinstance(times, int) and len(value) * times > RANGE_MAX:
            raise TemplateLimitError("`*` would repeat too much")
        if isinstance(value, int) and value.bit_length() > NUMBER_BITS_MAX:
            raise TemplateLimitError("the number is too large")


def check_power(base: Any, exponent: Any) -> None:
    """Look at both sides of a `**`."""
    if abs(base) > 1_000_000 or abs(exponent) > 64:
        raise TemplateLimitError("`**` would compute too large a number")


def check_width(*widths: Any) -> None:
    """Look at arguments that may be a width in columns; a string counts by its length."""
    for width in widths:
        columns = len(width) if isinstance(width, str) else width
        if isinstance(columns, int) and columns > WIDTH_MAX:
            raise TemplateLimitError(f"a width is above {WIDTH_MAX}")


def check_format(pattern: str, num_chars_args: int) -> None:
    """Look at a format's pattern, `%` or `str.format`: each field may show all arguments."""
    num_fields = pattern.count("%") + pattern.count("{")
    if _WIDE_FORMAT.search(pattern) or num_fields * (num_chars_args + 100) > NUM_CHARS_MAX:
        raise TemplateLimitError("the format would be too wide")


def check_occurrences(text: str, old: str, num_chars_new: int) -> None:
    """Look at a replacement of `old` in `text` by that many characters."""
    if len(text) + text.count(old) * num_chars_new > NUM_CHARS_MAX:
        raise TemplateLimitError("the replacement would be too long")
