"""What `lqs check` says of each model, and of the memory that all take together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lqs.engine.budget import num_together, room_of, staying, where
from lqs.engine.catalog import Entry
from lqs.engine.fitting import SEQUENCE_TOKENS
from lqs.engine.plan import Plan
from lqs.placement.gpus import SYSTEM_POOL

_MB = 1_000_000


def model_lines(entry: Entry, plan: Plan) -> Iterator[str]:
    """A model on its device slots."""
    num_slots = len(plan.slots)
    yield f"model      {entry.path.name}, context {plan.n_ctx_train} tokens{_names(entry)}"
    on_cpu = [slot for slot in plan.slots if slot.group.is_cpu]
    threads = f", {on_cpu[0].threads} threads each" if on_cpu else ""
    yield f"devices    {', '.join(plan.devices)}{threads}"
    for slot in plan.slots:
        if len(slot.parts) > 1:
            shares = ", ".join(f"{part / sum(slot.parts):.0%}" for part in slot.parts)
            yield f"           {slot.group}: one device slot, layers split {shares}"
    shared = (
        "shared by the device slots" if len(on_cpu) == num_slots else "once for those on cores, once for each other"
    )
    yield f"weights    {plan.weights_bytes // _MB} MB, {shared}"
    sizes = {slot.kv_tokens for slot in plan.slots}
    if len(sizes) == 1:
        count = f"{plan.kv_tokens} tokens x {plan.kv_bytes_per_token} bytes x {num_slots}"
    else:
        each = ", ".join(f"{slot.group} {slot.kv_tokens}" for slot in plan.slots)
        count = f"tokens: {each}; x {plan.kv_bytes_per_token} bytes"
    yield f"KV         {count} = {plan.kv_bytes // _MB} MB"
    buffers = ", ".join(f"{plan.needs.compute_bytes(slot.group) // _MB}" for slot in plan.slots)
    yield f"compute    {buffers} MB for buffers of each device slot, about"
    takes = ", ".join(f"{-(-takes // _MB)} MB of {where(pool)}" for pool, takes in plan.takes.items())
    yield f"takes      {takes} in all{', while it is loaded' if entry.model.on_demand else ''}"
    yield from _sequence_lines(entry, plan)
    yield f"a request  at most {plan.request_tokens_max} tokens, prompt and answer together"


def _sequence_lines(entry: Entry, plan: Plan) -> Iterator[str]:
    """How many each device slot runs, and why fewer than are set."""
    numbers = {slot.num_sequences for slot in plan.slots}
    if len(numbers) == 1:
        each = f"{numbers.pop()} per device slot"
    else:
        each = ", ".join(f"{slot.group} {slot.num_sequences}" for slot in plan.slots)
    yield f"sequences  {each}, {plan.num_sequences} in all"
    wanted = entry.config.engine.parallel
    for slot in plan.slots:
        if slot.num_sequences < wanted:
            yield (
                f"           {slot.group}: {slot.num_sequences} sequences instead of {wanted}: there is memory for "
                f"{slot.kv_tokens} tokens of context, {SEQUENCE_TOKENS} at least for each; "
                "free some memory, or set engine.ctx by hand"
            )


def memory_lines(plans: Sequence[Plan], entries: Sequence[Entry]) -> Iterator[str]:
    """What all that are there from the start take of each memory, and what the margin leaves."""
    room: dict[str, int | None] = {}
    for plan in plans:
        room |= plan.all_room
    config, taken = entries[0].config, staying(entries, plans)
    for number, (pool, free) in enumerate(room.items()):
        margin = config.engine.kv_margin_mb if pool == SYSTEM_POOL else config.engine.gpu_margin_mb
        left = "unknown what is free" if free is None else f"{taken[pool] // _MB} of {max(free, 0) // _MB} MB are taken"
        yield f"{'' if number else 'margin':11}{margin} MB; beside it, of {where(pool)}: {left}"
    yield from _on_demand_lines(plans, entries)


def _on_demand_lines(plans: Sequence[Plan], entries: Sequence[Entry]) -> Iterator[str]:
    """What there is for models that come and go, and how many of them fit beside each other."""
    config = entries[0].config
    coming = [plan.takes for plan, entry in zip(plans, entries, strict=True) if entry.model.on_demand]
    if not coming:
        return
    stay = staying(entries, plans)
    left = {pool: free - stay[pool] for pool, free in room_of(config, plans).items()}
    room = ", ".join(f"{max(free, 0) // _MB} MB of {where(pool)}" for pool, free in left.items())
    bound = f" (engine.loaded_mb {config.engine.loaded_mb})" if config.engine.loaded_mb else ""
    any_of_them, most = num_together(coming, left)
    together = f"any {any_of_them} of {len(coming)}" + (f", at most {most}" if most > any_of_them else "")
    yield f"on demand  {room or 'unknown what is free'} for them{bound}: {together} in memory at once"


def _names(entry: Entry) -> str:
    """What else there is to say of it."""
    words = []
    if entry.name != entry.path.name.removesuffix(".gguf"):
        words.append(f"as {entry.name}")
    if entry.model.aliases:
        words.append(f"also {', '.join(entry.model.aliases)}")
    if entry.model.share != 1:
        words.append(f"share {entry.model.share:g}")
    if entry.model.on_demand:
        words.append("on demand")
    return "".join(f", {word}" for word in words)
