# libllama's models, contexts and batches, and the worker's own C++ (engine/_native.h).
#
# Beside engine/llama.pxd, which has the vocabulary and the samplers. Every call is nogil;
# those of llama.h named here are plain reads or run before and after the worker's thread.

from libc.stddef cimport size_t
from libcpp cimport bool as cbool
from libc.stdint cimport int8_t, int32_t, int64_t, uint32_t, uint64_t

from lqs.engine.llama cimport llama_token, llama_vocab


cdef extern from "llama.h" nogil:
    ctypedef int32_t llama_pos
    ctypedef int32_t llama_seq_id
    ctypedef struct llama_model:
        pass
    ctypedef struct llama_context:
        pass

    const int LLAMA_TOKEN_ATTR_UNKNOWN
    const int LLAMA_TOKEN_ATTR_CONTROL
    const int LLAMA_TOKEN_ATTR_USER_DEFINED

    ctypedef enum llama_load_mode:
        LLAMA_LOAD_MODE_NONE
        LLAMA_LOAD_MODE_MMAP

    ctypedef cbool (*llama_progress_callback)(float progress, void* user_data) noexcept nogil

    ctypedef struct llama_model_params:
        int32_t n_gpu_layers
        llama_load_mode load_mode
        llama_progress_callback progress_callback
        void* progress_callback_user_data

    ctypedef struct llama_context_params:
        pass

    ctypedef struct llama_batch:
        int32_t n_tokens
        llama_token* token
        llama_pos* pos
        int32_t* n_seq_id
        llama_seq_id** seq_id
        int8_t* logits

    void llama_backend_init()
    llama_model_params llama_model_default_params()
    void llama_model_free(llama_model* model)
    const llama_vocab* llama_model_get_vocab(const llama_model* model)
    int32_t llama_model_n_ctx_train(const llama_model* model)
    int32_t llama_model_n_embd(const llama_model* model)
    int32_t llama_model_n_layer(const llama_model* model)
    int32_t llama_model_n_head(const llama_model* model)
    int32_t llama_model_n_head_kv(const llama_model* model)
    int32_t llama_model_n_swa(const llama_model* model)
    int32_t llama_model_meta_count(const llama_model* model)
    int32_t llama_model_meta_key_by_index(const llama_model* model, int32_t i, char* buf, size_t buf_size)
    int32_t llama_model_meta_val_str_by_index(const llama_model* model, int32_t i, char* buf, size_t buf_size)
    int32_t llama_model_desc(const llama_model* model, char* buf, size_t buf_size)
    uint64_t llama_model_size(const llama_model* model)
    uint64_t llama_model_n_params(const llama_model* model)
    const char* llama_model_chat_template(const llama_model* model, const char* name)
    bint llama_model_has_decoder(const llama_model* model)
    bint llama_model_is_recurrent(const llama_model* model)
    bint llama_model_is_hybrid(const llama_model* model)
    bint llama_model_is_diffusion(const llama_model* model)

    int llama_vocab_get_attr(const llama_vocab* vocab, llama_token token)
    llama_token llama_vocab_bos(const llama_vocab* vocab)
    llama_token llama_vocab_eos(const llama_vocab* vocab)
    llama_token llama_vocab_eot(const llama_vocab* vocab)
    bint llama_vocab_get_add_bos(const llama_vocab* vocab)

    ctypedef void* llama_memory_t
    llama_memory_t llama_get_memory(const llama_context* ctx)
    llama_pos llama_memory_seq_pos_max(llama_memory_t memory, llama_seq_id seq)
    void llama_free(llama_context* ctx)
    uint32_t llama_n_ctx(const llama_context* ctx)
    uint32_t llama_n_ctx_seq(const llama_context* ctx)
    void llama_set_n_threads(llama_context* ctx, int32_t n_threads, int32_t n_threads_batch)
    void llama_synchronize(llama_context* ctx)
    llama_batch llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max)
    void llama_batch_free(llama_batch batch)


cdef extern from "engine/_native.h" nogil:
    const int32_t INT32_MIN
    const int GGML_LOG_LEVEL_INFO
    const int GGML_LOG_LEVEL_ERROR
    const char* LQS_LLAMA_CPP_PYTHON
    const int LQS_IS_TRACED

    ctypedef void (*lqs_death_fn)(void* worker, const char* message) noexcept nogil

    int64_t lqs_now_ns()
    int64_t lqs_preemptions()
    void lqs_say(const char* text)
    void lqs_install_callbacks(lqs_death_fn on_death, int log_level_min)
    void lqs_bind_worker(void* worker)
    void lqs_abort_on_helper()
    void lqs_sleep(int64_t ns)

    int32_t lqs_decode(llama_context* ctx, llama_batch batch)
    float* lqs_logits(llama_context* ctx, int32_t i)
    int lqs_seq_rm(llama_context* ctx, llama_seq_id seq, llama_pos p0, llama_pos p1)
    int lqs_seq_cp(llama_context* ctx, llama_seq_id from_seq, llama_seq_id to_seq, llama_pos p0, llama_pos p1)
    size_t lqs_state_size(llama_context* ctx, llama_seq_id seq)
    size_t lqs_state_get(llama_context* ctx, char* out, llama_seq_id seq)
    bint lqs_state_set(llama_context* ctx, const char* saved, size_t size, llama_seq_id seq)
    void lqs_memory_clear(llama_context* ctx)
    llama_model* lqs_load_model(const char* path, llama_model_params params, const char* const* names,
                                const float* parts, int num_names)
    const char* lqs_gpu_place(size_t number)
    llama_context* lqs_open_context(llama_model* model, llama_context_params params)
    llama_context_params lqs_context_params(uint32_t n_ctx, uint32_t n_batch, uint32_t n_ubatch, uint32_t n_seq,
                                            int32_t threads, bint unified, int flash)
    int32_t lqs_tokenize(const llama_vocab* vocab, const char* text, int32_t n, llama_token* out, int32_t out_max,
                         bint add_special, bint parse_special)
    int32_t lqs_detokenize(const llama_vocab* vocab, const llama_token* tokens, int32_t n, char* out, int32_t out_max,
                           bint special)
