"""A seeded storm of requests, each cut off somewhere: at the door, in the queue, in the prompt, in the answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from tests.server.client import HOST, head_of

PARALLEL = 24
LIMIT_S = 60.0
LONG = 20_000


@dataclass
class Plan:
    """One request: what is sent, and when its client leaves, if it does."""

    body: dict[str, Any] | bytes
    path: str = "/v1/completions"
    headers: dict[str, str] = field(default_factory=dict)
    leaves_after_s: float | None = None
    leaves_after_first: bool = False
    is_reset: bool = False
    num_cut: int = 0  # Bytes of the body that are never sent.
    cancels: str = ""  # The id of the request to cancel by another.


def plan(dice: random.Random, number: int) -> Plan:
    """The request of that number."""
    long = {
        "prompt": "storm",
        "max_tokens": LONG,
        "ignore_eos": True,
        "stream": dice.random() < 0.5,
        "priority": dice.choice([2, 3, 4]),
    }
    leaves = {"leaves_after_s": dice.choice([0.0, 0.001, 0.005, 0.02, 0.05])}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, "stream": long["stream"]}
    bad = dice.choice([b"{", b"null", b'{"prompt":"x","max_tokens":0}', b'{"prompt":[999999]}'])
    name = f"storm-{number}"
    whole = Plan(long | {"max_tokens": dice.randint(1, 30)})
    kinds = [
        Plan(long, headers={"authorization": "Bearer wrong"}),
        Plan(bad),
        Plan(long | {"model": "other"}),
        Plan(long | {"prompt": [65] * 90_000}),
        whole,
        whole,
        Plan(chat, path="/v1/chat/completions"),
        Plan(long, **leaves),
        Plan(long, **leaves),
        Plan(long, **leaves, is_reset=True),
        Plan(long, **leaves, is_reset=True),
        Plan(long | {"prompt": [65 + number % 50] * 8000}, **leaves, is_reset=True),
        Plan(long, **leaves, num_cut=dice.randint(1, 50)),
        Plan(long | {"queue_timeout": 0.02, "max_tokens": 20}),
        Plan(long | {"timeout": 0.05}),
        Plan(long | {"stream": True}, leaves_after_first=True, is_reset=dice.random() < 0.5),
        Plan(long, headers={"x-request-id": name}, cancels=name),
    ]
    return dice.choice(kinds)


async def send(port: int, key: str, plan: Plan) -> int | None:
    """Do what is planned; the status, None if it left before one came."""
    payload = plan.body if isinstance(plan.body, bytes) else json.dumps(plan.body).encode()
    headers = {"host": "lqs", "authorization": f"Bearer {key}", "connection": "close"} | plan.headers
    head = head_of("POST", plan.path, headers | {"content-length": str(len(payload))})
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(head + payload[: len(payload) - plan.num_cut])
        limit_s = LIMIT_S if plan.leaves_after_s is None else plan.leaves_after_s
        answer = asyncio.create_task(asyncio.wait_for(read(reader, plan.leaves_after_first), limit_s))
        if plan.cancels:
            await cancel(port, key, plan.cancels, answer)
        return await answer
    except (TimeoutError, ConnectionError):
        assert plan.leaves_after_s is not None, plan
        return None
    finally:
        if plan.is_reset:
            raw: socket.socket = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def read(reader: asyncio.StreamReader, only_first: bool) -> int:
    """Read the answer, or a stream's first event; the status."""
    head = await reader.readuntil(b"\r\n\r\n")
    if only_first:
        await reader.read(1)
    else:
        await reader.read()
    return int(head.split()[1])


async def cancel(port: int, key: str, request_id: str, answer: asyncio.Task[int]) -> None:
    """Cancel a request by its id, as soon as it is known, unless it is answered before."""
    status = 404
    while status == 404 and not answer.done():
        reader, writer = await asyncio.open_connection(HOST, port)
        head = {"host": "lqs", "authorization": f"Bearer {key}", "connection": "close"}
        writer.write(head_of("DELETE", f"/v1/requests/{request_id}", head))
        status = await read(reader, False)
        writer.close()
        await writer.wait_closed()


def storm(port: int, key: str, seed: int, num: int) -> dict[int | None, int]:
    """Send that many, some at once; how often each status came."""
    dice = random.Random(seed)
    plans = iter([plan(dice, seed * 10_000 + number) for number in range(num)])
    seen: dict[int | None, int] = {}

    async def client() -> None:
        for planned in plans:
            status = await send(port, key, planned)
            seen[status] = seen.get(status, 0) + 1

    async def all_clients() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(PARALLEL):
                group.create_task(client())

    asyncio.run(all_clients())
    return seen
