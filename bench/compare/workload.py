"""The requests that comparisons send: text completions, whose prompts have no template around."""

from __future__ import annotations

from typing import Any

from bench.load.client import Client
from bench.load.drive import NextPayload
from bench.load.prompts import Prompts

GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 1}
# Lower is sooner; a server without classes ignores the field.
SHORT_PRIORITY, LONG_PRIORITY = 0, 4


def completions(client: Client, num_words: int, num_tokens: int, draw: int, **fields: Any) -> NextPayload:
    """Return a supply of streamed completions of `num_tokens` tokens, no two prompts alike.

    The same `draw` gives the same prompts: every server gets the same ones.
    """
    prompts = Prompts(num_words, draw)
    body = GREEDY | {
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= fields

    def next_payload() -> bytes:
        return client.payload("POST", "/v1/completions", body | {"prompt": prompts.next()})

    return next_payload
