"""What an operator can set about where a request runs; `[placement]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from lqs.describe import key

T = TypeVar("T")

# As the core takes them: a bit for each lane, short and long.
BOTH_LANES = 3
_LANE_BITS = {"short": 1, "long": 2, "both": BOTH_LANES}


class PlacementConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """On which device slot a request starts that could start on several."""

    policy: Annotated[
        str,
        key(
            "least_connections, vram, weighted_round_robin or load.",
            pattern="^(least_connections|vram|weighted_round_robin|load)$",
        ),
    ] = "least_connections"
    weights: Annotated[
        tuple[Annotated[float, Meta(ge=0.001, le=1000)], ...],
        key(
            "How much of the work is meant for each device slot, in the order of engine.devices; the last stands for "
            "the rest, also for devices that only a model names.",
            min_length=1,
            max_length=64,
        ),
    ] = (1.0,)
    lanes: Annotated[
        tuple[Annotated[str, Meta(pattern="^(both|short|long)$")], ...],
        key(
            "Which requests each device slot is for: short, long or both, in the order of engine.devices; the last "
            "stands for the rest, as with the weights.",
            min_length=1,
            max_length=64,
        ),
    ] = ("both",)

    prefix_margin: Annotated[
        float,
        key(
            "A device slot that holds more of the prompt may run so many more, for its weight; 0: it wins ties only.",
            "requests",
            ge=0,
            le=1000,
        ),
    ] = 1.0
    prefix_tokens_min: Annotated[
        int, key("A shorter beginning that is there already counts for nothing.", "tokens", ge=64, le=65_536)
    ] = 256

    nvml_s: Annotated[
        float, key("Time between two readings of the GPUs; 0: they are read once.", "s", ge=0, le=3600)
    ] = 1.0

    def rules(self, devices: Sequence[str]) -> Iterator[tuple[bool, str]]:
        """What its keys cannot show alone, beside `engine.devices`: whether it holds, and what is wrong if not."""
        for name, num in (("weights", len(self.weights)), ("lanes", len(self.lanes))):
            fits = num <= len(devices) or "auto" in devices
            yield fits, f"placement.{name}: there are {num} for {len(devices)} device slots."

    def weight_of(self, place: int) -> float:
        """The weight of device slots on the device of that place in `engine.devices`, from 0; -1: it is not there."""
        return _of(self.weights, place)

    def lanes_of(self, place: int) -> int:
        """The lanes of device slots on the device of that place, as the core takes them; -1: it is not there."""
        return _LANE_BITS[_of(self.lanes, place)]


def _of(values: Sequence[T], place: int) -> T:
    return values[min(place, len(values) - 1)]
