"""What an operator can set about the device slots and their steps; `[engine]`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from lqs.describe import CORES, key


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The device slots and how each runs its steps."""

    devices: Annotated[
        tuple[str, ...],
        key(
            "Device slots: auto, cpu:N, cuda:N (also by UUID or place on the bus); cuda:0+cuda:1 is one over both.",
            min_length=1,
            max_length=64,
        ),
    ] = ("auto",)
    cores: Annotated[
        tuple[Annotated[str, Meta(pattern=CORES)], ...],
        key("Cores of cpu:0, cpu:1, ...: 0-3, 4,6; empty: all, shared.", min_length=0, max_length=64),
    ] = ()
    memory_mb: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=1 << 40)], ...],
        key(
            "KV and compute buffers of cpu:0, cpu:1, ... take at most so much; 0: no bound; the last stands for the "
            "rest.",
            "MB",
            min_length=0,
            max_length=64,
        ),
    ] = ()
    threads: Annotated[
        int,
        key("Threads of a CPU device slot; 0: its share of the cores.", "threads", ge=0, le=512),
    ] = 0
    parallel: Annotated[
        int,
        key("Sequences per device slot; fewer where memory is short: one for 256 tokens.", "sequences", ge=1, le=256),
    ] = 32
    urgent_sequences: Annotated[
        int,
        key("Beside those: for requests of a better class than one that runs.", "sequences", ge=0, le=255),
    ] = 4
    ctx: Annotated[
        int,
        key(
            "KV cells per device slot, shared by its sequences; 0: from memory and model; else at least 256.",
            "tokens",
            ge=0,
            le=16_777_216,
        ),
    ] = 0
    n_batch: Annotated[int, key("Most tokens of one step.", "tokens", ge=1, le=65_536)] = 512
    n_ubatch: Annotated[
        int,
        key(
            "Most tokens computed at once within a step; from 64 on texts may depend on the batch.",
            "tokens",
            ge=1,
            le=65_536,
        ),
    ] = 63
    gpu_ubatch: Annotated[
        int, key("The same on a GPU, where texts depend on the batch anyway.", "tokens", ge=1, le=65_536)
    ] = 512
    kv_unified: Annotated[bool, key("One KV budget for all sequences; false: an equal part each.")] = True
    kv_mode: Annotated[
        str,
        key(
            "expected: KV is promised by how long answers come out, and grows; guaranteed: for the longest answer.",
            pattern="^(expected|guaranteed)$",
        ),
    ] = "expected"
    kv_block_tokens: Annotated[int, key("A promise grows by so much at once.", "tokens", ge=8, le=65_536)] = 32
    swap_mb: Annotated[
        int,
        key(
            "Host memory per device slot for requests that gave up their KV for better ones; 0: computed again.",
            "MB",
            ge=0,
            le=1_048_576,
        ),
    ] = 256
    prefix_cache: Annotated[bool, key("Keep finished sequences to answer the same beginning sooner.")] = True
    prefix_sequences: Annotated[
        int, key("Finished sequences kept beside the running ones.", "sequences", ge=0, le=255)
    ] = 32
    prefix_shared: Annotated[bool, key("Keys share the prefix cache and could guess prompts of others by time.")] = (
        False
    )
    flash_attention: Annotated[bool, key("Use flash attention where the model allows it.")] = True
    inter_token_target_ms: Annotated[
        float,
        key("Prefill leaves a step at most so long while others decode.", "ms", gt=0, le=60_000),
    ] = 200.0
    kv_margin_mb: Annotated[int, key("Memory that is left free beside weights and KV.", "MB", ge=0, le=1_048_576)] = 512
    gpu_margin_mb: Annotated[
        int,
        key("The same on each GPU; while less is free, as much less is promised there.", "MB", ge=0, le=1_048_576),
    ] = 1024
    loaded_mb: Annotated[
        int,
        key(
            "All loaded models take at most so much of a device; 0: what is free at the start.", "MB", ge=0, le=1 << 40
        ),
    ] = 0
    load_patience_s: Annotated[
        float,
        key(
            "A model that waits longer for memory than that closes the one that was used least lately to newcomers.",
            "s",
            ge=0,
            le=86_400,
        ),
    ] = 10.0
    out_buffer_bytes: Annotated[
        int,
        key(
            "Text made and not yet sent, per request; full: the sequence pauses.",
            "bytes",
            ge=4096,
            le=16_777_216,
        ),
    ] = 65_536
    stall_s: Annotated[
        float,
        key("A step that takes longer, and ten times as long as the slowest measured, never ends.", "s", gt=0, le=3600),
    ] = 30.0

    @property
    def grows_kv(self) -> bool:
        """Whether KV is promised by how long answers come out, and grows."""
        return self.kv_mode == "expected" and self.kv_unified
