"""What clients and operators see of the waiting: places, times, alerts, and who answered in whose place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from lqs.engine.synth import Recipe, parse_shape, write
from tests.server.client import HOST, Call
from tests.server.conftest import Start
from tests.server.process import Server, until

CONFIG = """
[engine]
parallel = 1
ctx = 100000
prefix_cache = false
[queue]
hold_s = 0.2
caps = [4]
total = 4
[alerts]
clear_s = 0.5
window_s = 1.0
mean_wait_s = [2.0, 0.0, 0.0, 0.0]
"""
# Some 2,000 tokens a second.
LONG, SHORT = 90_000, 4_000
COMMENT = re.compile(r": queue position=(\d+) eta_s=(\d+\.\d)")


@pytest.fixture(scope="module")
def server(share: Start, tiny: Path) -> Server:
    return share(tiny, config=CONFIG)


def alerts(server: Server) -> dict[tuple[str, str], str]:
    shown = server.ask("GET", "/admin/alerts").json
    assert shown["object"] == "list"
    return {(each["rule"], each["level"]): each["state"] for each in shown["data"]}


def is_raised(server: Server, rule: str, level: str) -> Callable[[], bool]:
    return lambda: alerts(server)[rule, level] == "raised"


def runs(server: Server) -> Call:
    """One that takes two seconds or more, and has made its first tokens."""
    call = server.complete(SHORT, stream=True)
    for _ in zip(range(50), call.lines(), strict=False):
        pass
    return call


def test_a_waiting_stream_hears_its_place_and_the_time_it_has_left(server: Server) -> None:
    """From the first tokens of what runs, before anything has ended: a place and a time that comes nearer."""
    running = runs(server)
    call = server.complete(5, stream=True)
    told = []
    for line in call.lines():
        if not line.startswith(":"):
            break
        found = COMMENT.fullmatch(line)
        assert found is not None, line
        told.append((int(found[1]), float(found[2])))
    assert {place for place, _ in told} == {1}
    etas_s = [eta_s for _, eta_s in told]
    assert len(etas_s) >= 2
    assert etas_s[-1] < etas_s[0] < 30
    running.close()
    call.close()
    server.wait_at_rest()


def test_others_with_the_key_are_told_the_same(server: Server) -> None:
    running = runs(server)
    body = {"prompt": "x", "max_tokens": 5}
    call = server.call("POST", "/v1/completions", body, headers={"x-request-id": "seen"})
    server.wait_waiting(1)
    shown = server.ask("GET", "/v1/requests/seen").json
    assert (shown["state"], shown["position"]) == ("waiting", 1)
    assert 0 < shown["eta_s"] < 30
    answer = call.answer()
    assert answer.status == 200
    assert float(answer.headers["x-lqs-queue-ms"]) > 0
    running.close()
    server.wait_at_rest()
    # What was told when it came is held against what it waited.
    assert server.metric("lqs_wait_error_ratio_count") >= 1


def test_a_full_queue_is_an_alert_until_it_has_been_empty_for_a_while(server: Server) -> None:
    """80 % warns, 100 % breaks; told once, in the metrics, the log and /admin/alerts."""
    assert not is_raised(server, "fill", "break")()
    calls = [server.complete(LONG) for _ in range(5)]
    server.wait_waiting(4)
    until(is_raised(server, "fill", "break"), 10)
    assert is_raised(server, "fill", "warn")()
    assert server.metrics()['lqs_alert{level="break",rule="fill"}'] == 1
    # Nobody has started for two seconds: the oldest has waited too long.
    until(is_raised(server, "mean_wait", "warn"), 10)
    for call in calls:
        call.close()
    until(lambda: not is_raised(server, "fill", "warn")(), 10)
    server.wait_at_rest()
    assert server.metrics()['lqs_alert{level="break",rule="fill"}'] == 0
    lines = [line for line in server.log.splitlines() if "rule=fill level=break" in line]
    assert [line.split()[1:3] for line in lines] == [["alert", "raised"], ["alert", "cleared"]]


def test_who_is_refused_and_comes_when_told_gets_in(server: Server) -> None:
    """B40: the official client, with its own two retries."""
    calls = [server.complete(SHORT // 2) for _ in range(5)]
    server.wait_waiting(4)
    with openai.OpenAI(base_url=f"http://{HOST}:{server.port}/v1", api_key="none") as client:
        answer = client.completions.with_raw_response.create(model="", prompt="x", max_tokens=2)
    assert 1 <= answer.retries_taken <= 2
    assert server.metric("lqs_promises_kept_total") >= 1
    for call in calls:
        call.close()
    server.wait_at_rest()


DEGRADE = """
[engine]
parallel = 1
ctx = 100000
prefix_cache = false
[model]
fallback = "{fallback}"
[degrade]
wait_s = 2.0
kv_tokens = 1024
[tiers.normal]
level = 2
best = 1
"""


@pytest.fixture(scope="module")
def pair(share: Start, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    small = write(tmp_path_factory.mktemp("models") / "small.gguf", Recipe(shape=parse_shape("tiny"), seed=9))
    return share(tiny, config=DEGRADE.format(fallback=small))


@pytest.fixture
def busy(pair: Server) -> Iterator[None]:
    """The model's only sequence is taken for half a minute, as its first tokens tell."""
    call = pair.complete(LONG, stream=True)
    for _ in zip(range(50), call.lines(), strict=False):
        pass
    yield
    call.close()
    pair.wait_at_rest()


def ask(server: Server, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True, "priority": 1}
    return server.ask("POST", "/v1/chat/completions", body | fields)


def test_both_models_are_served_by_their_names(pair: Server) -> None:
    listed = pair.ask("GET", "/v1/models").json["data"]
    assert [(each["id"], each["meta"]["state"]) for each in listed] == [("tiny", "ready"), ("small", "ready")]
    assert listed[1]["meta"]["devices"] == ["cpu:0@small"]
    assert ask(pair, model="small").json["model"] == "small"


@pytest.mark.parametrize("stream", [False, True])
def test_when_the_wait_is_too_long_the_smaller_model_answers_and_says_so(
    pair: Server, busy: None, stream: bool
) -> None:
    answer = ask(pair, model="tiny", allow_degrade=True, stream=stream)
    assert (answer.status, answer.headers["x-lqs-degraded-from"]) == (200, "tiny")
    assert b'"model":"small"' in answer.body
    assert b'"model":"tiny"' not in answer.body
    assert pair.metric("lqs_degraded_total") >= 1


def test_the_smaller_model_is_not_kept_by_those_who_wait_for_the_other(pair: Server, busy: None) -> None:
    """They wait in the same class, and came before."""
    waiting = [pair.complete(5, model="tiny") for _ in range(3)]
    pair.wait_waiting(3)
    answer = ask(pair, model="tiny", allow_degrade=True, priority=2)
    assert (answer.status, answer.json["model"]) == (200, "small")
    for call in waiting:
        call.close()


def test_who_did_not_allow_it_waits_for_the_model_it_asked_for(pair: Server, busy: None) -> None:
    answer = ask(pair, model="tiny", queue_timeout=0.3)
    assert (answer.status, answer.code) == (503, "queue_timeout")


def test_where_nobody_waits_the_asked_model_answers(pair: Server) -> None:
    answer = ask(pair, allow_degrade=True)
    assert (answer.json["model"], "x-lqs-degraded-from" in answer.headers) == ("tiny", False)


def test_a_fallback_of_the_same_name_is_refused_at_the_start(start: Start, tiny: Path, tmp_path: Path) -> None:
    server = start(tiny, config=f'[model]\nfallback = "{tiny}"\n', is_ready=False)
    assert server.wait() == 2
    assert "model.fallback" in server.log
