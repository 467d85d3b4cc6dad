"""One line per event, whatever clients put into it."""

from __future__ import annotations

import io
import json
import logging

import pytest

from lqs.config import LogConfig
from lqs.observe.log import Log, neutralise


def lines(config: LogConfig, *, access: bool = True) -> tuple[Log, io.StringIO]:
    stream = io.StringIO()
    return Log(config, stream, now_s=lambda: 12.3456), stream


def test_text_lines_are_for_people() -> None:
    log, stream = lines(LogConfig())
    log.info("ready", port=8080, model="a model", empty="", quote='say "x"')
    assert stream.getvalue() == 'info    ready port=8080 model="a model" empty="" quote="say \\"x\\""\n'


def test_json_lines_are_for_machines() -> None:
    log, stream = lines(LogConfig(format="json"))
    log.error("failed", reason="a\nb")
    assert json.loads(stream.getvalue()) == {"time": 12.346, "level": "error", "event": "failed", "reason": "a\\nb"}


def test_lines_below_the_level_are_left_out() -> None:
    log, stream = lines(LogConfig(level="warning"))
    log.debug("a")
    log.info("b")
    log.warning("c")
    assert stream.getvalue() == "warning c\n"


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_access_line_has_no_query_and_no_control_characters(form: str) -> None:
    log, stream = lines(LogConfig(format=form))
    path = "/v1/models\r\nerror forged\x1b[2J?api_key=SECRET1&key=%53ECRET1"
    log.access(method="GET", path=path, status=200, duration_ms=1.26, request_id="r", tenant="ann")
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "\x1b" not in text
    assert "SECRET1" not in text
    assert "ECRET1" not in text
    assert "ann" in text


def test_the_access_log_can_be_off() -> None:
    log, stream = lines(LogConfig(access=False))
    log.access(method="GET", path="/", status=200, duration_ms=1, request_id="r")
    assert stream.getvalue() == ""


def test_what_only_looks_after_the_server_is_for_the_developer() -> None:
    for level, num_lines in (("info", 0), ("debug", 1)):
        log, stream = lines(LogConfig(level=level))
        log.access(method="GET", path="/livez", status=200, duration_ms=1, request_id="r", is_probe=True)
        assert stream.getvalue().count("debug   access") == num_lines


def test_long_texts_are_cut_and_odd_characters_spelled_out() -> None:
    assert neutralise("x" * 1000) == "x" * 256
    assert neutralise("\u2028\x00é") == "\\u2028\\x00é"


def test_a_closed_stream_stops_the_log_and_not_the_server() -> None:
    log, stream = lines(LogConfig())
    stream.close()
    log.info("a")
    log.error("b")


def test_the_http_servers_own_lines_come_without_tracebacks() -> None:
    log, stream = lines(LogConfig(level="debug"))
    log.take_over("lqs-test-logger")
    logger = logging.getLogger("lqs-test-logger")
    logger.warning("odd %s", "bytes\n")
    try:
        raise ValueError("PROMPT9")
    except ValueError:
        logger.exception("Exception in ASGI application\n")
    text = stream.getvalue()
    assert 'debug   http message="odd bytes\\\\n"' in text
    assert "error=ValueError" in text
    assert "PROMPT9" not in text


def test_where_several_processes_write_each_line_has_its_number() -> None:
    text = io.StringIO()
    Log(LogConfig(), text, pid=7).info("ready", port=1)
    Log(LogConfig(), text).info("ready", port=1)
    assert text.getvalue() == "info    ready port=1 pid=7\ninfo    ready port=1\n"
