"""What is looked after again and again goes on where one part of it fails."""

from __future__ import annotations

import io

from lqs.config import LogConfig
from lqs.observe.log import Log
from lqs.upkeep import Upkeep


def test_one_that_fails_is_told_once_and_the_others_go_on() -> None:
    text, seen, is_broken = io.StringIO(), list[int](), True

    def breaks(now: int) -> None:
        if is_broken:
            raise ValueError("a secret")

    upkeep = Upkeep({"first": breaks, "second": seen.append}, Log(LogConfig(), text))
    for now in (1, 2):
        upkeep.look(now)
    assert seen == [1, 2]
    (line,) = text.getvalue().splitlines()
    assert "unexpected error" in line
    assert "looking_after=first error=ValueError at=test_upkeep.py:" in line
    assert "secret" not in line
    is_broken = False
    upkeep.look(3)
    upkeep.look(4)
    assert (seen, text.getvalue().count("looked after again")) == ([1, 2, 3, 4], 1)
    is_broken = True
    upkeep.look(5)
    assert text.getvalue().count("unexpected error") == 2
