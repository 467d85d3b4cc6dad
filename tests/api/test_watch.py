"""The watch over a client, alone."""

import asyncio

import pytest

from lqs.api.live import Live
from lqs.api.watch import ClientLeft, ClientWatch
from lqs.errors import RequestCancelled
from lqs.request import Request, Tenant
from tests.api.harness import driven

STALL_S = 60.0


async def never():
    await asyncio.Event().wait()


def watch_over(*messages, send=None):
    inbox = asyncio.Queue()
    for message in messages:
        inbox.put_nowait(message)
    return ClientWatch({"type": "http"}, inbox.get, send, STALL_S)


@driven
async def test_the_answer_is_interrupted_when_the_client_leaves():
    with pytest.raises(ClientLeft):
        async with watch_over({"type": "http.request"}, {"type": "http.disconnect"}):
            await never()


@driven
async def test_an_answer_that_is_complete_when_the_client_leaves_stays_so():
    async with watch_over() as watch:
        watch.interrupt(ClientLeft())
        watch.interrupt(RequestCancelled("Too late."))
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)


async def interrupted(*reasons, then):
    async with watch_over() as watch:
        for reason in reasons:
            watch.interrupt(reason)
        await then()


@driven
async def test_the_first_reason_counts():
    with pytest.raises(RequestCancelled):
        await interrupted(RequestCancelled("First."), ClientLeft(), then=never)


@driven
async def test_an_error_of_the_answer_itself_is_kept():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await interrupted(ClientLeft(), then=fail)
    # Nothing of the interruption is left for whoever goes on.
    await asyncio.sleep(0)


@driven
async def test_a_send_in_time_is_no_stall():
    sent = []

    async def send(message):
        sent.append(message)

    async with watch_over(send=send) as watch:
        await watch.send({"type": "http.response.start"})
        watch._check_stall()
    assert sent


@driven
async def test_an_id_that_was_taken_over_is_not_forgotten_with_its_first_owner():
    live = Live()
    tenant = Tenant("t", "normal", 0, 2, 2)
    first, second = (Request(id="x", tenant=tenant, model="M", arrival_ns=0) for _ in range(2))
    live.add(first, watch_over())
    live.add(second, watch_over())
    live.discard(first)
    assert live.find(tenant, "x").request is second
    live.discard(second)
    assert live.find(tenant, "x") is None
