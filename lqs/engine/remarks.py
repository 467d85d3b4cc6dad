"""What is allowed in a config and hardly meant; `lqs check` prints it, `lqs serve` warns of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from lqs.engine.catalog import Entry
from lqs.engine.cores import in_ranges
from lqs.engine.fitting import SlotPlan
from lqs.engine.plan import Plan
from lqs.engine.routing import shared_names


def remarks_on(entries: Sequence[Entry], plans: Sequence[Plan]) -> Iterator[str]:
    """Each in a sentence."""
    yield from _without_share(entries)
    slots = {str(slot.group): slot for plan in plans for slot in plan.slots if slot.group.is_cpu}
    yield from _overlapping(slots.values())
    num_cores = plans[0].machine.num_cores
    for device, slot in slots.items():
        if slot.group.number >= num_cores and not slot.cores:
            yield f"engine.devices: {device} is only a name: it computes on any of the {num_cores} cores."


def _without_share(entries: Sequence[Entry]) -> Iterator[str]:
    """Names behind which nobody takes part of the requests."""
    behind: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        for name in shared_names(entry.name, entry.model.aliases):
            behind[name].append(entry)
    for name, choices in behind.items():
        if len(choices) > 1 and not any(entry.model.share for entry in choices):
            yield f"share: is 0 for all that {name} means; {choices[0].name} gets its requests."


def _overlapping(slots: Iterable[SlotPlan]) -> Iterator[str]:
    for one, other in combinations(slots, 2):
        if both := one.cores & other.cores:
            yield f"engine.cores: {one.group} and {other.group} both have {in_ranges(both)}, and take turns there."
