"""Generated traces: the same for a seed, with the rates, the clumps and the lengths that the recipe says."""

import statistics
from itertools import pairwise

import pytest

from lqs.request import NS_PER_S
from lqs.simulate.generate import RecipeInvalid, generate, spread
from lqs.simulate.trace import TOKENS_MAX, TraceInvalid


def gaps(trace):
    return [(later - earlier) / NS_PER_S for earlier, later in pairwise(trace.arrival_ns)]


@pytest.mark.parametrize("recipe", ["poisson rate=5", "gamma cv=2 rate=5", "onoff on=1 off=4 rate=5"])
def test_the_same_seed_gives_the_same_trace(recipe: str):
    one, same, other = (generate(recipe, seed=seed) for seed in (7, 7, 8))
    assert (one.arrival_ns, one.prompt_tokens, one.completion_tokens) == (
        same.arrival_ns,
        same.prompt_tokens,
        same.completion_tokens,
    )
    assert one.arrival_ns != other.arrival_ns
    assert one.arrival_ns[0] == 0


@pytest.mark.parametrize(
    ("recipe", "scatter"),
    [("poisson", (0.9, 1.1)), ("gamma cv=3", (2.5, 3.5)), ("onoff on=2 off=8", (2.0, 9.0))],
)
def test_arrivals_have_the_rate_and_the_scatter_of_the_recipe(recipe: str, scatter: tuple[float, float]):
    trace = generate(f"{recipe} rate=4 requests=20000", seed=1)
    assert trace.rate == pytest.approx(4, rel=0.15)
    assert scatter[0] < statistics.pstdev(gaps(trace)) / statistics.fmean(gaps(trace)) < scatter[1]


@pytest.mark.parametrize(
    ("words", "median", "most"),
    [("37", 37, 37), ("uniform:10:20", 15, 20), ("exp:100", 69, 2000), ("lognormal:200:0.8", 200, 20_000)],
)
def test_lengths_are_drawn_as_the_recipe_says(words: str, median: float, most: int):
    trace = generate(f"poisson requests=20000 prompt={words} answer={words}", seed=3)
    for column in (trace.prompt_tokens, trace.completion_tokens):
        assert statistics.median(column) == pytest.approx(median, rel=0.05)
        assert min(column) >= 1
        assert max(column) <= most


@pytest.mark.parametrize(
    ("recipe", "word"),
    [
        ("", "poisson"),
        ("weibull", "weibull"),
        ("poisson speed=1", "speed"),
        ("poisson rate", "rate"),
        ("poisson rate=fast", "fast"),
        ("poisson rate=0", "rate"),
        ("poisson requests=1", "requests"),
        ("poisson prompt=normal:1:2", "normal"),
        ("poisson prompt=uniform:1", "uniform"),
    ],
)
def test_a_word_that_says_nothing_is_named(recipe: str, word: str):
    with pytest.raises(RecipeInvalid, match=word):
        generate(recipe, seed=1)


def test_classes_and_keys_are_given_by_their_shares():
    trace = generate("poisson requests=10000", seed=1)
    spread(trace, {0: 0.1, 4: 0.9}, 2, seed=1)
    assert set(trace.level) == {0, 4}
    assert trace.level.count(0) == pytest.approx(1000, rel=0.15)
    assert trace.key.count(0) == pytest.approx(2 * trace.key.count(1), rel=0.1)
    assert trace.keys == ["key-1", "key-2"]


def test_without_shares_classes_and_keys_stay():
    trace = generate("poisson requests=10", seed=1, default_level=3)
    spread(trace, {}, 0, seed=1)
    assert set(trace.level) == {3}
    assert trace.keys == [""]


def test_a_length_beyond_all_numbers_is_the_longest():
    trace = generate("poisson rate=1 requests=50 prompt=lognormal:100:1000", seed=1)
    assert max(trace.prompt_tokens) == TOKENS_MAX


def test_arrivals_beyond_the_virtual_clock_are_refused():
    with pytest.raises(TraceInvalid, match="can be played"):
        generate("poisson rate=1e-30 requests=3", seed=1)
