"""Time per draw, beside llama.cpp's own chain on the same logits.

    python bench/core/sampling.py [vocabulary size] [logits.npy]

Without a file the rows are noise with a few hundred likely tokens, which is the shape a
model's rows have. Both sides start from a plain row of floats: llama.cpp's chain needs
its candidate array filled first, so that is part of its time, as in llama_sampler_sample.
"""

import ctypes
import sys
import time
from collections.abc import Callable

import llama_cpp
import numpy as np

from lqs._engine import SamplerProbe, TextProbe

CHAINS = {
    "greedy": {"temperature": 0.0},
    "common (top_k 40, top_p 0.95, min_p 0.05)": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "common, penalties over 64": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.1},
    "whole vocabulary": {"temperature": 1.0},
    "whole vocabulary, top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "whole vocabulary, min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
}


def make_row(n_vocab: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    row = rng.standard_normal(n_vocab) * 2
    row[rng.choice(n_vocab, 300, replace=False)] += rng.exponential(4, 300)
    return row.astype(np.float32)


def best_us(call: Callable[[int], object], num: int, repeats: int = 7) -> float:
    """Microseconds per draw in the best of some repeats: the machine's noise only adds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call(num)
        times.append((time.perf_counter() - start) / num * 1e6)
    return min(times)


class Chain:
    """llama.cpp's samplers with the same options, driven through its C interface."""

    def __init__(self, row: np.ndarray, options: dict) -> None:
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for sampler in self._samplers(len(row), options):
            llama_cpp.llama_sampler_chain_add(self._chain, sampler)
        self._fresh = np.zeros(len(row), dtype=[("id", "i4"), ("logit", "f4"), ("p", "f4")])
        self._fresh["id"], self._fresh["logit"] = np.arange(len(row)), row
        self._room = self._fresh.copy()

    @staticmethod
    def _samplers(n_vocab: int, options: dict) -> list:
        if options["temperature"] <= 0:
            return [llama_cpp.llama_sampler_init_greedy()]
        chain = []
        if "repeat_penalty" in options:
            chain.append(llama_cpp.llama_sampler_init_penalties(n_vocab, 64, options["repeat_penalty"], 0.0, 0.0))
            for token in range(64):
                llama_cpp.llama_sampler_accept(chain[0], token)
        if "top_k" in options:
            chain.append(llama_cpp.llama_sampler_init_top_k(options["top_k"]))
        if "top_p" in options:
            chain.append(llama_cpp.llama_sampler_init_top_p(options["top_p"], 0))
        if "min_p" in options:
            chain.append(llama_cpp.llama_sampler_init_min_p(options["min_p"], 0))
        return [*chain, llama_cpp.llama_sampler_init_temp(options["temperature"]), llama_cpp.llama_sampler_init_dist(1)]

    def run(self, num: int) -> None:
        for _ in range(num):
            self._room[:] = self._fresh
            array = llama_cpp.llama_token_data_array(
                ctypes.cast(self._room.ctypes.data, ctypes.POINTER(llama_cpp.llama_token_data)),
                len(self._room),
                -1,
                False,
            )
            llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._chain)


def main() -> None:
    n_vocab = int(sys.argv[1]) if len(sys.argv) > 1 else 49_152
    row = np.load(sys.argv[2]).astype(np.float32).ravel()[-n_vocab:].copy() if len(sys.argv) > 2 else make_row(n_vocab)
    print(f"{'microseconds per draw, ' + str(n_vocab) + ' tokens':46}{'lqs':>8}{'llama.cpp':>12}")
    for name, options in CHAINS.items():
        prompt = list(range(64)) if "repeat_penalty" in options else []
        probe = SamplerProbe(n_vocab, prompt=prompt, **options)
        ours = best_us(lambda num, probe=probe: probe.run(row, num), 500)
        chain = Chain(row, options)
        theirs = best_us(chain.run, 20)
        chain.close()
        print(f"{name:46}{ours:8.2f}{theirs:12.2f}")
    text = TextProbe([b" piece"] * n_vocab)
    probe = SamplerProbe(n_vocab)
    for num_top in (0, 5, 20):
        ours = best_us(lambda num, k=num_top: [probe.logprobs(text, row, 7, k) for _ in range(num)], 200)
        print(f"{f'logprobs, top {num_top}':46}{ours:8.2f}{'-':>12}")


if __name__ == "__main__":
    main()
