"""How much memory a model takes, from its header: weights, KV, compute buffers.

Compute buffers are estimated, upwards. llama.cpp plans them for the worst case when it makes a context:
activations of one batch, an output of each sequence, and a mask of the batch over the whole context.
"""

from __future__ import annotations

from dataclasses import dataclass

from lqs.config import Config
from lqs.engine.gguf import ArrayShape, Header
from lqs.placement.survey import Group

_F16_BYTES, _F32_BYTES = 2, 4
_N_CTX_DEFAULT = 2048
# Tensors that live at once while a layer is computed: of its width, and of its feed-forward's.
_WIDE, _FEED = 8, 3
# A cell of the mask, for each token computed at once, also as f16 for flash attention.
_MASK_BYTES = 6


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes. `kv_bytes` is one cell over all layers, keys and values as f16."""

    weights_bytes: int
    kv_bytes: int
    n_ctx_train: int
    n_vocab: int
    width: int
    feed: int
    num_outputs: int
    cpu_batch: int  # Tokens computed at once.
    gpu_batch: int

    def token_bytes(self, group: Group) -> int:
        """What a token of context takes on a device slot: its cell, and its part of the mask."""
        return self.kv_bytes + self._batch(group) * _MASK_BYTES

    def compute_bytes(self, group: Group) -> int:
        """Compute buffers on each device of a device slot, but for the mask."""
        activations = self._batch(group) * (_WIDE * self.width + _FEED * self.feed) * _F32_BYTES
        return activations + self.num_outputs * self.n_vocab * _F32_BYTES

    def _batch(self, group: Group) -> int:
        return self.cpu_batch if group.is_cpu else self.gpu_batch


def needs_of(config: Config, header: Header) -> Needs:
    """What the header says, and the config makes of it."""
    engine = config.engine
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    # An output of each sequence id, whether the sequence runs or is cached.
    num_outputs = engine.parallel + engine.urgent_sequences + (engine.prefix_sequences if engine.prefix_cache else 0)
    width = _number(header, "embedding_length")
    return Needs(
        weights_bytes=header.size_bytes - header.data_offset,
        kv_bytes=_kv_bytes(header),
        n_ctx_train=_number(header, "context_length") or _N_CTX_DEFAULT,
        n_vocab=tokens.length if isinstance(tokens, ArrayShape) else 0,
        width=width,
        feed=_number(header, "feed_forward_length") or _WIDE // 2 * width,
        num_outputs=min(num_outputs + 1, 256),
        cpu_batch=min(engine.n_ubatch, engine.n_batch),
        gpu_batch=min(engine.gpu_ubatch, engine.n_batch),
    )


def _kv_bytes(header: Header) -> int:
    """Bytes of one cell over all layers, keys and values as f16."""
    num_heads = _number(header, "attention.head_count") or 1
    num_kv_heads = _number(header, "attention.head_count_kv") or num_heads
    head_size = _number(header, "embedding_length") // num_heads
    key_size = _number(header, "attention.key_length") or head_size
    value_size = _number(header, "attention.value_length") or head_size
    return _number(header, "block_count") * num_kv_heads * (key_size + value_size) * _F16_BYTES


def _number(header: Header, key: str) -> int:
    """A number of the model's architecture, 0 where it is missing or differs by layer."""
    value = header.metadata.get(f"{header.architecture}.{key}", 0)
    return value if isinstance(value, int) else 0
