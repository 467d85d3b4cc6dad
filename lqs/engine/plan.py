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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lqs.config import Config
from lqs.engine.cores import cores_of, memory_free_bytes
from lqs.engine.gguf import read_header
from lqs.engine.needs import Needs, needs_of
from lqs.errors import ConfigError, StartError
from lqs.placement.gpus import SYSTEM_POOL, headroom_bytes
from lqs.placement.survey import Group, Survey, no_gpus

_MB = 1_000_000
# A default for all: that many whole contexts of the model, but not beyond this many tokens.
_AUTO_CONTEXTS = 4
_AUTO_TOKENS_MAX = 32_768
PAD_TOKENS = 256  # llama.cpp rounds the size of a context up to that.


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to use: cores this process may run on, memory not yet taken, and GPUs."""

    num_cores: int
    memory_free_bytes: int
    survey: Survey = field(default_factory=no_gpus)


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """One device slot. `parts` say how a model is split over its GPUs; `takes` are bytes by pool, weights left out."""

    group: Group
    threads: int
    kv_tokens: int
    takes: Mapping[str, int]
    cores: frozenset[int] = frozenset()
    parts: tuple[float, ...] = ()

    @property
    def num_cells(self) -> int:
        """KV cells as llama.cpp makes them: rounded up."""
        return padded(self.kv_tokens)


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
    planner = _Planner(config, groups, needs, room, machine.num_cores, num_sharing)
    slots = tuple(map(planner.slot, groups))
    takes = _weights_by_pool(groups, needs)
    for slot in slots:
        takes.update(slot.takes)
    least, most = min(slot.kv_tokens for slot in slots), max(slot.kv_tokens for slot in slots)
    per_sequence = most if config.engine.kv_unified else most // config.engine.parallel
    return Plan(
        machine=machine,
        slots=slots,
        needs=needs,
        room=room,
        all_room=all_room,
        takes=takes,
        request_tokens_max=min(per_sequence, needs.n_ctx_train),
        num_extra=_num_extra(config, least),
    )


def smaller(kv_tokens: int) -> int:
    """The next size to try where a context did not fit; 0: there is none."""
    half = kv_tokens // 2 // PAD_TOKENS * PAD_TOKENS
    return half if half >= PAD_TOKENS else 0


def check_fits(config: Config, plan: Plan) -> None:
    """Raises StartError unless weights, KV, compute buffers and margin are within the memory that is free."""
    for pool, takes in plan.takes.items():
        room = plan.room[pool]
        if room is None or takes <= room:
            continue
        slots = [slot for slot in plan.slots if pool in slot.takes]
        over = takes - room
        a_token = sum(-(-plan.needs.token_bytes(slot.group) // len(slot.group.pools)) for slot in slots)
        most = (slots[0].kv_tokens - -(-over // max(a_token, 1))) // PAD_TOKENS * PAD_TOKENS
        lower = f"at most {most}" if most > 0 else "or engine.kv_margin_mb lower, or a smaller model"
        where = "" if pool == SYSTEM_POOL else f" on {pool}"
        raise StartError(
            f"It does not fit{where}: engine.ctx {slots[0].kv_tokens} is too large here; {lower}, or free some memory."
        )


def probe_machine() -> Machine:
    """Cores that this process may use, and memory that is available, cgroup limits included; no GPUs."""
    return Machine(len(os.sched_getaffinity(0)), memory_free_bytes())


def padded(kv_tokens: int) -> int:
    """A context's size as llama.cpp makes it."""
    return -(-kv_tokens // PAD_TOKENS) * PAD_TOKENS


def _room(config: Config, groups: Sequence[Group], machine: Machine) -> dict[str, int | None]:
    """What may be taken of each pool, the margin left out."""
    room: dict[str, int | None] = {}
    for group in groups:
        if group.is_cpu:
            room[SYSTEM_POOL] = machine.memory_free_bytes - config.engine.kv_margin_mb * _MB
        for gpu in group.gpus:
            room[gpu.pool] = headroom_bytes(gpu, config.engine.gpu_margin_mb * _MB)
    return room


def _weights_by_pool(groups: Sequence[Group], needs: Needs) -> Counter[str]:
    """The machine's memory holds them once for all CPU device slots, a GPU its part for each of its own."""
    weights: Counter[str] = Counter()
    if any(group.is_cpu for group in groups):
        weights[SYSTEM_POOL] += needs.weights_bytes
    for group in groups:
        for gpu in group.gpus:
            weights[gpu.pool] += needs.weights_bytes // len(group.gpus)
    return weights


@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans the device slots of one model beside each other."""

    config: Config
    groups: Sequence[Group]
    needs: Needs
    room: Mapping[str, int | None]
    num_cores: int
    num_sharing: int

    def slot(self, group: Group) -> SlotPlan:
        """One device slot, with as much context as is set, or else useful and there."""
        engine, needs = self.config.engine, self.needs
        kv_tokens = engine.ctx or self._auto_tokens(group)
        each = needs.compute_bytes(group) + -(-kv_tokens * needs.token_bytes(group) // len(group.pools))
        cores = cores_of(engine.cores, group.number) if group.is_cpu else frozenset()
        num_cpu = sum(one.is_cpu for one in self.groups)
        share = len(cores) or max(self.num_cores // max(num_cpu, 1), 1)
        return SlotPlan(
            group=group,
            # A GPU's thread only sends work; one more would spin.
            threads=(engine.threads or share) if group.is_cpu else 1,
            kv_tokens=kv_tokens,
            takes=dict.fromkeys(group.pools, each),
            cores=cores,
            parts=_parts(group),
        )

    def _auto_tokens(self, group: Group) -> int:
        """As many cells as are useful and fit beside weights, compute buffers and margin; at least one pad."""
        needs = self.needs
        tokens = min(_AUTO_CONTEXTS * needs.n_ctx_train, max(_AUTO_TOKENS_MAX, needs.n_ctx_train))
        for pool in group.pools:
            fitting = self._fitting(group, pool)
            tokens = tokens if fitting is None else min(tokens, fitting)
        if budget := _budget_bytes(self.config, group):
            tokens = min(tokens, (budget - needs.compute_bytes(group)) // max(needs.token_bytes(group), 1))
            if tokens < PAD_TOKENS:
                what = f"{budget // _MB} MB hold no context of {PAD_TOKENS} tokens on {group}"
                raise ConfigError(f"engine.memory_mb: {what}.")
        return tokens // PAD_TOKENS * PAD_TOKENS

    def _fitting(self, group: Group, pool: str) -> int | None:
        """The cells that fit in a pool, None where nobody knows. Raises ConfigError for less than one pad."""
        free = self.room[pool]
        if free is None:
            return None
        weights = _weights_by_pool(self.groups, self.needs)[pool]
        here = [each for each in self.groups if pool in each.pools]
        left = free - weights - sum(map(self.needs.compute_bytes, here))
        # Of a cell each GPU of the group has its part.
        a_token = self.needs.token_bytes(group) * len(here) * self.num_sharing
        fitting = left * len(group.pools) // max(a_token, 1)
        if fitting < PAD_TOKENS:
            where = "" if pool == SYSTEM_POOL else f"on {pool} "
            raise ConfigError(
                f"engine.ctx: the model does not fit: {where}{max(free, 0) // _MB} MB may be taken, its weights take "
                f"{weights // _MB} MB. Free some memory, take a smaller model, or lower engine.kv_margin_mb or "
                "engine.gpu_margin_mb."
            )
        return fitting


def _parts(group: Group) -> tuple[float, ...]:
    """Layers go to the GPUs as their free memory stands; equally where one does not tell."""
    free = [gpu.memory_free_bytes for gpu in group.gpus]
    if not all(free):
        return (1.0,) * len(free)
    return tuple(float(each or 0) for each in free)


def _num_extra(config: Config, kv_tokens: int) -> int:
    """Sequences for urgent requests: as many as are wanted and llama.cpp and a step have room for.

    One of its 256 lays the cells out. A cache that is split would be cut smaller for them.
    """
    engine = config.engine
    left = min(255, engine.n_batch, kv_tokens) - engine.parallel
    return max(min(engine.urgent_sequences, left), 0) if engine.kv_unified else 0


def _budget_bytes(config: Config, group: Group) -> int:
    """What a CPU device slot may take beside the weights; 0: no bound."""
    budgets = config.engine.memory_mb
    return budgets[min(group.number, len(budgets) - 1)] * _MB if budgets and group.is_cpu else 0
