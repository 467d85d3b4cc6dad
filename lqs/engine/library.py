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
from pathlib import Path
from typing import Any

import llama_cpp

from lqs import _engine
from lqs._core import Scheduler, Work
from lqs.engine.gguf import read_header
from lqs.engine.tokens import compile_markers
from lqs.errors import BadRequest, DeviceError, EngineFailed, ModelFileError, NoRoom
from lqs.request import Sampling

# Tokenizers that drop nothing of the text: only for them its bytes bound the number of tokens.
_LOSSLESS_TOKENIZERS = {"gpt2", "llama"}


def start(*, verbose: bool) -> None:
    """Set libllama up, once per process, before anything else of it is used.

    Raises DeviceError if this build of lqs does not fit the installed llama-cpp-python.
    """
    structs = {
        "llama_model_params": llama_cpp.llama_model_params,
        "llama_context_params": llama_cpp.llama_context_params,
        "llama_batch": llama_cpp.llama_batch,
    }
    _engine.install_callbacks(verbose=verbose)
    try:
        sizes = {name: ctypes.sizeof(struct) for name, struct in structs.items()}
        _engine.check_abi(llama_cpp.__version__, sizes)
    except _engine.EngineError as error:
        raise DeviceError(str(error)) from None
    _engine.backend_init()


def gpu_places() -> list[str]:
    """The places on the bus of the GPUs that libllama can use, in CUDA's order; empty where it does not say."""
    return _engine.gpu_places()


class Model:
    """A loaded model: its weights, vocabulary and header.

    Owner: the thread that loads and closes it; everything else may be called from any thread.
    """

    def __init__(self, path: Path) -> None:
        self.native = _engine.Model(str(path))

    def load(self, devices: Sequence[int] = (), parts: Sequence[float] = ()) -> None:
        """Check the file, then load it. Raises ModelFileError, which names it and the reason.

        `devices` are CUDA's numbers of the GPUs that share its layers as `parts` say; without any it stays in
        the machine's memory. The check comes first because libllama trusts a header: a damaged one can end
        the process.
        """
        read_header(self.native.path)
        try:
            self.native.load(devices=[f"CUDA{number}" for number in devices], parts=parts)
        except _engine.EngineError as error:
            raise ModelFileError(str(error)) from None
        native = self.native
        self.n_vocab: int = native.n_vocab
        self.meta: dict[str, str] = native.meta
        self.add_bos: bool = native.add_bos
        self.bos: int | None = native.bos if native.bos >= 0 else None
        self.control_texts = self._control_texts(native.special_texts)
        self.markers: re.Pattern[str] | None = compile_markers(self.control_texts)
        self.longest_piece_bytes = self._longest_piece_bytes()

    @property
    def progress(self) -> float:
        """How much is loaded, 0 to 1."""
        return self.native.progress

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of the file."""
        return self.native.chat_template

    def token_text(self, token: int) -> str:
        """A token as the vocabulary spells it, control tokens too."""
        return self.native.token_text(token)

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> array[int]:
        """Token ids of a text. Raises EngineFailed."""
        try:
            return self.native.tokenize(text, add_special, parse_special)
        except _engine.EngineError as error:
            raise EngineFailed(str(error)) from None

    def detokenize(self, ids: Sequence[int]) -> bytes:
        """The text of token ids, control tokens included. Raises BadRequest for unknown ids."""
        try:
            return self.native.detokenize(ids, special=True)
        except (_engine.EngineError, OverflowError) as error:
            raise BadRequest(f"tokens: {error}.", param="tokens") from None

    def grammar(self, gbnf: str) -> _engine.Grammar:
        """A grammar for this vocabulary. Raises BadRequest with what is wrong."""
        try:
            return _engine.Grammar(self.native, gbnf)
        except _engine.GrammarError as error:
            raise BadRequest(f"grammar: {error}.", param="grammar") from None

    def work(
        self,
        prompt: array[int],
        scope: int,
        sampling: Sampling,
        *,
        seed: int,
        grammar: _engine.Grammar | None,
        max_tokens: int,
    ) -> Work:
        """A request as the worker reads it. Raises BadRequest for what sampling cannot do."""
        try:
            return _engine.Completion(
                self.native,
                prompt,
                max_tokens=max_tokens,
                scope=scope,
                cache_prompt=sampling.cache_prompt,
                stops=list(sampling.stop),
                grammar=grammar,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                typical_p=sampling.typical_p,
                repeat_penalty=sampling.repeat_penalty,
                repeat_last_n=sampling.repeat_last_n,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                logit_bias=list(sampling.logit_bias),
                seed=seed,
                ignore_eos=sampling.ignore_eos,
                num_logprobs=sampling.num_logprobs,
            )
        except ValueError as error:
            raise BadRequest(f"{error}.") from None

    def close(self) -> bool:
        """Free the weights; False, and nothing is freed, while a device slot still stands on them."""
        try:
            self.native.close()
        except _engine.EngineError:
            return False
        # What was freed lies scattered over the arenas of threads that have ended, and is the process's until then.
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)
        return True

    def _control_texts(self, special: Sequence[str]) -> list[str]:
        """Texts that are control tokens only when parsed as such.

        Others in the vocabulary's list are matched in any text, whoever wrote it, and forge nothing.
        """
        return [text for text in special if self._is_control(text.encode())]

    def _is_control(self, text: bytes) -> bool:
        return self.native.tokenize(text, False, True) != self.native.tokenize(text, False, False)

    def _longest_piece_bytes(self) -> int | None:
        """Bytes of the longest token; None where tokens do not bound the bytes of a text."""
        if self.meta.get("tokenizer.ggml.model") not in _LOSSLESS_TOKENIZERS:
            return None
        longest_control = max((len(text.encode()) for text in self.control_texts), default=0)
        return max(self.native.longest_piece, longest_control, 1)


def make_worker(
    scheduler: Scheduler,
    slot: int,
    model: Model,
    *,
    n_ctx: int,
    n_seq: int,
    n_batch: int,
    n_ubatch: int,
    threads: int,
    kv_unified: bool,
    prefix_cache: bool,
    prefix_sequences: int,
    flash_attention: bool,
    inter_token_target_ms: float,
    n_extra: int,
    swap_bytes: int,
    kv_block: int,
    is_cpu: bool,
) -> _engine.Worker:
    """Open a worker, warm it up and calibrate its step and its swapping. Raises DeviceError; NoRoom for memory."""
    try:
        worker = _engine.Worker(
            scheduler,
            slot,
            model.native,
            n_ctx=n_ctx,
            n_seq=n_seq,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            # A GPU has computed a whole step in no time; cores would take longer for it than a start may.
            n_warm=n_ubatch if is_cpu else n_batch,
            threads=threads,
            kv_unified=kv_unified,
            prefix_cache=prefix_cache,
            num_cached=prefix_sequences,
            flash_attn=-1 if flash_attention else 0,
            n_extra=n_extra,
            swap_bytes=swap_bytes,
            kv_block=kv_block,
            # Where texts depend on the batch anyway, the order of the cells is worth nothing.
            compact=is_cpu,
        )
        worker.open()
        worker.calibrate(inter_token_target_ms)
        worker.calibrate_swap()
    except (_engine.NoRoom, MemoryError) as error:
        raise NoRoom(f"the device slot cannot be opened: {error}") from None
    except (_engine.EngineError, ValueError) as error:
        raise DeviceError(f"the device slot cannot be opened: {error}") from None
    return worker


class SchedulerBody:
    """The body of the scheduler's thread: native rounds until it is told to stop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._thread = _engine.SchedulerThread(scheduler)

    def run(self) -> None:
        """Run rounds until `stop`; holds no GIL."""
        self._thread.run()

    def snapshot(self) -> dict[str, Any]:
        """How long rounds have taken: in all, and how many up to each bound."""
        return self._thread.snapshot()

    def stop(self) -> None:
        """End `run` after its round; from any thread."""
        self._thread.stop()
