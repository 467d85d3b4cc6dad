"""Loads a model and opens its device slots: how much context each gets in the end, and what is said of it.

weights     in engine/weights.py
memory      read anew and promised (placement/loads.py) before a device slot on a GPU takes it
open        a context, warmed up and calibrated at full width, before anybody is let in. Not enough
            memory: half of the context, with fewer sequences where it is small, a few times. Device
            slots on different GPUs open at the same time; those on cores one after another, for they
            would measure each other
ready       each by itself: whoever owns the device slots hears of it (`tell`)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from lqs._core import set_capacity
from lqs.engine.drill import FAIL_LOAD, SLOW_LOAD, Break, cards_of, check_slots
from lqs.engine.fitting import Size, padded, smaller
from lqs.engine.opening import Opening, Seat
from lqs.engine.plan import Plan
from lqs.engine.served import Served
from lqs.engine.slot import Slot, Worker
from lqs.engine.weights import load_weights, weights_of
from lqs.errors import DeviceError, NoRoom
from lqs.observe.log import Log
from lqs.placement.gpus import Gpu, Snapshot
from lqs.placement.loads import Loads
from lqs.placement.survey import now_of

if TYPE_CHECKING:
    from pathlib import Path

    from lqs._core import Scheduler
    from lqs.engine.library import Model

# How far the KV of a token may be from what was planned, as a share of it.
_KV_TOLERANCE = 0.05
_MB = 1_000_000
# Contexts that are tried for one device slot, each half of the one before.
_TRIES_MAX = 4


class Refresh(Protocol):
    """Reads the GPUs anew."""

    def __call__(self) -> Snapshot: ...


class Loader:
    """Loads one model at a time.

    `make_model` and `make_worker` are the library's; tests bring their own. `drill` is what breaks on purpose.

    Owner: the thread that loads. `progress` may be read by any.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        make_model: Callable[[Path], Model],
        make_worker: Callable[..., Worker],
        log: Log,
        refresh: Refresh = Snapshot,
        gpu_margin_bytes: int = 0,
        drill: Sequence[Break] = (),
    ) -> None:
        self._scheduler = scheduler
        self._make_model = make_model
        self._make_worker = make_worker
        self._log = log
        self._refresh = refresh
        self._loads = Loads(gpu_margin_bytes)
        # The reservations of device slots that open at the same time.
        self._is_deciding = threading.Lock()
        self._drill = drill
        self._loads_to_fail = {each.slot: each.times for each in drill if each.kind == FAIL_LOAD}

    def check_drill(self, num_slots: int) -> None:
        """See that the drill names device slots that there are. Raises ConfigError."""
        check_slots(self._drill, num_slots)

    def load(self, served: Served, seats: Sequence[Seat], plan: Plan, tell: Callable[[Slot], None]) -> None:
        """Load the weights and open every device slot; `tell` hears of each. Takes long.

        Raises StartError if the file cannot be used, or none opens; one that does not is told at the end, with a
        worker that says why.
        """
        began_s = time.monotonic()
        load_weights(served, seats, self._make_model, self._log)
        served.prepare(plan)
        self._log.info("weights loaded", model=served.name, seconds=round(time.monotonic() - began_s, 2))
        if served.template is None:
            problem = "is missing" if served.template_error is None else f"cannot be used: {served.template_error}"
            self._log.warning("no chat: the model's chat template " + problem, model=served.name)
        opening = Opening(partial(self.open_one, served, plan=plan), tell, self._log, self._is_dead)
        opening.open_all(seats)
        for slot in opening.failed:
            tell(slot)
        if len(opening.failed) == len(seats):
            raise DeviceError(opening.failed[0].death)
        if served.kv_problem is not None:
            self._log.warning("KV: " + served.kv_problem, model=served.name)

    def open_one(self, served: Served, seat: Seat, plan: Plan) -> Slot:
        """A device slot with the largest context that there is memory for, its weights loaded before.

        A thread of its own calls this, for it stays on the cores of the device slot, where that is measured, and
        so do those that libllama starts to compute with. Raises DeviceError.
        """
        if seat.plan.cores:
            os.sched_setaffinity(0, seat.plan.cores)
        self._break_load(seat.number)
        model = served.weights[weights_of(seat)]
        kv_block, problem = _kv_block(served)
        served.kv_problem = problem
        worker, size = self._largest(served, seat, plan, model, kv_block)
        set_capacity(self._scheduler, seat.number, size.kv_tokens, kv_block, size.num_sequences)
        served.kv_problem = served.kv_problem or _other_kv(plan, worker)
        for each in self._drill:
            if each.slot == seat.number:
                each.order(worker)
        return Slot(
            seat.device,
            worker,
            size.kv_tokens,
            seat.number,
            seat.place,
            cards=cards_of(self._drill, seat.number, seat.cards),
            token_bytes=plan.kv_bytes_per_token,
            num_sequences=size.num_sequences,
            cores=seat.plan.cores,
        )

    def _largest(self, served: Served, seat: Seat, plan: Plan, model: Model, kv_block: int) -> tuple[Worker, Size]:
        """A worker with what is planned, or else the largest of a few smaller sizes that fits. Raises DeviceError."""
        wanted, reason = served.whole_config.engine.parallel, ""
        tried = Size(seat.plan.kv_tokens, seat.plan.num_sequences)
        size: Size | None = tried
        for number in range(_TRIES_MAX):
            if size is None:
                break
            if number > 0:
                self._log.warning(
                    "device slot gets less context",
                    device=seat.device,
                    kv_tokens=size.kv_tokens,
                    tried=tried.kv_tokens,
                    sequences=size.num_sequences,
                    reason=reason,
                )
            tried = size
            try:
                worker = self._try(served, seat, plan, model, tried, kv_block)
            except NoRoom as error:
                reason, size = str(error), smaller(tried)
                continue
            if tried.num_sequences < wanted:
                self._log.warning(
                    "device slot runs fewer sequences",
                    device=seat.device,
                    sequences=tried.num_sequences,
                    wanted=wanted,
                    kv_tokens=tried.kv_tokens,
                )
            return worker, tried
        raise DeviceError(f"{seat.device}: no context fits, not even {tried.kv_tokens} tokens: {reason}.")

    def _is_dead(self, number: int) -> bool:
        return bool(self._scheduler.slots()[number]["is_dead"])

    def _break_load(self, number: int) -> None:
        """What a drill ordered for this load. Raises DeviceError."""
        for each in self._drill:
            if each.slot == number and each.kind == SLOW_LOAD:
                time.sleep(each.for_s)
        if self._loads_to_fail.get(number, 0) > 0:
            self._loads_to_fail[number] -= 1
            raise DeviceError("the device slot cannot be opened: a drill says so")

    def _try(self, served: Served, seat: Seat, plan: Plan, model: Model, size: Size, kv_block: int) -> Worker:
        """One try with so much context, its memory promised meanwhile. Raises NoRoom, DeviceError."""
        engine, is_cpu = served.whole_config.engine, seat.plan.group.is_cpu
        promised = self._promise(seat, plan, size.kv_tokens)
        try:
            return self._make_worker(
                self._scheduler,
                seat.number,
                model,
                # As llama.cpp makes it: what it takes in a step is bounded by the size that it is told.
                n_ctx=padded(size.kv_tokens),
                n_seq=size.num_sequences,
                n_batch=min(engine.n_batch, padded(size.kv_tokens)),
                n_ubatch=engine.n_ubatch if is_cpu else engine.gpu_ubatch,
                threads=seat.plan.threads,
                kv_unified=engine.kv_unified,
                prefix_cache=engine.prefix_cache,
                prefix_sequences=engine.prefix_sequences,
                flash_attention=engine.flash_attention,
                inter_token_target_ms=engine.inter_token_target_ms,
                n_extra=plan.num_extra,
                swap_bytes=engine.swap_mb * _MB,
                kv_block=kv_block,
                is_cpu=is_cpu,
            )
        finally:
            with self._is_deciding:
                for gpu, num_bytes in promised:
                    self._loads.release(gpu, num_bytes)

    def _promise(self, seat: Seat, plan: Plan, kv_tokens: int) -> list[tuple[Gpu, int]]:
        """Memory of each GPU of the device slot, by a reading that begins now. Raises NoRoom, DeviceError."""
        group = seat.plan.group
        if not group.gpus:
            return []
        each = plan.needs.compute_bytes(group) + kv_tokens * plan.needs.token_bytes(group) // len(group.gpus)
        with self._is_deciding:
            promised: list[tuple[Gpu, int]] = []
            for gpu in now_of(group, self._refresh()):
                if self._loads.try_reserve(gpu, each):
                    promised.append((gpu, each))
                    continue
                for other, num_bytes in promised:
                    self._loads.release(other, num_bytes)
                free = self._loads.headroom_bytes(gpu) or 0
                raise NoRoom(f"{gpu.uuid} has {free // _MB} MB to give beside its margin, {each // _MB} MB are needed")
        return promised


def _kv_block(served: Served) -> tuple[int, str | None]:
    """Tokens by which promises of KV grow, 0 where they cannot, and why."""
    engine = served.whole_config.engine
    if engine.kv_mode == "guaranteed":
        return 0, None
    if engine.kv_unified and served.own.native.can_reuse_prefix:
        return engine.kv_block_tokens, None
    why = "the model's memory cannot be cut" if engine.kv_unified else "engine.kv_unified is false"
    return 0, f"it is promised for the longest answer, because {why}"


def _other_kv(plan: Plan, worker: Worker) -> str | None:
    """What to say where llama.cpp keeps more or less for a token than was planned."""
    kept, planned = worker.swapping.get("bytes_per_token", 0), plan.kv_bytes_per_token
    if kept > 0 and abs(kept - planned) > _KV_TOLERANCE * planned:
        return f"it takes {kept:g} bytes a token, and {planned} were planned; set engine.ctx by hand"
    return None
