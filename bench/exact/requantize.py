"""Writes an f16 copy of a model: the kind of file whose sums depend on the size of a batch."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp

F16 = 1  # LLAMA_FTYPE_MOSTLY_F16


def to_f16(source: Path, target: Path) -> None:
    """Write `source` with its weights widened to f16. Raises RuntimeError where llama.cpp refuses."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = F16
    params.allow_requantize = True
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if code:
        raise RuntimeError(f"llama.cpp could not write {target}: code {code}")


if __name__ == "__main__":
    to_f16(Path(sys.argv[1]), Path(sys.argv[2]))
