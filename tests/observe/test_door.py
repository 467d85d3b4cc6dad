"""What the log says of a queue that fills up."""

from __future__ import annotations

import io

from lqs._core import Breaker
from lqs.config import LogConfig
from lqs.observe.door import door_log
from lqs.observe.log import Log


def test_each_change_is_one_line_with_the_name_of_the_class() -> None:
    stream = io.StringIO()
    tell = door_log(Log(LogConfig(), stream), ["high", "low"])
    tell("warning", None, 1)
    for state in (Breaker.BREAKER_OPEN, Breaker.BREAKER_HALF_OPEN, Breaker.BREAKER_CLOSED):
        tell("breaker", 1, state)
    tell("warning", 0, 0)
    assert stream.getvalue().splitlines() == [
        "warning queue nearly full level=all",
        "warning breaker open level=low",
        "info    breaker half-open level=low",
        "info    breaker closed level=low",
        "info    queue has room again level=high",
    ]
