"""Python's own queues, each as a loop of put + get."""

import asyncio
import heapq
import itertools
import queue
from collections import deque
from collections.abc import Callable

from lqs._core import SpscRing


def ring(n: int) -> Callable[[], None]:
    """The ring, one put and one get at a time."""
    one = SpscRing(1024)

    def run() -> None:
        push, pop = one.try_push, one.try_pop
        for i in range(n):
            push(i)
            pop()

    return run


def blocking(kind: Callable[[], queue.Queue[int] | queue.SimpleQueue[int]], n: int) -> Callable[[], None]:
    """queue.Queue or queue.SimpleQueue."""
    one = kind()

    def run() -> None:
        put, get = one.put, one.get
        for i in range(n):
            put(i)
            get()

    return run


def plain_deque(n: int) -> Callable[[], None]:
    """collections.deque: no bound, no use without the GIL."""
    one: deque[int] = deque()

    def run() -> None:
        put, get = one.append, one.popleft
        for i in range(n):
            put(i)
            get()

    return run


def awaited(n: int) -> Callable[[], None]:
    """asyncio.Queue, both sides awaited."""

    async def loop() -> None:
        one: asyncio.Queue[int] = asyncio.Queue()
        for i in range(n):
            await one.put(i)
            await one.get()

    return lambda: asyncio.run(loop())


def filled_heap(depth: int) -> list[tuple[int, int]]:
    """What a priority queue of this depth holds: (priority, number)."""
    items = [(i * 7919 % 8, i) for i in range(depth)]
    heapq.heapify(items)
    return items


def priority(depth: int, n: int) -> Callable[[], None]:
    """queue.PriorityQueue at this depth."""
    one: queue.PriorityQueue[tuple[int, int]] = queue.PriorityQueue()
    one.queue = filled_heap(depth)
    numbers = itertools.count(depth)

    def run() -> None:
        for _ in range(n):
            level, _number = one.get()
            one.put((level, next(numbers)))

    return run


def awaited_priority(depth: int, n: int) -> Callable[[], None]:
    """asyncio.PriorityQueue at this depth, both sides awaited."""
    one: asyncio.PriorityQueue[tuple[int, int]] = asyncio.PriorityQueue()
    one._queue = filled_heap(depth)  # type: ignore[attr-defined]
    numbers = itertools.count(depth)

    async def loop() -> None:
        for _ in range(n):
            level, _number = await one.get()
            await one.put((level, next(numbers)))

    return lambda: asyncio.run(loop())
