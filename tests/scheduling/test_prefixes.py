"""Where prompts have begun before: the loop's guess."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from lqs.request import Request, Sampling, Tenant
from lqs.scheduling.prefixes import Prefixes


class Board:
    """Two device slots for one model, with room for ten blocks each, and one for another."""

    def __init__(self, *, is_shared: bool = False) -> None:
        self.slots: list[dict[str, Any]] = [
            {"model": 0, "capacity": 640},
            {"model": 0, "capacity": 640},
            {"model": 1, "capacity": 640},
        ]
        self.prefixes = Prefixes(lambda: self.slots, is_shared=is_shared)

    def find(self, prompt: list[int], **given: Any) -> list[tuple[int, int]]:
        return self.prefixes.find(ask(prompt, **given), 0)

    def note(self, prompt: list[int], slot: int, **given: Any) -> None:
        self.prefixes.note(ask(prompt, **given), Ended(slot))


@dataclass
class Ended:
    """An outcome."""

    slot: int
    prefill_done_ns: int = 1
    finish: int = 1
    error_code: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 1
    assigned_ns: int = 1
    first_token_ns: int = 1
    finished_ns: int = 1


def ask(prompt: list[int], *, key: int = 0, model: int = 0, cache_prompt: bool = True) -> Request:
    tenant = Tenant("t", "normal", key, 1, 1)
    request = Request(id="r", tenant=tenant, model="m", arrival_ns=0, sampling=Sampling(cache_prompt=cache_prompt))
    request.prompt, request.model_index = array("i", prompt), model
    return request


def test_a_common_beginning_is_found_in_whole_blocks() -> None:
    board = Board()
    board.note(list(range(300)), 1)
    assert board.find([*range(200), *[7] * 100]) == [(1, 192)]
    assert board.find(list(range(300))) == [(1, 256)]
    assert board.find(list(range(63))) == []
    # The same block elsewhere is another.
    assert board.find([1, *range(300)]) == []


def test_each_device_slot_tells_its_own() -> None:
    board = Board()
    board.note(list(range(130)), 0)
    board.note(list(range(300)), 1)
    assert board.find(list(range(300))) == [(0, 128), (1, 256)]


def test_keys_find_nothing_of_each_other_unless_they_share() -> None:
    for is_shared, found in ((False, []), (True, [(0, 128)])):
        board = Board(is_shared=is_shared)
        board.note(list(range(128)), 0, key=1)
        assert board.find(list(range(128)), key=2) == found


def test_no_more_is_remembered_than_a_device_slot_holds_and_beginnings_stay_longest() -> None:
    board = Board()
    for number in range(5):
        board.note([number] * 256, 0)
    # Twenty blocks were noted, ten fit: the last two prompts, and of the one before its first two blocks.
    assert [board.find([number] * 256) for number in range(5)] == [[], [], [(0, 128)], [(0, 256)], [(0, 256)]]


def test_without_a_choice_or_a_wish_nothing_is_kept() -> None:
    board = Board()
    board.prefixes.note(ask(list(range(128)), model=1), Ended(2))
    assert board.prefixes.find(ask(list(range(128))), 1) == []
    board.prefixes.note(ask(list(range(128))), Ended(0, prefill_done_ns=0))
    assert board.find(list(range(128))) == []
    board.note(list(range(128)), 0, cache_prompt=False)
    assert board.find(list(range(128))) == []
    board.note(list(range(128)), 0)
    assert board.find(list(range(128)), cache_prompt=False) == []
    nothing = Prefixes(lambda: board.slots, is_kept=False)
    nothing.note(ask(list(range(128))), Ended(0))
    assert nothing.find(ask(list(range(128))), 0) == []


def test_device_slots_that_come_later_are_seen() -> None:
    board = Board()
    assert board.find(list(range(128))) == []
    board.slots.append({"model": 0, "capacity": 640})
    board.note(list(range(128)), 3)
    assert board.find(list(range(128))) == [(3, 128)]
