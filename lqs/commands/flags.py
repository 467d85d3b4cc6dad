"""The flags that stand for settings, shared by the commands that read the config."""

from __future__ import annotations

import argparse
import os
from typing import Any

from lqs.config import Config
from lqs.settings import load

# Flag's name in the namespace -> the setting it overrides.
_SETTINGS = {
    "model": "model.path",
    "host": "server.host",
    "port": "server.port",
    "insecure": "server.insecure",
    "device": "engine.devices",
    "threads": "engine.threads",
    "parallel": "engine.parallel",
    "ctx": "engine.ctx",
    "log_format": "log.format",
}


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --config and the flags that override it."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a GGUF file, or the name of a fetched model (default: the small default model)",
    )
    add_config_flag(parser)
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default: 8080)")
    parser.add_argument("--device", action="append", help="a device slot: auto, cpu:0, ...; repeat")
    parser.add_argument("--threads", type=int, help="threads of a CPU device slot")
    parser.add_argument("--parallel", type=int, help="sequences per device slot")
    parser.add_argument("--ctx", type=int, help="KV cells per device slot, in tokens")
    parser.add_argument("--log-format", choices=("text", "json"), help="default: text")
    parser.add_argument("--insecure", action="store_const", const=True, help="listen on any address without keys")


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add --config."""
    parser.add_argument("--config", metavar="FILE", help="settings in TOML, such as lqs.toml")


def load_config(args: argparse.Namespace) -> Config:
    """The config that file, environment and flags make. Raises ConfigError."""
    given = vars(args)
    flags: dict[str, Any] = {setting: given[name] for name, setting in _SETTINGS.items() if given.get(name) is not None}
    return load(args.config, os.environ, flags)
