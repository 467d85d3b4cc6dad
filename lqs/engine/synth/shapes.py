"""The sizes of a made-up model, and the tensors that follow from them for each architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

ARCHITECTURES = ("llama", "gemma2", "mamba")
MAMBA_CONV, MAMBA_STATE = 4, 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. `vocab` is the least number of tokens; the made-up vocabulary has some 400 of its own."""

    layer: int = 2
    embd: int = 64
    head: int = 4
    head_kv: int = 2
    ff: int = 128
    ctx: int = 1024
    vocab: int = 0

    def __post_init__(self) -> None:
        if min(self.layer, self.embd, self.head, self.head_kv, self.ff, self.ctx) < 1 or self.vocab < 0:
            raise ValueError("every size of a shape is at least 1")
        if self.embd % 32 or self.ff % 32:
            raise ValueError("embd and ff must be multiples of 32, the block of q8_0")
        if self.embd % (2 * self.head) or self.head % self.head_kv:
            raise ValueError("embd must be a multiple of 2 * head, and head a multiple of head_kv")

    @property
    def head_size(self) -> int:
        return self.embd // self.head


PRESETS = {
    "tiny": Shape(),
    "small": Shape(layer=4, embd=128, head=4, head_kv=4, ff=256, ctx=2048),
    "135m": Shape(layer=30, embd=576, head=9, head_kv=3, ff=1536, ctx=8192, vocab=49152),
    "1b": Shape(layer=16, embd=2048, head=32, head_kv=8, ff=8192, ctx=8192, vocab=128256),
}


def parse_shape(text: str) -> Shape:
    """A shape from `tiny`, `layer=4,embd=128` or both: `135m,ctx=2048`.

    Raises:
        ValueError: an unknown name or size; the message says what there is.
    """
    shape = PRESETS["tiny"]
    names = [field.name for field in fields(Shape)]
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals and name in PRESETS:
            shape = PRESETS[name]
        elif name in names and value.isdecimal():
            shape = replace(shape, **{name: int(value)})
        else:
            raise ValueError(f"{part!r} is not a shape: give one of {', '.join(PRESETS)}, or {'=N, '.join(names)}=N")
    return shape


def settings(architecture: str, shape: Shape) -> dict[str, int | float]:
    """The architecture's own metadata, without its prefix."""
    common: dict[str, int | float] = {
        "context_length": shape.ctx,
        "embedding_length": shape.embd,
        "block_count": shape.layer,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if architecture == "mamba":
        return common | {
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "ssm.conv_kernel": MAMBA_CONV,
            "ssm.inner_size": 2 * shape.embd,
            "ssm.state_size": MAMBA_STATE,
            "ssm.time_step_rank": _mamba_rank(shape),
        }
    common |= {
        "feed_forward_length": shape.ff,
        "attention.head_count": shape.head,
        "attention.head_count_kv": shape.head_kv,
        "rope.dimension_count": shape.head_size,
        "rope.freq_base": 10000.0,
    }
    if architecture == "gemma2":
        common |= {
            "attention.key_length": shape.head_size,
            "attention.value_length": shape.head_size,
            "attention.sliding_window": min(64, shape.ctx),
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
    return common


def tensors(architecture: str, shape: Shape, num_tokens: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and dimensions, the fastest varying first, in the order of the file."""
    yield "token_embd.weight", (shape.embd, num_tokens)
    for layer in range(shape.layer):
        for name, dimensions in _layer(architecture, shape):
            yield f"blk.{layer}.{name}", dimensions
    yield "output_norm.weight", (shape.embd,)
    # Gemma's output is its embedding, read once more.
    if architecture != "gemma2":
        yield "output.weight", (shape.embd, num_tokens)


def _layer(architecture: str, shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    if architecture == "mamba":
        return _mamba_layer(shape)
    num_kv = shape.head_size * shape.head_kv
    layer: list[tuple[str, tuple[int, ...]]] = [
        ("attn_norm.weight", (shape.embd,)),
        ("attn_q.weight", (shape.embd, shape.embd)),
        ("attn_k.weight", (shape.embd, num_kv)),
        ("attn_v.weight", (shape.embd, num_kv)),
        ("attn_output.weight", (shape.embd, shape.embd)),
        ("ffn_norm.weight", (shape.embd,)),
        ("ffn_gate.weight", (shape.embd, shape.ff)),
        ("ffn_up.weight", (shape.embd, shape.ff)),
        ("ffn_down.weight", (shape.ff, shape.embd)),
    ]
    if architecture == "gemma2":
        layer += [("post_attention_norm.weight", (shape.embd,)), ("post_ffw_norm.weight", (shape.embd,))]
    return layer


def _mamba_layer(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    inner, rank = 2 * shape.embd, _mamba_rank(shape)
    return [
        ("attn_norm.weight", (shape.embd,)),
        ("ssm_in.weight", (shape.embd, 2 * inner)),
        ("ssm_conv1d.weight", (MAMBA_CONV, inner)),
        ("ssm_conv1d.bias", (inner,)),
        ("ssm_x.weight", (inner, rank + 2 * MAMBA_STATE)),
        ("ssm_dt.weight", (rank, inner)),
        ("ssm_dt.bias", (inner,)),
        ("ssm_a", (MAMBA_STATE, inner)),
        ("ssm_d", (inner,)),
        ("ssm_out.weight", (inner, shape.embd)),
    ]


def _mamba_rank(shape: Shape) -> int:
    return max(1, shape.embd // 16)
