"""Where settings come from, which one wins, and what is said about a wrong one."""

from pathlib import Path
from typing import Any

import pytest

from lqs.config import Config, is_loopback
from lqs.errors import ConfigError
from lqs.settings import check_exposure, load, settings


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "lqs.toml"
    path.write_text(text)
    return str(path)


def test_the_defaults_are_those_of_the_docs() -> None:
    config = load()
    queue = config.queue
    assert queue.levels == ("critical", "high", "normal", "low", "background")
    assert config.level_caps == (100,) * 5
    assert (queue.total, queue.timeout_s, queue.hold_s, queue.request_timeout_s) == (256, 60, 10, 600)
    assert (queue.aging_step_s, queue.aged_every, queue.lane_weights) == (60, 4, (3, 1))
    assert {name: tier.best_level for name, tier in config.tiers.items()} == {
        "vip": 0,
        "normal": 2,
        "free": 3,
        "batch": 4,
    }
    server = config.server
    assert (server.drain_s, server.write_stall_s) == (30, 30)
    assert (server.body_bytes_max, server.body_depth_max) == (4 * 1024 * 1024, 64)
    assert config.engine.out_buffer_bytes == 64 * 1024


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[queue]\ntotal = 1\ntimeout_s = 2\nhold_s = 3\n")
    env = {"LQS_QUEUE_TOTAL": "10", "LQS_QUEUE_TIMEOUT_S": "20"}
    queue = load(path, env, {"queue.total": 100}).queue
    assert (queue.total, queue.timeout_s, queue.hold_s) == (100, 20, 3)


def test_variables_have_the_type_of_their_key() -> None:
    env = {
        "LQS_ENGINE_DEVICES": "cpu:0,cpu:1",
        "LQS_SERVER_INSECURE": "true",
        "LQS_QUEUE_CAPS": "1,2,3,4,5",
        "LQS_MODELS_DIR": "not ours",
        "HOME": "/",
    }
    config = load(None, env)
    assert config.engine.devices == ("cpu:0", "cpu:1")
    assert config.server.insecure is True
    assert config.level_caps == (1, 2, 3, 4, 5)


def test_a_tier_takes_its_best_class_from_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[tiers.vip]\nlevel = 1\nbest = 0\n[tiers.normal]\nlevel = 2\n")
    tiers = load(path).tiers
    assert (tiers["vip"].best_level, tiers["normal"].best_level) == (0, 2)


def test_a_tier_of_the_file_stands_beside_the_usual_ones_or_instead_of_one(tmp_path: Path) -> None:
    tiers = load(written(tmp_path, "[tiers.partner]\nlevel = 1\n[tiers.free]\nlevel = 4\n")).tiers
    assert {name: tier.level for name, tier in tiers.items()} == {
        "vip": 0,
        "normal": 2,
        "free": 4,
        "batch": 4,
        "partner": 1,
    }


def test_with_few_classes_the_usual_tiers_move_together(tmp_path: Path) -> None:
    tiers = load(written(tmp_path, '[queue]\nlevels = ["first", "second"]\n')).tiers
    assert {name: tier.level for name, tier in tiers.items()} == {"vip": 0, "normal": 1, "free": 1, "batch": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[queue]\ntotl = 1", "queue.totl: there is no such setting; did you mean queue.total?"),
        ("[queu]\ntotal = 1", "queu: there is no such section; did you mean queue?"),
        ("[zzz]\ntotal = 1", "zzz: there is no such section."),
        ("[tiers.vip]\nlevl = 1", "tiers.vip.levl: there is no such setting; did you mean tiers.vip.level?"),
        ("[queue]\ntotal = 0", "queue.total: Expected `int` >= 1."),
        ("[queue]\ntotal = 'x'", "queue.total: Expected `int`, got `str`."),
        ("queue = 3", "queue: Expected `object`, got `int`."),
        ("tiers = 3", "tiers: Expected `object`, got `int`."),
        ("tiers = {vip = 3}", "tiers[...]: Expected `object`, got `int`."),
        ("[queue", "is not TOML"),
        ("[queue]\nlevels = ['a', 'a']\n[tiers.normal]\nlevel = 0", "queue.levels: a name is there twice."),
        ("[queue]\ncaps = [1, 2]", "queue.caps: give one number, or one for each of the 5 classes."),
        ("[queue]\ntable_capacity = 100", "queue.table_capacity: must hold"),
        ("[queue]\nshort_tokens_max = 5000", "queue.short_tokens_max: must not be above"),
        ("[engine]\nn_batch = 8", "engine.n_batch: must be at least engine.parallel."),
        ("[engine]\nn_batch = 0", "engine.n_batch: Expected `int` >= 1."),
        ("[engine]\nn_ubatch = 4096", "engine.n_ubatch: must not be above"),
        ("[keys]\nanonymous_tier = 'x'", "keys.anonymous_tier: there is no tier 'x'."),
        ("[tiers.normal]\nlevel = 7", "tiers.normal.level: the last class is 4."),
        ("[tiers.normal]\nlevel = 1\nbest = 2", "tiers.normal.best: must not be below its own class."),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"LQS_QUEUE_TIMEOUTS": "1"}, "LQS_QUEUE_TIMEOUTS: there is no such setting; did you mean queue.timeout_s?"),
        ({"LQS_QUEUE_TOTAL": "many"}, "LQS_QUEUE_TOTAL: Expected `int`, got `str`."),
    ],
)
def test_a_wrong_variable_is_named(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, env)
    assert str(caught.value) == message


def test_a_flag_does_not_hide_a_section_of_the_wrong_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"queue: Expected `object`"):
        load(written(tmp_path, "queue = 3"), None, {"queue.total": 1})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read"):
        load("nowhere.toml")


def test_every_key_has_a_doc_and_the_numbers_a_bound() -> None:
    seen: set[tuple[str, str]] = set()
    for section, key, default, unit, bound, doc in settings():
        assert doc, (section, key)
        assert (section, key) not in seen
        seen.add((section, key))
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        assert bound or not is_number, (section, key)
        if key.endswith(("_s", "_ms", "_bytes", "_mb")):
            assert unit, (section, key)
    assert ("queue", "timeout_s") in seen
    assert ("tiers", "level") in seen


def test_the_defaults_listed_are_those_in_force() -> None:
    config: Any = load()
    for section, key, default, *_ in settings():
        if section != "tiers":
            assert getattr(getattr(config, section), key) == default


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("lqs.example", False),
    ],
)
def test_only_this_machine_is_loopback(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local


def test_other_machines_are_not_let_in_without_keys() -> None:
    open_to_all = load(None, None, {"server.host": "0.0.0.0"})
    with pytest.raises(ConfigError, match="lqs keys add"):
        check_exposure(open_to_all, 0)
    check_exposure(open_to_all, 1)
    check_exposure(load(None, None, {"server.host": "0.0.0.0", "server.insecure": True}), 0)
    check_exposure(Config(), 0)
