"""Reads the TOML file as a tree of plain values, the files that it names as seen from here."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lqs.errors import ConfigError

# Settings that name a file; in the TOML file they are seen from its folder.
_FILES = (("model", "path"), ("model", "chat_template"), ("model", "fallback"), ("keys", "file"))
_FILES_OF_MODELS = ("path", "chat_template", "fallback")


def read_tree(path: str) -> dict[str, Any]:
    """The file's tables. Raises ConfigError."""
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}.") from None
    names = set(tree["models"]) if isinstance(tree.get("models"), dict) else set()
    for table, key in _file_settings(tree):
        name: Any = table.get(key)
        if _is_relative(name) and not (key == "fallback" and name in names):
            table[key] = str(Path(path).parent / name)
    return tree


def _file_settings(tree: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The tables and their keys that name files, where they are tables at all."""
    models = tree.get("models")
    tables = models.values() if isinstance(models, dict) else ()
    places = [(tree.get(section), key) for section, key in _FILES]
    places += [(table, key) for table in tables for key in _FILES_OF_MODELS]
    yield from ((table, key) for table, key in places if isinstance(table, dict))


def _is_relative(name: Any) -> bool:
    """Whether a value is a path from the file's folder; a model's bare name is none."""
    is_path = isinstance(name, str) and (os.sep in name or "." in name)
    return is_path and not name.startswith((os.sep, "~"))
