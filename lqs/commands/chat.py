"""`lqs chat`: talk to a server in the terminal. Ctrl-C ends an answer, Ctrl-D the talk."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from lqs.errors import StartError

KEY_VARIABLE = "LQS_API_KEY"
_TIMEOUT_S = 600.0
_HELP = "/help shows this, /exit or Ctrl-D ends the talk, Ctrl-C ends an answer."
_NO_KEY = f"Put the key into {KEY_VARIABLE}; the server's operator makes one with `lqs keys add`."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add URL and what the talk is about."""
    parser.epilog = f"Where the server wants a key: {KEY_VARIABLE}=KEY lqs chat URL"
    parser.add_argument(
        "url",
        nargs="?",
        default="http://127.0.0.1:8080",
        metavar="URL",
        help="where the server is (default: %(default)s)",
    )
    parser.add_argument("--model", help="a model's name (default: the server's first)")
    parser.add_argument("--system", help="a system message to begin with")
    parser.add_argument("--max-tokens", type=int, help="the longest answer, in tokens")


def run(args: argparse.Namespace) -> int:
    """Talk until the end of the input. Raises StartError if the server cannot be reached."""
    client = Client(args.url, os.environ.get(KEY_VARIABLE))
    model = args.model or client.first_model()
    messages = [{"role": "system", "content": args.system}] if args.system else []
    options = {"max_tokens": args.max_tokens} if args.max_tokens else {}
    print(f"{model} at {args.url}. {_HELP}", file=sys.stderr)
    while (said := _ask()) not in (None, "/exit"):
        if said == "/help":
            print(_HELP, file=sys.stderr)
            continue
        messages.append({"role": "user", "content": said})
        answer = _show(client, {"model": model, "messages": messages, "stream": True, **options})
        messages.append({"role": "assistant", "content": answer})
    return 0


class Client:
    """The few calls that a terminal needs. `key` is the API key, None for none. All raise StartError."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartError(f"{url} is not an address of a server; try http://127.0.0.1:8080.")
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._url, self._host, self._port = url, parts.hostname, parts.port
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def first_model(self) -> str:
        """The name of the first model that the server lists."""
        with self._send("GET", "/v1/models") as response:
            name: str = json.load(response)["data"][0]["id"]
        return name

    def get(self, path: str) -> dict[str, Any]:
        """What the server says under a path."""
        with self._send("GET", path) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def post(self, path: str) -> dict[str, Any]:
        """Ask for something to be done; what the server says then."""
        with self._send("POST", path) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """The answer, piece by piece. Closing the iterator cancels it on the server."""
        with self._send("POST", "/v1/chat/completions", json.dumps(body)) as response:
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield from self._pieces(json.loads(line[6:]))

    def _pieces(self, chunk: dict[str, Any]) -> Iterator[str]:
        if "error" in chunk:
            raise StartError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            yield choice["delta"].get("content") or ""

    def _send(self, method: str, path: str, body: str | None = None) -> http.client.HTTPResponse:
        connection = self._connect(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
        except OSError as error:
            raise StartError(f"cannot reach {self._url}: {error}. Is `lqs serve` running?") from None
        if response.status not in (http.HTTPStatus.OK, http.HTTPStatus.ACCEPTED):
            with response:
                raise StartError(f"{response.status}: {_reason(response.read())}{_advice(response.status)}")
        # The answer says "close" or is read to its end: the response alone keeps the socket.
        return response


def _ask() -> str | None:
    """What the user says next, without spaces around it; None at the end."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _show(client: Client, body: dict[str, Any]) -> str:
    """Print an answer as it comes; what of it came."""
    said: list[str] = []
    try:
        for piece in client.stream(body):
            said.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except StartError as error:
        print(f"lqs: {error}", file=sys.stderr)
    print()
    return "".join(said)


def _reason(body: bytes) -> str:
    """The message of an error answer."""
    try:
        message: str = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
    return message


def _advice(status: int) -> str:
    """What the user can do about a status, where that is more than to wait."""
    return f" {_NO_KEY}" if status == http.HTTPStatus.UNAUTHORIZED else ""
