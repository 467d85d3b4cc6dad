"""The only door to libllama: the one module that imports llama_cpp and, after it, lqs._engine.

The order matters. Wheels hold no symlinks, so if `_engine` were first, libllama would be mapped
twice, with two sets of state. And llama_cpp installs a log callback in Python, which would take
the GIL inside llama_decode; `start` replaces it.
"""

from __future__ import annotations

import ctypes
import re
from array import array
from collections.abc import Sequence

import llama_cpp

from lqs import _engine  # isort: skip
from lqs._core import Scheduler, Work
from lqs.admission_free import compile_markers
from lqs.errors import BadRequest, DeviceError, ModelFileError
from lqs.request import Sampling
