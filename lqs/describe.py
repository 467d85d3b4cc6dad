"""How a setting says what it is."""

from __future__ import annotations

from typing import Any

from msgspec import Meta


def key(doc: str, unit: str = "", **bound: Any) -> Meta:
    """Describe a key: what it does, in which unit, within which bound."""
    return Meta(description=doc, extra={"unit": unit}, **bound)
