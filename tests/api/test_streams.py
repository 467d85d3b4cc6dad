"""Streams: what is sent when, and how they end."""

import asyncio

import pytest

from lqs.api import generate
from tests.api.harness import HI, House, driven, until

STREAM = HI | {"stream": True}
CHAT = "/v1/chat/completions"


@driven
async def test_usage_is_sent_only_when_asked_and_in_every_way_of_ending():
    """B08: absent, null, {}, false: no usage; true: one chunk with no choices before [DONE]."""
    house = House()
    endings = [(("x", "y"), 1), (("x",), 2), ((), 1), ((), 2)]
    for options in ("absent", None, {}, {"include_usage": False}, {"include_usage": True}):
        for texts, finish in endings:
            body = STREAM if options == "absent" else STREAM | {"stream_options": options}
            call = await house.serve(house.call("POST", CHAT, body), *texts, finish=finish)
            *earlier, before_done, done = call.events
            assert done == "[DONE]"
            is_asked = options == {"include_usage": True}
            assert all(event.get("usage") is None for event in earlier)
            assert (before_done["choices"] == []) == is_asked
            if is_asked:
                usage = before_done["usage"]
                assert usage["completion_tokens"] == len(texts)
                assert usage["prompt_tokens"] + len(texts) == usage["total_tokens"]
            last = earlier[-1] if is_asked else before_done
            assert last["choices"][0]["finish_reason"] == {1: "stop", 2: "length"}[finish]


@driven
async def test_stream_options_without_a_stream_and_several_answers_are_refused():
    """B08: stream_options without stream=true is a 400; n=2 is a 400 that names n."""
    house = House()
    call = await house.ask("POST", CHAT, HI | {"stream_options": {"include_usage": True}})
    assert (call.status, call.error["param"]) == (400, "stream_options")
    call = await house.ask("POST", CHAT, STREAM | {"n": 2})
    assert (call.status, call.error["param"]) == (400, "n")
    assert await house.is_well()


@driven
async def test_an_engine_that_fails_mid_stream_ends_in_one_error_frame():
    """B07: tokens 61 62, then the engine fails: text, one error frame, no finish_reason, no [DONE]."""
    house = House()
    call = house.call("POST", CHAT, STREAM)
    (handle,) = await house.starts()
    house.emit(handle, b"\x61", b"\x62")
    await call.shows(b'"ab"')
    house.finish(handle, 5, error_code=-3)
    await call.done()
    *chunks, last = call.events
    assert set(last) == {"error"}
    assert last["error"]["code"] == "engine_error"
    assert all(c["finish_reason"] is None for chunk in chunks for c in chunk["choices"])
    assert b"[DONE]" not in call.body
    assert b"Traceback" not in call.body
    assert b"/" not in last["error"]["message"].encode()
    assert call.is_complete
    assert house.desk.num_inside == 0
    assert await house.is_well()


@driven
async def test_a_stream_that_fails_before_its_first_text_is_still_a_status():
    house = House()
    call = await house.serve(house.call("POST", CHAT, STREAM), finish=6)
    # The status line went out when the request started, so this is the frame; a refusal in the queue is not.
    assert call.status == 200 or call.error["code"] == "no_device"
    assert call.body.count(b'"error"') == 1


@pytest.mark.parametrize(
    ("finish", "status", "code"), [(4, 504, "timeout"), (5, 500, "engine_error"), (6, 503, "no_device")]
)
def test_a_whole_answer_that_fails_is_a_status(finish, status, code):
    @driven
    async def run():
        house = House()
        call = await house.serve(house.call("POST", CHAT, HI), "x", finish=finish)
        assert (call.status, call.error["code"]) == (status, code)
        assert await house.is_well()

    run()


@pytest.mark.parametrize("error_code", [-302, -303])
def test_a_grammar_that_comes_to_no_token_is_the_clients_fault(error_code):
    @driven
    async def run():
        house = House()
        bound = {"grammar": 'root ::= "a" [^\\x00-\\U0010ffff]'}
        call = await house.serve(house.call("POST", CHAT, HI | bound), "x", finish=5, error_code=error_code)
        assert (call.status, call.error["param"], call.error["code"]) == (400, "grammar", "grammar_dead_end")
        stream = house.call("POST", CHAT, STREAM | bound)
        (handle,) = await house.starts()
        house.emit(handle, "a")
        await stream.shows(b'"a"')
        house.finish(handle, 5, error_code=error_code)
        await stream.done()
        assert stream.events[-1]["error"]["message"] == "The grammar allows no further token."
        call = await house.serve(house.call("POST", CHAT, HI), "x", finish=5, error_code=error_code)
        assert (call.status, call.error["code"]) == (500, "engine_error")

    run()


@driven
async def test_a_timed_out_stream_ends_in_an_error_frame():
    house = House()
    call = await house.serve(house.call("POST", CHAT, STREAM), "x", finish=4)
    assert call.status == 200
    assert call.events[-1]["error"]["code"] == "timeout"


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_time_of_a_request_ends_also_while_its_worker_stands_still(monkeypatch, is_stream):
    """The worker is inside a step and says nothing; what it says afterwards is not told any more."""

    @driven
    async def run():
        # A second after it came, however long it may wait for its start.
        monkeypatch.setattr(generate, "OVERDUE_S", -29.0)
        house = House()
        call = house.call("POST", CHAT, (STREAM if is_stream else HI) | {"timeout": 30})
        (handle,) = await house.starts()
        house.emit(handle, "x")
        await call.done()
        if is_stream:
            assert call.text == "x"
            assert call.events[-1]["error"]["code"] == "timeout"
        else:
            assert (call.status, call.error["code"]) == (504, "timeout")
        body = call.body
        assert house.desk.scheduler.is_cancelled(handle)
        house.emit(handle, "y")
        house.finish(handle, 3, num_completion_tokens=2)
        assert call.body == body
        assert house.desk.num_inside == 0
        assert await house.is_well()

    run()


@driven
async def test_the_status_waits_for_the_start_and_a_refusal_in_the_queue_is_a_status():
    """A stream that expires in the queue within hold_s gets 503, Retry-After and nothing else."""
    house = House(slots=1)
    first = house.call("POST", CHAT, STREAM)
    (running,) = await house.starts()
    second = house.call("POST", CHAT, STREAM | {"queue_timeout": 0.05})
    await until(lambda: house.turn() or second.status is not None)
    await second.done()
    assert second.status == 503
    assert second.error["code"] == second.headers["x-lqs-reason"] == "queue_timeout"
    assert int(second.headers["retry-after"]) >= 1
    assert float(second.headers["x-lqs-queue-ms"]) >= 50
    house.finish(running)
    await first.done()


@driven
async def test_after_hold_s_the_stream_opens_with_comments_and_a_refusal_is_its_last_event():
    house = House(slots=1, queue={"hold_s": 0.01})
    first = house.call("POST", CHAT, STREAM)
    (running,) = await house.starts()
    second = house.call("POST", CHAT, STREAM | {"queue_timeout": 0.2})
    await until(lambda: house.turn() or second.task.done())
    assert second.status == 200
    assert second.body.startswith(b": queue position=1")
    (line,) = [line for line in house.log_text.getvalue().splitlines() if "access" in line]
    assert "status=200" in line
    assert line.endswith("outcome=queue_timeout")
    assert second.events[-1]["error"]["code"] == "queue_timeout"
    assert len(second.events) == 1
    house.finish(running)
    await first.done()


@driven
async def test_a_held_stream_that_starts_goes_on_as_usual():
    house = House(slots=1, queue={"hold_s": 0.01})
    first = house.call("POST", CHAT, STREAM)
    (running,) = await house.starts()
    second = house.call("POST", CHAT, STREAM)
    await until(lambda: house.turn() or second.status is not None)
    house.finish(running)
    await first.done()
    await house.serve(second, "late")
    assert second.text == "late"
    assert second.events[0]["choices"][0]["delta"]["role"] == "assistant"


@driven
async def test_stream_and_whole_answer_give_the_same_text_at_a_stop_string():
    """B10: the api passes on exactly what the worker released, however it was cut into records.

    Tokens "xx", "y" with stop ["xy", "xxz"]: the worker releases "x" and ends with stop.
    """
    house = House()
    body = HI | {"stop": ["xy", "xxz"]}
    whole = await house.serve(house.call("POST", CHAT, body), "x")
    assert house.model.works[-1]["sampling"].stop == (b"xy", b"xxz")
    streamed = await house.serve(house.call("POST", CHAT, body | {"stream": True}), "x")
    assert whole.json["choices"][0]["message"]["content"] == streamed.text == "x"


@driven
async def test_what_was_held_back_comes_before_the_error_frame():
    """B10: held-back text is flushed before an error frame."""
    house = House()
    call = house.call("POST", CHAT, STREAM)
    (handle,) = await house.starts()
    house.emit(handle, "AB", "DE")
    house.finish(handle, 5)
    await call.done()
    assert call.text == "ABDE"
    assert "error" in call.events[-1]


@driven
async def test_completions_stream_without_a_role_and_with_text():
    house = House()
    call = await house.serve(house.call("POST", "/v1/completions", {"prompt": "a", "stream": True}), "b", "\u00e9")
    *chunks, done = call.events
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "b\u00e9"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


@driven
async def test_a_crash_in_the_middle_of_a_stream_says_nothing_of_itself():
    house = House()
    call = house.call("POST", CHAT, STREAM)
    (handle,) = await house.starts()
    await until(lambda: call.status == 200)
    house.emit(handle, "a")
    await call.shows(b'"a"')
    # A record that is cut off: reading it raises inside the stream.
    house.emit(handle, logprobs=b"\x01")
    with pytest.raises(Exception, match="unpack"):
        await call.done()
    assert call.events[-1]["error"]["code"] == "engine_error"
    assert "unpack" not in call.body.decode() + house.log_text.getvalue()
    assert "outcome=engine_error" in house.log_text.getvalue()
    await asyncio.sleep(0)
    house.turn()
    assert house.desk.scheduler.is_cancelled(handle)


@driven
async def test_the_access_line_tells_how_each_request_failed():
    house = House()
    await house.ask("POST", CHAT, {"model": "M"})
    await house.ask("GET", "/nope")
    whole, stream = house.call("POST", CHAT, HI), house.call("POST", CHAT, STREAM)
    for handle in await house.starts(1):
        house.finish(handle, 5)
    for handle in await house.starts(1):
        house.finish(handle, 4)
    await whole.done()
    await stream.done()
    outcomes = [line.rpartition(" ")[2] for line in house.log_text.getvalue().splitlines() if "access" in line]
    assert outcomes[1:] == ["outcome=not_found", "outcome=engine_error", "outcome=timeout"]
    assert outcomes[0].startswith("outcome=")


@driven
async def test_a_request_that_went_well_has_no_outcome_and_a_probe_no_line():
    house = House()
    await house.serve(house.call("POST", CHAT, STREAM), "ok")
    await house.ask("GET", "/livez")
    (line,) = house.log_text.getvalue().splitlines()
    assert "outcome" not in line


@driven
async def test_an_answer_that_its_client_would_not_wait_for_is_not_computed():
    """The stock SDK tells how long it reads; a bad value of that header is nobody's promise."""
    house = House(slots=1)
    first = house.call("POST", CHAT, STREAM)
    (running,) = await house.starts()
    second = house.call("POST", CHAT, HI, headers=[(b"x-stainless-read-timeout", b"0.05")])
    third = house.call("POST", CHAT, HI, headers=[(b"x-stainless-read-timeout", b"-1e9")])
    await until(lambda: house.turn() or second.status is not None)
    assert (second.status, second.error["code"]) == (503, "queue_timeout")
    house.finish(running)
    await first.done()
    assert third.status is None
    (handle,) = await house.starts()
    house.finish(handle)
    await third.done()
    assert third.status == 200
