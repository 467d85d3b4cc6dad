"""A better class does not wait for a sequence, and long prompts leave room in every step."""

import pytest

from tests.engine.rig import Rig, alone
from tests.engine.test_worker import chat

LOW, URGENT = 3, 0
SHORT, LONG = 0, 1
LONG_TEXT = "Tell a long story about a fox. " * 12
OPTIONS = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}


def story(number):
    return chat(f"Tell a story about {number} foxes.")


def low(rig, number, **options):
    return rig.submit(story(number), level=LOW, **OPTIONS | options)


def urgent(rig):
    return rig.submit(
        chat("Say yes."), level=URGENT, max_tokens=4, temperature=0.0, ignore_eos=True, cache_prompt=False
    )


@pytest.mark.parametrize(("n_extra", "is_first"), [(1, True), (0, False)])
def test_an_urgent_request_starts_beside_the_lesser_ones(default_model, n_extra, is_first):
    want = alone(default_model, [story(number) for number in range(2)], **OPTIONS)
    with Rig(default_model, n_ctx=2048, n_seq=2, n_extra=n_extra, threads=1) as rig:
        lesser = [low(rig, number) for number in range(2)]
        rig.pump(lambda: all(answer.text for answer in lesser))
        answer = urgent(rig)
        rig.pump(lambda: answer.outcome is not None)
        assert (not any(one.settled for one in lesser)) == is_first
        rig.finish(answer, *lesser)
        # They stepped back, and nothing else happened to them.
        assert [one.text for one in lesser] == [one.text for one in want]
        assert rig.scheduler.snapshot()["slots"][0]["num_running"] == 0


def test_the_extra_sequences_are_for_nobody_else(default_model):
    with Rig(default_model, n_ctx=2048, n_seq=2, n_extra=2, threads=1) as rig:
        lesser = [low(rig, number) for number in range(3)]
        rig.pump(lambda: any(one.settled for one in lesser[:2]) or lesser[2].started)
        assert any(one.settled for one in lesser[:2])
        rig.finish(*lesser)


def test_the_lesser_go_on_while_urgent_ones_run(default_model):
    with Rig(default_model, n_ctx=2048, n_seq=1, n_extra=1, threads=1) as rig:
        lesser = low(rig, 1, max_tokens=120)
        rig.pump(lambda: lesser.num_tokens > 0)
        longer = rig.submit(chat("Count."), level=URGENT, max_tokens=60, temperature=0.0, ignore_eos=True)
        rig.pump(lambda: longer.num_tokens > 0)
        before = lesser.num_tokens
        rig.finish(longer)
        # Every fourth step at least; one or two may not have been told yet.
        assert 60 // 4 - 3 <= lesser.num_tokens - before <= 60 // 2
        rig.finish(lesser)


def test_a_long_prompt_does_not_stand_in_front_of_a_short_one(default_model):
    """Of one class, the long one first: the short one has its first token while the long one is computed."""
    with Rig(default_model, n_ctx=4096, n_seq=4, threads=1) as rig:
        long = rig.submit(chat(LONG_TEXT * 4), lane=LONG, max_tokens=4, temperature=0.0, cache_prompt=False)
        rig.pump(lambda: long.started)
        short = rig.submit(chat("Say yes."), lane=SHORT, max_tokens=4, temperature=0.0, cache_prompt=False)
        rig.finish(long, short)
        assert short.outcome.first_token_ns < long.outcome.prefill_done_ns


def test_prompts_of_low_classes_go_in_the_finest_chunks(default_model):
    """As many steps as chunks of sixteen; one of a better class needs one."""
    with Rig(default_model, n_ctx=2048, n_seq=2, threads=1, fine_level=3) as rig:
        steps = []
        for level in (2, 3):
            before = rig.worker.snapshot()["num_decodes"]
            rig.ask([5] * 65, level=level, max_tokens=1, temperature=0.0, ignore_eos=True, cache_prompt=False)
            steps.append(rig.worker.snapshot()["num_decodes"] - before)
        assert steps == [1, 5]
