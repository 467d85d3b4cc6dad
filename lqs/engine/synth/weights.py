"""The values of a made-up model's tensors: random, or such that it says a given text."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lqs.engine.synth.container import F16, Q8_0, Place

Values = NDArray[np.float32]

# How far the scripted token's logit stands above all others, before the norm's own factor.
SCRIPT_GAIN = 8.0


def random(place: Place, seed: int, silent: Sequence[int] = ()) -> Values:
    """Random values for a tensor, the same for the same seed and name.

    `silent`: tokens whose logit is always 0, so that greedy sampling never picks them by chance.
    """
    generator = np.random.default_rng([seed, zlib.crc32(place.name.encode())])
    shape = place.dimensions[::-1]
    if place.name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if place.name.endswith("ssm_a"):
        # A state that decays: its eigenvalues are negative.
        return -generator.uniform(0.5, 2.0, shape).astype(np.float32)
    values = generator.standard_normal(shape, np.float32)
    values *= np.float32(place.dimensions[0] ** -0.5)
    if place.name == "output.weight":
        values[list(silent)] = 0
    return values


def scripted(place: Place, script: Sequence[int], end: int) -> Values:
    """Values for a model that says the tokens of `script`, then `end`, whatever the prompt was.

    No layer adds anything, so a token's logits depend on that token alone. A token of the script has a
    direction of its own in the embedding, all others share direction 0, and the row of each next token
    in the output looks into the direction of the one before it.
    """
    shape = place.dimensions[::-1]
    if place.name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    values = np.zeros(shape, np.float32)
    if place.name == "token_embd.weight":
        values[:, 0] = 1
        for direction, token in enumerate(script, start=1):
            values[token] = 0
            values[token, direction] = 1
    elif place.name == "output.weight":
        for direction, token in enumerate([*script, end]):
            values[token, direction] = SCRIPT_GAIN
    return values


def check_script(script: Sequence[int], num_directions: int) -> None:
    """Raise ValueError for a script that no such model can say."""
    if len(set(script)) < len(script):
        raise ValueError("a script cannot hold a token twice: what follows depends on the token before alone")
    if len(script) >= num_directions:
        raise ValueError(f"a script of {len(script)} tokens needs an embedding of {len(script) + 1}")


def encode(values: Values, kind: int) -> bytes:
    """The tensor's bytes in its type."""
    if kind == F16:
        return values.astype("<f2").tobytes()
    if kind == Q8_0:
        return _q8_0(values)
    return values.astype("<f4", copy=False).tobytes()


def _q8_0(values: Values) -> bytes:
    """Blocks of 32 values: a 16-bit scale, then the values as 8-bit multiples of it."""
    blocks = values.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1) / 127).astype("<f2")
    divisors = np.where(scales == 0, np.float32(1), scales.astype(np.float32))
    packed = np.empty(len(blocks), np.dtype([("scale", "<f2"), ("values", "i1", 32)]))
    packed["scale"] = scales
    packed["values"] = np.clip(np.rint(blocks / divisors[:, None]), -127, 127).astype(np.int8)
    return packed.tobytes()
