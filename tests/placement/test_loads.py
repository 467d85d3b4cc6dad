"""Two loads never count on the same memory, and what is free may move as it likes meanwhile."""

from __future__ import annotations

import pytest

from lqs.placement.gpus import Gpu, GpuState
from lqs.placement.loads import Loads

GB = 1_000_000_000


def gpu(free_gb: int | None, uuid: str = "GPU-a", **more: object) -> Gpu:
    return Gpu(uuid=uuid, memory_free_bytes=None if free_gb is None else free_gb * GB, **more)


@pytest.fixture
def loads() -> Loads:
    return Loads(margin_bytes=GB)


def test_two_loads_decided_at_one_moment_do_not_both_get_the_rest(loads: Loads) -> None:
    """B49: a promise of the first is kept from the second, which may go to the next card."""
    assert loads.try_reserve(gpu(20), 12 * GB)
    assert loads.headroom_bytes(gpu(20)) == 7 * GB
    assert not loads.try_reserve(gpu(20), 8 * GB)
    assert loads.try_reserve(gpu(20, "GPU-b"), 8 * GB)
    assert loads.try_reserve(gpu(20), 7 * GB)


def test_memory_that_others_took_meanwhile_is_not_promised_and_what_they_gave_back_is(loads: Loads) -> None:
    """B49: free 20, 12, 18, 3, 22 at the moments of decision."""
    fits = []
    for free_gb in (20, 12, 18, 3, 22):
        if fitted := loads.try_reserve(gpu(free_gb), 15 * GB):
            loads.release(gpu(free_gb), 15 * GB)
        fits.append(fitted)
    assert fits == [True, False, True, False, True]


def test_a_load_that_ended_gives_its_promise_back_once(loads: Loads) -> None:
    loads.try_reserve(gpu(20), 12 * GB)
    loads.release(gpu(8), 12 * GB)
    assert loads.headroom_bytes(gpu(8)) == 7 * GB
    with pytest.raises(AssertionError):
        loads.release(gpu(8), 1)


def test_gpus_that_share_the_machines_memory_share_its_promises(loads: Loads) -> None:
    """B45: what is free is not counted twice."""
    assert loads.try_reserve(gpu(20, "GPU-a", is_unified=True), 12 * GB)
    assert not loads.try_reserve(gpu(20, "GPU-b", is_unified=True), 12 * GB)


def test_where_nobody_can_tell_the_load_finds_out_itself(loads: Loads) -> None:
    unknown = gpu(None, state=GpuState.UNREADABLE)
    assert loads.headroom_bytes(unknown) is None
    assert loads.try_reserve(unknown, 12 * GB)
    # Once it answers again the promise counts.
    assert loads.headroom_bytes(gpu(20)) == 7 * GB


def test_nothing_is_promised_of_a_failed_gpu(loads: Loads) -> None:
    assert not loads.try_reserve(gpu(20, state=GpuState.FAILED), 1)
