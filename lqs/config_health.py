"""What an operator can set about device slots that fail or are slow; `[health]`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from lqs.describe import key


class HealthConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When a device slot is left out, opened anew, and trusted again."""

    reload_attempts: Annotated[
        int,
        key("A device slot on a CPU that died, or that could not be opened, is opened anew so often.", ge=0, le=20),
    ] = 5
    reload_backoff_s: Annotated[
        float, key("The first time after so long; then each time after twice as long.", "s", gt=0, le=3600)
    ] = 1.0
    reload_backoff_max_s: Annotated[float, key("But never after longer than that.", "s", gt=0, le=86_400)] = 60.0
    steady_s: Annotated[
        float, key("Attempts are counted from the start again once it has lived for so long.", "s", gt=0, le=86_400)
    ] = 600.0
    probation_requests: Annotated[
        int, key("One that came back runs no more than so many at once ...", "requests", ge=1, le=256)
    ] = 2
    probation_steps: Annotated[int, key("... for so many steps.", "steps", ge=0, le=1_000_000)] = 100
    slow_factor: Annotated[
        float,
        key(
            "A device slot whose steps take so many times what they take as a rule, and what they take elsewhere, "
            "gets no more requests until they do not; 0: never mind.",
            ge=0,
            le=1000,
        ),
    ] = 8.0
