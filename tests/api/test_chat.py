"""Chat completions through the whole app."""

from tests.api.harness import HI, House, driven


@driven
async def test_a_whole_answer_has_openais_shape_usage_and_timings():
    house = House()
    call = await house.serve(house.call("POST", "/v1/chat/completions", HI), "Hel", "lo", num_cached_tokens=2)
    assert call.status == 200
    assert call.json["choices"][0]["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert call.json["choices"][0]["finish_reason"] == "stop"
    usage = call.json["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    assert call.json["timings"]["predicted_n"] == 2
    assert float(call.headers["x-lqs-queue-ms"]) >= 0
    assert await house.is_well()


@driven
async def test_a_stream_begins_with_the_role_and_ends_with_done():
    house = House()
    call = await house.serve(house.call("POST", "/v1/chat/completions", HI | {"stream": True}), "a", "b")
    events = call.events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert call.text == "ab"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    assert call.body.endswith(b"data: [DONE]\n\n")
