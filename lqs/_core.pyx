# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, embedsignature=True
"""The core: rings, backlog, ledger and the scheduler's round."""

from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memset

include "core/rings.pxi"
include "core/round.pxi"
