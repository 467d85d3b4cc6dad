"""A damaged model file is refused with its name and the reason, before libllama sees it."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from lqs.engine.gguf import BLOCKS, ArrayShape, read_header
from lqs.engine.synth import Recipe, write
from lqs.errors import ModelFileError

UINT8, UINT32, INT32, STRING, ARRAY, UINT64 = 0, 4, 5, 8, 9, 10
TENSOR_F32 = 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", Recipe())


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


ARCHITECTURE = pair("general.architecture", STRING, string("llama"))


def tensor(name: str = "t", shape: tuple[int, ...] = (32,), kind: int = TENSOR_F32, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def made(path: Path, pairs: list[bytes], tensors: Sequence[bytes] = (), *, version: int = 3, data: int = 256) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32 + data))
    return path


def test_reads_what_a_file_says_of_itself(model: Path) -> None:
    header = read_header(model)
    assert header.architecture == "llama"
    assert header.version == 3
    assert header.metadata["llama.embedding_length"] == 64
    assert header.metadata["tokenizer.ggml.add_bos_token"] is False
    assert isinstance(header.metadata["tokenizer.ggml.tokens"], ArrayShape)
    assert header.data_offset % 32 == 0
    assert header.data_offset + header.tensors[-1].offset + header.tensors[-1].num_bytes <= header.size_bytes


def test_reads_version_2_and_every_kind_of_value(tmp_path: Path) -> None:
    pairs = [ARCHITECTURE, pair("a.bytes", ARRAY, struct.pack("<IQ3B", UINT8, 3, 1, 2, 3))]
    pairs += [pair("a.double", 12, struct.pack("<d", 0.5)), pair("a.long", 11, struct.pack("<q", -7))]
    header = read_header(made(tmp_path / "v2.gguf", pairs, [tensor(shape=())], version=2))
    assert header.version == 2
    assert header.metadata["a.bytes"] == ArrayShape(UINT8, 3)
    assert (header.metadata["a.double"], header.metadata["a.long"]) == (0.5, -7)
    assert header.tensors[0].num_bytes == 4


# --- The files of case B53. ---


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    """B53: 0 bytes."""
    path = tmp_path / "empty.gguf"
    path.touch()
    assert refusal(path) == "is empty"


def test_a_file_of_24_bytes_is_refused(model: Path) -> None:
    """B53: the first 24 bytes."""
    model.write_bytes(model.read_bytes()[:24])
    assert "tensors do not fit in the 8 bytes left" in refusal(model)


def test_a_file_cut_inside_its_first_24_bytes_is_refused(model: Path) -> None:
    """B53: less than a header."""
    model.write_bytes(model.read_bytes()[:6])
    assert refusal(model) == "is cut short: it ends inside the version"


def test_a_file_cut_in_the_middle_of_its_tensor_data_is_refused(model: Path) -> None:
    """B53: cut in the middle of tensor data."""
    os.truncate(model, model.stat().st_size * 2 // 3)
    assert "is cut short or damaged: tensor " in refusal(model)


def test_a_wrong_magic_number_is_refused(model: Path) -> None:
    """B53: wrong magic."""
    model.write_bytes(b"GGML" + model.read_bytes()[4:])
    assert "is not a GGUF file: it starts with b'GGML'" in refusal(model)


def test_a_tensor_dimension_of_two_to_the_42_is_refused(tmp_path: Path) -> None:
    """B53: tensor dimension 2**42."""
    path = made(tmp_path / "wide.gguf", [ARCHITECTURE], [tensor(shape=(2**42,))])
    assert "tensor 't' ends at byte 17592186044" in refusal(path)


def test_a_string_length_of_two_to_the_63_is_refused(tmp_path: Path) -> None:
    """B53: string length 2**63."""
    path = made(tmp_path / "long.gguf", [pair("general.name", STRING, struct.pack("<Q", 2**63))])
    assert "9223372036854775808 bytes in the value of 'general.name' do not fit" in refusal(path)


def test_an_empty_metadata_key_is_refused(tmp_path: Path) -> None:
    """B53: empty metadata key, 37 bytes in all."""
    path = tmp_path / "key.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("") + struct.pack("<IB", UINT8, 1))
    assert path.stat().st_size == 37
    assert refusal(path) == "has an empty metadata key"


def test_a_directory_is_refused(tmp_path: Path) -> None:
    """B53: directory."""
    assert refusal(tmp_path) == "is a directory, not a model file"


def test_a_symlink_loop_is_refused(tmp_path: Path) -> None:
    """B53: symlink loop."""
    path = tmp_path / "loop.gguf"
    path.symlink_to(path)
    assert "symbolic links" in refusal(path)


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    """B53: FIFO, which would keep the start waiting for ever."""
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    assert refusal(path) == "is a FIFO, not a model file"


def test_a_device_is_refused_at_once() -> None:
    """B53: device, which never ends."""
    assert refusal(Path("/dev/zero")) == "is a device, not a model file"


def test_a_file_without_read_permission_is_refused(model: Path) -> None:
    """B53: no read permission; root, who may read everything, asks as nobody."""
    model.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        # Root may read everything; nobody may not.
        os.seteuid(65534)
    try:
        assert refusal(model) == "Permission denied"
    finally:
        if is_root:
            os.seteuid(0)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """B53: no file at all."""
    assert refusal(tmp_path / "none.gguf") == "No such file or directory"


def test_a_file_cut_anywhere_is_refused(model: Path) -> None:
    whole = model.read_bytes()
    ends = [*range(0, 2048, 7), *range(2048, len(whole), 4099), len(whole) - 1]
    for end in ends:
        model.write_bytes(whole[:end])
        assert refusal(model)


# --- Other damage that the native loader does not survive, or that would mislead. ---

WRONG_TYPE = "has a value of the wrong type under "
DAMAGED = {
    "names no architecture": ([], [], "does not name its architecture"),
    "a key twice": ([ARCHITECTURE, ARCHITECTURE], [], "has the metadata key 'general.architecture' twice"),
    "a key too long": ([string("k" * 65_536)], [], "has 65536 bytes in a metadata key"),
    "an unknown value type": ([pair("a.b", 77, b"")], [], "has a value of unknown type 77 under 'a.b'"),
    "an array of arrays": ([pair("a.b", ARRAY, struct.pack("<IQ", ARRAY, 0))], [], "has an array of unknown type 9"),
    "an array too long": ([pair("a.b", ARRAY, struct.pack("<IQ", UINT32, 2**61))], [], "do not fit"),
    "an array of strings too long": ([pair("a.b", ARRAY, struct.pack("<IQ", STRING, 2**60))], [], "do not fit"),
    "a string in an array too long": (
        [pair("a.b", ARRAY, struct.pack("<IQQ", STRING, 1, 2**62))],
        [],
        "bytes in a string of 'a.b' do not fit",
    ),
    "an architecture that is a number": ([pair("general.architecture", UINT32, bytes(4))], [], WRONG_TYPE),
    "tokens that are numbers": (
        [pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", UINT32, 0))],
        [],
        WRONG_TYPE,
    ),
    "fewer token types than tokens": (
        [
            ARCHITECTURE,
            pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 1) + string("a")),
            pair("tokenizer.ggml.token_type", ARRAY, struct.pack("<IQ", INT32, 0)),
        ],
        [],
        "has fewer values under 'tokenizer.ggml.token_type' than tokens",
    ),
    "an alignment of 24": (
        [ARCHITECTURE, pair("general.alignment", UINT32, struct.pack("<I", 24))],
        [],
        "has an alignment of 24",
    ),
    "an alignment of another type": ([pair("general.alignment", UINT64, bytes(8))], [], WRONG_TYPE),
    "five dimensions": ([ARCHITECTURE], [tensor(shape=(1, 1, 1, 1, 1))], "gives tensor 't' 5 dimensions"),
    "a dimension of 0": ([ARCHITECTURE], [tensor(shape=(0,))], "the impossible shape [0]"),
    "a product beyond 64 bits": ([ARCHITECTURE], [tensor(shape=(2**40, 2**40))], "the impossible shape"),
    "an unknown tensor type": ([ARCHITECTURE], [tensor(kind=99)], "in the unknown or withdrawn type 99"),
    "a withdrawn tensor type": ([ARCHITECTURE], [tensor(kind=4)], "in the unknown or withdrawn type 4"),
    "rows that are no whole blocks": ([ARCHITECTURE], [tensor(shape=(33,), kind=8)], "not a multiple of 32"),
    "an offset out of line": ([ARCHITECTURE], [tensor(offset=4)], "not a multiple of 32"),
    "an offset beyond the end": ([ARCHITECTURE], [tensor(offset=2**62)], "is cut short or damaged"),
    "a tensor's name too long": ([ARCHITECTURE], [tensor(name="t" * 64)], "has 64 bytes in a tensor's name"),
    "a tensor twice": ([ARCHITECTURE], [tensor(), tensor(offset=128)], "names a tensor twice"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_refuses_a_file_with(damage: str, tmp_path: Path) -> None:
    pairs, tensors, reason = DAMAGED[damage]
    assert reason in refusal(made(tmp_path / "damaged.gguf", pairs, tensors))


@pytest.mark.parametrize(
    ("version", "reason"), [(1, "has version 1"), (4, "has version 4"), (3 << 24, "is for a big-endian machine")]
)
def test_refuses_a_version_that_libllama_cannot_read(version: int, reason: str, tmp_path: Path) -> None:
    assert reason in refusal(made(tmp_path / "old.gguf", [ARCHITECTURE], version=version))


def test_knows_the_tensor_types_of_the_pinned_libllama() -> None:
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    # The very copy that llama_cpp maps, so that the process still holds one libggml.
    ggml = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libggml-base.so.0"))
    ggml.ggml_type_size.restype = ctypes.c_size_t
    ggml.ggml_blck_size.restype = ctypes.c_int64
    withdrawn = {4, 5, 31, 32, 33, 36, 37, 38}
    assert set(BLOCKS) == set(range(43)) - withdrawn
    for kind, block in BLOCKS.items():
        assert (ggml.ggml_blck_size(kind), ggml.ggml_type_size(kind)) == block
