"""A server with keys: who gets in, by which path, and what the log never says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.server.conftest import Start
from tests.server.process import Server

KEY = "RIGHT3-key"
PUBLIC = ("/livez", "/readyz", "/health", "/metrics")


@pytest.fixture(scope="module")
def server(share: Start, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    record = {"name": "one", "tier": "normal", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}
    keys.write_text(json.dumps(record) + "\n")
    return share(
        tiny,
        config=f'engine.ctx = 1024\nlog.level = "debug"\nkeys.file = "{keys}"\nserver.header_bytes_max = 100000\n',
    )


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([b"Bearer caf\xe9"], 401),
        ([b"Bearer \xf0\x9f\x98\x80"], 401),
        ([b"Bearer"], 401),
        ([b"Bearer "], 401),
        ([f"bearer {KEY}".encode()], 200),
        ([f"Bearer {KEY}".encode()], 200),
        ([f"Bearer  {KEY}".encode()], 401),
        ([f"Basic {KEY}".encode()], 401),
        ([KEY.encode()], 401),
        ([f"Bearer {KEY}".encode()] * 2, 401),
        ([b"Bearer " + b"x" * 65_536], 401),
        ([], 401),
    ],
    ids=range(12),
)
def test_only_the_right_key_gets_in(server: Server, lines: list[bytes], status: int) -> None:
    """B58: raw header bytes over a socket: non-ASCII, empty, doubled, 64 kB, absent."""
    headers = b"".join(b"authorization: " + line + b"\r\n" for line in lines)
    answer = server.call("GET", "/", raw=b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n").answer()
    assert answer.status == status
    if status == 401:
        assert answer.code == "invalid_api_key"
        assert answer.headers["www-authenticate"].startswith("Bearer")


def test_no_spelling_of_a_path_goes_past_the_key(server: Server) -> None:
    """B60: as is, doubled slashes, dots, percent-dots, upper case, trailing slash, other methods."""
    paths = ("/v1/models", "/v1/chat/completions", "/tokenize", "/v1/requests/x", "/admin/keys", "/", "/nope")
    for path in paths:
        for shape in (path, "/" + path, path.upper(), path + "/", "/livez/.." + path, "/livez/%2e%2e" + path,
                      "/metrics" + path, path + "?x=/livez", path + "%00", "/.%2f" + path):  # fmt: skip
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
                answer = server.ask(method, shape, headers={"x-http-method-override": "GET"})
                assert answer.status == 401, (method, shape)
    for path in PUBLIC:
        assert server.ask("GET", path).status == 200


def test_a_wrong_key_is_refused_before_the_body_comes(server: Server) -> None:
    """B21 with a wrong key: 401 although nothing of 10 GB has been sent."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000000\r\n\r\n"
    assert server.call("POST", "/", raw=head).answer().status == 401


def test_nothing_secret_is_said_anywhere(server: Server) -> None:
    """B59: keys in the query, wrong and right keys, a prompt in each kind of error, at level debug."""
    chat = {"messages": [{"role": "user", "content": "PROMPT9"}], "max_tokens": 2}
    answers = [
        server.ask("GET", "/v1/models?api_key=SECRET1&key=%53ECRET1"),
        server.ask("GET", "/v1/models%0d%0a%1b[31mFORGED", key="SECRET2"),
        server.ask("POST", "/v1/chat/completions", chat | {"temperature": "PROMPT9"}, key=KEY),
        server.ask("POST", "/v1/chat/completions", chat | {"stop": 9}, key=KEY),
        server.ask("POST", "/v1/completions", {"prompt": "PROMPT9 " * 2000}, key=KEY),
        server.ask("POST", "/v1/completions", {"prompt": "PROMPT9", "logit_bias": {"PROMPT9": 1}}, key=KEY),
        server.ask("POST", "/v1/completions", b'{"prompt": "PROMPT9', key=KEY),
        server.ask("GET", "/metrics"),
    ]
    assert [answer.status for answer in answers] == [401, 401, 400, 400, 400, 400, 400, 200]
    good = server.ask("POST", "/v1/chat/completions", chat, key=KEY)
    assert good.status == 200
    told = server.log + "".join(answer.body.decode() for answer in answers)
    for marker in ("SECRET1", "ECRET1", "SECRET2", KEY, "PROMPT9", "\x1b", "Traceback"):
        assert marker not in told
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    assert digest not in told


def test_another_keys_request_does_not_exist(start: Start, tiny: Path, tmp_path: Path) -> None:
    lines = [
        {"name": name, "tier": "normal", "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("a", "b")
    ]
    keys = tmp_path / "keys"
    keys.write_text("".join(json.dumps(line) + "\n" for line in lines))
    server = start(tiny, config=f'keys.file = "{keys}"\n')
    call = server.call(
        "POST", "/v1/completions", {"prompt": "x", "max_tokens": 20_000, "ignore_eos": True}, key="a",
        headers={"x-request-id": "mine"},
    )  # fmt: skip
    server.wait_running()
    for method in ("GET", "DELETE"):
        assert server.ask(method, "/v1/requests/mine", key="b").status == 404
    assert server.ask("GET", "/v1/requests/mine", key="a").json["state"] == "running"
    assert server.ask("DELETE", "/v1/requests/mine", key="a").status == 200
    assert call.answer().code == "cancelled"
