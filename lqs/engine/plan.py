"""What a config means on this machine for one model: device slots, threads, memory, how much context fits.

Everything is computed from the config, the model file's header and what the machine has; nothing
is loaded. `lqs check` prints it, `lqs serve` does it. Memory is counted by pool: the machine's own, that
CPU device slots and GPUs without a memory share, and one for each other GPU.

    what is free in the pool - margin - what other models take     the room
    - weights, once for all CPU device slots, once for each other   engine/needs.py
    - compute buffers of each device slot
    = KV of the pool's device slots, in equal parts
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lqs.config import Config
from lqs.engine.cores import memory_free_bytes
from lqs.engine.fitting import (
    Planner,
    Size,
    SlotPlan,
    budget_bytes,
    in_pads,
    padded,
    tokens_within,
    weights_by_pool,
)
from lqs.engine.gguf import read_header
from lqs.engine.needs import Needs, needs_of
from lqs.errors import StartError
from lqs.placement.gpus import SYSTEM_POOL, headroom_bytes
from lqs.placement.survey import Group, Survey, no_gpus

_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to use: cores this process may run on, memory not yet taken, and GPUs."""

    num_cores: int
    memory_free_bytes: int
    survey: Survey = field(default_factory=no_gpus)


@dataclass(frozen=True, slots=True)
class Plan:
    """The outcome for one model.

    `room` is what it may take of each pool, `all_room` what all models may, `takes` what it does; None: nobody knows.
    """

    machine: Machine
    slots: tuple[SlotPlan, ...]
    needs: Needs
    room: Mapping[str, int | None]
    all_room: Mapping[str, int | None]
    takes: Mapping[str, int]
    request_tokens_max: int
    num_extra: int  # Sequences for urgent requests.

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of its device slots."""
        return tuple(str(slot.group) for slot in self.slots)

    @property
    def threads(self) -> int:
        """Threads of the first device slot."""
        return self.slots[0].threads

    @property
    def weights_bytes(self) -> int:
        """The weights, once."""
        return self.needs.weights_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """One KV cell over all layers."""
        return self.needs.kv_bytes

    @property
    def n_ctx_train(self) -> int:
        """The context that the model was made for."""
        return self.needs.n_ctx_train

    @property
    def kv_tokens(self) -> int:
        """KV cells of the largest device slot."""
        return max(slot.kv_tokens for slot in self.slots)

    @property
    def num_sequences(self) -> int:
        """Sequences of all device slots."""
        return sum(slot.num_sequences for slot in self.slots)

    @property
    def num_cells(self) -> int:
        """The same as llama.cpp makes them."""
        return padded(self.kv_tokens)

    @property
    def kv_bytes(self) -> int:
        """KV cache of all device slots."""
        return sum(slot.kv_tokens for slot in self.slots) * self.kv_bytes_per_token


def make_plan(
    config: Config,
    path: Path,
    machine: Machine | None = None,
    *,
    taken: Mapping[str, int] | None = None,
    num_sharing: int = 1,
) -> Plan:
    """Plan the config, as the model sees it, for its file. Raises ModelFileError, ConfigError, DeviceError.

    `taken` is what other models take, by pool; `num_sharing` models share what is left for KV.
    """
    header = read_header(path)
    machine = machine or probe_machine()
    groups = machine.survey.groups(config.engine.devices)
    needs = needs_of(config, header)
    all_room = _room(config, groups, machine)
    room = {pool: None if free is None else free - (taken or {}).get(pool, 0) for pool, free in all_room.items()}
    planner = Planner(config, groups, needs, room, machine.num_cores, num_sharing)
    slots = tuple(map(planner.slot, groups))
    takes = weights_by_pool(groups, needs)
    for slot in slots:
        takes.update(slot.takes)
    least = min(slot.kv_tokens for slot in slots)
    sizes = [Size(slot.kv_tokens, slot.num_sequences) for slot in slots]
    return Plan(
        machine=machine,
        slots=slots,
        needs=needs,
        room=room,
        all_room=all_room,
        takes=takes,
        request_tokens_max=min(longest(config, sizes), needs.n_ctx_train),
        num_extra=_num_extra(config, least),
    )


def longest(config: Config, sizes: Sequence[Size]) -> int:
    """The most tokens of a request on device slots of these sizes.

    A cache that is split has a part for each sequence, and the core does not know whose are the larger ones.
    """
    if config.engine.kv_unified:
        return max(size.kv_tokens for size in sizes)
    return min(size.kv_tokens // size.num_sequences for size in sizes)


def check_fits(config: Config, plan: Plan) -> None:
    """Raises StartError unless weights, KV, compute buffers and margin are within the memory that is free.

    And where a device slot takes more than `engine.memory_mb` lets it.
    """
    for slot in plan.slots:
        _check_budget(config, plan, slot)
    for pool, takes in plan.takes.items():
        room = plan.room[pool]
        if room is None or takes <= room:
            continue
        slots = [slot for slot in plan.slots if pool in slot.takes]
        over = takes - room
        a_token = sum(-(-plan.needs.token_bytes(slot.group) // len(slot.group.pools)) for slot in slots)
        most = in_pads(slots[0].kv_tokens - -(-over // max(a_token, 1)))
        lower = f"at most {most}" if most > 0 else "or engine.kv_margin_mb lower, or a smaller model"
        where = "" if pool == SYSTEM_POOL else f" on {pool}"
        raise StartError(
            f"It does not fit{where}: engine.ctx {slots[0].kv_tokens} is too large here; {lower}, or free some memory."
        )


def _check_budget(config: Config, plan: Plan, slot: SlotPlan) -> None:
    """A context that was set by hand is not cut, so it is told."""
    budget = budget_bytes(config, slot.group)
    if not budget or slot.takes[SYSTEM_POOL] <= budget:
        return
    most = in_pads(tokens_within(budget, slot.group, plan.needs))
    lower = f"set at most {most}, or 0 for what fits, or more memory" if most > 0 else "set more memory"
    raise StartError(
        f"engine.memory_mb: {budget // _MB} MB for {slot.group}, and engine.ctx {slot.kv_tokens} takes "
        f"{-(-slot.takes[SYSTEM_POOL] // _MB)} MB there; {lower}."
    )


def probe_machine() -> Machine:
    """Cores that this process may use, and memory that is available, cgroup limits included; no GPUs."""
    return Machine(len(os.sched_getaffinity(0)), memory_free_bytes())


def _room(config: Config, groups: Sequence[Group], machine: Machine) -> dict[str, int | None]:
    """What may be taken of each pool, the margin left out: the larger one where cores and a GPU share it."""
    engine = config.engine
    known: dict[str, list[int]] = {pool: [] for group in groups for pool in group.pools}
    for group in groups:
        if group.is_cpu:
            known[SYSTEM_POOL].append(machine.memory_free_bytes - engine.kv_margin_mb * _MB)
        for gpu in group.gpus:
            headroom = headroom_bytes(gpu, engine.gpu_margin_mb * _MB)
            known[gpu.pool] += [] if headroom is None else [headroom]
    return {pool: min(rooms, default=None) for pool, rooms in known.items()}


def _num_extra(config: Config, kv_tokens: int) -> int:
    """Sequences for urgent requests: as many as are wanted and llama.cpp and a step have room for.

    One of its 256 lays the cells out. A cache that is split would be cut smaller for them.
    """
    engine = config.engine
    left = min(255, engine.n_batch, kv_tokens) - engine.parallel
    return max(min(engine.urgent_sequences, left), 0) if engine.kv_unified else 0
