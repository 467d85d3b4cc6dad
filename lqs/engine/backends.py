"""What the installed llama-cpp-python can compute with, without loading it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def has_cuda() -> bool:
    """Whether it was built with CUDA: that comes as a library of its own."""
    spec = find_spec("llama_cpp")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    return folder is not None and any((folder / "lib").glob("libggml-cuda*"))
