"""A Jinja environment for templates that nobody vouches for.

A chat template comes with a model file, so it is untrusted input that runs on every request. Jinja's
immutable sandbox keeps it from attributes and files; what it does not bound is work. Here each render
has an `Allowance`, and whatever can grow or take long is metered against it:

    loops       each item taken is a step
    calls       so is each call: macros, methods, recursive loops
    values      what an operator, a comparison, a literal, a filter or a call has built is weighed
    output      what blocks, macros and the template itself put out is measured before it is joined

The clock is looked at with every step, so a template that only burns time is interrupted in its loop.
There is no loader: `include`, `import` and `extends` end in an error. Filters are an allow-list; those
that take a width or a count have it bounded.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import wraps
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from lqs.engine import meter
from lqs.engine.allowance import (
    NUM_CHARS_MAX,
    RENDER_S_MAX,
    WIDTH_MAX,
    Allowance,
    Steps,
    TemplateLimitError,
    bounded_range,
    check_format,
    check_occurrences,
    check_power,
    check_repeat,
    check_width,
)

_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "forceescape",
    "groupby", "indent", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "reverse", "safe", "select", "selectattr", "sort", "title", "trim", "unique", "upper", "wordcount",
)  # fmt: skip
# Methods of str whose result no argument bounds.
_REFUSED_METHODS = {"expandtabs", "translate"}
_PADDING_METHODS = {"center", "ljust", "rjust", "zfill"}


class SandboxEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders one model's chat template within bounds.

    Owner: the pool threads together; what a render uses up is kept per thread.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, clock: Callable[[], float] = time.monotonic, render_s_max: float = RENDER_S_MAX) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            cache_size=0,
            extensions=[LoopControlExtension, meter.GenerationTag],
            finalize=self._put_out,
        )
        self._clock = clock
        self._render_s_max = render_s_max
        self._local = threading.local()
        self.tests = {name: self._metered(cast(Any, test)) for name, test in self.tests.items()}
        self.filters = {name: self._metered(self.filters[name]) for name in _FILTERS} | {
            "indent": self._metered(_bounded_indent(self.filters["indent"])),
            "join": self._metered(self._join),
            "replace": self._metered(self._replace),
            "string": self._metered(str),
            "tojson": self._metered(self._to_json),
            meter.EACH: self._each,
            meter.BUILT: self._weighed,
            meter.CONCAT: self._concat,
        }
        self.globals = {
            "range": bounded_range,
            "dict": dict,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def render_bounded(self, template: Any, variables: Mapping[str, Any]) -> str:
        """Render in this thread. Raises what the template raises, TemplateLimitError among it."""
        self._local.allowance = Allowance(self._clock, self._render_s_max)
        try:
            context = template.new_context(dict(variables))
            return self.concat(template.root_render_func(context))
        finally:
            del self._local.allowance

    # What Jinja calls while it compiles and renders.

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = meter.Meter().visit(Parser(self, source, name, filename).parse())
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse what would build too much before it is built; weigh what is left."""
        if operator == "*":
            check_repeat(left, right)
        elif operator == "**":
            check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            check_format(left, self._allowance().weigh(right))
        self._allowance().spend()
        return self._weighed(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the call a step; weigh what comes back, and first what goes into a string's method."""
        __self._allowance().spend()
        if __obj is Namespace:
            return super().call(__context, __obj, *args, **kwargs)
        if isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            raise SecurityError("varargs and kwargs are not supported")
        if isinstance(__obj, LoopContext):
            args = tuple(map(__self._each, args))
        elif isinstance(getattr(__obj, "__self__", None), str):
            args = __self._string_arguments(__obj, args, kwargs)
        return __self._weighed(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Look at pattern and arguments of a str.format before it runs."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            check_format(value.__self__, self._allowance().weigh([args, kwargs]))
            return wrapped(*args, **kwargs)

        return bounded

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a template, a block or a macro put out, measured as it comes."""
        pieces = []
        num_chars = 0
        for part in parts:
            pieces.append(part)
            num_chars += len(part)
            if num_chars > NUM_CHARS_MAX:
                raise TemplateLimitError("the template puts out too much text")
        return "".join(pieces)

    # The meters.

    def _allowance(self) -> Allowance:
        """Return the allowance of this thread's render.

        There is none while the template is compiled; the error then keeps Jinja from computing
        constant expressions early, where nothing would bound them.
        """
        allowance: Allowance | None = getattr(self._local, "allowance", None)
        if allowance is None:
            raise TemplateLimitError("nothing is computed before the render")
        return allowance

    def _weighed(self, value: Any) -> Any:
        self._allowance().weigh(value)
        return value

    def _put_out(self, value: Any) -> str:
        return str(self._weighed(value))

    def _each(self, items: Any) -> Steps:
        return Steps(items if isinstance(items, Sized) else self._gather(items), self._allowance())

    def _gather(self, items: Iterable[Any]) -> list[Any]:
        """Turn an iterator into a list within the bounds."""
        allowance = self._allowance()
        gathered = []
        for item in items:
            allowance.spend()
            gathered.append(item)
        allowance.weigh(gathered)
        return gathered

    def _concat(self, values: Sequence[Any]) -> str:
        return "".join(map(str, self._weighed(values)))

    def _join(self, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        items = self._gather(values)
        if attribute is not None:
            items = self._weighed([self.getattr(item, attribute) for item in items])
        check_occurrences("x" * len(items), "x", len(str(d)))
        return str(d).join(map(str, items))

    def _replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = (str(self._weighed(part)) for part in (text, old, new))
        check_occurrences(text, old, len(new))
        return str(text.replace(old, new, -1 if count is None else count))

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Turn a value into JSON as chat templates expect it: without HTML escapes."""
        check_width(indent)
        separators = tuple(separators) if separators else None  # type: ignore[assignment]
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return self.concat(encoder.iterencode(value))

    def _string_arguments(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Check the arguments of a method of str; return them, iterators gathered."""
        text, name = method.__self__, method.__name__
        if name in _REFUSED_METHODS:
            raise SecurityError(f"{name} is not supported")
        if name in _PADDING_METHODS:
            check_width(*args, *kwargs.values())
        elif name == "join" and args:
            args = (self._gather(args[0]),)
            check_occurrences("x" * len(args[0]), "x", len(text))
        elif name == "replace" and len(args) > 1:
            check_occurrences(text, str(args[0]), len(args[1]))
        return args

    def _metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Weigh what goes into a filter or a test, and what comes out."""

        # wraps() keeps the marks by which Jinja passes its context or itself as first argument.
        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self._weighed([arg for arg in args if isinstance(arg, (str, list, tuple, Mapping))])
            return self._weighed(function(*args, **kwargs))

        return metered


def _bounded_indent(indent: Callable[..., str]) -> Callable[..., str]:
    def bounded(text: str, width: int | str = 4, *args: Any, **kwargs: Any) -> str:
        check_width(width)
        check_occurrences(text, "\n", len(width) if isinstance(width, str) else width)
        return indent(text, width, *args, **kwargs)

    return bounded


def _raise_exception(message: Any = "") -> None:
    raise TemplateRaised(str(message))


def _strftime_now(pattern: str) -> str:
    check_format(pattern, WIDTH_MAX)
    return time.strftime(pattern)


class TemplateRaised(TemplateError):
    """The template itself refused, by raise_exception(message)."""
