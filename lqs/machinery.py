"""Builds what computes: the GPUs as they are, the models as they are planned on them, who comes and who goes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lqs.admission.fleet import Fleet
from lqs.cards import Cards
from lqs.config import Config
from lqs.engine import library
from lqs.engine import plan as planning
from lqs.engine.budget import check_budget, residents_of, room_of
from lqs.engine.catalog import Entry, check_all, plan_all
from lqs.engine.drill import Break, lost_cards
from lqs.engine.keeper import Keeper
from lqs.engine.loading import Loader
from lqs.engine.plan import Plan, make_plan
from lqs.engine.remarks import remarks_on
from lqs.engine.residents import Standing
from lqs.engine.slots import Models
from lqs.observe.families import Life
from lqs.observe.log import Log
from lqs.observe.models import model_families
from lqs.process import in_thread

if TYPE_CHECKING:
    from lqs._core import Scheduler
    from lqs.engine.served import Served

_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Machinery:
    """What serve.py runs of it."""

    cards: Cards
    models: Models
    fleet: Fleet
    keeper: Keeper

    def snapshots(self) -> Mapping[str, Mapping[str, Any]]:
        """What every device slot has counted, by device, and in which state it is."""
        states = {slot.device: self.keeper.standing_of(slot).state(slot) for slot in self.models.slots}
        counted = self.models.snapshots().items()
        # A model may come or leave meanwhile.
        return {device: {**seen, "state": states.get(device, seen["state"])} for device, seen in counted}

    def lives(self) -> Iterator[Life]:
        """How often every device slot died and was opened anew, whether its model is in memory or not."""
        deaths, reopened = self.keeper.num_deaths, self.keeper.num_reopened
        for served in self.models.all():
            for seat in self.models.seats_of(served):
                yield Life(seat.device, served.name, deaths[seat.device], reopened[seat.device])

    def families(self) -> Iterator[Any]:
        """The metrics of the GPUs and of the models."""
        yield from self.cards.families()
        yield from model_families(map(self.fleet.figures, self.models.all()), list(map(str, Standing)))


def make_machinery(
    config: Config, entries: Sequence[Entry], scheduler: Scheduler, log: Log, drill: Sequence[Break]
) -> Machinery:
    """Read the GPUs, set libllama up, plan, seat all device slots; nothing is loaded yet. Raises StartError."""
    # CUDA reads its variables when libllama looks for GPUs, so they are set before.
    cards = Cards(config, os.environ, log)
    library.start(verbose=config.log.level == "debug")
    plans = plan_all(entries, cards.machine(library.gpu_places))
    check_all(entries, plans)
    check_budget(entries, plans)
    loader = Loader(
        scheduler,
        make_model=library.Model,
        make_worker=library.make_worker,
        log=log,
        refresh=cards.refresh,
        gpu_margin_bytes=config.engine.gpu_margin_mb * _MB,
        drill=drill,
    )
    models = Models(config, entries, plans, scheduler, loader)
    cards.watch(scheduler, lambda: models.slots)
    fleet = _make_fleet(config, models, plans, cards, log)
    models.when_there(fleet.came, fleet.loaded)
    keeper = Keeper(config, models, scheduler, log, lost_cards=lambda: cards.lost() | lost_cards(drill, models.slots))
    for remark in remarks_on(entries, plans):
        log.warning(remark)
    return Machinery(cards, models, fleet, keeper)


def _make_fleet(config: Config, models: Models, plans: Sequence[Plan], cards: Cards, log: Log) -> Fleet:
    """The fleet, whose models are planned anew by what is free when they are loaded."""
    survey = plans[0].machine.survey

    def plan(served: Served) -> Plan:
        machine = replace(planning.probe_machine(), survey=survey.seen_anew(cards.refresh()))
        return make_plan(served.whole_config, served.path, machine)

    residents = residents_of(config, models, room_of(config, plans))
    return Fleet(config, models, residents, in_thread=in_thread, plan=plan, log=log)
