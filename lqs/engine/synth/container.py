"""Writes the GGUF container: metadata, tensor list, tensor data."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from lqs.engine.gguf import ALIGNMENT_DEFAULT, BLOCKS, MAGIC

Value = bool | int | float | str | Sequence[int] | Sequence[str]

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
F32, F16, Q8_0 = 0, 1, 8
DTYPES = {"f32": F32, "f16": F16, "q8_0": Q8_0}


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the file to be: its dimensions, the fastest varying first, and its type."""

    name: str
    dimensions: tuple[int, ...]
    type: int

    @property
    def num_bytes(self) -> int:
        per_block, block_bytes = BLOCKS[self.type]
        num_values = 1
        for dimension in self.dimensions:
            num_values *= dimension
        return num_values // per_block * block_bytes


def header(metadata: dict[str, Value], places: Sequence[Place]) -> bytes:
    """All that stands before the tensor data. Each tensor's data follows, padded with `padding`."""
    parts = [MAGIC, struct.pack("<IQQ", 3, len(places), len(metadata))]
    parts += [_string(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for place in places:
        shape = struct.pack(f"<I{len(place.dimensions)}Q", len(place.dimensions), *place.dimensions)
        parts.append(_string(place.name) + shape + struct.pack("<IQ", place.type, offset))
        offset += place.num_bytes + len(padding(place.num_bytes))
    head = b"".join(parts)
    return head + padding(len(head))


def padding(num_bytes: int) -> bytes:
    """The zeros between the end of something and the next aligned byte."""
    return bytes(-num_bytes % ALIGNMENT_DEFAULT)


def _value(value: Value) -> bytes:
    # bool first: it is an int too.
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(_string(str(text)) for text in value)
    return struct.pack(f"<IIQ{len(value)}i", ARRAY, INT32, len(value), *value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
