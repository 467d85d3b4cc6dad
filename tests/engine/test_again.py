"""Requests of a device slot that dies go on at another one: the same text, to the last byte, told once."""

from typing import Any

import pytest

from lqs import _core
from tests.engine.rig import Rig, alone, grammar
from tests.engine.test_swap import assert_nothing_is_left, expect_short
from tests.engine.test_worker import PROMPTS, chat

LENGTH, STOP = _core.Finish.FINISH_LENGTH, _core.Finish.FINISH_STOP
COLOURS = 'root ::= ("red" | "green" | "blue") ("," ("red" | "green" | "blue"))+'
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    "penalised": {"temperature": 0.0, "repeat_penalty": 1.3, "frequency_penalty": 0.5, "repeat_last_n": 32},
    "held back": {"temperature": 0.0, "stops": [b"never", b" the sun sets over the sea and nobody", b"\n\n\n"]},
    "logprobs": {"temperature": 0.0, "num_logprobs": 2},
    "grammar": {"temperature": 0.7, "seed": 3},
}


def options_of(model: Any, kind: str) -> dict[str, Any]:
    more = {"grammar": grammar(model, COLOURS)} if kind == "grammar" else {}
    return {"max_tokens": 30, "ignore_eos": kind != "grammar", **KINDS[kind], **more}


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_goes_on_without_a_seam(default_model: Any, kind: str) -> None:
    prompts = [chat(p) for p in PROMPTS[:4]]
    options = options_of(default_model, kind)
    want = alone(default_model, prompts, **options)
    with Rig(default_model, num_slots=2, n_ctx=1024, n_seq=2, threads=1) as rig:
        answers = [rig.submit(p, **options) for p in prompts]
        rig.pump(lambda: all(a.num_tokens >= 5 for a in answers))
        rig.worker.break_at("assert")
        rig.finish(*answers)
        assert [a.text for a in answers] == [w.text for w in want]
        assert [a.logprobs for a in answers] == [w.logprobs for w in want]
        assert [a.num_tokens for a in answers] == [w.num_tokens for w in want]
        assert [a.outcome.finish for a in answers] == [w.outcome.finish for w in want]
        assert [a.outcome.num_completion_tokens for a in answers] == [a.num_tokens for a in answers]
        figures = rig.scheduler.snapshot()
        assert (figures["num_lost"], figures["num_restarted"]) == (2, 2)
        assert rig.workers[1].snapshot()["num_taken_over"] == 2
        assert rig.worker.is_parked
        rig.worker = rig.workers[1]
        assert_nothing_is_left(rig)


def test_half_a_character_and_half_a_stop_string_are_rebuilt(default_model: Any) -> None:
    """Wherever it dies: the bytes of one character come in several tokens, and so does the stop string."""
    prompt = "Repeat: \U0001f9ea\U0001f469‍\U0001f52c\U0001f9ea\U0001f469‍\U0001f52c\U0001f9ea\U0001f469‍\U0001f52c"
    options = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "stops": ["\U0001f52c zz".encode()]}
    (want,) = alone(default_model, [prompt], **options)
    for num_steps in (1, 2, 3, 5, 8, 13):
        with Rig(default_model, num_slots=2, n_ctx=256, n_seq=1, threads=1) as rig:
            rig.worker.break_at("assert", step=num_steps)
            answer = rig.ask(prompt, **options)
            assert (answer.text, answer.num_tokens) == (want.text, want.num_tokens)
            assert rig.scheduler.snapshot()["num_restarted"] == 1


@pytest.mark.parametrize("kind", ["greedy", "logprobs"])
def test_a_worker_that_hangs_and_wakes_is_not_heard_any_more(default_model: Any, kind: str) -> None:
    """It wakes in the middle of its step, when all that it ran is done elsewhere."""
    prompts = [chat(p) for p in PROMPTS[:4]]
    options = options_of(default_model, kind)
    want = alone(default_model, prompts, **options)
    with Rig(default_model, num_slots=2, n_ctx=1024, n_seq=2, threads=1) as rig:
        rig.scheduler.set_stall(0, 500_000_000)
        answers = [rig.submit(p, **options) for p in prompts]
        rig.pump(lambda: all(a.num_tokens >= 5 for a in answers))
        rig.worker.break_at("hang", for_s=2.0)
        rig.finish(*answers)
        assert [(a.text, a.logprobs) for a in answers] == [(w.text, w.logprobs) for w in want]
        assert rig.scheduler.snapshot()["num_stalled"] == 1
        assert rig.worker.state == "dead"
        assert rig.worker.death == "its step did not end"
        rig._threads[0].join(30)
        assert not rig._threads[0].is_alive()
        later = rig.ask(prompts[0], **options)
        assert later.text == want[0].text
        assert rig.scheduler.snapshot()["num_broken"] == 0


def test_when_llama_decode_keeps_failing_the_others_go_on_elsewhere(default_model: Any) -> None:
    prompts = [chat(p) for p in PROMPTS[:4]]
    options = options_of(default_model, "greedy")
    want = alone(default_model, prompts, **options)
    with Rig(default_model, num_slots=2, n_ctx=1024, n_seq=2, threads=1) as rig:
        answers = [rig.submit(p, **options) for p in prompts]
        rig.pump(lambda: all(a.num_tokens >= 5 for a in answers))
        rig.worker.break_at("rc", rc=-100, times=-1)
        rig.finish(*answers)
        assert rig.worker.state == "dead"
        assert [a.text for a in answers] == [w.text for w in want]
        assert {a.outcome.finish for a in answers} == {LENGTH}


def test_one_that_is_alone_when_llama_decode_fails_is_tried_again(default_model: Any) -> None:
    """A lack that passes costs it nothing."""
    with Rig(default_model, n_ctx=512, n_seq=2, threads=1) as rig:
        want = rig.ask(chat(PROMPTS[0]), **options_of(default_model, "greedy"))
        for times in (1, 3):
            answer = rig.submit(chat(PROMPTS[0]), **options_of(default_model, "greedy"))
            rig.pump(lambda one=answer: one.num_tokens >= 5)
            rig.worker.break_at("rc", rc=-2, times=times)
            rig.finish(answer)
            assert (answer.text, answer.outcome.finish) == (want.text, LENGTH)
        assert rig.worker.state == "ready"
        assert_nothing_is_left(rig)


def test_one_that_is_alone_goes_on_elsewhere_when_nothing_is_computed_any_more(default_model: Any) -> None:
    prompt, options = chat(PROMPTS[0]), options_of(default_model, "greedy")
    (want,) = alone(default_model, [prompt], **options)
    with Rig(default_model, num_slots=2, n_ctx=512, n_seq=2, threads=1) as rig:
        answer = rig.submit(prompt, **options)
        rig.pump(lambda: answer.num_tokens >= 5)
        rig.worker.break_at("rc", rc=-2, times=-1)
        rig.finish(answer)
        assert (answer.text, answer.outcome.finish) == (want.text, LENGTH)
        assert rig.worker.death == "llama_decode kept failing"


def test_one_that_is_alone_is_to_blame_when_the_token_of_nobody_is_computed(default_model: Any) -> None:
    """Then it ends, and the device slot is not taken for broken, however often it comes."""
    with Rig(default_model, n_ctx=512, n_seq=2, threads=1) as rig:
        for _ in range(5):
            # Its prompt fails whenever it is in a batch; one token does not.
            rig.worker.break_at("rc", rc=-3, times=-1, tokens=2)
            answer = rig.ask(chat(PROMPTS[0]), **options_of(default_model, "greedy"))
            assert (answer.outcome.finish, answer.outcome.error_code) == (_core.Finish.FINISH_ERROR, -3)
        assert rig.worker.state == "ready"
        rig.worker.break_at("rc", rc=-3, times=0, tokens=1 << 20)
        assert rig.ask(chat(PROMPTS[1]), **options_of(default_model, "greedy")).outcome.finish == LENGTH


@pytest.mark.parametrize("is_bad_first", [True, False])
def test_one_to_blame_among_others_ends_whichever_place_it_has(default_model: Any, is_bad_first: bool) -> None:
    with Rig(default_model, n_ctx=512, n_seq=2, threads=1, prefix_cache=False) as rig:
        options = options_of(default_model, "greedy")
        want = rig.ask(chat(PROMPTS[0]), **options)
        # One of a long prompt keeps the first place, or leaves it to who comes then.
        other = rig.submit(chat(PROMPTS[1]), max_tokens=1 if is_bad_first else 8, temperature=0.0, ignore_eos=True)
        good = rig.submit(chat(PROMPTS[0]), **options)
        rig.finish(other)
        rig.pump(lambda: good.num_tokens >= 2)
        # What decodes one token is computed, a prompt is not.
        failed = rig.worker.snapshot()["num_failed_decodes"]
        rig.worker.break_at("rc", rc=-3, times=-1, tokens=2)
        bad = rig.submit(chat(PROMPTS[2]), **options)
        rig.finish(bad, good)
        assert (bad.outcome.finish, bad.outcome.error_code) == (_core.Finish.FINISH_ERROR, -3)
        assert (good.text, good.outcome.finish) == (want.text, LENGTH)
        assert rig.worker.snapshot()["num_failed_decodes"] - failed <= 4
        assert rig.worker.state == "ready"


def test_two_to_blame_among_others_do_not_cost_the_device_slot(default_model: Any) -> None:
    """Both fail one after the other, and nobody gets on in between: a token of nobody says whose fault it is."""
    with Rig(default_model, n_ctx=512, n_seq=3, threads=1, prefix_cache=False) as rig:
        options = options_of(default_model, "greedy")
        want = rig.ask(chat(PROMPTS[0]), **options)
        good = rig.submit(chat(PROMPTS[0]), **options)
        rig.pump(lambda: good.num_tokens >= 2)
        rig.worker.break_at("rc", rc=-3, times=-1, tokens=2)
        bad = [rig.submit(chat(PROMPTS[i]), **options) for i in (1, 2)]
        rig.finish(good, *bad)
        assert [one.outcome.finish for one in bad] == [_core.Finish.FINISH_ERROR] * 2
        assert (good.text, good.outcome.finish) == (want.text, LENGTH)
        assert rig.worker.state == "ready"


def test_with_little_kv_those_that_come_and_those_that_are_there_all_end(default_model: Any) -> None:
    """Promises that grow: some are put out, some go on, and every text is the same."""
    prompts = [chat(p) for p in PROMPTS[:6]]
    options = options_of(default_model, "greedy")
    want = alone(default_model, prompts, **options)
    with Rig(default_model, num_slots=2, n_ctx=1024, kv_tokens=180, n_seq=4, threads=1, kv_block=16) as rig:
        expect_short(rig)
        answers = [rig.submit(p, level=i % 4, **options) for i, p in enumerate(prompts)]
        rig.pump(lambda: sum(a.num_tokens for a in answers) >= 40)
        rig.worker.break_at("assert")
        rig.finish(*answers)
        assert [a.text for a in answers] == [w.text for w in want]
        assert {a.outcome.finish for a in answers} == {LENGTH}
        assert rig.scheduler.snapshot()["slots"][1]["num_put_out"] > 0
        rig.worker = rig.workers[1]
        assert_nothing_is_left(rig)
