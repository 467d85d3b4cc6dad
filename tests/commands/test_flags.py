"""Flags stand for settings and win over everything."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from lqs.commands.flags import add_setting_flags, load_config
from lqs.errors import ConfigError


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_setting_flags(parser)
    return parser.parse_args(argv)


def test_each_flag_sets_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lqs.toml"
    file.write_text("[server]\nport = 1\n[engine]\nthreads = 9\n")
    monkeypatch.setenv("LQS_SERVER_PORT", "2")
    flags = (
        "m.gguf --port 3 --host ::1 --device cpu:0 --device cpu:1 --parallel 2 --ctx 512 --log-format json --insecure"
    )
    config = load_config(parsed("--config", str(file), *flags.split()))
    server, engine = config.server, config.engine
    assert (config.model.path, server.host, server.port, server.insecure) == ("m.gguf", "::1", 3, True)
    assert (engine.devices, engine.threads, engine.parallel, engine.ctx) == (("cpu:0", "cpu:1"), 9, 2, 512)
    assert config.log.format == "json"


def test_flags_that_are_not_given_change_nothing() -> None:
    assert load_config(parsed()).server.port == 8080


def test_a_flag_is_checked_like_its_key() -> None:
    with pytest.raises(ConfigError, match=r"server\.port"):
        load_config(parsed("--port", "70000"))
