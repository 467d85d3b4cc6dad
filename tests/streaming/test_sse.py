"""The bytes of a stream."""

import json

from hypothesis import given
from hypothesis import strategies as st

from lqs.streaming.outlet import Piece
from lqs.streaming.sse import ChatFrames, CompletionFrames, error_frame, escape, waiting_comment


def parsed(frame):
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2
    assert b"\r" not in frame
    return json.loads(frame.removeprefix(b"data: "))


@given(st.text())
def test_any_text_survives_a_chunk_and_breaks_no_line(text):
    for frames in (ChatFrames("i", 1, 'm"\n'), CompletionFrames("i", 1, 'm"\n')):
        chunk = parsed(frames.text(Piece(text.encode(errors="replace"), 1, b"")))
        assert chunk["model"] == 'm"\n'
        (choice,) = chunk["choices"]
        shown = choice["delta"]["content"] if "delta" in choice else choice["text"]
        assert shown == text.encode(errors="replace").decode()
        assert choice["finish_reason"] is None
        assert choice["logprobs"] is None


def test_bytes_that_are_no_text_do_not_break_the_stream():
    assert json.loads(escape(b"\xff")) == "\ufffd"


def test_first_last_usage_and_error():
    chat, completion = ChatFrames("i", 1, "m"), CompletionFrames("i", 1, "m")
    assert parsed(chat.first())["choices"][0]["delta"]["role"] == "assistant"
    assert completion.first() == b""
    assert parsed(chat.last("stop", {"cache_n": 0}))["choices"][0]["delta"] == {}
    assert parsed(completion.last("length", {}))["choices"][0]["finish_reason"] == "length"
    usage = parsed(chat.usage({"total_tokens": 3}))
    assert (usage["choices"], usage["usage"]) == ([], {"total_tokens": 3})
    assert parsed(error_frame(b'{"error":{}}')) == {"error": {}}


def test_the_comment_of_a_waiting_request_says_what_is_known():
    assert waiting_comment(5, 12.34) == b": queue position=5 eta_s=12.3\n\n"
    assert waiting_comment(5, None) == b": queue position=5\n\n"
    assert waiting_comment(None, None) == b": queue\n\n"
