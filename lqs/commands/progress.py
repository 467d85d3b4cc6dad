"""Shows how far something long has come: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
from typing import TextIO

BAR_WIDTH = 30
LOG_STEP = 0.25


class ProgressBar:
    """Counts bytes up to a total. Call it with the bytes done and in all; leave the `with` to end its line.

    Owner: the thread that made it.
    """

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._shown = -1.0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._shown >= 0:
            self._write("\n")

    def __call__(self, num_done: int, num_total: int) -> None:
        share = num_done / num_total if num_total else 1.0
        step = 0.001 if self._is_terminal else LOG_STEP
        if share < self._shown + step and not (share >= 1 > self._shown):
            return
        self._shown = share
        done = f"{share:4.0%} of {num_total / 1e6:,.1f} MB"
        if self._is_terminal:
            filled = round(share * BAR_WIDTH)
            self._write(f"\r{self._title} [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done}")
        else:
            self._write(f"{self._title} {done}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
