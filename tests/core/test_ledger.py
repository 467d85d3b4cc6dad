"""The token ledger: exact, and never below zero."""

import pytest

from lqs._core import IS_DEBUG, Ledger, LedgerBroken


def make():
    return Ledger(capacities=[1000, 50], num_sequences=[3, 1], num_keys=2)


def test_a_promise_is_kept_for_its_slot_and_its_key():
    ledger = make()
    assert ledger.reserve(0, 1, 600)
    assert ledger.slot(0) == {
        "capacity": 1000,
        "reserved": 600,
        "used": 0,
        "num_sequences": 3,
        "num_running": 1,
    }
    assert ledger.key(1)["reserved"] == 600
    assert ledger.key(0)["reserved"] == 0


def test_nothing_is_promised_beyond_tokens_or_sequences():
    ledger = make()
    assert ledger.reserve(0, 0, 1000)
    assert not ledger.reserve(0, 0, 1)
    assert ledger.reserve(0, 0, 0)
    assert ledger.reserve(0, 0, 0)
    assert not ledger.reserve(0, 0, 0)
    assert not ledger.reserve(1, 0, 51)
    assert ledger.reserve(1, 0, 50)
    assert ledger.slot(1)["num_running"] == 1


def test_a_promise_grows_only_into_what_is_free():
    ledger = make()
    assert ledger.reserve(0, 0, 900)
    assert ledger.grow(0, 0, 100)
    assert not ledger.grow(0, 0, 1)
    assert ledger.slot(0)["reserved"] == ledger.key(0)["reserved"] == 1000


def test_settling_gives_all_back_and_books_what_was_computed():
    ledger = make()
    ledger.reserve(0, 1, 600)
    ledger.use(0, 100)
    ledger.settle(0, 1, 600, 100, 100, 37)
    assert ledger.slot(0)["reserved"] == ledger.slot(0)["used"] == 0
    assert ledger.slot(0)["num_running"] == 0
    assert ledger.key(1) == {"reserved": 0, "prompt_tokens": 100, "completion_tokens": 37}


def test_part_of_a_promise_is_given_back_and_its_sequence_stays_taken():
    ledger = make()
    ledger.reserve(0, 1, 600)
    ledger.use(0, 100)
    ledger.shrink(0, 1, 600, 100)
    assert ledger.slot(0)["reserved"] == ledger.slot(0)["used"] == ledger.key(1)["reserved"] == 0
    assert ledger.slot(0)["num_running"] == 1
    assert ledger.grow(0, 1, 1000)


def test_releasing_books_nothing():
    ledger = make()
    ledger.reserve(0, 1, 600)
    ledger.release(0, 1, 600, 0)
    assert ledger.key(1) == {"reserved": 0, "prompt_tokens": 0, "completion_tokens": 0}


@pytest.mark.skipif(IS_DEBUG, reason="a debug build ends the process here")
@pytest.mark.parametrize(
    "wrong",
    [
        lambda ledger: ledger.release(1, 0, 0, 0),
        lambda ledger: ledger.release(0, 0, 601, 0),
        lambda ledger: ledger.release(0, 1, 1, 0),
        lambda ledger: ledger.shrink(0, 0, 601, 0),
        lambda ledger: ledger.shrink(0, 0, 501, 0),
        lambda ledger: ledger.release(0, 0, 600, 101),
        lambda ledger: ledger.release(0, 0, 600, 99),
        lambda ledger: ledger.settle(0, 0, 601, 0, 5, 5),
        lambda ledger: ledger.use(0, 501),
    ],
)
def test_giving_back_more_than_is_held_is_an_error_and_changes_nothing(wrong):
    ledger = make()
    ledger.reserve(0, 0, 600)
    ledger.use(0, 100)
    before = ledger.slot(0), ledger.slot(1), ledger.key(0), ledger.key(1)
    with pytest.raises(LedgerBroken):
        wrong(ledger)
    assert (ledger.slot(0), ledger.slot(1), ledger.key(0), ledger.key(1)) == before


def test_an_unknown_slot_or_key_is_an_error():
    ledger = make()
    for call in (
        lambda: ledger.reserve(2, 0, 1),
        lambda: ledger.grow(0, 2, 1),
        lambda: ledger.use(2, 1),
        lambda: ledger.slot(2),
        lambda: ledger.key(2),
    ):
        with pytest.raises(IndexError):
            call()


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacities": [], "num_sequences": []},
        {"capacities": [1], "num_sequences": []},
        {"capacities": [1], "num_sequences": [1], "num_keys": 0},
    ],
)
def test_a_ledger_needs_slots_and_keys(wrong):
    with pytest.raises(ValueError, match="one capacity"):
        Ledger(**wrong)


def test_cycling_leaves_nothing_behind():
    ledger = make()
    ledger.cycle(100)
    assert ledger.slot(0)["reserved"] == ledger.slot(0)["num_running"] == 0
    assert ledger.key(0)["completion_tokens"] == 6400
