"""From wishes and bounds to classes and lanes."""

from array import array

import pytest

from lqs.admission.classes import Classes
from lqs.config import QueueConfig
from lqs.errors import BadRequest
from lqs.request import NS_PER_S, Lane, Request, Tenant


def a_request(level: int = 2, best_level: int = 1, **wishes: object) -> Request:
    tenant = Tenant("t", "normal", 1, level, best_level)
    return Request(id="r", tenant=tenant, model="m", arrival_ns=0, **wishes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wishes", "level", "is_clamped"),
    [
        ({}, 2, False),
        ({"priority": 1}, 1, False),
        ({"priority": 0}, 1, True),
        ({"priority": -7}, 1, True),
        ({"priority": 4}, 4, False),
        ({"priority": 99}, 4, True),
        ({"service_tier": "auto"}, 2, False),
        ({"service_tier": "default"}, 2, False),
        ({"service_tier": "priority"}, 1, False),
        ({"service_tier": "flex"}, 3, False),
        ({"service_tier": "flex", "priority": 1}, 1, False),
    ],
)
def test_a_wish_holds_within_the_bounds_of_the_key(wishes: dict[str, object], level: int, is_clamped: bool) -> None:
    request = a_request(**wishes)
    Classes(QueueConfig()).assign(request)
    assert (request.level, request.is_clamped) == (level, is_clamped)


def test_flex_has_nothing_below_the_last_class() -> None:
    request = a_request(level=4, best_level=4, service_tier="flex")
    Classes(QueueConfig()).assign(request)
    assert (request.level, request.is_clamped) == (4, False)


@pytest.mark.parametrize(
    ("level", "best", "timeout_s", "load", "expected"),
    [
        # Base: the tier's.
        (2, 0, None, 0.0, 2),
        # Less than twice the expected 10 s to its deadline: one class up, if the key may.
        (2, 0, 19.9, 0.0, 1),
        (2, 0, 20.0, 0.0, 2),
        (2, 2, 1.0, 0.0, 2),
        (1, 0, 1.0, 0.0, 0),
        (0, 0, 1.0, 0.0, 0),
        # Over 80 %: one class down, but for the best, and no lower than the lowest.
        (2, 0, None, 0.8, 2),
        (2, 0, None, 0.81, 3),
        (4, 0, None, 0.81, 4),
        (0, 0, None, 1.0, 0),
        # Both: urgent first, and what has become critical stays it.
        (2, 0, 1.0, 0.81, 2),
        (1, 0, 1.0, 0.81, 0),
    ],
)
def test_the_class_is_computed_from_tier_deadline_and_load(
    level: int, best: int, timeout_s: float | None, load: float, expected: int
) -> None:
    """S10."""
    request = a_request(level=level, best_level=best)
    request.arrival_ns = 7 * NS_PER_S
    if timeout_s is not None:
        request.deadline_ns = request.arrival_ns + int(timeout_s * NS_PER_S)
    Classes(QueueConfig()).assign(request, load=load, service_s=10.0)
    assert (request.level, request.is_clamped) == (expected, expected != level)


def test_as_long_as_nothing_is_known_of_service_times_no_deadline_is_urgent() -> None:
    request = a_request(best_level=0)
    request.deadline_ns = 1
    Classes(QueueConfig()).assign(request)
    assert request.level == 2


def test_the_load_that_counts_as_high_and_the_deadline_that_is_urgent_are_settings() -> None:
    calm = Classes(QueueConfig(high_load_at=1.0, urgent_below=0.0))
    request = a_request(best_level=0)
    request.deadline_ns = 1
    calm.assign(request, load=1.0, service_s=100.0)
    assert request.level == 2


def test_a_service_tier_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(BadRequest) as caught:
        Classes(QueueConfig()).assign(a_request(service_tier="scale"))
    assert caught.value.param == "service_tier"


@pytest.mark.parametrize(
    ("num_prompt", "num_expected", "task_type", "border", "lane"),
    [
        (256, 256, None, 512, Lane.SHORT),
        (257, 256, None, 512, Lane.LONG),
        (257, 256, None, 700, Lane.SHORT),
        (10, 10, "long", 512, Lane.LONG),
        (1000, 256, "short", 512, Lane.SHORT),
        (2000, 256, "short", 2048, Lane.LONG),
    ],
)
def test_the_lane_follows_tokens_and_between_the_borders_the_wish(
    num_prompt: int, num_expected: int, task_type: str | None, border: int, lane: Lane
) -> None:
    request = a_request(task_type=task_type)
    request.prompt = array("i", [1] * num_prompt)
    Classes(QueueConfig()).assign_lane(request, border, num_expected)
    assert request.lane is lane


@pytest.mark.parametrize(
    ("tokens", "lane"),
    [
        (64, Lane.SHORT),
        (128, Lane.SHORT),
        (256, Lane.SHORT),
        (2048, Lane.LONG),
        (3000, Lane.LONG),
        (10_000, Lane.LONG),
    ],
)
def test_the_source_of_the_split_sorts_like_this(tokens: int, lane: Lane) -> None:
    """S14: a threshold of 512 tokens in all, and at rest that is where the border is."""
    request = a_request(max_tokens=tokens // 2)
    request.prompt = array("i", [1] * (tokens - tokens // 2))
    Classes(QueueConfig()).assign_lane(request, QueueConfig().short_tokens_max, tokens // 2)
    assert request.lane is lane
