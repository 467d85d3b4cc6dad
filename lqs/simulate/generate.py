"""Makes traces: arrivals and lengths drawn by a seeded generator.

A recipe is words: `gamma cv=3 requests=5000 rate=4 prompt=lognormal:200:0.8 answer=uniform:8:128`.

    poisson             arrivals that know nothing of each other
    gamma cv=3          gaps that scatter by `cv` times their mean: above 1 they come in clumps
    onoff on=10 off=50  a Poisson stream that flows for about 10 s and is still for about 50 s

    256                 always so many tokens       uniform:LOW:HIGH        any number between them
    exp:MEAN            mostly short, some long     lognormal:MEDIAN:SIGMA  the usual shape of prompts
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterator, Mapping

from lqs.errors import ConfigError
from lqs.simulate.trace import TOKENS_MAX, Item, Trace, make_trace

REQUESTS_MAX = 10_000_000

_DEFAULTS = {"requests": "2000", "rate": "1", "cv": "3", "on": "10", "off": "50"}
_LENGTHS = {"prompt": "lognormal:200:0.8", "answer": "lognormal:64:0.6"}
_SHAPES = {"exp": 1, "uniform": 2, "lognormal": 2}

Draw = Callable[[random.Random], float]


class RecipeInvalid(ConfigError):
    """A recipe that says nothing sensible; the message names the word."""


def generate(recipe: str, *, seed: int, default_level: int = 0) -> Trace:
    """The trace of a recipe, the same for the same seed. Raises RecipeInvalid."""
    kind, words = _parse(recipe)
    numbers = {name: _number(name, words.get(name, text)) for name, text in _DEFAULTS.items()}
    num_requests = int(numbers["requests"])
    if not 2 <= num_requests <= REQUESTS_MAX:
        raise RecipeInvalid(f"--generate: requests={num_requests}: from 2 to {REQUESTS_MAX}.")
    prompt, answer = (length_of(name, words.get(name, text)) for name, text in _LENGTHS.items())
    draw = random.Random(seed)
    arrivals = _ARRIVALS[kind](draw, numbers)
    items = [Item(next(arrivals), _drawn(prompt, draw), _drawn(answer, draw)) for _ in range(num_requests)]
    return make_trace(items, default_level=default_level)


def length_of(name: str, text: str) -> Draw:
    """What draws lengths as the words say. Raises RecipeInvalid."""
    shape, *rest = text.split(":")
    if shape in _SHAPES and len(rest) == _SHAPES[shape]:
        first, *more = (_number(name, number) for number in rest)
        second = more[0] if more else 0.0
        draws: dict[str, Draw] = {
            "exp": lambda draw: draw.expovariate(1 / first),
            "uniform": lambda draw: draw.randint(int(first), max(int(first), int(second))),
            "lognormal": lambda draw: draw.lognormvariate(math.log(first), second),
        }
        return draws[shape]
    if shape.isdecimal() and not rest:
        length = _number(name, shape)
        return lambda _: length
    raise RecipeInvalid(
        f"--generate: {name}={text}: write a number, exp:MEAN, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA."
    )


def _drawn(length: Draw, draw: random.Random) -> int:
    try:
        return min(max(round(length(draw)), 1), TOKENS_MAX)
    except OverflowError:
        return TOKENS_MAX


def _parse(recipe: str) -> tuple[str, dict[str, str]]:
    kind, *words = recipe.split() or [""]
    if kind not in _ARRIVALS:
        raise RecipeInvalid(f"--generate: there is no {kind!r}; there are {', '.join(_ARRIVALS)}.")
    pairs = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or name not in _DEFAULTS | _LENGTHS:
            known = ", ".join(f"{name}=" for name in _DEFAULTS | _LENGTHS)
            raise RecipeInvalid(f"--generate: {word!r} is not understood; there are {known}.")
        pairs[name] = value
    return kind, pairs


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= TOKENS_MAX:
        raise RecipeInvalid(f"--generate: {name}: {text!r} is no number above 0.")
    return value


def _poisson(draw: random.Random, numbers: Mapping[str, float]) -> Iterator[float]:
    at_s = 0.0
    while True:
        at_s += draw.expovariate(numbers["rate"])
        yield at_s


def _gamma(draw: random.Random, numbers: Mapping[str, float]) -> Iterator[float]:
    shape = 1 / numbers["cv"] ** 2
    at_s = 0.0
    while True:
        at_s += draw.gammavariate(shape, 1 / (numbers["rate"] * shape))
        yield at_s


def _on_off(draw: random.Random, numbers: Mapping[str, float]) -> Iterator[float]:
    """Flows and pauses are exponential; `rate` is that of the whole, pauses included."""
    flow_rate = numbers["rate"] * (numbers["on"] + numbers["off"]) / numbers["on"]
    at_s = 0.0
    while True:
        ends_s = at_s + draw.expovariate(1 / numbers["on"])
        while (at_s := at_s + draw.expovariate(flow_rate)) < ends_s:
            yield at_s
        at_s = ends_s + draw.expovariate(1 / numbers["off"])


_ARRIVALS: Mapping[str, Callable[[random.Random, Mapping[str, float]], Iterator[float]]] = {
    "poisson": _poisson,
    "gamma": _gamma,
    "onoff": _on_off,
}


def spread(trace: Trace, shares: Mapping[int, float], num_keys: int, *, seed: int) -> None:
    """Give the requests of a trace classes by their shares, and keys: the first sends most, as 1, 1/2, 1/3, ...

    Without shares the classes stay, with `num_keys` 0 the keys.
    """
    draw = random.Random(seed + 1)
    if shares:
        levels, weights = list(shares), list(shares.values())
        trace.level = array("B", draw.choices(levels, weights, k=len(trace)))
    if num_keys:
        weights = [1 / number for number in range(1, num_keys + 1)]
        trace.key = array("I", draw.choices(range(num_keys), weights, k=len(trace)))
        trace.keys = [f"key-{number}" for number in range(1, num_keys + 1)]
