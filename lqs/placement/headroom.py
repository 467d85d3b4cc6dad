"""What the GPUs' free memory and use mean for the device slots on them, told to the core after each reading.

The cells of a device slot were taken when it opened, and who starts there takes no more of the card. What has to
stay free is the margin: drivers and libraries take memory while they work, and an allocation that fails
there ends the device slot. So while others leave less than the margin free, what is lacking is held back:

    headroom of a device slot = its cells that nobody was promised - what the margin lacks, in cells

A card's lack is shared by the device slots on it as their cells are. The bound goes when the margin is whole again.

    the card                        its device slots
    less than the margin is free    take that much less
    cannot be read                  take nobody until it can
    the driver answers nothing      stay as they are: CUDA may not have noticed
    failed                          take nobody any more; whoever looks after them declares them dead
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from lqs.observe.log import Log
from lqs.placement.gpus import Gpu, GpuState, Snapshot

_MB = 1_000_000


class Seat(Protocol):
    """A device slot, as far as it concerns its cards. `token_bytes` is a KV cell over all of them."""

    @property
    def device(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def cards(self) -> Sequence[str]: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...


class Placing(Protocol):
    """The core's scheduler, as far as any thread may call it."""

    def slots(self) -> list[dict[str, Any]]: ...
    def set_headroom(self, slot: int, kv_tokens: int | None) -> None: ...
    def set_use(self, slot: int, percent: int) -> None: ...


class Headrooms:
    """Looks at each snapshot. `seats` are the device slots that are open now.

    Owner: the poller's thread.
    """

    def __init__(
        self,
        scheduler: Placing,
        seats: Callable[[], Iterable[Seat]],
        *,
        margin_bytes: int,
        log: Log,
    ) -> None:
        self._scheduler = scheduler
        self._seats = seats
        self._margin_bytes = margin_bytes
        self._log = log
        self._held: dict[int, str] = {}  # By device slot: why it takes less than it has.

    def look(self, snapshot: Snapshot) -> None:
        """Tell the core what the snapshot means for each device slot."""
        seats = [seat for seat in self._seats() if seat.cards]
        if not seats:
            return
        gpus = {gpu.uuid: gpu for gpu in snapshot.gpus}
        cells_on = _cells_on(seats)
        accounts = self._scheduler.slots()
        for seat in seats:
            cards = [gpus[uuid] for uuid in seat.cards if uuid in gpus]
            self._look_at(seat, cards, cells_on, accounts[seat.number], is_silent=bool(snapshot.problem))

    def _look_at(
        self, seat: Seat, cards: list[Gpu], cells_on: Mapping[str, int], account: Mapping[str, Any], *, is_silent: bool
    ) -> None:
        failed = [card for card in cards if card.state is GpuState.FAILED]
        if failed:
            self._hold(seat, 0, "its GPU failed: " + failed[0].reason)
        elif is_silent:
            return
        elif blind := [card for card in cards if card.state is GpuState.UNREADABLE]:
            self._hold(seat, 0, "its GPU cannot be read: " + blind[0].reason)
        elif lack := self._lack(seat, cards, cells_on):
            left = max(account["capacity"] - account["reserved"] - lack, 0)
            self._hold(seat, left, "less than the margin is free on its GPU")
        else:
            self._release(seat)
        uses = [card.use for card in cards if card.use is not None]
        if uses:
            self._scheduler.set_use(seat.number, round(100 * max(uses)))

    def _lack(self, seat: Seat, cards: Sequence[Gpu], cells_on: Mapping[str, int]) -> int:
        """Cells of the device slot that its part of the lacking margin comes to, on its worst card."""
        lacks = [0]
        for card in cards:
            if card.memory_free_bytes is None or card.memory_free_bytes >= self._margin_bytes:
                continue
            bytes_here = max(seat.token_bytes // len(seat.cards), 1)
            share = (self._margin_bytes - card.memory_free_bytes) * seat.kv_tokens // max(cells_on[card.uuid], 1)
            lacks.append(-(-share // bytes_here))
        return max(lacks)

    def _hold(self, seat: Seat, kv_tokens: int, why: str) -> None:
        self._scheduler.set_headroom(seat.number, kv_tokens)
        if self._held.get(seat.number) != why:
            self._log.warning(
                "device slot takes less",
                device=seat.device,
                kv_tokens=kv_tokens,
                reason=why,
                gpus=",".join(seat.cards),
            )
        self._held[seat.number] = why

    def _release(self, seat: Seat) -> None:
        if self._held.pop(seat.number, None) is not None:
            self._scheduler.set_headroom(seat.number, None)
            self._log.info("device slot takes all again", device=seat.device)


def _cells_on(seats: Sequence[Seat]) -> dict[str, int]:
    """All cells of the device slots on each card."""
    cells: dict[str, int] = {}
    for seat in seats:
        for uuid in seat.cards:
            cells[uuid] = cells.get(uuid, 0) + seat.kv_tokens
    return cells
