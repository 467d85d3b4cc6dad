"""A device slot breaks under running streams: each of them ends as if nothing had been. Real process, real sockets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fake_nvml import card, compile_library, environ_of, replace_script
from tests.server.client import Call, Streamed, collect
from tests.server.conftest import Start
from tests.server.process import Server, until

CONFIG = """
engine.devices = ["cpu:0", "cpu:1"]
engine.parallel = {parallel}
engine.ctx = 4096
engine.stall_s = 2.0
engine.inter_token_target_ms = 20.0
health.reload_backoff_s = {backoff_s}
health.reload_attempts = {attempts}
server.drain_s = 1
server.close_s = 1
"""
PROMPTS = [f"Write a long story about {what}." for what in ("a red fox", "the sea", "an old clock", "rain")]
TOKENS, LONG = 32, 60


def begin(server: Server, prompt: str, **fields: Any) -> Call:
    body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    return server.call("POST", "/v1/completions", body | {"stream_options": {"include_usage": True}} | fields)


def config(backoff_s: float = 0.2, attempts: int = 5, parallel: int = 4) -> str:
    return CONFIG.format(backoff_s=backoff_s, attempts=attempts, parallel=parallel)


@pytest.fixture(scope="module")
def wanted(share: Start, default_model: Path) -> list[Streamed]:
    """What each says undisturbed."""
    server = share(default_model, config=config(parallel=1))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda prompt: collect(begin(server, prompt)), PROMPTS))


def told_alike(told: list[Streamed], wanted: list[Streamed], num_tokens: int = TOKENS) -> None:
    assert [one.error for one in told] == [None] * len(told)
    assert [(one.text, one.finish, one.is_done) for one in told] == [(w.text, w.finish, True) for w in wanted]
    # Counted once as well.
    assert [one.usage["completion_tokens"] for one in told] == [num_tokens] * len(told)  # type: ignore[index]


def opened_anew(server: Server, num: int = 1) -> None:
    """Wait until they work again; of each that died the core keeps what it slept on."""
    until(lambda: server.log.count("device slot is opened anew") >= num and server.metric("lqs_device_healthy") == 2)
    server.start_figures["files"] += num


def broken(start: Start, model: Path, drill: str, **settings: Any) -> Server:
    return start(model, "--chaos", drill, config=config(**settings))


@pytest.mark.parametrize(
    "deed", ["abort@step=20", "abort-helper@step=20", "hang@step=20 for=6s", "oom@step=20"], ids=lambda deed: deed[:12]
)
def test_every_stream_goes_on_at_the_other_device_slot(
    start: Start, default_model: Path, wanted: list[Streamed], deed: str
) -> None:
    """B50: an assert in the worker, one in a thread that helps it, a step that ends too late, no memory any more."""
    server = broken(start, default_model, f"device_slot=1 {deed}")
    told = [collect(call) for call in [begin(server, prompt) for prompt in PROMPTS]]
    told_alike(told, wanted)
    assert server.metric("lqs_requests_lost_total") >= 2
    # It comes back, in another place, and serves as before.
    opened_anew(server)
    told_alike([collect(call) for call in [begin(server, prompt) for prompt in PROMPTS[:2]]], wanted[:2])
    assert server.metric("lqs_device_healthy") == 2
    assert server.metric("lqs_core_broken_total") == 0


def test_a_lost_card_takes_its_device_slot_with_it_and_no_stream(
    start: Start, default_model: Path, tmp_path: Path
) -> None:
    """A CPU device slot that counts as being on a card of the fake NVML, which reports that it fell off the bus."""
    script = tmp_path / "gpus"
    environ = environ_of(compile_library(tmp_path / "nvml"), script, [card("GPU-a")])
    drill = "device_slot=1 card=GPU-a"
    server = start(default_model, "--chaos", drill, config=config() + "placement.nvml_s = 0.05\n", environ=environ)
    calls = [begin(server, prompt, max_tokens=LONG, cache_prompt=False) for prompt in PROMPTS]
    until(lambda: server.metric("lqs_step_tokens_total") >= 5 * len(calls))
    replace_script(script, card("GPU-a"), "event card=GPU-a xid=79")
    told = [collect(call) for call in calls]
    assert server.metric("lqs_requests_restarted_total") >= 2
    # CUDA's error would stay with the process, so it is not opened anew.
    until(lambda: "until lqs is restarted" in server.log)
    assert "its GPU is lost: the driver reported XID 79" in server.log
    assert server.metric("lqs_device_healthy") == 1
    # Undisturbed on the one that is left.
    again = [begin(server, prompt, max_tokens=LONG, cache_prompt=False) for prompt in PROMPTS]
    told_alike(told, [collect(call) for call in again], LONG)


def test_the_drill_lose_card_does_the_same_without_a_driver(
    start: Start, default_model: Path, wanted: list[Streamed]
) -> None:
    """From that step on the device slot is as on a card that the driver has lost."""
    server = broken(start, default_model, "device_slot=0 lose-card@step=30")
    told_alike([collect(call) for call in [begin(server, prompt) for prompt in PROMPTS]], wanted)
    assert server.metric("lqs_requests_restarted_total") >= 2
    until(lambda: "device slot stays out until lqs is restarted device=cpu:0 attempts=0" in server.log)
    assert "its GPU is lost: a drill says so" in server.log
    assert "is opened anew" not in server.log
    (lost, sound) = server.ask("GET", "/admin/devices").json["data"]
    assert (lost["state"], sound["state"]) == ("quarantined", "ready")
    assert lost["health"]["reason"] == "its GPU is lost: a drill says so"
    assert server.metric("lqs_device_healthy") == 1
    steps = 'lqs_device_steps_total{device="cpu:0"}'
    before = server.metrics()[steps]
    told_alike([collect(call) for call in [begin(server, prompt) for prompt in PROMPTS[:2]]], wanted[:2])
    assert server.metrics()[steps] == before
    assert server.ask("GET", "/readyz").status == 200
    server.start_figures["files"] = server.num_files


def test_where_the_only_card_is_lost_health_says_so(start: Start, default_model: Path) -> None:
    server = start(default_model, "--ctx", "4096", "--chaos", "device_slot=0 lose-card@step=4")
    (told,) = [collect(begin(server, PROMPTS[0]))]
    assert told.error is not None
    assert told.error["code"] == "no_device"
    until(lambda: server.ask("GET", "/readyz").status == 503)
    assert server.ask("GET", "/admin/devices").json["data"][0]["state"] in ("dead", "quarantined")
    until(lambda: server.ask("GET", "/admin/devices").json["data"][0]["state"] == "quarantined")
    server.start_figures["files"] = server.num_files


def test_a_load_that_fails_costs_nothing_but_time(start: Start, default_model: Path, wanted: list[Streamed]) -> None:
    """B55: the other device slot serves meanwhile."""
    server = broken(start, default_model, "device_slot=1 fail-load times=2")
    assert server.metric("lqs_device_healthy") == 1
    told_alike([collect(call) for call in [begin(server, prompt) for prompt in PROMPTS]], wanted)
    until(lambda: server.metric("lqs_device_healthy") == 2)
    told_alike([collect(call) for call in [begin(server, prompt) for prompt in PROMPTS[:2]]], wanted[:2])
    assert server.log.count("cannot be opened anew") == 1


def test_when_both_break_the_streams_say_so_and_health_does_too(start: Start, default_model: Path) -> None:
    """B57: nothing says ok while nothing works; and it works again when one of them does."""
    drill = "device_slot=0 abort@step=15 device_slot=1 abort@step=20"
    server = broken(start, default_model, drill, backoff_s=2.0)
    calls = [begin(server, prompt) for prompt in PROMPTS]
    told = [collect(call) for call in calls]
    assert {one.error["code"] for one in told if one.error is not None} == {"no_device"}
    assert any(one.error is not None for one in told)
    assert server.ask("GET", "/readyz").status == 503
    refused = server.complete(1).answer()
    assert (refused.status, refused.code) == (503, "no_device")
    assert int(refused.headers["retry-after"]) >= 1
    until(lambda: server.ask("GET", "/readyz").status == 200)
    assert server.complete(3).answer().usage[1] == 3
    opened_anew(server, 2)
