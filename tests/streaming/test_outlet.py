"""The outlet: what is taken, when, and what holds the source back."""

import asyncio
from types import SimpleNamespace

from lqs.streaming.outlet import Outlet

REQUEST = SimpleNamespace(id="r")
OUTCOME = SimpleNamespace(finish=1)


class Valve:
    def __init__(self):
        self.calls = []

    def pause(self, request):
        self.calls.append("pause")

    def resume(self, request):
        self.calls.append("resume")


def driven(test):
    def run():
        asyncio.run(test())

    return run


async def taken(outlet):
    return [piece async for piece in outlet.pieces()]


@driven
async def test_what_came_together_is_taken_together():
    outlet = Outlet(REQUEST)
    outlet.started(5)
    outlet.output(b"a", 1, None)
    outlet.output(b"b", 2, b"x")
    outlet.finished(OUTCOME)
    assert await taken(outlet) == [(b"ab", 3, b"x")]
    assert outlet.is_empty
    assert outlet.is_over
    outlet.settled()
    assert outlet.is_settled


@driven
async def test_a_reader_waits_for_text_and_for_the_end():
    outlet = Outlet(REQUEST)
    reader = asyncio.create_task(taken(outlet))
    for number in range(3):
        await asyncio.sleep(0)
        outlet.output(b"%d" % number, 1, None)
    await asyncio.sleep(0)
    outlet.finished(OUTCOME)
    assert b"".join(piece.text for piece in await reader) == b"012"


@driven
async def test_tokens_without_text_are_passed_on():
    outlet = Outlet(REQUEST)
    outlet.output(b"", 1, None)
    outlet.ended("cancelled")
    assert await taken(outlet) == [(b"", 1, b"")]


@driven
async def test_waiting_for_the_start_ends_at_the_limit_or_with_the_request():
    outlet = Outlet(REQUEST)
    assert not await outlet.wait_begun(0.001)
    waiter = asyncio.create_task(outlet.wait_begun())
    await asyncio.sleep(0)
    outlet.ended("expired")
    assert await waiter
    assert await Outlet(REQUEST).wait_begun(0) is False


@driven
async def test_a_reader_that_does_not_take_holds_the_source_back():
    """No more than the bound waits here: the valve is shut once, and opened when the text is taken."""
    valve = Valve()
    outlet = Outlet(REQUEST, valve=valve, num_bytes_max=4)
    pieces = outlet.pieces()
    outlet.output(b"abc", 1, None)
    assert valve.calls == []
    outlet.output(b"d", 1, None)
    outlet.output(b"e", 1, b"lp")
    assert valve.calls == ["pause"]
    assert await anext(pieces) == (b"abcde", 3, b"lp")
    assert valve.calls == ["pause", "resume"]
