"""The sampler beside a plain reference in numpy: candidate sets, arithmetic, seeds, distribution."""

import math
import struct

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lqs._engine import SamplerProbe, TextProbe

OK, NOT_FINITE, NO_CANDIDATE = 0, 1, 2

rows = st.tuples(st.integers(2, 700), st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0, 3.0, 8.0]))


def make_row(n: int, seed: int, spread: float) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)


def ordered(row: np.ndarray) -> list[int]:
    """Best first, then by id: the sampler's total order."""
    return sorted(np.flatnonzero(row > -np.inf), key=lambda i: (-row[i], i))


def softmax(row: np.ndarray, ids: list[int]) -> np.ndarray:
    logits = row[ids].astype(np.float64)
    mass = np.exp(logits - logits.max())
    return mass / mass.sum()


def nucleus(row: np.ndarray, ids: list[int], top_p: float) -> list[int]:
    return ids[: int(np.searchsorted(np.cumsum(softmax(row, ids)), top_p)) + 1]


def assume_clear_of(top_p: float, row: np.ndarray, ids: list[int]) -> None:
    """A sum that lands on the border is rounding's to decide, not the filter's."""
    assume(np.min(np.abs(np.cumsum(softmax(row, ids))[:-1] - top_p), initial=1) > 1e-5)


def typical(row: np.ndarray, ids: list[int], typical_p: float) -> list[int]:
    probs = softmax(row, ids)
    surprise = -np.log(probs)
    distance = np.abs(surprise - (probs * surprise).sum())
    order = np.argsort(distance, kind="stable")
    running = np.cumsum(probs[order])
    assume(np.min(np.abs(running[:-1] - typical_p), initial=1) > 1e-5)
    num = min(int(np.searchsorted(running, typical_p, side="right")) + 1, len(ids))
    if num < len(ids):
        assume(distance[order[num]] - distance[order[num - 1]] > 1e-4)
    kept = {ids[i] for i in order[:num]}
    return [i for i in ids if i in kept]


def candidates(row: np.ndarray, **options) -> list[int]:
    probe = SamplerProbe(len(row), temperature=1.0, **options)
    code, token, _ = probe.draw(row, 0)
    assert code == OK
    assert token in probe.candidates()
    return probe.candidates()


@given(rows, st.integers(1, 800))
def test_top_k_keeps_exactly_the_k_best(shape, k):
    row = make_row(*shape)
    assert candidates(row, top_k=k) == ordered(row)[:k]


@given(rows, st.floats(0.05, 0.999))
def test_top_p_keeps_the_shortest_prefix_that_reaches_it(shape, top_p):
    row = make_row(*shape)
    assume_clear_of(top_p, row, ordered(row))
    assert candidates(row, top_p=top_p) == nucleus(row, ordered(row), top_p)


@given(rows, st.integers(1, 800), st.floats(0.05, 0.999))
def test_top_p_after_top_k_counts_within_the_k_best(shape, k, top_p):
    row = make_row(*shape)
    assume_clear_of(top_p, row, ordered(row)[:k])
    assert candidates(row, top_k=k, top_p=top_p) == nucleus(row, ordered(row)[:k], top_p)


@given(rows, st.floats(0.05, 0.99), st.sampled_from([0, 40]))
def test_typical_p_keeps_what_is_nearest_to_the_entropy(shape, typical_p, top_k):
    row = make_row(*shape)
    ids = ordered(row)[: top_k or None]
    assert sorted(candidates(row, typical_p=typical_p, top_k=top_k)) == sorted(typical(row, ids, typical_p))


@given(rows, st.floats(0.001, 0.9), st.sampled_from([{}, {"top_k": 50}, {"top_p": 0.9}]))
def test_min_p_keeps_those_near_the_best_one(shape, min_p, other):
    row = make_row(*shape)
    ids = ordered(row)[: other.get("top_k")]
    if "top_p" in other:
        assume_clear_of(other["top_p"], row, ids)
        ids = nucleus(row, ids, other["top_p"])
    gap = row.max().astype(np.float64) - row[ids]
    assume(np.min(np.abs(gap + math.log(min_p))) > 1e-5)
    kept = [i for i, d in zip(ids, gap, strict=True) if d <= -math.log(min_p)]
    assert sorted(candidates(row, min_p=min_p, **other)) == sorted(kept)


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("top_p", [0.3, 0.97, 0.9999])
def test_a_large_vocabulary_gives_the_same_nucleus(spread, top_p):
    row = make_row(49_152, 5, spread)
    kept = candidates(row, top_p=top_p)
    assert set(kept) == set(ordered(row)[: len(kept)])
    # Probabilities near the border are of the order of the rounding: a few tokens more or less.
    assert len(kept) == pytest.approx(len(nucleus(row, ordered(row), top_p)), rel=1e-3, abs=1)


def test_every_filter_keeps_at_least_one():
    row = make_row(300, 1, 1.0)
    for options in ({"top_p": 0.0}, {"typical_p": 0.0}, {"min_p": 1.0}):
        assert len(candidates(row, **options)) == 1
    assert candidates(row, top_p=0.0) == [int(row.argmax())]


@given(rows)
def test_greedy_takes_the_best_and_of_equals_the_lowest_id(shape):
    row = np.round(make_row(*shape))
    code, token, prob = SamplerProbe(len(row), temperature=0).draw(row, 7)
    assert (code, token, prob) == (OK, int(np.argmax(row)), 1.0)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 127, 128, 129, 1000])
def test_the_last_token_of_an_odd_sized_vocabulary_can_win(n):
    row = np.zeros(n, np.float32)
    row[-1] = 5
    for options in ({"temperature": 0}, {"temperature": 0.01}, {"temperature": 0.01, "top_k": 3}):
        assert SamplerProbe(n, **options).draw(row, 0)[1] == n - 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 130, 299])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 5}, {}, {"top_p": 0.5}])
def test_a_row_that_is_not_finite_has_its_own_code(bad, at, options):
    row = make_row(300, 0, 1.0)
    row[at] = bad
    assert SamplerProbe(300, **options).draw(row, 0)[0] == NOT_FINITE


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 5}, {}, {"top_p": 0.5}, {"typical_p": 0.5}])
def test_nothing_left_to_draw_has_its_own_code(options):
    row = np.zeros(20, np.float32)
    assert SamplerProbe(20, banned=list(range(20)), **options).draw(row, 0)[0] == NO_CANDIDATE


def test_banned_tokens_are_never_drawn():
    row = np.zeros(50, np.float32)
    probe = SamplerProbe(50, temperature=2.0, banned=[3, 4])
    drawn = {probe.draw(row, i)[1] for i in range(2000)}
    assert drawn == set(range(50)) - {3, 4}


@given(
    st.lists(st.integers(0, 9), max_size=40), st.integers(1, 12), st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2)
)
def test_penalties_are_llama_cpps(tokens, last_n, repeat, presence, frequency):
    row = make_row(10, 3, 2.0)
    expected = row.copy()
    window = tokens[-last_n:]
    for token in set(window):
        logit = row[token]
        logit = logit * np.float32(repeat) if logit <= 0 else logit / np.float32(repeat)
        expected[token] = logit - (window.count(token) * np.float32(frequency) + np.float32(presence))
    probe = SamplerProbe(
        10,
        temperature=0,
        repeat_last_n=last_n,
        repeat_penalty=repeat,
        presence_penalty=presence,
        frequency_penalty=frequency,
        prompt=tokens[:20],
    )
    for token in tokens[20:]:
        probe.accept(token)
    best_two = np.sort(expected)[-2:]
    assume(best_two[1] - best_two[0] > 1e-5)
    before = row.copy()
    assert probe.draw(row, 0)[1] == int(expected.argmax())
    assert np.array_equal(row, before), "the row must be put back"


def test_a_bias_comes_before_the_penalties():
    row = np.array([0.0, 1.0], np.float32)
    # (0 + 4) / 4 = 1 against 1.5: bias first. 0 / 4 + 4 = 4 would have won.
    probe = SamplerProbe(2, temperature=0, repeat_penalty=4.0, prompt=[0], logit_bias=[(0, 4.0), (1, 0.5)])
    assert probe.draw(row, 0)[1] == 1


def test_the_same_seed_and_position_give_the_same_draw_whatever_came_before():
    row = make_row(1000, 9, 2.0)
    first, second = SamplerProbe(1000, seed=42, top_k=40), SamplerProbe(1000, seed=42, top_k=40)
    forwards = [first.draw(row, i) for i in range(50)]
    backwards = [second.draw(row, i) for i in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert forwards != [SamplerProbe(1000, seed=43, top_k=40).draw(row, i) for i in range(50)]
    assert len({token for _, token, _ in forwards}) > 5


def test_the_generator_gives_the_published_numbers():
    # Random123's known answers for philox4x32-10: key and counter zero.
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    expected = tuple((words[i] | words[i + 1] << 32) >> 11 for i in (0, 2))
    assert tuple(int(u * 2**53) for u in SamplerProbe.uniform(0, 0)) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.5, "top_k": 6},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.1},
    ],
)
def test_draws_follow_the_distribution(options):
    row = make_row(12, 4, 1.5)
    ids = ordered(row)[: options.get("top_k")]
    if "top_p" in options:
        ids = nucleus(row, ids, options["top_p"])
    if "min_p" in options:
        ids = [i for i in ids if row[i] >= row.max() + math.log(options["min_p"])]
    expected = np.zeros(12)
    expected[ids] = softmax(row / np.float32(options["temperature"]), ids)
    probe = SamplerProbe(12, seed=1, **options)
    num = 40_000
    counts = np.zeros(12)
    for i in range(num):
        _, token, prob = probe.draw(row, i)
        counts[token] += 1
        assert prob == pytest.approx(expected[token], rel=1e-5)
    error = np.abs(counts - num * expected)
    assert (error <= 5 * np.sqrt(num * expected * (1 - expected)) + 1e-9).all()


@settings(deadline=None)
@given(rows, st.sampled_from([1e-6, 1e-3, 0.7, 50.0]))
def test_probabilities_are_accurate_at_any_temperature(shape, temperature):
    row = make_row(*shape)
    _, token, prob = SamplerProbe(len(row), temperature=temperature).draw(row, 0)
    logits = row.astype(np.float64) - row.max()
    mass = np.exp(logits / max(temperature, 1e-5))
    assert prob == pytest.approx(mass[token] / mass.sum(), rel=3e-5, abs=1e-7)


def parse_logprobs(raw: bytes) -> list[tuple[int, float, bytes]]:
    token, logprob, num_top, size = struct.unpack_from("<ifHH", raw)
    at = 12 + size
    entries = [(token, logprob, raw[12:at])]
    for _ in range(num_top):
        token, logprob, size = struct.unpack_from("<ifH", raw, at)
        entries.append((token, logprob, raw[at + 10 : at + 10 + size]))
        at += 10 + size
    assert at == len(raw)
    return entries


@given(rows, st.integers(0, 20))
def test_logprobs_are_the_log_softmax_of_the_raw_row(shape, num_top):
    row = make_row(*shape)
    text = TextProbe([b"t%d" % i for i in range(len(row))])
    probe = SamplerProbe(len(row), temperature=0.1, logit_bias=[(0, 5.0)])
    entries = parse_logprobs(probe.logprobs(text, row, 1, num_top))
    logits = row.astype(np.float64)
    expected = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
    assert [token for token, _, _ in entries] == [1, *ordered(row)[:num_top]]
    for token, logprob, piece in entries:
        assert logprob == pytest.approx(expected[token], abs=1e-5)
        assert piece == b"t%d" % token


def test_logprobs_say_9999_for_never_and_name_what_prints_nothing():
    row = np.array([0.0, -np.inf, 1.0], np.float32)
    text = TextProbe([b"a", b"b", b""], markers={2: b"<|end|>"})
    entries = parse_logprobs(SamplerProbe(3).logprobs(text, row, 1, 3))
    assert entries[0] == (1, -9999.0, b"b")
    assert entries[1][2] == b"<|end|>"
    row[0] = np.nan
    assert SamplerProbe(3).logprobs(text, row, 1, 0) == -2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": math.nan}, ValueError),
        ({"top_p": 1.5}, ValueError),
        ({"min_p": -1}, ValueError),
        ({"repeat_penalty": 0}, ValueError),
        ({"repeat_last_n": 10**6}, ValueError),
        ({"num_logprobs": 21}, ValueError),
        ({"logit_bias": [(10, 1.0)]}, ValueError),
        ({"logit_bias": [(-1, 1.0)]}, ValueError),
        ({"logit_bias": [(0, math.nan)]}, ValueError),
        ({"logit_bias": [(0, 1.0)] * 2000}, ValueError),
        ({"frequenzy_penalty": 1}, TypeError),
    ],
)
def test_bad_options_blame_the_caller(options, error):
    with pytest.raises(error):
        SamplerProbe(10, **options)
