"""When the smaller model answers, and when it does not though the wait is long."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from lqs.admission.gate import Gate
from lqs.admission.prompts import Prompts
from lqs.config import PromptsConfig
from lqs.config_tiers import TierConfig
from lqs.errors import BadRequest
from lqs.request import NS_PER_S, Lane, PromptSource, Request, Sampling, Segment, Tenant
from lqs.scheduling.core import make_door, make_scheduler
from lqs.scheduling.desk import Desk
from lqs.scheduling.outlook import make_outlook
from lqs.settings import load
from tests.admission.parts import ByteServed, text
from tests.scheduling.parts import Told

S = NS_PER_S


@dataclass
class TwoModels:
    """A catalogue with a model and its fallback."""

    served: ByteServed
    fallback: ByteServed
    is_loading = False
    has_healthy_device = True

    def find(self, name: str) -> ByteServed | None:
        return {"m": self.served, "small": self.fallback}.get(name)

    def fallback_of(self, served: ByteServed) -> ByteServed | None:
        return self.fallback if served is self.served else None


class Door:
    """A gate over the real core with one device slot for each model; the first is taken for 50 s."""

    def __init__(self, **flags: Any) -> None:
        config = load(None, None, {"engine.parallel": 1, "model.fallback": "small", "degrade.wait_s": 10.0} | flags)
        strict = TierConfig(level=2, degrade="never")
        config = msgspec.structs.replace(config, tiers=config.tiers | {"strict": strict})
        self.now_ns = self.began_ns = time.monotonic_ns()
        core = make_scheduler(config, [1.0] * 8)
        for model in (0, 1):
            core.add_device_slot(kv_tokens=1000, num_sequences=1, model=model)
        outlook = make_outlook(config, core, now_ns=lambda: self.now_ns)
        self.desk = Desk(core, Told(), door=make_door(config), outlook=outlook)
        self.models = TwoModels(ByteServed(n_ctx=600), ByteServed(n_ctx=64, name="small", index=1))
        self.prompts = Prompts(PromptsConfig(threads=1))
        self.gate = Gate(
            config,
            desk=self.desk,
            models=self.models,
            prompts=self.prompts,
            rng=random.Random(1),  # type: ignore[arg-type]
        )
        self.core = core

    def busy(self) -> None:
        """One runs that makes a token a second, and has 50 to go."""
        self.admit(arriving(max_tokens=60))
        self.turn(0)
        (handle,) = self.core.take(0)
        for second in range(1, 11):
            self.core.emit(handle, b"x")
            self.turn(second)

    def turn(self, second: int) -> None:
        self.now_ns = self.began_ns + second * S
        self.core.round(self.now_ns)
        self.desk.drain_events()

    def admit(self, request: Request, source: PromptSource | None = None) -> Request:
        asyncio.run(self.gate.admit(request, source or portable("hello"), Told()))
        return request


def arriving(tier: str = "free", **given: Any) -> Request:
    tenant = Tenant("ann", tier, 3, 2, 2)
    return Request(id="r", tenant=tenant, model="m", arrival_ns=time.monotonic_ns(), **given)


def portable(prompt: str) -> PromptSource:
    """A prompt that any model can be given."""
    return PromptSource(render=lambda: [Segment(prompt, True)], remake=lambda served: portable(prompt))


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    made.busy()
    yield made
    made.prompts.close()


def test_a_wait_that_is_too_long_is_spared_by_the_smaller_model(door: Door) -> None:
    request = door.admit(arriving())
    assert (request.model, request.degraded_from, request.model_index) == ("small", "m", 1)
    # Its prompt was made for the model that answers.
    assert len(door.models.fallback.loaded.worked) == 1
    door.turn(12)
    assert len(door.core.take(1)) == 1


@pytest.mark.parametrize(
    ("tier", "wish", "is_degraded"),
    [
        ("free", None, True),
        ("free", False, False),
        ("free", True, True),
        ("normal", None, False),
        ("normal", True, True),
        ("strict", True, False),
    ],
)
def test_the_tier_and_the_request_must_allow_it(tier: str, wish: bool | None, is_degraded: bool) -> None:
    door = Door()
    door.busy()
    request = door.admit(arriving(tier, allow_degrade=wish))
    assert (request.degraded_from is not None) is is_degraded
    assert request.model == ("small" if is_degraded else "m")
    door.prompts.close()


def unrenderable(served: object) -> PromptSource:
    raise BadRequest("no chat template")


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({"task_type": "long"}, None),
        ({"max_tokens": 3000}, None),
        ({"sampling": Sampling(logit_bias=((1, 2.0),))}, None),
        ({}, PromptSource(ids=[1, 2])),
        ({}, text("no other way to make it")),
        ({}, PromptSource(render=lambda: [Segment("hi", True)], remake=unrenderable)),
        # Too long for the smaller one.
        ({}, portable("x" * 100)),
    ],
)
def test_what_the_smaller_model_cannot_do_stays_with_the_asked_one(
    door: Door, given: dict[str, Any], source: PromptSource | None
) -> None:
    request = door.admit(arriving(**given), source)
    assert (request.model, request.degraded_from, request.model_index) == ("m", None, 0)


def test_a_short_wait_is_waited_unless_an_alert_says_otherwise() -> None:
    door = Door(**{"degrade.wait_s": 5000.0})
    door.busy()
    assert door.admit(arriving()).degraded_from is None
    door.gate.degrader.force(True)
    assert door.admit(arriving()).degraded_from == "m"
    door.gate.degrader.force(False)
    assert door.admit(arriving()).degraded_from is None
    door.prompts.close()


def test_a_smaller_model_that_is_dead_or_busier_does_not_answer(door: Door) -> None:
    door.models.fallback.has_healthy_device = False
    assert door.admit(arriving()).degraded_from is None
    door.models.fallback.has_healthy_device = True
    door.desk.outlook.wait_s = lambda level, lane, model: [20.0, 30.0][model]  # type: ignore[method-assign]
    assert door.admit(arriving()).degraded_from is None
    assert door.desk.outlook.wait_s(2, Lane.SHORT, 1) == 30
