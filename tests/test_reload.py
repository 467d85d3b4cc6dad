"""What a running server takes over of a config that was read again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lqs.errors import ConfigError
from lqs.reload import taken_over
from lqs.settings import load

STARTED = load(None, None, {"engine.parallel": 4, "queue.total": 10, "queue.table_capacity": 16})


def read(**flags: Any) -> Any:
    base = {"engine.parallel": 4, "queue.total": 10, "queue.table_capacity": 16}
    return load(None, None, base | {name.replace("__", "."): value for name, value in flags.items()})


def test_limits_and_bounds_are_taken_over() -> None:
    config, waiting = taken_over(STARTED, read(queue__total=12, queue__timeout_s=5.0))
    assert (config.queue.total, config.queue.timeout_s, waiting) == (12, 5.0, [])


def test_what_was_built_at_the_start_stays_and_is_named() -> None:
    config, waiting = taken_over(STARTED, read(engine__ctx=512, server__port=1, keys__file="k", keys__num_keys_max=9))
    assert (config.engine, config.server) == (STARTED.engine, STARTED.server)
    assert (config.keys.file, config.keys.num_keys_max) == ("", 1024)
    assert waiting == ["server", "engine", "keys.file", "keys.num_keys_max"]


def test_of_placement_the_weights_are_taken_over_and_the_rest_is_named() -> None:
    changed = read(placement__weights=(2.0,), placement__policy="load", placement__prefix_margin=0.0)
    config, waiting = taken_over(STARTED, changed)
    assert (config.placement.weights, config.placement.policy, config.placement.prefix_margin) == (
        (2.0,),
        "least_connections",
        1.0,
    )
    assert waiting == ["placement.policy", "placement.prefix_margin"]


@pytest.mark.parametrize("section", [field.name for field in msgspec.structs.fields(type(STARTED))])
def test_no_change_of_any_section_is_passed_over_in_silence(section: str) -> None:
    """Each section is read again, or held and named; what is read again is written here, one by one."""
    is_read_again = section in ("placement", "queue", "tiers", "limits", "keys", "degrade")
    changed = {
        "server": {"port": 1},
        "model": {"path": "other"},
        "engine": {"ctx": 512},
        "health": {"reload_attempts": 1},
        "prompts": {"threads": 3},
        "refusals": {"retry_after_s": 3.0},
        "alerts": {"enabled": False},
        "log": {"access": False},
    }
    if section in changed:
        (name, value), *_ = changed[section].items()
        config, waiting = taken_over(STARTED, read(**{f"{section}__{name}": value}))
        assert (getattr(config, section), waiting) == (getattr(STARTED, section), [section])
    else:
        assert is_read_again or section == "models"


def test_what_the_scheduler_was_started_with_stays_and_is_named() -> None:
    changed = read(queue__lane_weights=(2, 1), queue__bypass_s=1.0, refusals__retry_after_s=3.0, queue__total=12)
    config, waiting = taken_over(STARTED, changed)
    assert (config.queue.lane_weights, config.queue.bypass_s, config.queue.total) == ((3, 1), 10.0, 12)
    assert waiting == ["refusals", "queue.bypass_s", "queue.lane_weights"]


def test_a_tier_with_another_weight_is_taken_over() -> None:
    tiers = STARTED.tiers | {"vip": msgspec.structs.replace(STARTED.tiers["vip"], weight=9.0)}
    config, waiting = taken_over(STARTED, msgspec.structs.replace(STARTED, tiers=tiers))
    assert (config.tiers["vip"].weight, waiting) == (9.0, [])


def test_bounds_are_held_against_the_sequences_that_run() -> None:
    """Fewer sequences in the file do not make room in the table."""
    with pytest.raises(ConfigError, match="table_capacity"):
        taken_over(STARTED, read(engine__parallel=1, queue__total=15))


@pytest.mark.parametrize("flags", [{"queue__table_capacity": 32}, {"queue__levels": ("a", "b", "c", "d", "e")}])
def test_some_changes_are_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="restart"):
        taken_over(STARTED, read(**flags))
