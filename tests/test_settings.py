"""Where settings come from, which one wins, and what is said about a wrong one."""

from pathlib import Path
from typing import Any

import pytest

from lqs.config import Config, is_loopback
from lqs.errors import ConfigError
from lqs.overflow import per_class
from lqs.settings import NAMED, check_exposure, load, settings


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
        "LQS_SERVER_CORS_ORIGINS": " http://a , http://b",
        "LQS_QUEUE_LANE_WEIGHTS": "[5, 2]",
        "LQS_MODELS_DIR": "not ours",
        "LQS_API_KEY": "not ours",
        "LQS_TEST_ANYTHING": "not ours",
        "LQS_SERVICE_HOST": "not ours, from Kubernetes",
        "LQS_PORT": "tcp://10.0.0.1:80",
        "LQS_PORT_80_TCP_ADDR": "10.0.0.1",
        "HOME": "/",
    }
    config = load(None, env)
    assert config.engine.devices == ("cpu:0", "cpu:1")
    assert config.server.insecure is True
    assert config.level_caps == (1, 2, 3, 4, 5)
    assert config.server.cors_origins == ("http://a", "http://b")
    assert config.queue.lane_weights == (5, 2)


def test_an_empty_variable_is_an_empty_list() -> None:
    assert load(None, {"LQS_SERVER_CORS_ORIGINS": ""}).server.cors_origins == ()


@pytest.mark.parametrize(
    ("section", "key", "text", "found"),
    [
        ("keys", "file", "keys.json", "{folder}/keys.json"),
        ("keys", "file", "", ""),
        ("keys", "file", "/etc/keys.json", "/etc/keys.json"),
        ("model", "path", "../m.gguf", "{folder}/../m.gguf"),
        ("model", "path", "~/m.gguf", "~/m.gguf"),
        ("model", "path", "smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("model", "chat_template", "own.jinja", "{folder}/own.jinja"),
    ],
)
def test_files_named_in_the_file_are_seen_from_its_folder(
    section: str, key: str, text: str, found: str, tmp_path: Path
) -> None:
    config = load(written(tmp_path, f'[{section}]\n{key} = "{text}"\n'))
    assert getattr(getattr(config, section), key) == found.format(folder=tmp_path)


def test_files_named_in_a_variable_or_flag_are_seen_from_here(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    assert load(path, {"LQS_KEYS_FILE": "keys.json"}, {"model.path": "m.gguf"}).keys.file == "keys.json"
    assert load(path, None, {"model.path": "m.gguf"}).model.path == "m.gguf"


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


def test_a_limit_says_what_it_counts_for_whom_and_how_much(tmp_path: Path) -> None:
    text = """
        [limits.tokens_a_minute]
        of = "tokens"
        amount = 100_000
        [limits.smooth]
        of = "requests"
        kind = "leaky_bucket"
        per = "server"
        amount = 2
        period_s = 1.0
        burst = 20
        tiers = ["batch"]
    """
    limits = load(written(tmp_path, text)).limits
    assert list(limits) == ["tokens_a_minute", "smooth"]
    usual, smooth = limits.values()
    assert (usual.per, usual.kind, usual.period_s, usual.capacity) == ("key", "token_bucket", 60, 100_000)
    assert (smooth.capacity, smooth.tiers, smooth.is_bucket) == (20, ("batch",), True)


def test_with_few_classes_the_usual_tiers_move_together(tmp_path: Path) -> None:
    tiers = load(written(tmp_path, '[queue]\nlevels = ["first", "second"]\n')).tiers
    assert {name: tier.level for name, tier in tiers.items()} == {"vip": 0, "normal": 1, "free": 1, "batch": 1}


POLICIES = "must be one of least_connections, vram, weighted_round_robin, load"
LIMIT = "[limits.a]\namount = 10\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[queue]\ntotl = 1", "queue.totl: there is no such setting; did you mean queue.total?"),
        ("[queu]\ntotal = 1", "queu: there is no such section; did you mean queue?"),
        ("[zzz]\ntotal = 1", "zzz: there is no such section."),
        ("[tiers.vip]\nlevl = 1", "tiers.vip.levl: there is no such setting; did you mean tiers.vip.level?"),
        ("[engine]\nctx = 1", "engine.ctx: must be 0 or at least 256."),
        ("[engine]\nctx = -1", "engine.ctx: must be a whole number >= 0."),
        ("[engine]\nctx = 1000000000", "engine.ctx: must be a whole number <= 16777216."),
        ("[queue]\ntotal = 0", "queue.total: must be a whole number >= 1."),
        ("[queue]\ntotal = 'x'", "queue.total: must be a whole number, not text."),
        ("queue = 3", "queue: must be a table, not a whole number."),
        ("tiers = 3", "tiers: must be a table, not a whole number."),
        ("tiers = {vip = 3}", "tiers.vip: must be a table, not a whole number."),
        ("[tiers.a]\nlevel = 1\n[tiers.b]\nlevel = 9", "tiers.b.level: must be a whole number <= 7."),
        ("[tiers.a]\nweight = 2.0", "tiers.a: level is missing."),
        ("port = 1", "port: there is no such section; did you mean server.port?"),
        ("threads = 1", "threads: there is no such section; did you mean engine.threads or prompts.threads?"),
        ("[server]\nctx = 1", "server.ctx: there is no such setting; did you mean model.ctx or engine.ctx?"),
        ("[log]\nformat = 'xml'", "log.format: must be one of text, json."),
        ("[queue]\nlevels = ['A']", "queue.levels[0]: must be small letters, digits and _, a letter first."),
        ("[queue]\nlevels = 'a'", "queue.levels: must be a list, not text."),
        ("[queue", "is not TOML"),
        ("[queue]\nlevels = ['a', 'a']\n[tiers.normal]\nlevel = 0", "queue.levels: a name is there twice."),
        ("[queue]\ncaps = [1, 2]", "queue.caps: give one number, or one for each of the 5 classes."),
        ("[queue]\nevict = [true, true, true, true, true, false]", "queue.evict: there are only 5 classes."),
        ("[queue]\non_full = ['drop']", "queue.on_full[0]: must be one of refuse, demote."),
        ("[queue]\non_full = ['demotes']", "queue.on_full[0]: must be one of refuse, demote; did you mean demote?"),
        (
            "[placement]\npolicy = 'round_robin'",
            f"placement.policy: {POLICIES}; did you mean weighted_round_robin?",
        ),
        ("[engine]\ncores = ['0', '0-a']", "engine.cores[1]: must be numbers of cores, such as 0-3 or 0,2,4-5."),
        ("[queue]\nplace_wait_s = [-1.0]", "queue.place_wait_s[0]: must be a number >= 0"),
        ("[queue]\nwarn_clear_at = 0.9", "queue.warn_clear_at: 0.9 must not be above queue.warn_at, 0.8; set both."),
        ("[queue]\ntable_capacity = 100", "queue.table_capacity: must hold"),
        ("[queue]\nshort_tokens_max = 5000", "queue.short_tokens_max: must not be above"),
        ("[engine]\nn_batch = 8", "engine.n_batch: must be at least engine.parallel."),
        ("[engine]\nn_batch = 0", "engine.n_batch: must be a whole number >= 1."),
        ("[engine]\nn_ubatch = 4096", "engine.n_ubatch: must not be above"),
        ("[keys]\nanonymous_tier = 'x'", "keys.anonymous_tier: there is no tier 'x'."),
        ("[limits.a]\nof = 'requests'", "limits.a: amount is missing."),
        ("[limits.a]\namount = 1", "limits.a: of is missing."),
        ("limits = 3", "limits: must be a table, not a whole number."),
        (LIMIT + "of = 'words'", "limits.a.of: must be one of requests, tokens, compute_s, parallel."),
        (LIMIT + "of = 'tokens'\nper = 'user'", "limits.a.per: must be one of key, tier, model, route, server."),
        (LIMIT + "of = 'tokens'\nkind = 'bucket'", "limits.a.kind: must be one of token_bucket, leaky_bucket,"),
        (LIMIT + "of = 'tokens'\nburts = 1", "limits.a.burts: there is no such setting; did you mean limits.a.burst?"),
        (LIMIT + "of = 'tokens'\nkind = 'fixed_window'\nburst = 1", "limits.a.burst: only buckets have one."),
        (LIMIT + "of = 'parallel'\nburst = 1", "limits.a.burst: only buckets have one."),
        (LIMIT + "of = 'tokens'\ntiers = ['x']", "limits.a.tiers: there is no tier x."),
        (LIMIT + "of = 'tokens'\nroutes = ['x']", "limits.a.routes[0]: must be one of chat, completions."),
        (LIMIT + "of = 'compute_s'\nburst = 2000000", "limits.a.amount: at most 1000000 s of compute."),
        (LIMIT + "of = 'tokens'\nperiod_s = 2e6\nburst = 20000", "limits.a.burst: it would take more than 30 years"),
        ("[limits.entry]\nof = 'requests'\namount = 1", "limits.entry: queue.entry_per_s is the limit of that name."),
        ("[limits.A]\nof = 'requests'\namount = 1", "limits.A: a name is small letters"),
        ("".join(f"[limits.a{i}]\nof = 'tokens'\namount = 1\n" for i in range(25)), "limits: there may be at most 24."),
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
        (
            {"LQS_QUEUE_TIMEOUTS": "1"},
            "LQS_QUEUE_TIMEOUTS: there is no such setting; did you mean LQS_QUEUE_TIMEOUT_S?",
        ),
        ({"LQS_QUEUE_TOTAL": "many"}, "LQS_QUEUE_TOTAL: must be a whole number."),
        ({"LQS_PLACEMENT_POLICY": "VRAMs"}, f"placement.policy: {POLICIES}; did you mean vram?"),
        ({"LQS_QUEUE_CAPS": "1,many"}, "LQS_QUEUE_CAPS: must be a whole number."),
        ({"LQS_QUEUE_CAPS": "[1, 2"}, "LQS_QUEUE_CAPS: must be a whole number."),
        ({"LQS_SERVR_PORT": "1"}, "LQS_SERVR_PORT: there is no such setting; did you mean LQS_SERVER_PORT?"),
        ({"LQS_PORT": "1"}, "LQS_PORT: there is no such setting; did you mean LQS_SERVER_PORT?"),
        ({"LQS_FOO_BAR": "1"}, "LQS_FOO_BAR: there is no such setting."),
        ({"LQS_LIMITS_RPM_OF": "x"}, "LQS_LIMITS_RPM_OF: limits are set in the file, as [limits.NAME]."),
        ({"LQS_TIERS_PARTNER_LEVEL": "1"}, "LQS_TIERS_PARTNER_LEVEL: tiers are set in the file, as [tiers.NAME]."),
    ],
)
def test_a_wrong_variable_is_named(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, env)
    assert str(caught.value) == message


def test_a_flag_does_not_hide_a_section_of_the_wrong_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"queue: must be a table"):
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
        if section not in NAMED:
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


def test_one_class_needs_no_more_than_its_name() -> None:
    config = load(None, {"LQS_QUEUE_LEVELS": "only"}, {})
    assert per_class(config.queue.place_wait_s, 1) == [5.0]
    with pytest.raises(ConfigError, match="there are only 1 classes"):
        load(None, {"LQS_QUEUE_LEVELS": "only"}, {"queue.place_wait_s": [1.0, 2.0]})


def test_a_list_that_is_nested_without_end_is_no_list_of_numbers() -> None:
    with pytest.raises(ConfigError, match="LQS_QUEUE_CAPS"):
        load(None, {"LQS_QUEUE_CAPS": "[" * 5000}, {})
