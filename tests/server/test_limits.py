"""Limits over a real socket: the figures of a bucket, a limit of parallel requests, and a reload."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import openai
import pytest

from lqs.engine.synth import Recipe, parse_shape, write
from lqs.serve import build
from tests.server.client import HOST
from tests.server.conftest import Start
from tests.server.process import Server, until
from tests.server.test_life import ask, config_for, live, prompt
from tests.server.test_life import until as until_status

S = 10**9
MS = 10**6
CONFIG = """
engine.ctx = 60000
engine.parallel = 2
engine.kv_mode = "guaranteed"
[limits.at_once]
of = "parallel"
amount = 3
per = "server"
[limits.long]
of = "tokens"
kind = "fixed_window"
amount = {tokens}
period_s = 2000000.0
per = "server"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write(path, Recipe(shape=parse_shape("tiny")), lambda *_: None)
    return str(path)


def test_the_figures_of_a_bucket_over_a_socket(model: str) -> None:
    """S3 with the limiter's clock passed in: capacity 5, 2 a second. B40: the wait that is told is true."""
    now_ns = 5 * S

    async def scene(port: int) -> None:
        nonlocal now_ns

        async def passes() -> bool:
            status, headers, body = await ask(port, "POST", "/v1/completions", prompt(1))
            if status == 200:
                return True
            assert (status, headers["x-lqs-reason"]) == (429, "rate_limit_exceeded")
            assert json.loads(body)["error"]["message"].startswith("The limit five (2 requests in 1s for each key)")
            assert headers["retry-after"] == "2"
            assert 1000 <= int(headers["retry-after-ms"]) <= 1250
            return False

        async def calls(num: int, apart_ns: int, pass_ns: int) -> list[bool]:
            nonlocal now_ns
            passed = []
            for _ in range(num):
                passed.append(await passes())
                now_ns += apart_ns + (pass_ns if passed[-1] else 0)
            return passed

        await until_status(port, "/readyz", 200)
        assert await calls(20, 0, 0) == [True] * 5 + [False] * 15
        now_ns += 3 * S
        assert await calls(8, 50 * MS, 50 * MS) == [True] * 6 + [False] * 2
        now_ns += 60 * S
        passed = await calls(20, 300 * MS, 50 * MS)
        assert [number for number, has_passed in enumerate(passed) if not has_passed] == [14, 17]
        _, headers, _ = await ask(port, "POST", "/v1/completions", prompt(1))
        assert headers["x-ratelimit-limit-requests"] == "5"

    limit = {"of": "requests", "amount": 2, "period_s": 1.0, "burst": 5}
    server = build(config_for(model, **{"limits.five": limit}), limits_clock=lambda: now_ns)
    assert live(server, scene) == 0


TOKENS = 1_000_000


@pytest.fixture
def server(start: Start, tiny: Path) -> Server:
    return start(tiny, config=CONFIG.format(tokens=TOKENS))


def left(server: Server, limit: str) -> float:
    return server.metrics()[f'lqs_limit_remaining{{limit="{limit}"}}']


def test_parallel_requests_are_bounded_and_their_end_makes_room(server: Server) -> None:
    """B40: the key's concurrency. Of those whose clients leave, queued or running, only what was made is paid."""
    answer = server.complete(7).answer()
    spent = sum(answer.usage)
    assert left(server, "long") == TOKENS - spent
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(TOKENS - spent)
    calls = [server.complete(50_000, stream=True) for _ in range(3)]
    server.wait_running(1)
    server.wait_waiting(2)
    assert left(server, "at_once") == 0
    assert left(server, "long") < TOKENS - spent - 150_000
    refused = server.complete(1).answer()
    assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1
    assert server.metrics()['lqs_limit_refusals_total{limit="at_once"}'] == 1
    for call in calls:
        call.close()
    until(lambda: left(server, "at_once") == 3)
    server.wait_at_rest()
    # Two were never started.
    assert TOKENS - spent - 50_000 < left(server, "long") < TOKENS - spent
    assert server.complete(1).answer().status == 200


def test_a_hangup_takes_new_limits_and_keeps_what_did_not_change(server: Server) -> None:
    spent = sum(server.complete(5).answer().usage)
    assert left(server, "long") == TOKENS - spent
    running = server.complete(3000, stream=True)
    events = running.events()
    next(events)
    file = server.log_path.with_name("lqs.toml")
    one = '[limits.new]\nof = "requests"\namount = 1\nperiod_s = 1e6\n'
    file.write_text(CONFIG.format(tokens=TOKENS) + one)
    server.signal(signal.SIGHUP)
    until(lambda: "reloaded" in server.log)
    assert server.complete(1).answer().status == 200
    refused = server.complete(1).answer()
    assert refused.json["error"]["message"].startswith("The limit new (1 requests in ")
    # Who was in before is served to its end and pays where it was charged.
    assert list(events)[-1] == "[DONE]"
    assert TOKENS - spent - 3200 < left(server, "long") < TOKENS - spent - 3000
    # What is wrong changes nothing.
    file.write_text(CONFIG.format(tokens=0))
    server.signal(signal.SIGHUP)
    until(lambda: "limits.long.amount: must be a whole number >= 1" in server.log)
    assert server.complete(1).answer().status == 429


def test_the_official_client_waits_as_it_is_told_and_comes_in_at_its_first_retry(start: Start, tiny: Path) -> None:
    """B40: the stock client retries a 429 after `retry-after-ms`."""
    server = start(tiny, config='[limits.one]\nof = "requests"\namount = 1\nperiod_s = 1.0\n')
    with openai.OpenAI(base_url=f"http://{HOST}:{server.port}/v1", api_key="x", max_retries=1) as client:
        for number in range(3):
            assert client.completions.create(model="", prompt="hi", max_tokens=2).usage.completion_tokens <= 2
            assert server.metrics()['lqs_limit_refusals_total{limit="one"}'] == number
