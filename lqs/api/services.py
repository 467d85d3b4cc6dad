"""What the HTTP surface is built from. serve.py makes these and hands them in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lqs.admission.fleet import Fleet
    from lqs.admission.gate import Gate
    from lqs.admission.keys import KeyRing
    from lqs.config import Config
    from lqs.engine.keeper import Keeper
    from lqs.engine.slots import Models
    from lqs.observe.alerts import Alerts
    from lqs.observe.log import Log
    from lqs.observe.metrics import Metrics
    from lqs.scheduling.desk import Desk


class Reloaded(NamedTuple):
    """What came of reading the config again: what is wrong with it, or which settings wait for a restart."""

    problem: str = ""
    waiting: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Control:
    """What an admin may ask of the process.

    `drain` begins to end it. `reload` reads keys and limits again. `restart` asks whoever
    keeps the socket for a successor and says why there will be none, empty if one comes; `successor` tells
    what became of it: none, starting, or failed and how.
    """

    drain: Callable[[], None]
    reload: Callable[[], Reloaded]
    restart: Callable[[], Awaitable[str]]
    successor: Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Services:
    """The parts behind the routes."""

    config: Config
    gate: Gate
    desk: Desk
    keys: KeyRing
    models: Models
    metrics: Metrics
    alerts: Alerts
    log: Log
    fleet: Fleet
    keeper: Keeper
    control: Control
