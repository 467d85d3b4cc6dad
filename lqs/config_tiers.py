"""What an operator can set about tiers: what the keys of one may ask for. A section of `lqs.config`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from lqs.describe import key as _key


class TierConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What the keys of one tier may ask for."""

    level: Annotated[int, _key("Class of its requests by default; 0 is the most urgent.", ge=0, le=7)]
    best: Annotated[int, _key("Best class it may ask for; absent: its own.", ge=0, le=7)] | None = None
    weight: Annotated[float, _key("Share of a key inside its class.", ge=0.001, le=1000)] = 1.0
    degrade: Annotated[
        str,
        _key(
            "May the fallback model answer: never, ask (if the request allows it), allow (unless it forbids it).",
            pattern="^(never|ask|allow)$",
        ),
    ] = "ask"

    @property
    def best_level(self) -> int:
        """The best class it may ask for."""
        return self.level if self.best is None else self.best


def default_tiers() -> dict[str, TierConfig]:
    """The tiers that there are without any in the file."""
    return {
        "vip": TierConfig(level=0),
        "normal": TierConfig(level=2),
        "free": TierConfig(level=3, degrade="allow"),
        "batch": TierConfig(level=4, degrade="allow"),
    }
