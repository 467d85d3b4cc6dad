"""The GPUs while lqs serves: read once to plan by, then watched in a thread of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import replace
from typing import Any

from lqs.config import Config
from lqs.engine import plan
from lqs.engine.backends import has_cuda
from lqs.engine.cores import memory_free_bytes
from lqs.engine.plan import Machine
from lqs.observe.gpus import gpu_families
from lqs.observe.log import Log
from lqs.placement.cuda import number_gpus, pin_order
from lqs.placement.gpus import Snapshot
from lqs.placement.headroom import Headrooms, Placing, Seat
from lqs.placement.losses import lost_gpus
from lqs.placement.notices import Notices
from lqs.placement.poller import Poller
from lqs.placement.reader import Reader
from lqs.placement.standing import remarks, standings
from lqs.placement.survey import Survey, survey_of
from lqs.upkeep import Upkeep

_MB = 1_000_000
# A driver that takes longer to answer is planned without.
_FIRST_READ_S = 5.0
# Where the GPUs are read once only.
_NEVER_S = 1e9


class Cards:
    """What is known of the GPUs. Owner: the event loop; `refresh` and what is read are for any thread.

    `environ` gets CUDA's order pinned, so this is made before libllama looks for GPUs.
    """

    def __init__(self, config: Config, environ: MutableMapping[str, str], log: Log) -> None:
        pin_order(environ)
        self._environ = environ
        self._margin_bytes = config.engine.gpu_margin_mb * _MB
        self._log = log
        self._headrooms: Headrooms | None = None
        notices = Notices(log, self._margin_bytes)
        # In the poller's thread.
        upkeep = Upkeep({"GPUs": notices.look, "headroom": self._look_at_headroom}, log)
        self._survey: Survey | None = None
        self._poller = Poller(
            lambda: Reader(memory_free_bytes),
            interval_s=config.placement.nvml_s or _NEVER_S,
            on_snapshot=upkeep.look,
        )
        self._is_watching = False

    def start(self) -> None:
        """Begin to watch."""
        self._poller.start()
        self._is_watching = True

    def survey(self, listed: Callable[[], list[str]]) -> Survey:
        """The GPUs by CUDA's numbers; the same for the life of the process. `listed` asks CUDA itself.

        Raises DeviceError.
        """
        if self._survey is None:
            is_built = has_cuda()
            places = listed() if is_built else None
            self._survey = survey_of(self.refresh(), self._environ, has_cuda=is_built, listed=places)
            self._tell_numbers(self._survey, has_cuda=is_built)
        return self._survey

    def machine(self, listed: Callable[[], list[str]]) -> Machine:
        """What there is to use now. Raises DeviceError."""
        return replace(plan.probe_machine(), survey=self.survey(listed))

    def refresh(self) -> Snapshot:
        """A reading that begins now, or the last one of a driver that hangs. Not for the event loop."""
        return self._poller.refresh(_FIRST_READ_S) if self._is_watching else read_once()

    def watch(self, scheduler: Placing, seats: Callable[[], Iterable[Seat]]) -> None:
        """From now on tell the core what each reading means for its device slots."""
        self._headrooms = Headrooms(scheduler, seats, margin_bytes=self._margin_bytes, log=self._log)

    def lost(self) -> dict[str, str]:
        """Why, by UUID, for each GPU that has failed as far as is known."""
        return lost_gpus(self._poller.latest)

    def families(self) -> Iterator[Any]:
        """The metrics of the GPUs."""
        gpus = self._survey.numbering.gpus if self._survey is not None else ()
        numbers = {gpu.uuid: number for number, gpu in enumerate(gpus)}
        return gpu_families(self._poller.latest, numbers, time.monotonic_ns())

    def stop(self, limit_s: float) -> bool:
        """End the thread; False if it hangs in the driver."""
        return self._poller.stop(limit_s) if self._is_watching else True

    def _tell_numbers(self, survey: Survey, *, has_cuda: bool) -> None:
        """Say of each GPU which number CUDA gives it, or why it is not used."""
        snapshot = survey.snapshot
        # Where libllama has no CUDA, the numbers that it would have are told, as `lqs check` does.
        numbering = survey.numbering if has_cuda else number_gpus(snapshot.gpus, self._environ)
        for gpu, device, reason in standings(snapshot, numbering):
            found = {"gpu": gpu.uuid, "bus": gpu.bus_id}
            if device:
                found = {"device": device, **found}
            if reason:
                self._log.info("GPU is not used", **found, reason=reason)
            else:
                self._log.info("GPU has CUDA's number", **found)
        for remark in remarks(snapshot, numbering, has_cuda=has_cuda):
            self._log.warning(remark)

    def _look_at_headroom(self, snapshot: Snapshot) -> None:
        if self._headrooms is not None:
            self._headrooms.look(snapshot)


def read_once(limit_s: float = _FIRST_READ_S) -> Snapshot:
    """One reading, in a thread that is left behind where the driver hangs."""
    found = [Snapshot(problem="the driver does not answer")]

    def body() -> None:
        reader = Reader(memory_free_bytes)
        found.append(reader.read(time.monotonic_ns()))
        reader.close()

    thread = threading.Thread(target=body, name="lqs-nvml", daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[-1]
