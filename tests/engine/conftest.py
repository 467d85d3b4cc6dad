"""llama_cpp comes first: `lqs._engine` must find its libllama already loaded, or it is mapped twice."""

import llama_cpp  # noqa: F401
