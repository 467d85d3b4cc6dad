"""What clients see of their limits: in every answer, streamed or not, and in a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.api.harness import HI, House, driven, until

CHAT = "/v1/chat/completions"
LIMITS = {
    "rpm": {"of": "requests", "amount": 3, "kind": "fixed_window", "period_s": 3600.0},
    "tpm": {"of": "tokens", "amount": 1000, "kind": "fixed_window", "period_s": 3600.0},
}
ASK = HI | {"max_tokens": 10}


def seen(headers: dict[str, str], unit: str) -> tuple[int, int]:
    """(limit, remaining); the reset is a time in Go's and OpenAI's form."""
    assert headers[f"x-ratelimit-reset-{unit}"].endswith("s")
    return int(headers[f"x-ratelimit-limit-{unit}"]), int(headers[f"x-ratelimit-remaining-{unit}"])


@driven
async def test_an_answer_and_a_stream_tell_what_is_left() -> None:
    house = House(limits=LIMITS)
    whole = await house.serve(house.call("POST", CHAT, ASK), "a", "b", assigned_ns=1, finished_ns=2)
    num_prompt = whole.json["usage"]["prompt_tokens"]
    assert seen(whole.headers, "requests") == (3, 2)
    assert seen(whole.headers, "tokens") == (1000, 1000 - num_prompt - 2)
    stream = await house.serve(house.call("POST", CHAT, ASK | {"stream": True}), "a", assigned_ns=1, finished_ns=2)
    assert stream.status == 200
    assert seen(stream.headers, "requests") == (3, 1)
    assert seen(stream.headers, "tokens") == (1000, 1000 - 2 * num_prompt - 2 - 1)


@driven
async def test_a_refusal_tells_them_too_and_names_the_limit() -> None:
    house = House(limits=LIMITS)
    for _ in range(3):
        await house.serve(house.call("POST", CHAT, ASK), "a", assigned_ns=1, finished_ns=2)
    for body in (ASK, ASK | {"stream": True}):
        call = await house.ask("POST", CHAT, body)
        assert (call.status, call.error["code"]) == (429, "rate_limit_exceeded")
        assert call.headers["x-lqs-reason"] == "rate_limit_exceeded"
        assert "rpm (3 requests in 1h0m0s for each key)" in call.error["message"]
        assert seen(call.headers, "requests") == (3, 0)
        assert 1 <= int(call.headers["retry-after"]) <= 120
        assert int(call.headers["retry-after-ms"]) >= 1000
    assert house.metrics.refused_by_reason == {"rate_limit_exceeded": 2}


@driven
async def test_what_is_too_large_for_a_limit_is_not_worth_a_retry() -> None:
    house = House(limits=LIMITS)
    call = await house.ask("POST", CHAT, HI | {"max_tokens": 2000})
    assert (call.status, call.error["code"], call.error["param"]) == (400, "limit_too_small", "max_tokens")
    assert call.headers["x-lqs-reason"] == "limit_too_small"
    assert call.headers["x-should-retry"] == "false"
    assert "retry-after" not in call.headers
    assert seen(call.headers, "requests") == (3, 3)
    assert house.metrics.refused_by_reason == {"limit_too_small": 1}


@driven
async def test_a_client_that_leaves_while_it_waits_pays_nothing() -> None:
    house = House(limits=LIMITS)
    first = house.call("POST", CHAT, ASK)
    (handle,) = await house.starts()
    waiting = house.call("POST", CHAT, ASK)
    await until(lambda: len(house.model.works) == 2)
    waiting.leave()
    await waiting.done()
    house.turn()
    house.turn()
    house.emit(handle, "a")
    house.finish(handle, 1, num_completion_tokens=1, assigned_ns=1, finished_ns=2)
    await first.done()
    assert seen(first.headers, "requests") == (3, 2)


@driven
async def test_without_limits_nothing_is_said_of_them() -> None:
    house = House()
    call = await house.serve(house.call("POST", CHAT, ASK), "a")
    assert not [name for name in call.headers if name.startswith("x-ratelimit")]


@driven
async def test_keys_do_not_see_each_others_limits(tmp_path: Path) -> None:
    house = House(limits=LIMITS, keys=["one", "two"], tmp_path=tmp_path)
    for _ in range(3):
        await house.serve(house.call("POST", CHAT, ASK, key="one"), "a", assigned_ns=1, finished_ns=2)
    assert (await house.ask("POST", CHAT, ASK, key="one")).status == 429
    other = await house.serve(house.call("POST", CHAT, ASK, key="two"), "a", assigned_ns=1, finished_ns=2)
    assert seen(other.headers, "requests") == (3, 2)


@driven
async def test_a_limit_may_be_for_one_route() -> None:
    only: dict[str, Any] = {"only": LIMITS["rpm"] | {"per": "route", "routes": ["completions"]}}
    house = House(limits=only)
    text = await house.serve(
        house.call("POST", "/v1/completions", {"model": "M", "prompt": "a", "max_tokens": 3}), "a", assigned_ns=1
    )
    assert seen(text.headers, "requests") == (3, 2)
    chat = await house.serve(house.call("POST", CHAT, ASK), "a")
    assert "x-ratelimit-limit-requests" not in chat.headers
