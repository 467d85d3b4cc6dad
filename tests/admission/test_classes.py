"""From wishes and bounds to classes and lanes."""

from array import array

import pytest

from lqs.admission.classes import Classes
from lqs.config import QueueConfig
from lqs.errors import BadRequest
from lqs.request import Lane, Request, Tenant


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


def test_a_service_tier_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(BadRequest) as caught:
        Classes(QueueConfig()).assign(a_request(service_tier="scale"))
    assert caught.value.param == "service_tier"


@pytest.mark.parametrize(
    ("num_prompt", "granted", "asked", "task_type", "border", "lane"),
    [
        (256, 256, 256, None, 512, Lane.SHORT),
        (257, 256, 256, None, 512, Lane.LONG),
        (257, 256, 256, None, 700, Lane.SHORT),
        (256, 8000, None, None, 512, Lane.SHORT),
        (10, 10, 10, "long", 512, Lane.LONG),
        (1000, 256, 256, "short", 512, Lane.SHORT),
        (2000, 256, 256, "short", 2048, Lane.LONG),
    ],
)
def test_the_lane_follows_tokens_and_between_the_borders_the_wish(
    num_prompt: int, granted: int, asked: int | None, task_type: str | None, border: int, lane: Lane
) -> None:
    request = a_request(max_tokens=asked, task_type=task_type)
    request.prompt, request.max_tokens_granted = array("i", [1] * num_prompt), granted
    Classes(QueueConfig()).assign_lane(request, border)
    assert request.lane is lane
