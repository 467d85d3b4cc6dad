"""The load client: what it makes of bytes, and what it does on a connection."""

import asyncio
import json
import math

import pytest

from bench.load.client import Client, body_bytes_missing
from bench.load.reply import ChunkDecoder, EventReader, Exchange, event_text, read_reply

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def event(**content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text_event(text: str) -> bytes:
    return event(choices=[{"text": text}])


def usage_event(num_prompt: int, num_completion: int) -> bytes:
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_completion}
    return event(choices=[], usage=usage)


DONE = b"data: [DONE]\n\n"


def exchange_of(*pieces: tuple[float, bytes], failure: str | None = None) -> Exchange:
    return Exchange(10.0, list(pieces), 99.0, failure)


def test_tokens_are_counted_from_usage_and_not_from_events():
    reply = read_reply(
        exchange_of(
            (10.5, STREAM_HEAD + chunk(text_event("a few tokens"))),
            (11.5, chunk(text_event(" more"))),
            (11.6, chunk(text_event(""))),
            (11.7, chunk(usage_event(28, 64)) + chunk(DONE) + b"0\r\n\r\n"),
        )
    )
    assert reply.ok
    assert reply.text == "a few tokens more"
    assert (reply.num_prompt_tokens, reply.num_completion_tokens) == (28, 64)
    assert reply.token_times_s == [10.5, 11.5]
    assert reply.ttft_s == 0.5


def test_a_chat_stream_begins_with_a_role_and_that_is_no_text():
    role = event(choices=[{"delta": {"role": "assistant", "content": None}}])
    hello = event(choices=[{"delta": {"content": "Hello"}}])
    reply = read_reply(
        exchange_of((10.1, STREAM_HEAD + chunk(role)), (10.9, chunk(hello) + chunk(DONE) + b"0\r\n\r\n"))
    )
    assert reply.ttft_s == pytest.approx(0.9)
    assert reply.text == "Hello"


def test_a_response_may_be_cut_anywhere():
    raw = STREAM_HEAD + chunk(text_event("ä")) + chunk(usage_event(1, 2)) + chunk(DONE)
    raw += b"0\r\n\r\n"
    pieces = [(10.0 + number, raw[number : number + 1]) for number in range(len(raw))]
    reply = read_reply(exchange_of(*pieces))
    assert reply.ok
    assert reply.text == "ä"
    assert reply.num_completion_tokens == 2


def test_comments_of_a_waiting_stream_are_no_text():
    comment = chunk(b": queue position=5 eta_s=12.3\n\n")
    reply = read_reply(
        exchange_of(
            (10.1, STREAM_HEAD + comment),
            (12.0, chunk(text_event("x")) + chunk(DONE) + b"0\r\n\r\n"),
        )
    )
    assert reply.ttft_s == 2.0


def test_a_stream_that_was_cut_is_no_answer():
    cut = read_reply(exchange_of((10.1, STREAM_HEAD + chunk(text_event("x")))))
    assert cut.error == "response was cut"
    silent = read_reply(exchange_of((10.1, STREAM_HEAD + chunk(text_event("x")) + b"0\r\n\r\n")))
    assert silent.error == "stream ended without [DONE]"


def test_an_error_inside_a_stream_is_an_error():
    failed = event(error={"code": "timeout"})
    reply = read_reply(exchange_of((10.1, STREAM_HEAD + chunk(failed) + chunk(DONE))))
    assert not reply.ok
    assert "timeout" in (reply.error or "")


def test_a_refusal_says_when_to_come_back():
    body = b'{"error": {"code": "queue_full"}}'
    head = (
        b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"
        b"Retry-After: 7\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    reply = read_reply(exchange_of((10.1, head + body)))
    assert reply.status == 429
    assert reply.retry_after_s == 7.0
    assert not reply.ok
    assert math.isnan(reply.ttft_s)


def test_no_response_keeps_the_reason():
    assert read_reply(exchange_of(failure="timeout")).error == "timeout"
    assert read_reply(exchange_of()).error == "no response"


def test_a_body_that_is_not_json_is_told():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    assert read_reply(exchange_of((10.1, head + b"{"))).error == "body is not JSON"


def test_the_length_of_a_body_is_known_only_from_its_head():
    assert body_bytes_missing(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab") == 3
    assert body_bytes_missing(STREAM_HEAD) is None
    assert body_bytes_missing(b"HTTP/1.1 200") is None


def test_a_chunk_may_carry_an_extension():
    decoder = ChunkDecoder()
    assert decoder.feed(b"3;name=value\r\nabc\r\n0\r\n") == b"abc"
    assert not decoder.finished
    decoder.feed(b"\r\n")
    assert decoder.finished


def test_events_may_use_either_line_end_and_several_data_lines():
    reader = EventReader()
    assert reader.feed(b"data: a\r\n\r\ndata:b\ndata: c\n") == [b"a"]
    assert reader.feed(b"\n") == [b"b\nc"]


def test_an_event_without_choices_has_no_text():
    assert event_text({"choices": []}) == ""
    assert event_text({"choices": [{"delta": {"content": None}}]}) == ""


async def serve_once(pieces: list[bytes], close: bool) -> Exchange:
    """Let the client talk to a server that writes these pieces, and return what it kept."""
    client_left = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if not close:
            await reader.read()
        writer.close()
        client_left.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        client = Client("127.0.0.1", server.sockets[0].getsockname()[1])
        exchange = await client.send(client.payload("GET", "/"), timeout_s=0.3)
        await client_left.wait()
    return exchange


@pytest.mark.parametrize(
    ("pieces", "close", "failure"),
    [
        ([STREAM_HEAD, chunk(DONE) + b"0\r\n\r\n"], False, None),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", b"abc"], False, None),
        ([b"HTTP/1.1 200 OK\r\n\r\nabc"], True, None),
        ([], True, "connection lost: closed"),
        ([STREAM_HEAD], False, "timeout"),
    ],
)
def test_the_client_knows_when_a_response_is_over(pieces, close, failure):
    exchange = asyncio.run(serve_once(pieces, close))
    assert exchange.failure == failure
    assert b"".join(piece for _, piece in exchange.pieces) == b"".join(pieces)
    assert exchange.end_s >= exchange.start_s


def test_a_port_where_nobody_listens_is_told():
    client = Client("127.0.0.1", 1)
    exchange = asyncio.run(client.send(client.payload("GET", "/")))
    assert (exchange.failure or "").startswith("no connection")
