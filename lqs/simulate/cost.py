"""What a step of a device slot takes: the cost model, and the calibration that it comes from.

    step = fixed + decode x tokens drawn + prefill x other tokens
         + context x (each token's own context, summed) + cells x tokens x filled cells

Its five numbers are fitted to real runs by least squares of the relative errors, none below 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from lqs.errors import ConfigError
from lqs.plain import open_plain

VERSION = 1
_Cost = Annotated[float, Meta(ge=0, le=1e12)]


class StepCost(Struct, frozen=True, forbid_unknown_fields=True):
    """Nanoseconds: of a step, of a token, of a token per token of context, of a token per filled cell."""

    fixed_ns: _Cost
    decode_ns: _Cost
    prefill_ns: _Cost
    context_ns: _Cost = 0.0
    cells_ns: _Cost = 0.0


class SlotShape(Struct, frozen=True, forbid_unknown_fields=True):
    """What bounds a device slot: sequences, KV tokens, tokens of a step, the longest request.

    `num_extra` sequences are for urgent requests alone. The step's `budget` is where it begins; it is
    steered towards steps of `target_ms` (0: it stays). `fine_budget` of it are for long prompts.
    """

    num_sequences: Annotated[int, Meta(ge=1, le=65_536)]
    kv_tokens: Annotated[int, Meta(ge=1, le=1_000_000_000)]
    budget: Annotated[int, Meta(ge=1, le=1_000_000)]
    batch_max: Annotated[int, Meta(ge=1, le=1_000_000)]
    context_tokens: Annotated[int, Meta(ge=2, le=1_000_000_000)]
    num_extra: Annotated[int, Meta(ge=0, le=65_536)] = 0
    fine_budget: Annotated[int, Meta(ge=1, le=1_000_000)] = 16
    target_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0


class Calibration(Struct, frozen=True, forbid_unknown_fields=True):
    """What `lqs check --calibrate` writes and `lqs simulate --cost` reads.

    `error_p50` and `error_max` say how far the model is off the runs that it was fitted to, as shares. `swap_ms` is
    what `swap_tokens` cells take to host memory and back, `recompute_ms` what computing them again takes; 0: unknown.
    """

    model: str
    machine: str
    threads: int
    devices: Annotated[int, Meta(ge=1, le=64)]
    cost: StepCost
    shape: SlotShape
    error_p50: float = 0.0
    error_max: float = 0.0
    swap_tokens: Annotated[int, Meta(ge=0)] = 0
    swap_ms: Annotated[float, Meta(ge=0)] = 0.0
    recompute_ms: Annotated[float, Meta(ge=0)] = 0.0
    version: int = VERSION


# The small default model on one thread of a server's CPU: for a first look, where nothing was measured.
EXAMPLE = Calibration(
    model="smollm2-135m-instruct",
    machine="example: one CPU thread",
    threads=1,
    devices=1,
    cost=StepCost(fixed_ns=5e6, decode_ns=7.5e6, prefill_ns=5.2e6, context_ns=5_000.0, cells_ns=400.0),
    shape=SlotShape(
        num_sequences=32,
        kv_tokens=32_768,
        budget=32,
        batch_max=512,
        context_tokens=8_192,
        num_extra=2,
        target_ms=200.0,
    ),
)


def load_calibration(path: str | Path) -> Calibration:
    """Read one. Raises ConfigError that names the file."""
    try:
        with open_plain(Path(path), "a calibration") as file:
            found = msgspec.json.decode(file.read(), type=Calibration)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: is no calibration: {error}. `lqs check --calibrate` writes one.") from None
    if found.version != VERSION:
        raise ConfigError(f"{path}: was written by another version of lqs; `lqs check --calibrate` writes a new one.")
    return found


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Write one, whole or not at all. Raises ConfigError."""
    draft = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}.") from None


def fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The coefficients, none below 0, with which the rows come nearest to the values, relatively.

    A coefficient that would be below 0 is taken out and the rest fitted again; with few of them
    that ends where the best solution is.
    """
    scaled = [[cell / value for cell in row] for row, value in zip(rows, values, strict=True)]
    used = list(range(len(rows[0])))
    while used:
        found = _least_squares([[row[i] for i in used] for row in scaled])
        worst = min(range(len(used)), key=lambda k: found[k] * _size(scaled, used[k]))
        if found[worst] >= 0:
            break
        used.pop(worst)
    found_at = dict(zip(used, found, strict=True)) if used else {}
    return [found_at.get(i, 0.0) for i in range(len(rows[0]))]


def _size(rows: Sequence[Sequence[float]], column: int) -> float:
    """How much a column counts for, so that coefficients of different units compare."""
    return sum(row[column] for row in rows) or 1.0


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """The x that brings every `row . x` nearest to 1, by the normal equations."""
    n = len(rows[0])
    # Columns of one size: else the elimination loses the small ones.
    sizes = [max((abs(row[i]) for row in rows), default=0.0) or 1.0 for i in range(n)]
    even = [[cell / size for cell, size in zip(row, sizes, strict=True)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in even) for j in range(n)] + [sum(row[i] for row in even)] for i in range(n)
    ]
    return [x / size for x, size in zip(_solve(matrix), sizes, strict=True)]


def _solve(matrix: list[list[float]]) -> list[float]:
    """Gauss-Jordan; a column that says nothing new gets 0."""
    n = len(matrix)
    for i in range(n):
        pivot = max(range(i, n), key=lambda row: abs(matrix[row][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-12:
            matrix[i] = [0.0] * (n + 1)
            matrix[i][i] = 1.0
        scale = matrix[i][i]
        matrix[i] = [cell / scale for cell in matrix[i]]
        for row in range(n):
            if row != i:
                factor = matrix[row][i]
                matrix[row] = [cell - factor * own for cell, own in zip(matrix[row], matrix[i], strict=True)]
    return [row[n] for row in matrix]
