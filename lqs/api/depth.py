"""Measures how deep a JSON body is nested, before a parser that recurses sees it.

Time is linear in the body and spent in slices, so that the caller can let others run in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

SLICE_BYTES = 65_536

# Brackets as signed bytes: +1 opens, -1 (0xff) closes; all else is left out.
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def is_surely_flat(body: bytes, depth_max: int) -> bool:
    """Tell at once that `body` has too few brackets to be too deep; False says nothing."""
    return body.count(b"[") + body.count(b"{") <= depth_max


def depths(body: bytes) -> Iterator[int]:
    """Yield the deepest nesting of each slice of `body`. Brackets inside strings do not count."""
    # Backslashes are legal inside strings only, and pair from the left.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    depth, is_in_string = 0, False
    for start in range(0, len(plain), SLICE_BYTES):
        pieces = plain[start : start + SLICE_BYTES].split(b'"')
        outside = b"".join(pieces[is_in_string::2])
        is_in_string ^= len(pieces) % 2 == 0
        steps = memoryview(outside.translate(_STEPS, _OTHERS)).cast("b")
        levels = list(accumulate(steps, initial=depth))
        depth = levels[-1]
        yield max(levels)
