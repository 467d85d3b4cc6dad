"""Looks after the device slots: says who stopped working, opens anew who may be, leaves out who is slow.

        died, or could not be opened
              |  not too often; what died: on a CPU only      else: quarantine, until lqs is restarted
              v
        backoff -- twice as long each time --> opens (a thread of its own) --> failed: backoff
                                                 |
                                                 v
                                          probation: few requests --> steps enough: as the others

        steps take far longer than they do as a rule, and than elsewhere
              v
        rests: nobody starts there, what runs goes on --> steps are quick again, or nothing runs: probation

Nobody waits for a lock here, and nothing here is waited for: a step that does not end is found by the
scheduler's thread (core/failover.pxi), which needs no Python. What died is never freed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from lqs.config import Config
from lqs.engine.care import OUT_OF_WORK, SOUND, Care, Opening, Opens, Stage, Standing
from lqs.engine.slot import Slot
from lqs.request import NS_PER_S

if TYPE_CHECKING:
    from lqs._core import Scheduler
    from lqs.observe.log import Log

# Of steps: what a pace is taken from, and how fast the usual one follows.
_STEPS_MIN = 4
_USUAL_SHARE = 0.1
# So many looks in a row must agree.
_LOOKS = 3
# Shorter steps are not slow, whatever others take; nor are those that take what a full one took when it was opened.
_SLOW_NS_MIN = 50_000_000
_SLOW_STEPS = 2
# A thread that opens on a card that was lost meanwhile is given so long to come back.
_LOST_WAIT_NS = 60 * NS_PER_S


class Keeper:
    """Looks after all device slots, every now and then.

    `lost_cards` tells why by the UUID of each GPU that cannot be used any more.

    Owner: the event loop; `now_ns` is monotonic.
    """

    def __init__(
        self,
        config: Config,
        models: Opens,
        scheduler: Scheduler,
        log: Log,
        *,
        lost_cards: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._config = config.health
        self._models = models
        self._scheduler = scheduler
        self._log = log
        self._stall_s = config.engine.stall_s
        self._lost_cards = lost_cards
        self._care: dict[str, Care] = {}
        # By device, whichever slot stood for it, as long as the server lives.
        self.num_deaths: Counter[str] = Counter()
        self.num_reopened: Counter[str] = Counter()
        # Those that open one, or are parked in it; no more than there are attempts.
        self._threads: list[threading.Thread] = []

    def standing_of(self, slot: Slot) -> Standing:
        """Where a device slot stands, as an operator is told."""
        care = self._care.get(slot.device)
        # Nobody has looked at it yet, or not since it died.
        if care is None or care.slot is not slot or care.stage.is_out != (slot.worker.state in OUT_OF_WORK):
            return SOUND
        is_left = self._may_open(slot, care) and care.stage is not Stage.QUARANTINE
        return Standing(
            care.stage,
            care.reason,
            care.num_attempts,
            self._config.reload_attempts - care.num_attempts if is_left else 0,
            care.due_ns if care.stage is Stage.BACKOFF else 0,
        )

    def look(self, now_ns: int) -> None:
        """See how all of them are, and do what is due; nothing as long as they are loaded."""
        if self._models.is_loading:
            return
        slots = list(self._models.slots)
        for slot in slots:
            self._measure(slot, self._care_of(slot, now_ns))
        self._lose_cards(slots, now_ns)
        for slot in slots:
            care = self._care[slot.device]
            self._tell(slot, care, now_ns)
            if slot.worker.state in OUT_OF_WORK:
                self._mend(slot, care, now_ns)
            elif care.stage is Stage.PROBATION:
                self._try_out(slot, care)
            else:
                self._compare(slot, care, slots)

    @property
    def num_out(self) -> int:
        """How many of those that should work do not."""
        return sum(slot.worker.state in OUT_OF_WORK for slot in self._models.slots)

    def close(self) -> bool:
        """Whether no thread is left behind that opens one."""
        return not any(thread.is_alive() for thread in self._threads)

    def _care_of(self, slot: Slot, now_ns: int) -> Care:
        """What is known of it. One whose model has left and come back begins anew, with nothing held against it."""
        care = self._care.get(slot.device)
        if care is None or care.slot is not slot:
            care = self._care[slot.device] = Care(slot, since_ns=now_ns, number=slot.number)
            # Its seat may be that of one that was on probation when it left.
            self._scheduler.limit_slot(slot.number)
        return care

    def _tell(self, slot: Slot, care: Care, now_ns: int) -> None:
        """Say once that it stopped working, and once that it works again."""
        is_healthy = slot.is_healthy(now_ns, self._stall_s)
        if is_healthy and care.was_told:
            self._log.info("device slot works again", device=slot.device)
        elif not is_healthy and not care.was_told:
            reason = slot.death or "its step does not end"
            self._log.error("device slot does not work", device=slot.device, reason=reason)
        care.was_told = not is_healthy

    # Who is dead, or never lived.

    def _lose_cards(self, slots: Iterable[Slot], now_ns: int) -> None:
        """What is on a GPU that cannot be used any more is dead, whatever its worker says.

        Not while it is opened anew: that may be in the same seat, and who is dead there is taken for parked. That is
        true of a thread that does not come back from a driver that lost its card.
        """
        lost = self._lost_cards()
        for slot in slots:
            care = self._care[slot.device]
            if care.stage is Stage.OPENING and now_ns - care.due_ns < _LOST_WAIT_NS:
                continue
            why = next((lost[card] for card in slot.cards if card in lost), "")
            if why and not slot.lost:
                slot.lost = f"its GPU is lost: {why}"
                self._scheduler.report_dead(slot.number)

    def _mend(self, slot: Slot, care: Care, now_ns: int) -> None:
        if care.stage is Stage.OPENING:
            self._take_over(slot, care, now_ns)
        elif care.stage is Stage.BACKOFF:
            if slot.lost:
                self._put_off(slot, care, now_ns, slot.lost)
            elif now_ns >= care.due_ns:
                self._open(slot, care, now_ns)
        elif care.stage is not Stage.QUARANTINE:
            if now_ns - care.since_ns >= self._config.steady_s * NS_PER_S:
                care.num_attempts = 0
            self.num_deaths[slot.device] += slot.worker.state == "dead"
            # One that never lived keeps its place in the core.
            care.number = slot.number if slot.worker.state == "failed" else -1
            self._put_off(slot, care, now_ns, slot.death)

    def _may_open(self, slot: Slot, care: Care) -> bool:
        """Whether it may be opened anew: not too often, and not on a card where it died.

        CUDA's errors stay for as long as the process does; a load for which there was no memory left none.
        """
        is_on_card = bool(slot.cards) or not slot.device.startswith("cpu:")
        has_died = care.number < 0 or bool(slot.lost)
        return not (is_on_card and has_died) and care.num_attempts < self._config.reload_attempts

    def _put_off(self, slot: Slot, care: Care, now_ns: int, reason: str) -> None:
        """Try later, or never again."""
        config, care.reason = self._config, reason
        if not self._may_open(slot, care):
            care.stage = Stage.QUARANTINE
            if care.number >= 0:
                # Nobody waits for it any more.
                self._scheduler.report_dead(care.number)
            self._log.error(
                "device slot stays out until lqs is restarted", device=slot.device, attempts=care.num_attempts
            )
            return
        wait_s = min(config.reload_backoff_s * 2**care.num_attempts, config.reload_backoff_max_s)
        care.stage, care.due_ns = Stage.BACKOFF, now_ns + int(wait_s * NS_PER_S)
        self._log.warning("device slot is opened anew", device=slot.device, in_s=f"{wait_s:g}")

    def _open(self, slot: Slot, care: Care, now_ns: int) -> None:
        care.num_attempts += 1
        try:
            if care.number < 0:
                care.number = self._models.add_again(slot)
        except ValueError as error:
            self._log.error("device slot cannot be opened anew", device=slot.device, reason=str(error))
            care.stage, care.reason = Stage.QUARANTINE, str(error)
            return
        care.stage, care.opening = Stage.OPENING, Opening(self._models, slot, care.number)
        self._threads = [*(thread for thread in self._threads if thread.is_alive()), care.opening.thread]

    def _take_over(self, slot: Slot, care: Care, now_ns: int) -> None:
        """See how far the thread is that opens it."""
        opening = care.opening
        assert opening is not None
        if self._scheduler.slots()[opening.number]["is_dead"]:
            # libllama gave up in it: it is parked, and so is that place in the core.
            care.number, opening.failure = -1, "libllama gave up while it was opened"
        elif opening.thread.is_alive():
            return
        if opening.new is None:
            self._log.error("device slot cannot be opened anew", device=slot.device, reason=opening.failure)
            self._put_off(slot, care, now_ns, opening.failure)
            return
        care.opening, care.slot, care.since_ns = None, opening.new, now_ns
        care.num_steps = care.step_ns = 0
        self.num_reopened[slot.device] += 1
        self._begin_probation(opening.new, care, "it was opened anew")
        self._models.replace(slot, opening.new)

    # Who is new.

    def _begin_probation(self, slot: Slot, care: Care, reason: str) -> None:
        care.stage, care.reason, care.num_alike = Stage.PROBATION, reason, 0
        care.steps_wanted = slot.worker.snapshot()["num_steps"] + self._config.probation_steps
        self._scheduler.limit_slot(slot.number, self._config.probation_requests)

    def _try_out(self, slot: Slot, care: Care) -> None:
        if slot.worker.snapshot()["num_steps"] >= care.steps_wanted:
            care.stage = Stage.SOUND
            self._scheduler.limit_slot(slot.number)

    # Who is slow.

    def _measure(self, slot: Slot, care: Care) -> None:
        """Its pace since the last look."""
        seen = slot.worker.snapshot()
        num_steps, step_ns = seen["num_steps"] - care.num_steps, seen["step_ns"] - care.step_ns
        care.num_steps, care.step_ns = seen["num_steps"], seen["step_ns"]
        care.pace_ns = step_ns / num_steps if num_steps >= _STEPS_MIN else 0.0

    def _is_slow(self, slot: Slot, care: Care, slots: list[Slot]) -> bool:
        paces = [self._care[other.device].pace_ns for other in slots if other is not slot]
        others = [pace for pace in paces if pace > 0]
        usual_ns = self._config.slow_factor * max([care.usual_ns, *others])
        bound_ns = max(usual_ns, _SLOW_STEPS * slot.slowest_ns, _SLOW_NS_MIN)
        return bool(others) and care.usual_ns > 0 and care.pace_ns > bound_ns

    def _compare(self, slot: Slot, care: Care, slots: list[Slot]) -> None:
        if not self._config.slow_factor:
            return
        is_slow = self._is_slow(slot, care, slots)
        if care.pace_ns > 0 and not is_slow:
            care.usual_ns += _USUAL_SHARE * (care.pace_ns - care.usual_ns) if care.usual_ns else care.pace_ns
        is_changed = is_slow if care.stage is Stage.SOUND else not is_slow
        care.num_alike = care.num_alike + 1 if is_changed else 0
        if care.num_alike < _LOOKS:
            return
        care.num_alike = 0
        if care.stage is Stage.SOUND:
            pace_ms, usual_ms = round(care.pace_ns / 1e6), round(care.usual_ns / 1e6)
            care.stage, care.reason = Stage.RESTING, f"a step takes {pace_ms} ms, {usual_ms} ms as a rule"
            self._log.warning("device slot is slow and rests", device=slot.device, step_ms=pace_ms)
            self._scheduler.rest_slot(slot.number)
        else:
            self._log.info("device slot takes requests again", device=slot.device)
            self._begin_probation(slot, care, "its steps took too long before")
            self._scheduler.rest_slot(slot.number, False)
