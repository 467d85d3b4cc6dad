"""What a calibration says about limits and bounds: how much the device slots do, and so how much may wait."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lqs.config import Config
from lqs.simulate.cost import Calibration
from lqs.simulate.play import Devices, capacity_of
from lqs.simulate.trace import at_once

# Rounds of requests through all sequences: enough that filling and emptying them does not count.
_ROUNDS = 24
# Of a limit for a minute: rounding down costs no more than a tenth.
_AMOUNT_MIN = 10


@dataclass(frozen=True, slots=True)
class Lengths:
    """The request that a proposal is made for, in tokens."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """Rates of the whole server, and the bound of its queue.

    `queue_total` is what drains within the tolerable wait: who comes behind it would wait in vain.
    """

    requests_per_s: float
    tokens_per_s: float
    answer_tokens_per_s: float
    num_parallel: int
    queue_total: int


def propose(calibration: Calibration, config: Config, lengths: Lengths) -> Proposal:
    """What fits requests of these lengths and the config's `queue.timeout_s`."""
    devices = Devices.of(calibration, config)
    shape = calibration.shape
    num_tokens = lengths.prompt + lengths.answer
    num_parallel = min(shape.num_sequences, shape.kv_tokens // num_tokens) * devices.num
    requests = at_once(_ROUNDS * max(num_parallel, 1), lengths.prompt, lengths.answer)
    rate = capacity_of(requests, devices)
    num_sequences = shape.num_sequences * devices.num
    most = config.queue.table_capacity - num_sequences
    return Proposal(
        requests_per_s=rate,
        tokens_per_s=rate * num_tokens,
        answer_tokens_per_s=rate * lengths.answer,
        num_parallel=num_parallel,
        queue_total=max(min(math.floor(rate * config.queue.timeout_s), most), 1),
    )


def proposal_lines(calibration: Calibration, config: Config, lengths: Lengths, num_keys: int) -> Iterator[str]:
    """The proposal as `lqs check` prints it."""
    found = propose(calibration, config, lengths)
    if found.requests_per_s <= 0:
        yield f"proposals  none: a request of {lengths.prompt} + {lengths.answer} tokens fits no device slot"
        return
    yield (
        f"measured   {found.requests_per_s:.2f} requests/s of {lengths.prompt} + {lengths.answer} tokens, "
        f"{found.num_parallel} at once: {found.tokens_per_s:.0f} tokens/s, {found.answer_tokens_per_s:.0f} in answers"
    )
    timeout_s = config.queue.timeout_s
    verdict = "as it is" if config.queue.total <= found.queue_total else f"now {config.queue.total}"
    yield f"proposals  queue.total {found.queue_total}: what drains in queue.timeout_s, {timeout_s:g} s ({verdict})"
    share = max(num_keys, 1)
    limits = {
        "requests": _limit(found.requests_per_s / share),
        "tokens": _limit(found.tokens_per_s / share),
        "parallel": f"amount = {max(found.num_parallel // share, 1)}",
    }
    yield f'           [limits.NAME] with per = "key", where {share} share the machine:'
    for of, amount in limits.items():
        yield f'           of = "{of}", {amount}'


def _limit(per_s: float) -> str:
    """A rate as a limit's settings; amounts are whole, so a slow one is given for a longer period."""
    period_s = 60 if per_s * 60 >= _AMOUNT_MIN else 3600
    return f"amount = {max(math.floor(per_s * period_s), 1)}, period_s = {period_s}"
