"""Cython's own plugin for coverage.py, told beforehand which files the compiled modules are made of.

Alone it looks for a module's C file where an included file stands, and so finds none for `lqs/core/`; and
a declaration file it knows only once its module was met. Which it meets first is a matter of chance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from Cython.Coverage import Plugin

PACKAGE = Path(__file__).parents[1] / "lqs"


class WholePlugin(Plugin):
    def file_reporter(self, filename: str) -> Any:
        if self._c_files_map is None:
            for c_file in (*PACKAGE.glob("_*.c"), *PACKAGE.glob("_*.cpp")):
                self._read_source_lines(str(c_file), filename)
        return super().file_reporter(filename)


def coverage_init(registry: Any, options: dict[str, str]) -> None:
    plugin = WholePlugin()
    registry.add_configurer(plugin)
    registry.add_file_tracer(plugin)
