"""Bodies as they come over a socket: too large, too slow, not what they say, nested, not JSON."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tests.server.client import Answer, Call, head_of
from tests.server.conftest import Start
from tests.server.process import Server

CHAT = "/v1/chat/completions"
CAP = 200_000
TIMEOUT_S = 0.5
CONFIG = f"""
engine.ctx = 2048
server.body_bytes_max = {CAP}
server.body_timeout_s = {TIMEOUT_S}
server.keep_alive_s = 2
server.header_bytes_max = 8192
"""


@pytest.fixture(scope="module")
def server(share: Start, tiny: Path) -> Server:
    return share(tiny, config=CONFIG)


def raw(server: Server, head: dict[str, str], *parts: bytes) -> Call:
    """A request of exactly these bytes."""
    sent = head_of("POST", CHAT, {"host": "lqs", "content-type": "application/json"} | head) + b"".join(parts)
    return server.call("POST", CHAT, raw=sent)


def is_well(server: Server) -> bool:
    """The next ordinary request still answers 200."""
    return server.complete(2).answer().status == 200


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def send_for(call: Call, limit_s: float) -> None:
    """Send chunks until the server has enough of it."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        call.sock.sendall(chunk(b" " * 1_000_000))


def padded(size: int) -> bytes:
    """A good body of that many bytes."""
    body = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1}'
    return body + b" " * (size - len(body))


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize(("size", "status"), [(CAP, 200), (CAP + 1, 413)])
def test_the_cap_is_exact(server: Server, framing: str, size: int, status: int) -> None:
    """B21: limit exactly, limit + 1, by both framings."""
    body = padded(size)
    if framing == "length":
        call = raw(server, {"content-length": str(size)}, body)
    else:
        call = raw(server, {"transfer-encoding": "chunked"}, chunk(body), b"0\r\n\r\n")
    assert call.answer().status == status
    assert is_well(server)


def test_a_length_that_is_too_large_is_refused_before_the_body_comes(server: Server) -> None:
    """B21: Content-Length 10 GB, 1 MB sent, then a stall."""
    call = raw(server, {"content-length": "10000000000"})
    answer = call.answer()
    assert (answer.status, answer.code) == (413, "body_too_large")
    assert answer.headers["connection"] == "close"
    assert is_well(server)


def test_endless_chunks_end_at_the_cap_and_take_no_memory(server: Server) -> None:
    """B21: chunked, no length, 1 MB chunks without end; memory stays near the cap."""
    is_well(server)
    before = server.memory_bytes
    call = raw(server, {"transfer-encoding": "chunked"})
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        send_for(call, 30)
    assert server.memory_bytes - before < 20_000_000
    assert is_well(server)


@pytest.mark.parametrize("framing", [{"content-length": "1000"}, {"transfer-encoding": "chunked"}])
@pytest.mark.parametrize("pause", ["stall", "trickle"])
def test_a_slow_upload_ends_with_408_and_holds_no_place(server: Server, framing: dict[str, str], pause: str) -> None:
    """B21: a stalled upload, or one that trickles, ends at the read timeout."""
    call = raw(server, framing)
    began_s = time.monotonic()
    call.sock.settimeout(0.05 if pause == "trickle" else 5)
    while True:
        try:
            answer = call.begin()
            break
        except TimeoutError:
            call._response = None
            call.sock.sendall(b" " if "content-length" in framing else chunk(b" "))
    call.sock.settimeout(5)
    assert answer.status == 408
    assert TIMEOUT_S * 0.9 < time.monotonic() - began_s < TIMEOUT_S + 2
    assert server.metric("lqs_queue_total_places_taken") == 0
    call.close()
    assert is_well(server)


def test_headers_that_do_not_come_end_the_connection(server: Server) -> None:
    """A client that says nothing, or never comes to the end of its headers."""
    calls = [server.call("POST", CHAT, raw=sent) for sent in (b"", b"POST / HTTP/1.1\r\nhost: x\r\n")]
    for call in calls:
        call.sock.settimeout(10)
        assert call.sock.recv(1) == b""


def test_a_body_that_is_longer_than_its_length_is_cut_there(server: Server) -> None:
    """B21: Content-Length smaller than the body: the rest is no part of it, and no request either."""
    assert raw(server, {"content-length": "80"}, padded(80), b"\r\n").answer().status == 200
    for length in ("80", "40"):
        assert raw(server, {"content-length": length}, padded(80), b"x" * 100).answer().status == 400
    assert is_well(server)


@pytest.mark.parametrize("length", ["-1", "1e3", "0x10", " ", "18446744073709551616", "9" * 400])
def test_a_length_that_is_none_is_refused(server: Server, length: str) -> None:
    answer = raw(server, {"content-length": length}).answer()
    assert answer.status in (400, 413)
    assert is_well(server)


def test_headers_that_are_too_large_are_refused(server: Server) -> None:
    assert raw(server, {"x-large": "x" * 9000, "content-length": "0"}).answer().status == 431
    assert is_well(server)


@pytest.mark.parametrize("depth", [100, 3000, 90_000])
def test_deep_json_is_refused(server: Server, depth: int) -> None:
    """B20: N nested brackets, over a socket; and more bytes than may come are a 413."""
    body = b'{"messages":[{"role":"user","content":"hi"}],"tools":' + b"[" * depth + b"]" * depth + b"}"
    answer = server.ask("POST", CHAT, body)
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
    assert is_well(server)


def test_a_client_that_sends_all_before_it_reads_still_gets_its_413(server: Server) -> None:
    """B20, N = 5,000,000: an answer, and no dropped connection, although it comes long before the end."""
    for _ in range(5):
        answer = server.ask("POST", CHAT, b"[" * 5_000_000 + b"]" * 5_000_000)
        assert (answer.status, answer.code) == (413, "body_too_large")
    assert is_well(server)


BAD = [
    b"\xc3\x28", b'{"messages":"\xc3\x28"}', "{'中文'}".encode("gbk"), b"{:", b"", b"null", b"[]", b"\xef\xbb\xbf{}",
    b'{"max_tokens":' + b"9" * 100_000 + b"}", b'{"messages":[]}', b'{"messages":[{"role":"user"}]}', b"\x00" * 100,
]  # fmt: skip


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_what_is_not_a_request_is_a_400(server: Server, body: bytes) -> None:
    """B20: invalid UTF-8, GBK, '{:', empty, null, [], a BOM, 100,000 digits. B13: no messages."""
    answer = server.ask("POST", CHAT, body)
    assert answer.status == 400
    assert answer.code
    assert is_well(server)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repeat_penalty", "seed"])
def test_numbers_that_are_none_are_refused(server: Server, field: str) -> None:
    """B18: NaN, Infinity, 1e999 and integers over 64 bits."""
    values = ("NaN", "Infinity", "-Infinity", "1e999", "18446744073709551616", "-9223372036854775809", '"NaN"')
    for value in values:
        body = '{"messages":[{"role":"user","content":"hi"}],"%s":%s}' % (field, value)  # noqa: UP031
        answer: Answer = server.ask("POST", CHAT, body.encode())
        assert answer.status == 400, value
        assert answer.code
    assert is_well(server)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [999_999]}, {"prompt": [-1]}, {"prompt": [2**40]}, {"prompt": [1, "a"]}, {"prompt": [1.0, True]},
        {"prompt": "hi", "logit_bias": {"999999": -100}}, {"prompt": "hi", "logit_bias": {"AI": -100}},
        {"prompt": "hi", "logit_bias": {"1": 1e308}}, {"prompt": ["", ""]}, {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "stop": ["a"] * 99}, {"prompt": "x", "grammar": "root ::= " + "(" * 60_000},
        {"prompt": "x", "grammar": "root ::= root | \"a\""}, {"prompt": "x", "grammar": "r ::="},
    ],
)  # fmt: skip
def test_what_could_hurt_the_engine_is_refused_before_it(server: Server, body: dict[str, object]) -> None:
    """B16, B13, B14, B10, B63: ids outside the vocabulary, empty prompts, max_tokens 0, stops, grammars."""
    answer = server.ask("POST", "/v1/completions", body)
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
    assert is_well(server)


def test_another_content_type_is_refused(server: Server) -> None:
    answer = server.ask("POST", CHAT, b"a=b", headers={"content-type": "application/x-www-form-urlencoded"})
    assert answer.status == 415


def test_what_is_no_http_is_answered_and_closed(server: Server) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00", b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        call = server.call("GET", "/", raw=sent)
        call.sock.shutdown(socket.SHUT_WR)
        assert b"".join(iter(lambda call=call: call.sock.recv(4096), b""))[:12] in (b"HTTP/1.1 400", b"")
    assert is_well(server)


def test_health_answers_while_many_large_prompts_come(server: Server) -> None:
    """B44: prompts that are refused for their length, 80 at once; a stream goes on meanwhile."""
    stream = server.complete(1500, stream=True)
    events = stream.events()
    next(events)
    body = b'{"messages":[{"role":"user","content":"' + b"word " * 39_000 + b'"}]}'
    calls = [server.call("POST", CHAT, body) for _ in range(80)]
    took_s = []
    for _ in range(20):
        began_s = time.monotonic()
        assert server.ask("GET", "/health").status == 200
        took_s.append(time.monotonic() - began_s)
    assert {call.answer().code for call in calls} == {"context_length_exceeded"}
    assert list(events)[-1] == "[DONE]"
    assert sorted(took_s)[-2] < 0.5
