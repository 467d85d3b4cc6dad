"""What an operator can set about overload: when another model answers, and what raises an alert.

Sections of `lqs.config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct

from lqs.describe import key


class RefusalsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What those are told who are sent away."""

    retry_after_s: Annotated[
        float, key("Told to everybody, and nobody is promised a place; 0: computed for each.", "s", ge=0, le=120)
    ] = 0.0


class DegradeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When the fallback model answers in place of the one that was asked for."""

    wait_s: Annotated[float, key("An expected wait above that is too long.", "s", gt=0, le=86_400)] = 10.0
    kv_tokens: Annotated[
        int, key("KV cells of each device slot of the fallback model.", "tokens", ge=256, le=16_777_216)
    ] = 8192


# A threshold for each of warn, tighten, degrade and break.
_Bound = Annotated[float, Meta(ge=0)]
_Steps = tuple[_Bound, _Bound, _Bound, _Bound]


class AlertsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What is worth waking somebody for, and what the server does about it by itself.

    Each rule has four thresholds, for the levels warn, tighten, degrade and break; 0: never.
    """

    enabled: Annotated[bool, key("Look at the rules at all.")] = True
    fill: Annotated[_Steps, key("All who wait, as a part of `queue.total`.", "share")] = (
        0.8,
        0.9,
        0.95,
        1.0,
    )
    mean_wait_s: Annotated[_Steps, key("Mean wait of those who started within the window.", "s")] = (
        5.0,
        10.0,
        20.0,
        40.0,
    )
    depth_growing_s: Annotated[_Steps, key("For so long the queue has grown from window to window.", "s")] = (
        30.0,
        60.0,
        0.0,
        0.0,
    )
    refusals_per_s: Annotated[_Steps, key("Refusals with 429, but for limits, within the window.", "1/s")] = (
        1.0,
        10.0,
        0.0,
        0.0,
    )
    refusals_jump: Annotated[_Steps, key("The same, as a multiple of the window before.")] = (
        5.0,
        0.0,
        0.0,
        0.0,
    )
    devices_out: Annotated[_Steps, key("Device slots that died or could not be opened, and are not back.")] = (
        1.0,
        0.0,
        0.0,
        0.0,
    )
    window_s: Annotated[float, key("What is counted is counted over that time.", "s", ge=1, le=1000)] = 10.0
    clear_share: Annotated[
        float, key("An alert is cleared below this part of its threshold ...", "share", gt=0, le=1)
    ] = 0.8
    clear_s: Annotated[float, key("... where it has been for so long.", "s", ge=0, le=3600)] = 10.0

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Whether it holds, and what is wrong if not: a worse level is not reached before a milder one."""
        for name in ("fill", "mean_wait_s", "depth_growing_s", "refusals_per_s", "refusals_jump", "devices_out"):
            steps = [step for step in getattr(self, name) if step]
            yield steps == sorted(steps), f"alerts.{name}: a later level must not have a lower threshold (0: never)."
