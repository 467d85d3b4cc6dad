"""A talk in the terminal, against a connection that answers from a script."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from lqs.cli import main
from lqs.commands import chat

MODELS = json.dumps({"data": [{"id": "m"}]}).encode()


def chunk(text: str | None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


class Answer(io.BytesIO):
    """An HTTP response; `interrupt` plays Ctrl-C after so many lines."""

    def __init__(self, body: bytes, status: int = 200, interrupt: int | None = None) -> None:
        super().__init__(body)
        self.status = status
        self._interrupt = interrupt

    def __iter__(self) -> Iterator[bytes]:  # type: ignore[override]
        for number, line in enumerate(self.readlines()):
            if number == self._interrupt:
                raise KeyboardInterrupt
            yield line


class Script:
    """Plays the connection class: gives the answers in order and keeps what was sent."""

    def __init__(self, *answers: Answer | OSError) -> None:
        self.answers = list(answers)
        self.sent: list[tuple[Any, ...]] = []

    def __call__(self, host: str, port: int | None, timeout: float) -> Script:
        return self

    def request(self, *args: Any) -> None:
        self.sent.append(args)

    def getresponse(self) -> Answer:
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


def talk(monkeypatch: pytest.MonkeyPatch, script: Script, *said: str, argv: tuple[str, ...] = ()) -> int:
    lines = iter(said)

    def ask(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(chat.http.client, "HTTPConnection", script)
    monkeypatch.setattr("builtins.input", ask)
    return main(["chat", *argv])


def test_a_talk_remembers_what_was_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LQS_API_KEY", "KEY")
    stream = b": queue position=1\n\n" + chunk(None) + chunk("Hel") + chunk("lo") + b"data: [DONE]\n\n"
    script = Script(Answer(MODELS), Answer(stream), Answer(chunk("Bye")))
    argv = ("127.0.0.1:1", "--system", "Be kind.", "--max-tokens", "5")
    assert talk(monkeypatch, script, "hi", "bye", argv=argv) == 0
    assert capsys.readouterr().out == "Hello\nBye\n\n"
    method, path, body, headers = script.sent[-1]
    assert (method, path, headers["Authorization"]) == ("POST", "/v1/chat/completions", "Bearer KEY")
    asked = json.loads(body)
    assert (asked["model"], asked["max_tokens"], asked["stream"]) == ("m", 5, True)
    assert [message["content"] for message in asked["messages"]] == ["Be kind.", "hi", "Hello", "bye"]


def test_ctrl_c_ends_the_answer_and_not_the_talk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = Answer(chunk("one") + chunk("two"), interrupt=2)
    script = Script(cut, Answer(chunk("three")))
    assert talk(monkeypatch, script, "a", "b", argv=("--model", "m")) == 0
    assert cut.closed
    assert capsys.readouterr().out == "one\nthree\n\n"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(b'data: {"error": {"message": "draining"}}\n'), "draining"),
        (Answer(b'{"error": {"message": "full"}}', 429), "429: full"),
        (Answer(b"<html>", 502), "502: <html>"),
    ],
)
def test_a_failed_answer_is_told_and_the_talk_goes_on(
    answer: Answer, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, Script(answer), "a", argv=("--model", "m")) == 0
    assert said in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, Script(ConnectionRefusedError("refused"))) == 1
    assert "Is `lqs serve` running?" in capsys.readouterr().err


def test_words_with_a_slash_stay_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(Answer(MODELS))
    assert talk(monkeypatch, script, "/help", "/exit", "never sent") == 0
    assert capsys.readouterr().err.count("/exit or Ctrl-D ends the talk") == 2
    assert len(script.sent) == 1


def test_a_server_that_wants_a_key_says_where_it_goes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LQS_API_KEY", raising=False)
    assert talk(monkeypatch, Script(Answer(b'{"error": {"message": "A key."}}', 401))) == 1
    assert "401: A key. Put the key into LQS_API_KEY" in capsys.readouterr().err
    assert main(["chat", "--help"]) == 0
    assert "LQS_API_KEY" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["ftp://x", "http://"])
def test_what_is_no_address_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", url]) == 1
    assert "is not an address" in capsys.readouterr().err


def test_an_https_address_is_reached_over_tls() -> None:
    assert chat.Client("https://lqs.example", None)._connect is chat.http.client.HTTPSConnection
