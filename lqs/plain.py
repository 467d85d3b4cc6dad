"""Opens plain files alone: a FIFO or a device could be waited for, or read, for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_plain(path: Path, wanted: str) -> BinaryIO:
    """Open for reading. Raises OSError, for what is no plain file with `is a FIFO, not WANTED`."""
    # O_NONBLOCK: opening a FIFO would otherwise wait for a writer, for ever if none comes.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    raise OSError(errno.EINVAL, f"is {kinds.get(stat.S_IFMT(mode), 'not a plain file')}, not {wanted}")
