"""When a request has to be through: its limits, the deadline it names, and how long its client waits.

An explicit `timeout` is a deadline: it orders the request among those of its key, ends it when it
runs into it, and takes it out of the queue while that still saves the work, as soon as it can no longer be
met. How long a client reads at most, which the stock SDK tells in a header, is not a wish to be
served earlier: it only takes out of the queue what nobody would wait for.
"""

from __future__ import annotations

from lqs.config import QueueConfig
from lqs.request import NS_PER_S, Request
from lqs.scheduling.pace import Pace


def set_limits(request: Request, queue: QueueConfig) -> None:
    """Set when it leaves the queue and when it ends: a client may ask for less time than the config gives."""
    timeout_s = min(request.timeout_s or queue.request_timeout_s, queue.request_timeout_s)
    wait_s = min(request.queue_timeout_s or queue.timeout_s, queue.timeout_s, timeout_s)
    request.stop_ns = request.arrival_ns + int(timeout_s * NS_PER_S)
    request.expire_ns = request.arrival_ns + int(wait_s * NS_PER_S)
    if request.timeout_s is not None:
        request.deadline_ns = request.stop_ns


def set_latest_start(request: Request, queue: QueueConfig, pace: Pace, num_expected: int) -> None:
    """Let it leave the queue when it can no longer be done in time; its prompt is known now.

    `num_expected` is how many tokens its answer is taken to have.
    """
    answer_ns = pace.service_ns(request.num_prompt_tokens, num_expected)
    latest_ns = [request.expire_ns]
    if request.deadline_ns:
        latest_ns.append(_latest_start(request, request.deadline_ns, answer_ns))
    if request.read_timeout_s is not None:
        read_ns = request.arrival_ns + int(request.read_timeout_s * NS_PER_S)
        if not request.is_stream:
            latest_ns.append(_latest_start(request, read_ns, answer_ns))
        elif request.read_timeout_s <= queue.hold_s:
            # Later than that a stream has been opened and its comments are read.
            latest_ns.append(_latest_start(request, read_ns, pace.service_ns(request.num_prompt_tokens, 0)))
    request.expire_ns = min(latest_ns)


def _latest_start(request: Request, end_ns: int, service_ns: int) -> int:
    """When it has to start to be through by then.

    One that could not have been even at its arrival is not given up for that: it wants what there is by then.
    """
    latest_ns = end_ns - service_ns
    return latest_ns if latest_ns >= request.arrival_ns else end_ns
