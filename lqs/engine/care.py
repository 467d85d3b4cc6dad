"""What is known of a device slot that is looked after, and what others are told of it; see engine/keeper.py."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from lqs.engine.slot import Slot
from lqs.errors import reason_of

# What a worker says that computes nothing any more.
OUT_OF_WORK = ("dead", "failed")


class Stage(Enum):
    """Where a device slot stands, in the words of `/admin/devices` and `lqs_device_state`."""

    SOUND = "sound"
    RESTING = "resting"
    PROBATION = "probation"
    BACKOFF = "backoff"
    OPENING = "opening"
    QUARANTINE = "quarantined"

    @property
    def is_out(self) -> bool:
        """Whether nothing works there at this stage."""
        return self in (Stage.BACKOFF, Stage.OPENING, Stage.QUARANTINE)


class Standing(NamedTuple):
    """What an operator is told of a device slot. `due_ns` is when it is opened anew, monotonic; 0: nobody will."""

    stage: Stage
    reason: str = ""
    num_attempts: int = 0
    num_left: int = 0
    due_ns: int = 0

    def state(self, slot: Slot) -> str:
        """The word for the device slot: its stage, or what its worker says where there is nothing else to say."""
        return slot.state if self.stage is Stage.SOUND else self.stage.value


SOUND = Standing(Stage.SOUND)


class Opens(Protocol):
    """What opens device slots anew; see `Models`."""

    @property
    def is_loading(self) -> bool: ...
    @property
    def slots(self) -> Iterable[Slot]: ...
    def add_again(self, slot: Slot) -> int: ...
    def open_again(self, slot: Slot, number: int) -> Slot: ...
    def replace(self, slot: Slot, new: Slot) -> None: ...


class Opening:
    """A device slot that is being opened, in a thread that may never come back."""

    def __init__(self, models: Opens, slot: Slot, number: int) -> None:
        self.new: Slot | None = None
        self.failure = ""
        self._models, self._slot, self.number = models, slot, number
        self.thread = threading.Thread(target=self._run, name=f"lqs-open-{slot.device}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.new = self._models.open_again(self._slot, self.number)
        except Exception as error:
            self.failure = reason_of(error)


@dataclass(slots=True)
class Care:
    """What is known of one device, for as long as its model is there. Owner: the keeper."""

    slot: Slot | None = None  # What stands for it now; another one once it was opened anew.
    stage: Stage = Stage.SOUND
    reason: str = ""  # Of the stage.
    since_ns: int = 0
    num_attempts: int = 0
    due_ns: int = 0
    number: int = -1  # In the core, where the next one is to be.
    opening: Opening | None = None
    num_steps: int = 0
    step_ns: int = 0
    pace_ns: float = 0.0  # A step's time since the last look; 0: none ended.
    usual_ns: float = 0.0
    num_alike: int = 0
    steps_wanted: int = 0  # Of probation.
    was_told: bool = False
