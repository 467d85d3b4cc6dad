"""Until when a request may wait, and that what cannot be done in time costs no prefill."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from lqs.admission.deadlines import set_latest_start, set_limits
from lqs.config import QueueConfig
from lqs.request import NS_PER_S, Request
from lqs.scheduling.pace import Pace
from tests.admission.test_classes import a_request

S = NS_PER_S
QUEUE = QueueConfig(timeout_s=60, request_timeout_s=600, hold_s=10)


def pace() -> Pace:
    """Ten prompt tokens a second, two tokens of an answer."""
    known = Pace()
    request = a_request()
    request.prompt = array("i", [1] * 100)
    known.note(request, outcome(assigned_ns=S, prefill_done_ns=11 * S, finished_ns=31 * S, num_completion_tokens=40))
    return known


def outcome(**figures: int) -> Any:
    return SimpleNamespace(**{"num_cached_tokens": 0, "first_token_ns": figures.get("prefill_done_ns"), **figures})


def limited(**wishes: Any) -> Request:
    request = a_request(**wishes)
    request.arrival_ns = 1000 * S
    request.prompt = array("i", [1] * 50)
    set_limits(request, QUEUE)
    set_latest_start(request, QUEUE, pace(), 20)
    return request


def test_the_config_bounds_what_a_client_may_ask_for() -> None:
    request = limited(timeout_s=1000.0, queue_timeout_s=1000.0)
    assert (request.expire_ns, request.stop_ns) == (1060 * S, 1600 * S)


def test_only_an_explicit_timeout_orders() -> None:
    assert limited(timeout_s=30.0).deadline_ns == 1030 * S
    assert limited(read_timeout_s=30.0).deadline_ns == 0


def test_a_request_leaves_the_queue_when_it_can_no_longer_meet_its_deadline() -> None:
    # 50 prompt tokens take 5 s, 20 tokens of answer 10 s.
    assert limited(timeout_s=30.0).expire_ns == 1015 * S


def test_one_that_could_not_even_have_met_it_at_its_arrival_is_cut_off_and_not_given_up() -> None:
    assert limited(timeout_s=12.0).expire_ns == 1012 * S


@pytest.mark.parametrize(
    ("wishes", "expire_s"),
    [
        ({"read_timeout_s": 40.0}, 1025),
        ({"read_timeout_s": 40.0, "is_stream": True}, 1060),
        ({"read_timeout_s": 8.0, "is_stream": True}, 1003),
        ({"read_timeout_s": 3.0, "is_stream": True}, 1003),
        ({"read_timeout_s": 600.0}, 1060),
    ],
)
def test_nobody_is_served_whose_client_has_stopped_reading(wishes: dict[str, Any], expire_s: int) -> None:
    """Until the whole answer, or until the first byte of a stream, which comes after hold_s at the latest."""
    assert limited(**wishes).expire_ns == expire_s * S


def test_while_nothing_is_known_nobody_is_given_up_early() -> None:
    request = a_request(timeout_s=30.0)
    request.arrival_ns = 1000 * S
    set_limits(request, QUEUE)
    set_latest_start(request, QUEUE, Pace(), 20)
    assert request.expire_ns == 1030 * S


def test_the_pace_leaves_out_what_was_cached_and_what_never_began() -> None:
    known = Pace()
    request = a_request()
    request.prompt = array("i", [1] * 100)
    known.note(request, outcome(assigned_ns=S, prefill_done_ns=0, finished_ns=9 * S, num_completion_tokens=0))
    assert known.service_ns(10, 10) == 0
    known.note(
        request,
        outcome(num_cached_tokens=90, assigned_ns=0, prefill_done_ns=S, finished_ns=5 * S, num_completion_tokens=4),
    )
    assert known.service_ns(10, 1) == 2 * S


def test_the_pace_follows_and_forgets() -> None:
    known = pace()
    request = a_request()
    request.prompt = array("i", [1] * 100)
    for _ in range(2000):
        known.note(request, outcome(assigned_ns=S, prefill_done_ns=2 * S, finished_ns=4 * S, num_completion_tokens=100))
    assert known.service_ns(100, 100) == pytest.approx(3 * S, rel=0.01)
