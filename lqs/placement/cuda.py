"""Which number CUDA gives to which GPU; it differs from NVML's.

It is worked out from what NVML lists and from two variables that CUDA reads, before CUDA is loaded, and set
right by what CUDA then lists (`as_listed`):

    CUDA_DEVICE_ORDER       PCI_BUS_ID: by place on the bus. Else CUDA begins with the card that it takes for
                            the fastest, by a rule that is not published: numbers are then sure only where
                            all cards are of one model. `pin_order` avoids that.
    CUDA_VISIBLE_DEVICES    the cards that CUDA sees, in that order; see `visible`.

With MIG a process sees one instance and no whole card. Numbers hold for the life of the process: a card that
fails keeps its own, so a numbering is made once, at start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from lqs.errors import DeviceError
from lqs.placement.gpus import Gpu, GpuState

ORDER, VISIBLE = "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"
_BY_BUS = "PCI_BUS_ID"
_BUS_ID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Numbering:
    """The GPUs as CUDA counts them. `hidden` says of the others, by UUID, why CUDA does not see them.

    `is_sure` is False where only CUDA itself knows its order.
    """

    gpus: tuple[Gpu, ...]
    hidden: Mapping[str, str]
    is_sure: bool

    def number_of(self, uuid: str) -> int | None:
        """CUDA's number of a GPU, None for one that it does not see."""
        return next((number for number, gpu in enumerate(self.gpus) if gpu.uuid == uuid), None)


def pin_order(environ: MutableMapping[str, str]) -> None:
    """Have CUDA count by place on the bus unless the operator wants otherwise. Before CUDA is loaded."""
    environ.setdefault(ORDER, _BY_BUS)


def number_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Numbering:
    """The GPUs as CUDA will count them in this process. Those that have failed already are not counted."""
    usable = [gpu for gpu in gpus if gpu.state is not GpuState.FAILED and not gpu.is_nameless]
    cards = sorted((gpu for gpu in usable if not gpu.is_instance), key=lambda gpu: (_place(gpu), gpu.index))
    wanted = environ.get(VISIBLE)
    shown = cards if wanted is None else visible(wanted, cards, usable)
    seen = tuple(_counted(shown, usable))
    return Numbering(
        gpus=seen,
        hidden={gpu.uuid: _why_hidden(gpu, shown, seen, gpus) for gpu in gpus if gpu not in seen},
        is_sure=environ.get(ORDER) == _BY_BUS
        or len({card.name for card in cards}) <= 1
        or (wanted is not None and _kind(wanted) != "number"),
    )


def visible(wanted: str, cards: Sequence[Gpu], gpus: Sequence[Gpu]) -> list[Gpu]:
    """What CUDA_VISIBLE_DEVICES leaves, in its order. `cards` are in CUDA's order, `gpus` with their instances.

    As CUDA reads it: either numbers, or beginnings of UUIDs that fit one GPU each, by the first entry. An
    entry of another kind, or that fits none, ends the list; one that comes twice empties it.
    """
    entries = [entry.strip() for entry in wanted.split(",")]
    kind = _kind(entries[0])
    chosen: list[Gpu] = []
    for entry in entries:
        found = _entry(entry, cards, gpus) if _kind(entry) == kind else []
        if len(found) != 1:
            break
        if found[0] in chosen:
            return []
        chosen += found
    return chosen


def by_uuid(text: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs whose UUID begins so; an instance also by its card, `MIG-GPU-.../1/0`, as older drivers write it."""
    prefix = text.lower()
    named = [gpu for gpu in gpus if gpu.uuid.lower().startswith(prefix) or _name_by_card(gpu) == prefix]
    return [gpu for gpu in named if gpu.uuid.lower() == prefix] or named


def normal_bus_id(text: str) -> str:
    """A place on the bus as NVML writes it, `00000000:01:00.0`, whoever wrote it; empty for what is none."""
    match = _BUS_ID.fullmatch(text)
    if match is None:
        return ""
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):08X}:{bus.upper()}:{device.upper()}.{function}"


def as_listed(numbering: Numbering, bus_ids: Sequence[str]) -> Numbering:
    """The numbering by the places of the GPUs that CUDA itself lists, in its order: then it is sure.

    Raises DeviceError if they are not the same GPUs: figures would be those of other cards.
    """
    listed = [normal_bus_id(bus_id) for bus_id in bus_ids]
    by_place = {normal_bus_id(gpu.bus_id): gpu for gpu in numbering.gpus}
    if sorted(listed) != sorted(by_place):
        raise DeviceError(
            f"CUDA lists the GPUs {', '.join(listed) or 'none'}, but NVML {', '.join(by_place) or 'none'}. "
            f"Name those to use by UUID in {VISIBLE}."
        )
    return Numbering(tuple(by_place[place] for place in listed), numbering.hidden, is_sure=True)


def _place(gpu: Gpu) -> tuple[int, ...]:
    """A card's place on the bus, to sort by."""
    match = _BUS_ID.fullmatch(gpu.bus_id)
    return tuple(int(part or "0", 16) for part in match.groups()) if match else ()


def _kind(entry: str) -> str:
    """What an entry of CUDA_VISIBLE_DEVICES is: a number, `GPU-`, `MIG-`, or none of them."""
    if re.match(r"\+?\d", entry.lstrip()):
        return "number"
    return entry[:4].upper() if entry[:4].upper() in ("GPU-", "MIG-") else ""


def _entry(entry: str, cards: Sequence[Gpu], gpus: Sequence[Gpu]) -> Sequence[Gpu]:
    """The GPUs that an entry of CUDA_VISIBLE_DEVICES fits."""
    # Like C's strtoul, with which CUDA reads numbers: what follows the digits is not looked at.
    if digits := re.match(r"\+?(\d+)", entry):
        return cards[int(digits[1]) :][:1]
    return by_uuid(entry, gpus) if _kind(entry) else []


def _name_by_card(gpu: Gpu) -> str:
    """The name of an instance by its card and its two numbers; empty for a card."""
    if gpu.instance_ids is None:
        return ""
    gpu_instance, compute_instance = gpu.instance_ids
    return f"mig-{gpu.card_uuid.lower()}/{gpu_instance}/{compute_instance}"


def _counted(shown: Sequence[Gpu], gpus: Sequence[Gpu]) -> Iterator[Gpu]:
    """What CUDA makes of the visible: with an instance among them the first alone, else the cards that are whole."""
    instances = [first for gpu in shown for first in _instances(gpu, gpus)[:1]]
    yield from instances[:1] or (gpu for gpu in shown if not gpu.is_split)


def _instances(gpu: Gpu, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Those of a split card; an instance itself."""
    return [gpu] if gpu.is_instance else [one for one in gpus if one.card_uuid == gpu.uuid]


def _why_hidden(gpu: Gpu, shown: Sequence[Gpu], seen: Sequence[Gpu], gpus: Sequence[Gpu]) -> str:
    if gpu.state is GpuState.FAILED or gpu.is_nameless:
        return gpu.reason
    if gpu.is_split:
        return f"it is split into MIG instances: {', '.join(one.uuid for one in _instances(gpu, gpus)) or 'none yet'}"
    if not any(one.uuid in (gpu.uuid, gpu.card_uuid) for one in shown):
        return f"{VISIBLE} leaves it out"
    return f"a process has one MIG instance and no whole card beside it, here {seen[0].uuid}; choose by {VISIBLE}"
