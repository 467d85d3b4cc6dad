"""Requests that pause, give up their cells and come back: nobody sees it but by the clock."""

import random
import time

import pytest

from lqs import _core, _engine
from lqs.engine import synth
from lqs.engine.plan import make_plan
from lqs.settings import load
from tests.engine.rig import Rig, alone, grammar
from tests.engine.test_worker import PROMPTS, chat

LENGTH, CANCELLED, TIMEOUT = _core.Finish.FINISH_LENGTH, _core.Finish.FINISH_CANCELLED, _core.Finish.FINISH_TIMEOUT
BLOCK = 16
COPIED, COMPUTED = 1 << 26, 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = _engine.Model(str(synth.write(tmp_path_factory.mktemp("model") / "tiny.gguf", synth.Recipe(dtype="q8_0"))))
    model.load()
    return model


def expect_short(rig) -> None:
    """Let the core believe that answers are short, so that it starts more than will fit."""
    rig.finish(*[rig.submit([1, 2, 3], max_tokens=2, ignore_eos=True, cache_prompt=False) for _ in range(20)])


def assert_nothing_is_left(rig) -> None:
    rig.pump(lambda: rig.worker.snapshot()["num_active"] == 0)
    figures = rig.scheduler.snapshot()
    assert (figures["num_live"], figures["num_running"], figures["num_broken"]) == (0, 0, 0)
    for slot in figures["slots"]:
        names = ("reserved", "used", "num_running", "num_out", "num_short")
        assert [slot[name] for name in names] == [0] * len(names)
    seen = rig.worker.snapshot()
    assert (seen["num_out"], seen["kept_bytes"], seen["num_kv_failures"]) == (0, 0, 0)
    assert seen["cells_used"] == rig.worker.count_cells()


@pytest.mark.parametrize("swap_bytes", [COPIED, COMPUTED])
def test_with_kv_for_half_of_the_growth_every_text_is_whole_and_the_low_classes_pay(default_model, swap_bytes):
    prompts = [chat(p) for p in PROMPTS[:8]]
    options = {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True}
    want = alone(default_model, prompts, **options)
    num_prompt = sum(len(default_model.tokenize(p.encode(), False, True)) for p in prompts)
    kv_tokens = num_prompt + 8 * 32 // 2
    with Rig(
        default_model, n_ctx=1024, kv_tokens=kv_tokens, n_seq=8, threads=1, kv_block=BLOCK, swap_bytes=swap_bytes
    ) as rig:
        expect_short(rig)
        answers = [rig.submit(p, level=i % 4, **options) for i, p in enumerate(prompts)]
        rig.finish(*answers)
        assert [a.text for a in answers] == [w.text for w in want]
        assert {a.outcome.finish for a in answers} == {LENGTH}
        slot, seen = rig.scheduler.snapshot()["slots"][0], rig.worker.snapshot()
        assert slot["num_put_out"] > 0
        assert slot["num_resumed"] == slot["num_put_out"]
        if swap_bytes:
            assert seen["num_swaps_out"] == seen["num_swaps_in"] > 0
            assert seen["recomputed_tokens"] == 0
        else:
            assert seen["num_swaps_out"] == 0
            assert seen["recomputed_tokens"] > 0
        # The best class never waits for another: of the two lowest nobody ends before it.
        ends = [a.outcome.finished_ns for a in answers]
        assert max(ends[0::4]) <= min(ends[2::4] + ends[3::4])
        assert max(ends[0::4]) < min(ends[3::4])
        assert_nothing_is_left(rig)


@pytest.mark.parametrize("swap_bytes", [COPIED, COMPUTED])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "seed": 5, "top_k": 40},
        {"temperature": 0.0, "repeat_penalty": 1.3, "repeat_last_n": 64},
        {"temperature": 0.0, "num_logprobs": 2},
        {"temperature": 0.0, "stops": [b"no such text", b"\n\n\n\n"]},
        {"temperature": 0.7, "seed": 9, "grammar": 'root ::= ([a-z ]+ ". ")+'},
    ],
    ids=["seed", "penalties", "logprobs", "stops", "grammar"],
)
def test_what_a_request_carries_goes_on_where_it_was(default_model, options, swap_bytes):
    options = options | {"max_tokens": 32, "ignore_eos": True}
    if "grammar" in options:
        options |= {"grammar": grammar(default_model, options["grammar"])}
    prompts = [chat(p) for p in PROMPTS[:4]]
    want = alone(default_model, prompts, **options)
    with Rig(default_model, n_ctx=512, kv_tokens=170, n_seq=4, threads=1, kv_block=BLOCK, swap_bytes=swap_bytes) as rig:
        expect_short(rig)
        answers = [rig.submit(p, level=1, **options) for p in prompts]
        rig.finish(*answers)
        assert rig.worker.snapshot()["num_preemptions"] > 0
        assert [a.text for a in answers] == [w.text for w in want]
        assert [a.logprobs for a in answers] == [w.logprobs for w in want]
        assert [a.num_tokens for a in answers] == [32] * 4
        assert_nothing_is_left(rig)


def put_out(rig, num: int = 4):
    """`num` requests of which at least one is out just now."""
    expect_short(rig)
    answers = [rig.submit(chat(p), max_tokens=64, temperature=0.0, ignore_eos=True, level=1) for p in PROMPTS[:num]]
    rig.pump(lambda: rig.worker.snapshot()["num_out"] > 0)
    return answers


@pytest.mark.parametrize("swap_bytes", [COPIED, COMPUTED])
def test_one_that_is_out_can_be_cancelled_and_the_others_go_on(default_model, swap_bytes):
    with Rig(default_model, n_ctx=512, kv_tokens=200, n_seq=4, threads=1, kv_block=BLOCK, swap_bytes=swap_bytes) as rig:
        answers = put_out(rig)
        # The youngest is the first to go and the last to come back.
        rig.scheduler.cancel(answers[-1].handle)
        rig.finish(answers[-1])
        assert answers[-1].outcome.finish == CANCELLED
        assert answers[-1].num_tokens == answers[-1].outcome.num_completion_tokens > 0
        rig.finish(*answers)
        assert {a.outcome.finish for a in answers[:-1]} == {LENGTH}
        assert_nothing_is_left(rig)


def test_the_time_of_one_that_is_out_runs_on(default_model):
    with Rig(default_model, n_ctx=512, kv_tokens=200, n_seq=4, threads=1, kv_block=BLOCK) as rig:
        expect_short(rig)
        probe = rig.ask(chat(PROMPTS[0]), max_tokens=40, ignore_eos=True, cache_prompt=False).outcome
        token_ns = (probe.finished_ns - probe.prefill_done_ns) // 40
        first = [rig.submit(chat(p), max_tokens=120, ignore_eos=True) for p in PROMPTS[:3]]
        # The cells are full after some 110 tokens of all four; the last one would be through after 480.
        last = rig.submit(
            chat(PROMPTS[3]), max_tokens=120, ignore_eos=True, stop_ns=time.monotonic_ns() + 140 * token_ns
        )
        rig.finish(last)
        assert last.outcome.finish == TIMEOUT
        assert rig.worker.snapshot()["num_preemptions"] > 0
        rig.finish(*first)
        assert {a.outcome.finish for a in first} == {LENGTH}
        assert_nothing_is_left(rig)


def test_one_that_is_out_is_lost_with_its_device_slot(default_model):
    with Rig(default_model, n_ctx=512, kv_tokens=200, n_seq=4, threads=1, kv_block=BLOCK) as rig:
        answers = put_out(rig)
        rig.worker.break_at("assert")
        rig.finish(*answers)
        assert {a.outcome.finish for a in answers} == {_core.Finish.FINISH_DEVICE}
        figures = rig.scheduler.snapshot()
        assert (figures["num_running"], figures["num_broken"]) == (0, 0)
        assert figures["slots"][0]["reserved"] == figures["slots"][0]["num_out"] == 0


def test_a_worker_that_is_told_to_stop_ends_those_that_are_out(default_model):
    with Rig(default_model, n_ctx=512, kv_tokens=200, n_seq=4, threads=1, kv_block=BLOCK) as rig:
        answers = put_out(rig)
        rig.worker.stop()
        rig.finish(*answers)
        assert {a.outcome.finish for a in answers} == {_core.Finish.FINISH_DEVICE}
        assert_nothing_is_left(rig)


def test_a_failed_batch_does_not_wait_for_one_that_is_out(default_model):
    """Suspects are tried alone; one that must give up its cells meanwhile is a suspect no more."""
    with Rig(default_model, n_ctx=512, kv_tokens=200, n_seq=4, threads=1, kv_block=BLOCK) as rig:
        answers = put_out(rig)
        rig.worker.break_at("rc", rc=-3, times=1)
        rig.finish(*answers)
        assert {a.outcome.finish for a in answers} == {LENGTH}
        assert_nothing_is_left(rig)


@pytest.mark.parametrize("swap_bytes", [COPIED, 60_000, COMPUTED])
@pytest.mark.parametrize("n_batch", [512, 16])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_beyond_the_kv_changes_no_text(tiny, seed, n_batch, swap_bytes):
    """Shared beginnings, classes, cancels and far too little KV; 60 kB hold some states and not all.

    In steps of 16 tokens some give up their cells while their prompt is being computed.
    """
    rng = random.Random(seed)
    starts = [[rng.randrange(300) for _ in range(rng.randrange(5, 40))] for _ in range(3)]
    prompts = [rng.choice(starts) + [rng.randrange(300) for _ in range(rng.randrange(1, 20))] for _ in range(60)]
    lengths = [rng.randrange(2, 90) for _ in prompts]
    with Rig(tiny, n_ctx=1024, n_seq=1, prefix_cache=False) as rig:
        want = [
            rig.ask(p, max_tokens=n, temperature=0.0, ignore_eos=True).text
            for p, n in zip(prompts, lengths, strict=True)
        ]
    with Rig(
        tiny, n_ctx=512, kv_tokens=300, n_seq=6, n_batch=n_batch, num_cached=5, kv_block=8, swap_bytes=swap_bytes
    ) as rig:
        expect_short(rig)
        answers = []
        for prompt, length in zip(prompts, lengths, strict=True):
            answers.append(
                rig.submit(prompt, max_tokens=length, temperature=0.0, ignore_eos=True, level=rng.randrange(5))
            )
            if rng.random() < 0.2:
                rig.pump(lambda: sum(not a.settled for a in answers) < 8)
            if rng.random() < 0.1:
                rig.scheduler.cancel(rng.choice(answers).handle)
        rig.finish(*answers)
        done = [(a.text, w) for a, w in zip(answers, want, strict=True) if a.outcome and a.outcome.finish == LENGTH]
        assert len(done) > 40
        assert [text for text, _ in done] == [text for _, text in done]
        assert rig.worker.snapshot()["num_preemptions"] > 0
        assert_nothing_is_left(rig)


def test_the_bytes_of_a_token_are_what_was_planned(default_model):
    """Within 5 %: layers, KV heads, head size and f16, against what llama.cpp really keeps."""
    from pathlib import Path

    plan = make_plan(load(), Path(default_model.path))
    rig = Rig(default_model, n_ctx=512, n_seq=2, threads=1)
    rig.worker.open()
    found = rig.worker.calibrate_swap(64)
    rig.worker.close()
    assert found["bytes_per_token"] == pytest.approx(plan.kv_bytes_per_token, rel=0.05)
    assert found == rig.worker.swapping
    assert 0 < found["swap_ms"] < found["compute_ms"]
