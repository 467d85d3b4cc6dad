"""What models on demand need beside those that stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lqs.engine.budget import wanted_on_demand
from lqs.settings import load

MB = 1_000_000


@pytest.mark.parametrize(
    ("takes", "wanted_mb"),
    [({}, 0), ({"stays": {"system": 900 * MB}}, 0), ({"a": {"system": 200 * MB}, "b": {"GPU-a": 5}}, 300)],
)
def test_a_start_wants_room_for_the_largest_model_on_demand(takes: dict[str, Any], wanted_mb: int) -> None:
    served = [SimpleNamespace(name=name, is_on_demand=name != "stays") for name in takes]
    models: Any = SimpleNamespace(all=lambda: served, plan_of=lambda one: SimpleNamespace(takes=takes[one.name]))
    assert wanted_on_demand(load(None, None, {"engine.kv_margin_mb": 100}), models) == wanted_mb * MB
