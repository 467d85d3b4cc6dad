"""Log lines: text for people, JSON for machines. Never a prompt, an answer or a key.

What comes from outside (a path, a name) is neutralised: no line break, no escape code, no long
tail. A query string is never written: people put keys there.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import msgspec

from lqs.config import LogConfig

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_FIELD_CHARS_MAX = 256


class Log:
    """Writes one line per event to a stream, with `pid` where several processes write to it.

    A stream that is gone is ignored, the server goes on.

    Owner: the event loop; single lines may come from other threads too.
    """

    def __init__(
        self,
        config: LogConfig,
        stream: TextIO | None = None,
        now_s: Callable[[], float] = time.time,
        pid: int | None = None,
    ) -> None:
        self._is_json = config.format == "json"
        self._level = _LEVELS[config.level]
        self._has_access = config.access
        self._stream = stream or sys.stderr
        self._now_s = now_s
        self._always = {} if pid is None else {"pid": pid}

    def debug(self, event: str, **fields: Any) -> None:
        """For the developer."""
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """For the operator, nothing to do."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """For the operator, to look at."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """For the operator, to act on."""
        self._write("error", event, fields)

    def access(
        self,
        *,
        method: str,
        path: str,
        status: int,
        duration_ms: float,
        request_id: str,
        is_probe: bool = False,
        **fields: Any,
    ) -> None:
        """One request over HTTP, one that only looks after the server for the developer.

        `path` may hold a query; it is cut off.
        """
        if self._has_access:
            path = path.partition("?")[0]
            shown = {"method": method, "path": path, "status": status, "request_id": request_id}
            self._write(
                "debug" if is_probe else "info", "access", shown | {"duration_ms": round(duration_ms, 1)} | fields
            )

    def take_over(self, name: str) -> None:
        """Write what the stdlib logger `name` logs, message only: tracebacks may quote anything."""
        logger = logging.getLogger(name)
        logger.handlers = [_Handler(self)]
        logger.setLevel(self._level)
        logger.propagate = False

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if _LEVELS[level] < self._level:
            return
        fields = {**fields, **self._always}
        line = self._json(level, event, fields) if self._is_json else _text(level, event, fields)
        try:
            self._stream.write(line)
            self._stream.flush()
        except (OSError, ValueError):
            # Nobody reads any more (a closed pipe); requests matter more than their log lines.
            self._level = sys.maxsize

    def _json(self, level: str, event: str, fields: dict[str, Any]) -> str:
        clean = {key: _clean(value) for key, value in fields.items()}
        stamp = {"time": round(self._now_s(), 3), "level": level, "event": event}
        return msgspec.json.encode(stamp | clean).decode() + "\n"


class _Handler(logging.Handler):
    """Brings the HTTP server's own messages here."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        # Its warnings are about single clients (a malformed request): nothing to wake anybody for.
        write = self._log.error if record.levelno >= logging.ERROR else self._log.debug
        kind = record.exc_info[0] if record.exc_info else None
        fields = {"error": kind.__name__} if kind else {}
        write("http", message=record.getMessage(), **fields)


def neutralise(text: str) -> str:
    """Text from outside as it may stand in a log line: printable and short."""
    short = text[:_FIELD_CHARS_MAX]
    if short.isprintable():
        return short
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def _clean(value: Any) -> Any:
    return neutralise(value) if isinstance(value, str) else value


def _text(level: str, event: str, fields: dict[str, Any]) -> str:
    shown = " ".join(f"{key}={_quoted(_clean(value))}" for key, value in fields.items())
    return f"{level:<7} {event} {shown}".rstrip() + "\n"


def _quoted(value: Any) -> str:
    """The value, in quotes where it could be taken for something else."""
    text = str(value)
    is_plain = bool(text) and not any(c in text for c in ' "=')
    return text if is_plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
