"""Reads the header of a GGUF file before libllama does.

The native loader trusts its file: an empty key ends the process on an assert, a file that was cut short
ends it later, on the first touch of a page that is not there. So every count, length and offset is
checked here against the size of the file first, and only a file that passes is handed on. Nothing is
read but the header, and a path that is no plain file is refused before a byte of it is waited for.

Not here: what the weights mean. A file that passes may still be refused by libllama, with a message of
its own. Nor can this help against a file that is changed while it is served.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from lqs.errors import ModelFileError
from lqs.plain import open_plain

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_DEFAULT = 32
DIMENSIONS_MAX = 4
NAME_BYTES_MAX = 64  # A longer tensor name would be cut by ggml, and then not found.
KEY_BYTES_MAX = 65535

STRING, ARRAY, UINT64 = 8, 9, 10
INT32, UINT32, FLOAT32 = 5, 4, 6
# struct codes of the scalar value types; the array's and the string's are read by parts.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# Tensor type -> (values in a block, bytes of a block). Numbers that are missing were withdrawn.
# fmt: off
BLOCKS = {
    0: (1, 4), 1: (1, 2), 30: (1, 2), 28: (1, 8),                                      # f32 f16 bf16 f64
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),                                    # i8 i16 i32 i64
    2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),      # q4_0 q4_1 q5_0 q5_1 q8_0 q8_1
    10: (256, 84), 11: (256, 110), 12: (256, 144),                                     # q2_K q3_K q4_K
    13: (256, 176), 14: (256, 210), 15: (256, 292),                                    # q5_K q6_K q8_K
    16: (256, 66), 17: (256, 74), 22: (256, 82), 18: (256, 98), 21: (256, 110),        # iq2_xxs _xs _s iq3_xxs _s
    19: (256, 50), 29: (256, 56), 20: (32, 18), 23: (256, 136),                        # iq1_s _m iq4_nl _xs
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36),                          # tq1_0 tq2_0 mxfp4 nvfp4
    41: (128, 18), 42: (64, 18),                                                       # q1_0 q2_0
}
# fmt: on

# Keys that the native loader reads without asking for their type first: (type, type of an array's values).
EXPECTED_TYPES = {
    "general.architecture": (STRING, None),
    "general.alignment": (UINT32, None),
    "tokenizer.ggml.model": (STRING, None),
    "tokenizer.ggml.tokens": (ARRAY, STRING),
    "tokenizer.ggml.merges": (ARRAY, STRING),
    "tokenizer.ggml.scores": (ARRAY, FLOAT32),
    "tokenizer.ggml.token_type": (ARRAY, INT32),
}
# Arrays that are indexed by token and so must be as long as the vocabulary.
PER_TOKEN = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """An array of the metadata: the type and number of its values. The values are checked, not kept."""

    value_type: int
    length: int


Value = int | float | bool | str | ArrayShape


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's place in the file; `offset` counts from the start of the tensor data."""

    name: str
    dimensions: tuple[int, ...]
    type: int
    offset: int
    num_bytes: int


@dataclass(slots=True)
class Header:
    """What a GGUF file says of itself."""

    version: int
    size_bytes: int
    metadata: dict[str, Value] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    data_offset: int = 0

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of the model file at `path`.

    Raises:
        ModelFileError: the file cannot be opened, is not a plain file, or is damaged. The message names
            the file and the reason.
    """
    path = Path(path)
    try:
        with open_plain(path, "a model file") as file:
            return _Reader(file).read()
    except _Damage as damage:
        raise ModelFileError(f"{path}: {damage}") from None
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror or error}") from None


class _Damage(ValueError):
    """A reason to refuse the file, without its name."""


class _Reader:
    """One pass over a header. Never takes a length from the file without comparing it with what is left."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size
        self._header = Header(version=0, size_bytes=self._left)

    def read(self) -> Header:
        num_tensors, num_values = self._preamble()
        for _ in range(num_values):
            self._key_value()
        self._check_metadata()
        tensors = [self._tensor() for _ in range(num_tensors)]
        self._place(tensors)
        return self._header

    def _preamble(self) -> tuple[int, int]:
        if self._left == 0:
            raise _Damage("is empty")
        magic = self._bytes(4, "the magic number")
        if magic != MAGIC:
            raise _Damage(f"is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
        version = self._unsigned(UINT32, "the version")
        if version not in VERSIONS:
            reason = "is for a big-endian machine" if version & 0xFFFF == 0 else f"has version {version}"
            raise _Damage(f"is a GGUF file that {reason}; supported are versions 2 and 3, little-endian")
        self._header.version = version
        num_tensors = self._count("tensors", bytes_each_min=24)
        return num_tensors, self._count("metadata values", bytes_each_min=13)

    def _key_value(self) -> None:
        key = self._string("a metadata key", KEY_BYTES_MAX)
        if not key:
            raise _Damage("has an empty metadata key")
        if key in self._header.metadata:
            raise _Damage(f"has the metadata key {key!r} twice")
        kind = self._kind(key, EXPECTED_TYPES.get(key, (None, None))[0])
        self._header.metadata[key] = self._value(kind, key)

    def _kind(self, key: str, expected: int | None) -> int:
        kind = self._unsigned(UINT32, f"the type of {key!r}")
        if expected is not None and kind != expected:
            raise _Damage(f"has a value of the wrong type under {key!r}")
        return kind

    def _value(self, kind: int, key: str) -> Value:
        if kind in SCALARS:
            return self._scalar(kind, f"the value of {key!r}")
        if kind == STRING:
            return self._string(f"the value of {key!r}")
        if kind == ARRAY:
            return self._array(key)
        raise _Damage(f"has a value of unknown type {kind} under {key!r}")

    def _array(self, key: str) -> ArrayShape:
        kind = self._kind(key, EXPECTED_TYPES.get(key, (None, None))[1])
        if kind in SCALARS:
            size = struct.calcsize("<" + SCALARS[kind])
            length = self._count(f"values in {key!r}", size)
            self._skip(length * size)
        elif kind == STRING:
            length = self._count(f"strings in {key!r}", 8)
            for _ in range(length):
                self._skip(self._count(f"bytes in a string of {key!r}", 1))
        else:
            raise _Damage(f"has an array of unknown type {kind} under {key!r}")
        return ArrayShape(kind, length)

    def _check_metadata(self) -> None:
        if not self._header.architecture:
            raise _Damage("does not name its architecture (general.architecture)")
        tokens = self._header.metadata.get("tokenizer.ggml.tokens")
        for key in PER_TOKEN:
            values = self._header.metadata.get(key)
            if isinstance(values, ArrayShape) and (not isinstance(tokens, ArrayShape) or values.length < tokens.length):
                raise _Damage(f"has fewer values under {key!r} than tokens")

    def _tensor(self) -> Tensor:
        name = self._string("a tensor's name", NAME_BYTES_MAX - 1)
        num_dimensions = self._unsigned(UINT32, f"the shape of tensor {name!r}")
        if num_dimensions > DIMENSIONS_MAX:
            raise _Damage(f"gives tensor {name!r} {num_dimensions} dimensions; {DIMENSIONS_MAX} is the most")
        dimensions = tuple(self._unsigned(UINT64, f"the shape of tensor {name!r}") for _ in range(num_dimensions))
        kind = self._unsigned(UINT32, f"the type of tensor {name!r}")
        offset = self._unsigned(UINT64, f"the offset of tensor {name!r}")
        return Tensor(name, dimensions, kind, offset, _tensor_bytes(name, dimensions, kind))

    def _place(self, tensors: list[Tensor]) -> None:
        """Check that every tensor lies inside the file."""
        alignment = int(self._header.metadata.get("general.alignment", ALIGNMENT_DEFAULT))  # type: ignore[arg-type]
        if alignment <= 0 or alignment & (alignment - 1):
            raise _Damage(f"has an alignment of {alignment}, which is not a power of two")
        size = self._header.size_bytes
        start = -(-(size - self._left) // alignment) * alignment
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise _Damage("names a tensor twice")
        for tensor in tensors:
            end = start + tensor.offset + tensor.num_bytes
            if tensor.offset % alignment:
                raise _Damage(f"puts tensor {tensor.name!r} at an offset that is not a multiple of {alignment}")
            if end > size:
                raise _Damage(f"is cut short or damaged: tensor {tensor.name!r} ends at byte {end} of {size}")
        self._header.data_offset = start
        self._header.tensors = tensors

    def _count(self, what: str, bytes_each_min: int) -> int:
        """A number of things that follow; there must be room for them in the file."""
        count = self._unsigned(UINT64, f"the number of {what}")
        if count * bytes_each_min > self._left:
            raise _Damage(f"is cut short or damaged: {count} {what} do not fit in the {self._left} bytes left")
        return count

    def _string(self, what: str, num_bytes_max: int | None = None) -> str:
        length = self._count(f"bytes in {what}", 1)
        if num_bytes_max is not None and length > num_bytes_max:
            raise _Damage(f"has {length} bytes in {what}; {num_bytes_max} is the most")
        # What cannot be read as UTF-8 is nothing that this program looks for.
        return self._bytes(length, what).decode("utf-8", "replace")

    def _scalar(self, kind: int, what: str) -> int | float | bool:
        code = struct.Struct("<" + SCALARS[kind])
        value: int | float | bool = code.unpack(self._bytes(code.size, what))[0]
        return value

    def _unsigned(self, kind: int, what: str) -> int:
        return int(self._scalar(kind, what))

    def _bytes(self, num_bytes: int, what: str) -> bytes:
        found = self._file.read(num_bytes) if num_bytes <= self._left else b""
        if len(found) < num_bytes:
            raise _Damage(f"is cut short: it ends inside {what}")
        self._left -= num_bytes
        return found

    def _skip(self, num_bytes: int) -> None:
        # Callers have compared num_bytes with what is left.
        self._file.seek(num_bytes, os.SEEK_CUR)
        self._left -= num_bytes


def _tensor_bytes(name: str, dimensions: tuple[int, ...], kind: int) -> int:
    if kind not in BLOCKS:
        raise _Damage(f"holds tensor {name!r} in the unknown or withdrawn type {kind}")
    per_block, block_bytes = BLOCKS[kind]
    num_values = 1
    for dimension in dimensions:
        num_values *= dimension
    if any(dimension == 0 for dimension in dimensions) or num_values >= 2**63:
        raise _Damage(f"gives tensor {name!r} the impossible shape {list(dimensions)}")
    if dimensions and dimensions[0] % per_block:
        raise _Damage(f"gives tensor {name!r} rows of {dimensions[0]} values, not a multiple of {per_block}")
    return num_values // per_block * block_bytes
