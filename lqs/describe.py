"""How a setting says what it is."""

from __future__ import annotations

from typing import Any

from msgspec import Meta

# Patterns that are no choice; `lqs.wording` has words for each.
NAME = "^[a-z][a-z0-9_]{0,31}$"
CORES = "^[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*$"


def key(doc: str, unit: str = "", **bound: Any) -> Meta:
    """Describe a key: what it does, in which unit, within which bound."""
    return Meta(description=doc, extra={"unit": unit}, **bound)
