"""Short and long requests: their shares, and how shares and border follow the backlogs."""

import pytest

from .test_scheduler import S, make, run, submit

SHORT, LONG = 0, 1


def two_lanes(**kwargs):
    settings = {"num_lanes": 2, "lane_weights": [3, 1], "lane_share_mins": (0.5, 0.1), "borders": (512, 2048)}
    return make(**{**settings, "slots": [(10_000, 1)], **kwargs})


def with_waiting(*tokens_by_lane):
    """A scheduler whose only sequence is taken, and what waits behind it, by lane."""
    scheduler = two_lanes()
    submit(scheduler, "running", footprint_tokens=10_000)
    run(scheduler)
    handles = [
        submit(scheduler, (lane, tokens), lane=lane, footprint_tokens=tokens)
        for lane, tokens in enumerate(tokens_by_lane)
        if tokens
    ]
    return scheduler, handles


def share_after(scheduler, seconds, start=0):
    for second in range(start + 1, start + seconds + 1):
        run(scheduler, second * S)
    return scheduler.snapshot()["lanes"][SHORT]["share"]


def started(scheduler):
    return [scheduler_sink for _, scheduler_sink in run(scheduler)]


def test_shares_count_tokens_as_well_as_sequences():
    """A few long requests cannot take all cells while short ones wait."""
    scheduler = two_lanes(slots=[(1000, 8)])
    for name in ("long", "longer"):
        submit(scheduler, name, lane=LONG, footprint_tokens=300)
    submit(scheduler, "short", lane=SHORT, level=3, footprint_tokens=100)
    # The first long one takes the long lane's quarter; then the short lane comes first, in
    # spite of its class, and what is left is lent.
    assert started(scheduler) == ["long", "short", "longer"]


def test_no_more_of_a_lane_run_than_its_cap_however_much_is_free():
    scheduler = two_lanes(slots=[(10_000, 8)], lane_caps=[0, 2])
    long = [submit(scheduler, f"long {number}", lane=LONG, level=0) for number in range(4)]
    submit(scheduler, "short", lane=SHORT, level=3)
    assert started(scheduler) == ["long 0", "long 1", "short"]
    scheduler.take(0)
    scheduler.finish(long[0])
    # Its end comes first.
    assert started(scheduler)[-2:] == ["long 0", "long 2"]


def test_a_lane_starts_no_more_once_it_has_the_cells_of_its_cap():
    scheduler = two_lanes(slots=[(10_000, 8)], lane_token_caps=[0, 500])
    long = [submit(scheduler, number, lane=LONG, footprint_tokens=300) for number in range(4)]
    assert started(scheduler) == [0, 1]
    scheduler.take(0)
    for handle in long[:2]:
        scheduler.finish(handle)
    # Their ends come first.
    assert started(scheduler)[-3:] == [1, 2, 3]


def test_one_that_is_larger_than_the_cap_of_its_lane_runs_alone():
    scheduler = two_lanes(slots=[(10_000, 8)], lane_token_caps=[0, 100])
    for number in range(2):
        submit(scheduler, number, lane=LONG, footprint_tokens=5000)
    assert started(scheduler) == [0]


@pytest.mark.parametrize("wrong", [{"lane_caps": [1]}, {"lane_token_caps": [1, 2, 3]}])
def test_each_lane_has_its_cap(wrong):
    with pytest.raises(ValueError, match="for each lane"):
        two_lanes(**wrong)


def test_an_idle_device_slot_is_taken_before_a_busy_one():
    scheduler = two_lanes(slots=[(1000, 8, 0, 8.0), (1000, 8, 0, 1.0)])
    handles = [submit(scheduler, number, lane=SHORT) for number in range(2)]
    run(scheduler)
    assert [scheduler.take(0), scheduler.take(1)] == [handles[:1], handles[1:]]


def test_the_share_follows_the_backlog_down_to_its_bound():
    scheduler, _ = with_waiting(0, 400)
    assert share_after(scheduler, 1) == pytest.approx(0.70)
    assert share_after(scheduler, 20, start=1) == pytest.approx(0.50, abs=0.051)


def test_the_share_of_the_long_lane_has_a_bound_too():
    scheduler, _ = with_waiting(400, 0)
    # Half way between its own three quarters and all.
    assert share_after(scheduler, 30) == pytest.approx(0.875, abs=0.051)


def test_the_share_comes_home_when_nothing_waits():
    scheduler, handles = with_waiting(0, 400)
    share_after(scheduler, 20)
    for handle in handles:
        scheduler.cancel(handle)
    assert share_after(scheduler, 20, start=20) == pytest.approx(0.75)


def test_a_backlog_like_the_shares_moves_nothing():
    scheduler, _ = with_waiting(300, 100)
    assert share_after(scheduler, 30) == 0.75
    assert scheduler.border_tokens == 512


def test_a_backlog_that_swings_does_not_make_the_share_flap():
    """From side to side of the shares within the band: it stays where it is."""
    scheduler, handles = with_waiting(300, 100)
    seen = set()
    for second in range(1, 31):
        scheduler.cancel(handles.pop(0))
        lane = second % 2
        handles.insert(0, submit(scheduler, second, lane=SHORT, footprint_tokens=320 if lane else 280))
        run(scheduler, second * S)
        seen.add((scheduler.snapshot()["lanes"][SHORT]["share"], scheduler.border_tokens))
    assert seen == {(0.75, 512)}


def test_a_flood_of_requests_in_between_does_not_make_itself_short():
    """S15: they would stand in front of the short ones."""
    scheduler, _ = with_waiting(0, 720)
    share_after(scheduler, 60)
    assert scheduler.border_tokens == 512


def test_the_border_rises_with_long_requests_and_falls_again():
    scheduler, handles = with_waiting(0, 3000)
    share_after(scheduler, 1)
    assert scheduler.border_tokens == 576
    share_after(scheduler, 30, start=1)
    assert scheduler.border_tokens == 2048
    for handle in handles:
        scheduler.cancel(handle)
    share_after(scheduler, 40, start=31)
    assert scheduler.border_tokens == 512


def test_nothing_moves_more_often_than_once_a_second():
    scheduler, _ = with_waiting(0, 3000)
    for tick in range(100):
        run(scheduler, S + tick * S // 100)
    assert scheduler.border_tokens == 576
