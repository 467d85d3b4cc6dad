"""Clients that leave, stall or cancel, in every phase of a request."""

import asyncio
import threading

import pytest

from lqs.streaming.outlet import PENDING_BYTES_MAX
from tests.api.harness import HI, House, driven, until

CHAT = "/v1/chat/completions"
KEY = "secret"


def guarded(tmp_path, **options):
    """Every middleware the product ships is on: auth, metrics, CORS, access log."""
    server = {"cors_origins": ["*"]} | options.pop("server", {})
    house = House(keys=[KEY], tmp_path=tmp_path, server=server, **options)
    house.any_key = KEY
    return house


def call(house, **fields):
    return house.call("POST", CHAT, HI | fields, key=KEY, headers=[(b"origin", b"http://page")])


async def assert_released(house, handle):
    """The engine is told to cancel, and when it has ended it everything is back."""
    await until(lambda: house.desk.scheduler.is_cancelled(handle))
    house.finish(handle, 3, num_completion_tokens=1)
    assert house.desk.num_inside == 0
    assert house.desk.scheduler.num_running == 0
    assert await house.is_well()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("has_text", [True, False])
def test_a_client_that_leaves_while_it_runs_cancels_it(tmp_path, stream, has_text):
    """B03: max_tokens 4000, streamed or not, after the first token or during the prompt."""

    @driven
    async def run():
        house = guarded(tmp_path)
        left = call(house, max_tokens=4000, stream=stream)
        (handle,) = await house.starts()
        if has_text:
            house.emit(handle, "a")
        left.leave()
        await left.done()
        await assert_released(house, handle)
        assert "status=499" in house.log_text.getvalue() or stream

    run()


@driven
async def test_a_waiting_request_starts_when_the_client_before_it_leaves(tmp_path):
    """B03: a waiting request starts at once."""
    house = guarded(tmp_path)
    left = call(house, stream=True)
    (handle,) = await house.starts()
    waiting = call(house)
    await until(lambda: house.desk.num_inside == 2)
    left.leave()
    await left.done()
    await until(lambda: house.desk.scheduler.is_cancelled(handle))
    house.finish(handle, 3)
    await house.serve(waiting, "now")
    assert waiting.json["choices"][0]["message"]["content"] == "now"


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_the_queue_are_never_started(tmp_path, stream):
    """B04: A runs; B, C, D wait and close; E is next. The depth falls when they leave."""

    @driven
    async def run():
        house = guarded(tmp_path, queue={"caps": [4], "total": 4})
        a = call(house)
        (running,) = await house.starts()
        leavers = [call(house, stream=stream) for _ in range(3)]
        await until(lambda: house.turn() or house.desk.scheduler.num_waiting(2) == 3)
        for leaver in leavers:
            leaver.leave()
            await leaver.done()
        house.turn()
        assert house.desk.scheduler.num_waiting(2) == 0
        # The dead do not count: the queue of four takes four more.
        others = [call(house) for _ in range(4)]
        await until(lambda: house.turn() or house.desk.scheduler.num_waiting(2) == 4)
        house.finish(running)
        await a.done()
        for _ in others:
            # The pool may have finished their prompts in any order.
            (handle,) = await house.starts()
            house.finish(handle)
        assert [(await other.done()).status for other in others] == [200] * 4

    run()


@driven
async def test_a_client_that_leaves_while_its_prompt_is_made_gives_its_place_back(tmp_path):
    """B04, before the core has it: the template is still rendering in the pool."""
    house = guarded(tmp_path, prompts={"threads": 1})
    gate_open = threading.Event()
    house.prompts._pool.submit(gate_open.wait)
    left = call(house)
    await until(lambda: house.desk.scheduler.num_entered(2) == 1)
    left.leave()
    await left.done()
    assert house.desk.scheduler.num_entered(2) == 0
    gate_open.set()
    assert await house.is_well()


@driven
async def test_a_client_that_leaves_while_it_sends_its_body_costs_nothing(tmp_path):
    house = guarded(tmp_path)
    left = house.call("POST", CHAT, None, key=KEY, chunks=[b'{"model"'], complete=False)
    left.leave()
    await left.done()
    assert left.status is None
    assert "status=499" in house.log_text.getvalue()
    # B38: it has an outcome like any other, once.
    assert b'lqs_refusals_total{reason="client_left"} 1.0' in house.metrics.render()


@driven
async def test_a_reader_that_stalls_is_dropped_and_its_request_cancelled(tmp_path):
    """A slow reader: the socket accepts nothing for write_stall_s."""
    house = guarded(tmp_path, server={"write_stall_s": 1})
    aborted = []

    async def stuck(body: bytes) -> None:
        if b'"a"' in body:
            await asyncio.Event().wait()

    stalled = house.call(
        "POST", CHAT, HI | {"stream": True}, key=KEY, taker=stuck, **{"lqs.abort": lambda: aborted.append(1)}
    )
    (handle,) = await house.starts()
    await until(lambda: stalled.status == 200)
    house.emit(handle, "a")
    await stalled.done()
    assert aborted == [1]
    await assert_released(house, handle)


@driven
async def test_a_cancellation_from_outside_goes_on_and_cancels_the_request(tmp_path):
    """The server stops the handler's task: not our own cancellation, so it is not swallowed."""
    house = guarded(tmp_path)
    stopped = call(house)
    (handle,) = await house.starts()
    stopped.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopped.task
    await assert_released(house, handle)


@driven
async def test_the_owner_sees_its_request_and_cancels_it(tmp_path):
    house = House(keys=[KEY, "other"], tmp_path=tmp_path)
    house.any_key = KEY
    first = call(house)
    (running,) = await house.starts()
    waiting = house.call("POST", CHAT, HI, key=KEY, headers=[(b"x-request-id", b"mine.1")])
    await until(lambda: house.turn() or house.desk.scheduler.num_waiting(2) == 1)
    shown = await house.ask("GET", "/v1/requests/mine.1", key=KEY)
    assert (shown.json["state"], shown.json["position"], shown.json["id"]) == ("waiting", 1, "mine.1")
    for method in ("GET", "DELETE"):
        assert (await house.ask(method, "/v1/requests/mine.1", key="other")).status == 404
    gone = await house.ask("DELETE", "/v1/requests/mine.1", key=KEY)
    assert (gone.status, gone.json["state"]) == (200, "cancelled")
    house.turn()
    await waiting.done()
    assert (waiting.status, waiting.error["code"]) == (499, "cancelled")
    assert (await house.ask("GET", "/v1/requests/mine.1", key=KEY)).status == 404
    house.finish(running, 3)
    await first.done()
    assert first.error["code"] == "cancelled"


@driven
async def test_cancelling_a_request_whose_prompt_is_being_made_ends_it(tmp_path):
    house = guarded(tmp_path, prompts={"threads": 1})
    gate_open = threading.Event()
    house.prompts._pool.submit(gate_open.wait)
    preparing = house.call("POST", CHAT, HI, key=KEY, headers=[(b"x-request-id", b"p")])
    await until(lambda: house.desk.scheduler.num_entered(2) == 1)
    assert (await house.ask("DELETE", "/v1/requests/p", key=KEY)).status == 200
    await preparing.done()
    assert preparing.error["code"] == "cancelled"
    assert house.desk.scheduler.num_entered(2) == 0
    gate_open.set()


@driven
async def test_what_a_drain_cuts_off_is_told_so(tmp_path):
    """B51: after the drain limit the waiting get 503 `draining`, a begun stream an error chunk."""
    house = guarded(tmp_path)
    streaming = call(house, stream=True)
    (handle,) = await house.starts()
    house.emit(handle, "a")
    await streaming.shows(b'"a"')
    waiting = call(house)
    await until(lambda: house.turn() or house.desk.scheduler.num_waiting(2) == 1)
    house.gate.drain(0)
    refused = await call(house).done()
    assert (refused.status, refused.error["code"], refused.headers["connection"]) == (503, "draining", "close")
    assert int(refused.headers["retry-after"]) >= 1
    assert (await house.ask("GET", "/readyz")).status == 503
    assert (await house.ask("GET", "/livez")).status == 200
    house.desk.cancel_all("draining")
    house.turn()
    await waiting.done()
    assert (waiting.status, waiting.error["code"]) == (503, "draining")
    house.finish(handle, 3)
    await streaming.done()
    assert streaming.events[-1]["error"]["code"] == "draining"


@driven
async def test_the_bound_holds_for_six_at_once():
    """B37: one slot, queue of one, six before any has started: 1 runs, 1 waits, 4 get 429 with Retry-After."""
    # With one thread the first to arrive is the first to be submitted.
    house = House(queue={"caps": [1], "total": 1}, prompts={"threads": 1})
    first, *others = [house.call("POST", CHAT, HI) for _ in range(6)]
    (running,) = await house.starts()
    await until(lambda: sum(other.status == 429 for other in others) == 4)
    for other in others:
        if other.status == 429:
            assert other.error["code"] == other.headers["x-lqs-reason"] == "queue_full"
            assert int(other.headers["retry-after"]) >= 1
            assert int(other.headers["retry-after-ms"]) >= 1000
    house.finish(running)
    await first.done()
    (waiting,) = [other for other in others if other.status is None]
    await house.serve(waiting, "x")
    assert waiting.status == 200


@driven
async def test_the_bound_holds_while_prompts_are_made_and_the_model_loads():
    """B37: what waits for the pool counts too; while loading everybody is refused."""
    house = House(queue={"caps": [1], "total": 1}, prompts={"threads": 1})
    gate_open = threading.Event()
    house.prompts._pool.submit(gate_open.wait)
    preparing = [house.call("POST", CHAT, HI) for _ in range(2)]
    await until(lambda: house.desk.scheduler.num_entered(2) == 2)
    assert (await house.ask("POST", CHAT, HI)).status == 429
    gate_open.set()
    for call in preparing:
        await house.serve(call, "x")
    house.served.is_loading = True
    refused = await house.ask("POST", CHAT, HI)
    assert (refused.status, refused.error["code"]) == (503, "model_loading")
    assert (await house.ask("POST", "/v1/completions", {"prompt": "a"})).error["code"] == "model_loading"


@driven
async def test_a_stream_that_nobody_takes_stops_its_worker_at_a_bound_and_loses_nothing():
    """Back pressure: one out-buffer and the outlet's bound hold text; then the worker finds no room."""
    may_take = asyncio.Event()
    house = House(engine={"out_buffer_bytes": 4096})
    slow = house.call("POST", CHAT, HI | {"stream": True}, taker=lambda body: may_take.wait())
    (handle,) = await house.starts()
    num_emitted = 0
    while house.desk.scheduler.emit(handle, b"x" * 1000):
        num_emitted += 1
        house.turn()
        await asyncio.sleep(0)
    assert num_emitted * 1000 <= PENDING_BYTES_MAX + 2 * 4096
    may_take.set()
    await until(lambda: house.turn() or house.desk.scheduler.emit(handle, b"y"))
    house.finish(handle)
    await until(lambda: house.turn() or slow.task.done())
    assert slow.text == "x" * 1000 * num_emitted + "y"
