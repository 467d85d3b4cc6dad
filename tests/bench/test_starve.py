"""G15 on a small scale: the bound is computed as it is stated, and a run keeps to it."""

from array import array

import pytest

from bench.starve import Wait, measure, waits_of
from lqs._core import Ending
from lqs.config import Config
from lqs.simulate.play import Played
from lqs.simulate.trace import Item, make_trace

S = 10**9


def test_the_bound_counts_those_that_are_due_before_it():
    """One of level 4 that comes at 0 is due at 240 s; who waits then and is due before it counts, no other."""
    items = [
        Item(0.0, 1, 1, level=4),
        Item(230.0, 1, 1, level=0),
        Item(235.0, 1, 1, level=0),
        Item(241.0, 1, 1, level=0),
    ]
    started = [260, 250, 239, 255]
    served = array("B", [Ending.ENDING_SERVED] * 4)
    times = array("q", [at * S for at in started])
    order = array("I", [4, 2, 1, 3])
    played = Played("lqs", make_trace(items, default_level=0), times, times, times, order, served, 1.0, {})
    # After 240 s starts the one that waited, one that came later, and it itself; two times 4 were allowed.
    assert waits_of(played.trace, played.start_no, played.started_ns, Config().queue, 4) == [Wait(260.0, 260.0, 3, 8)]


@pytest.mark.parametrize("seed", [1, 2])
def test_nobody_starves_at_more_than_the_capacity(seed: int):
    """G15: the longest wait of the lowest class is within its bound, and everybody is served."""
    longest, nearest, never, *beside = measure(1.3, 8.0, seed)
    assert never.value == 0
    assert 0 < longest.value <= longest.peer_value
    # Sequences that are kept for urgent requests change nothing about it.
    assert [row.passed for row in (longest, nearest, *beside)] == [True] * 4
