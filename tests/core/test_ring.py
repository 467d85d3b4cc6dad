"""Rings, one thread: order, bounds, batches, wrap-around."""

import pytest

from lqs._core import MpmcRing, SpscRing


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8])
def test_a_ring_holds_exactly_its_capacity_over_many_laps(capacity):
    ring = SpscRing(capacity)
    for lap in range(7):
        for i in range(capacity):
            assert ring.try_push(lap * 100 + i)
        assert not ring.try_push(999)
        assert len(ring) == ring.capacity == capacity
        assert [ring.try_pop() for _ in range(capacity)] == [lap * 100 + i for i in range(capacity)]
        assert ring.try_pop() is None
        assert len(ring) == 0


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 200])
def test_batches_wrap_around_and_stop_at_full_and_empty(capacity):
    ring = SpscRing(capacity)
    pushed, popped = 0, []
    for size in (1, 2, 3, 70, 150, 1, 300):
        took = ring.push_batch(list(range(pushed, pushed + size)))
        assert took == min(size, capacity - (pushed - len(popped)))
        pushed += took
        popped += ring.pop_batch(size // 2 + 1)
    popped += ring.pop_batch(capacity)
    assert popped == list(range(pushed))
    assert ring.pop_batch(5) == []
    assert ring.pop_batch(0) == []
    assert ring.push_batch([]) == 0


def test_a_ring_carries_every_bit_of_a_handle():
    ring, shared = SpscRing(1), MpmcRing(1)
    for handle in (0, 1, 2**63, 2**64 - 1):
        assert ring.try_push(handle)
        assert ring.try_pop() == handle
        assert shared.try_push(handle)
        assert shared.try_pop() == handle


@pytest.mark.parametrize(("asked", "given"), [(1, 2), (2, 2), (3, 4), (4, 4), (100, 128)])
def test_a_shared_ring_rounds_up_and_is_exact_at_that(asked, given):
    ring = MpmcRing(asked)
    assert ring.capacity == given
    for lap in range(5):
        assert all(ring.try_push(lap * 1000 + i) for i in range(given))
        assert not ring.try_push(1)
        assert len(ring) == given
        assert [ring.try_pop() for _ in range(given)] == [lap * 1000 + i for i in range(given)]
        assert ring.try_pop() is None
        assert len(ring) == 0


@pytest.mark.parametrize("kind", [SpscRing, MpmcRing])
@pytest.mark.parametrize("capacity", [0, 2**31 + 1])
def test_a_ring_without_a_sane_bound_is_refused(kind, capacity):
    with pytest.raises(ValueError, match="capacity"):
        kind(capacity)


@pytest.mark.parametrize("kind", [SpscRing, MpmcRing])
def test_a_handle_that_is_no_64_bit_number_is_refused(kind):
    ring = kind(4)
    for wrong in (-1, 2**64):
        with pytest.raises(OverflowError):
            ring.try_push(wrong)
    with pytest.raises(TypeError):
        ring.try_push("handle")
    assert len(ring) == 0
