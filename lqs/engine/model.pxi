# A model file in memory: its weights, its vocabulary and what its header says.
#
# Loading and tokenising release the GIL; llama.cpp's vocabulary calls are thread-safe.
# The weights may be shared by several workers: `close` refuses while one is open.

cdef int SPECIAL_ATTRS = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED | LLAMA_TOKEN_ATTR_UNKNOWN


cdef enum:
    SPLIT_MAX = 16


cdef cbool _on_progress(float progress, void* where) noexcept nogil:
    (<float*>where)[0] = progress
    return True


@cython.final
cdef class Model:
    """One GGUF file loaded by llama.cpp.

    Owner: the thread that loads and closes it. Reading (tokenize, detokenize, the fields)
    is safe from any thread once `load` has returned.
    """
    cdef llama_model* _model
    cdef const llama_vocab* _vocab
    cdef PieceTable _pieces
    cdef float _progress
    cdef int _num_open
    cdef readonly str path
    cdef readonly int32_t n_vocab
    cdef frozenset _eog

    def __cinit__(self, path):
        self.path = str(path)
        self._model = NULL
        self._vocab = NULL
        self._progress = 0.0
        self._num_open = 0

    def __dealloc__(self):
        self._free()

    cdef void _free(self) noexcept:
        if self._model != NULL:
            pieces_free(&self._pieces)
            llama_model_free(self._model)
            self._model = NULL

    def load(self, *, devices=(), parts=(), bint use_mmap=True):
        """Load the weights; `progress` (0..1) can be read from another thread meanwhile.

        They go onto `devices`, by libllama's names (CUDA0, ...), layers split as `parts` stand to each
        other; without any they stay in the machine's memory. Raises EngineError where llama.cpp refuses
        the file or knows no such device, ValueError for parts that are not one above 0 for each device.
        """
        cdef llama_model_params params = llama_model_default_params()
        cdef bytes raw = self.path.encode("utf-8", "surrogateescape")
        cdef const char* c_path = raw
        cdef list names = [str(name).encode() for name in devices]
        cdef int num_names = <int>len(names)
        cdef const char* c_names[SPLIT_MAX]
        cdef float c_parts[SPLIT_MAX]
        cdef int i
        if self._model != NULL:
            raise EngineError(f"{self.path} is loaded already")
        if num_names != len(parts) or num_names > SPLIT_MAX or any(not part > 0 for part in parts):
            raise ValueError(f"a part above 0 for each of at most {SPLIT_MAX} devices")
        for i in range(num_names):
            c_names[i] = names[i]
            c_parts[i] = parts[i]
        # All layers, or none.
        params.n_gpu_layers = -1 if num_names else 0
        params.load_mode = LLAMA_LOAD_MODE_MMAP if use_mmap else LLAMA_LOAD_MODE_NONE
        params.progress_callback = _on_progress
        params.progress_callback_user_data = &self._progress
        with nogil:
            self._model = lqs_load_model(c_path, params, c_names, c_parts, num_names)
        if self._model == NULL:
            raise EngineError(f"llama.cpp could not load {self.path}; its reason is in the log above")
        self._vocab = llama_model_get_vocab(self._model)
        self.n_vocab = llama_vocab_n_tokens(self._vocab)
        if pieces_build(&self._pieces, self._vocab) != 0:
            self._free()
            raise MemoryError("no memory for the table of token pieces")
        # Once: each request that ignores them asks, and the vocabulary is large.
        self._eog = frozenset(i for i in range(self.n_vocab) if pieces_is_eog(&self._pieces, i))

    def close(self):
        """Free the weights. Raises EngineError while a worker still uses them."""
        if self._num_open:
            raise EngineError(f"{self.path} is still used by {self._num_open} device slot(s)")
        self._free()

    cdef _require(self):
        if self._model == NULL:
            raise EngineError(f"{self.path} is not loaded")

    @property
    def progress(self) -> float:
        return self._progress

    @property
    def n_ctx_train(self) -> int:
        self._require()
        return llama_model_n_ctx_train(self._model)

    @property
    def n_params(self) -> int:
        self._require()
        return llama_model_n_params(self._model)

    @property
    def size_bytes(self) -> int:
        self._require()
        return llama_model_size(self._model)

    @property
    def desc(self) -> str:
        cdef char buf[256]
        self._require()
        llama_model_desc(self._model, buf, sizeof(buf))
        return buf.decode("utf-8", "replace")

    @property
    def can_reuse_prefix(self) -> bool:
        """Whether a sequence's tail can be cut: not for recurrent, hybrid or sliding-window memory."""
        self._require()
        return not (llama_model_is_recurrent(self._model) or llama_model_is_hybrid(self._model)
                    or llama_model_n_swa(self._model) > 0)

    @property
    def has_decoder(self) -> bool:
        self._require()
        return llama_model_has_decoder(self._model) and not llama_model_is_diffusion(self._model)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of f16 KV cache per token, from layers, KV heads and head size."""
        self._require()
        cdef int64_t head = llama_model_n_embd(self._model) // max(1, llama_model_n_head(self._model))
        return 2 * 2 * llama_model_n_layer(self._model) * llama_model_n_head_kv(self._model) * head

    @property
    def chat_template(self) -> str | None:
        self._require()
        cdef const char* text = llama_model_chat_template(self._model, NULL)
        return None if text == NULL else text.decode("utf-8", "replace")

    @property
    def meta(self) -> dict:
        """The header's scalar values as text, by key."""
        self._require()
        return {
            self._meta_text(i, True): self._meta_text(i, False)
            for i in range(llama_model_meta_count(self._model))
        }

    cdef str _meta_text(self, int32_t i, bint key):
        cdef char small[512]
        cdef int32_t n = self._meta_read(i, key, small, sizeof(small))
        if n < <int32_t>sizeof(small):
            return small[:max(n, 0)].decode("utf-8", "replace")
        large = bytearray(n + 1)
        cdef char* buf = large
        self._meta_read(i, key, buf, n + 1)
        return large[:n].decode("utf-8", "replace")

    cdef int32_t _meta_read(self, int32_t i, bint key, char* buf, size_t size):
        if key:
            return llama_model_meta_key_by_index(self._model, i, buf, size)
        return llama_model_meta_val_str_by_index(self._model, i, buf, size)

    @property
    def add_bos(self) -> bool:
        self._require()
        return llama_vocab_get_add_bos(self._vocab)

    @property
    def bos(self) -> int:
        """The start token's id, -1 where the vocabulary has none."""
        self._require()
        return llama_vocab_bos(self._vocab)

    @property
    def eos(self) -> int:
        self._require()
        return llama_vocab_eos(self._vocab)

    @property
    def eot(self) -> int:
        self._require()
        return llama_vocab_eot(self._vocab)

    @property
    def eog(self) -> frozenset:
        """Ids of every token that ends a generation."""
        self._require()
        return self._eog

    def token_text(self, int32_t token) -> str:
        """The token as the vocabulary spells it (control tokens too)."""
        self._require()
        if not 0 <= token < self.n_vocab:
            raise EngineError(f"token {token} is outside the vocabulary of {self.n_vocab}")
        return llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace")

    @property
    def special_texts(self) -> list:
        """Texts that become control tokens when parsed as such; what a client types must not."""
        self._require()
        found = []
        for i in range(self.n_vocab):
            if llama_vocab_get_attr(self._vocab, i) & SPECIAL_ATTRS or llama_vocab_is_eog(self._vocab, i):
                found.append(llama_vocab_get_text(self._vocab, i).decode("utf-8", "replace"))
        return found

    @property
    def longest_piece(self) -> int:
        """Bytes of the longest token: a text of n bytes has at least n / longest_piece tokens."""
        self._require()
        return self._pieces.longest

    def tokenize(self, bytes text, bint add_special=False, bint parse_special=False) -> array.array:
        """Token ids of `text`; with parse_special control-token texts become control tokens.

        Raises EngineError where llama.cpp cannot tokenise it.
        """
        self._require()
        cdef const char* raw = text
        cdef int32_t n = <int32_t>len(text)
        cdef array.array out = array.array("i", bytes(4 * (n + 8)))
        cdef int32_t* data = <int32_t*>out.data.as_ints
        cdef int32_t room = n + 8
        cdef int32_t made
        with nogil:
            made = lqs_tokenize(self._vocab, raw, n, data, room, add_special, parse_special)
        if made < 0 and made != INT32_MIN:
            room = -made
            out = array.array("i", bytes(4 * room))
            data = <int32_t*>out.data.as_ints
            with nogil:
                made = lqs_tokenize(self._vocab, raw, n, data, room, add_special, parse_special)
        if made < 0:
            raise EngineError("the text cannot be tokenised")
        array.resize(out, made)
        return out

    def detokenize(self, tokens, bint special=False) -> bytes:
        """The text of token ids; control tokens print only with `special`."""
        self._require()
        cdef array.array ids = array.array("i", tokens)
        cdef int32_t n = <int32_t>len(ids)
        if any(not 0 <= t < self.n_vocab for t in ids):
            raise EngineError(f"a token is outside the vocabulary of {self.n_vocab}")
        cdef int32_t room = 64 + n * 16
        cdef int32_t made = 0
        cdef bytearray out
        cdef char* buf
        for _ in range(2):
            out = bytearray(room)
            buf = out
            with nogil:
                made = lqs_detokenize(self._vocab, <llama_token*>ids.data.as_ints, n, buf, room, special)
            if made >= 0 or made == INT32_MIN:
                break
            room = -made
        if made < 0:
            raise EngineError("the tokens cannot be turned into text")
        return bytes(out[:made])
