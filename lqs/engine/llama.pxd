# libllama as its own header declares it. Only what lqs calls; every call is nogil.
#
# Calls that may throw are not used from here but through engine/_shim.h.

from libc.stdint cimport int32_t


cdef extern from "llama.h" nogil:
    ctypedef int32_t llama_token

    # --- vocabulary
    ctypedef struct llama_vocab:
        pass

    int32_t llama_vocab_n_tokens(const llama_vocab* vocab)
    const char* llama_vocab_get_text(const llama_vocab* vocab, llama_token token)
    bint llama_vocab_is_eog(const llama_vocab* vocab, llama_token token)
    bint llama_vocab_is_control(const llama_vocab* vocab, llama_token token)

    # --- samplers (grammars only: the rest of sampling is engine/sampling.pxi)
    ctypedef struct llama_sampler:
        pass

    ctypedef struct llama_token_data:
        llama_token id
        float logit
        float p
