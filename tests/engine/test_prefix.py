"""The prefix cache under random traffic: shared, cut, evicted and laid out anew, with no text changed.

A tiny model with random weights: a cell that is wrong, stale or out of order changes its texts. Its
weights are quantised, so that its logits do not depend on the size of a batch.
"""

import random

import pytest

from lqs import _core, _engine
from lqs.engine import synth
from tests.engine.rig import Rig

LENGTH, STOPPED = _core.Finish.FINISH_LENGTH, _core.Finish.FINISH_CANCELLED


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = _engine.Model(str(synth.write(tmp_path_factory.mktemp("model") / "tiny.gguf", synth.Recipe(dtype="q8_0"))))
    model.load()
    return model


def conversations(rng: random.Random, num: int) -> list[list[int]]:
    """Prompts that grow out of each other: same system texts, branching turns, repeats."""
    prompts = [[rng.randrange(300) for _ in range(rng.randrange(20, 60))] for _ in range(3)]
    while len(prompts) < num:
        base = rng.choice(prompts)
        kept = base[: rng.randrange(1, len(base) + 1)]
        prompts.append((kept + [rng.randrange(300) for _ in range(rng.randrange(0, 40))])[:150])
    return prompts


def expected(model, prompts: list[list[int]], max_tokens: int) -> list[bytes]:
    with Rig(model, n_ctx=1024, n_seq=1, prefix_cache=False) as rig:
        return [rig.ask(p, max_tokens=max_tokens, temperature=0.0, ignore_eos=True).text for p in prompts]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [{}, {"compact": False}, {"kv_unified": False}, {"num_cached": 0}])
def test_random_traffic_changes_no_text_and_loses_no_cell(tiny, seed, settings):
    rng = random.Random(seed)
    prompts = conversations(rng, 60)
    want = expected(tiny, prompts, 12)
    in_order = settings.get("compact", True)
    with Rig(tiny, n_ctx=1024, n_seq=4, num_cached=settings.pop("num_cached", 5), **settings) as rig:
        answers = []
        for prompt in prompts:
            answers.append(
                rig.submit(prompt, max_tokens=12, temperature=0.0, ignore_eos=True, scope=0, level=rng.randrange(5))
            )
            if rng.random() < 0.3:
                rig.pump(lambda: sum(not a.settled for a in answers) < 3)
            if rng.random() < 0.1:
                rig.scheduler.cancel(rng.choice(answers).handle)
        rig.finish(*answers)
        assert rig.worker.snapshot()["num_kv_failures"] == 0
        assert rig.worker.snapshot()["cells_used"] == rig.worker.count_cells()
    done = [(a.text, w) for a, w in zip(answers, want, strict=True) if a.outcome and a.outcome.finish == LENGTH]
    assert len(done) > 40
    if in_order:
        assert [text for text, _ in done] == [text for _, text in done]


def test_a_running_donor_that_ends_first_leaves_its_cells_to_its_borrowers(tiny):
    system = list(range(60, 120))
    with Rig(tiny, n_ctx=1024, n_seq=4, num_cached=0) as rig:
        donor = rig.submit(system, max_tokens=30, temperature=0.0, ignore_eos=True)
        rig.pump(lambda: donor.num_tokens > 0)
        borrowers = [rig.submit([*system, 7 + i], max_tokens=60, temperature=0.0, ignore_eos=True) for i in range(3)]
        rig.finish(donor, *borrowers)
        assert rig.worker.snapshot()["cells_used"] == rig.worker.count_cells()
    assert all(b.outcome.num_cached_tokens >= len(system) - 1 for b in borrowers)
    want = expected(tiny, [[*system, 7 + i] for i in range(3)], 60)
    assert [b.text for b in borrowers] == want


def test_a_request_that_turns_the_cache_off_neither_reads_nor_leaves_a_prefix(tiny):
    ids = list(range(40, 100))
    with Rig(tiny, n_ctx=512, n_seq=2) as rig:
        first = rig.ask(ids, max_tokens=2, cache_prompt=False)
        second = rig.ask(ids, max_tokens=2)
        third = rig.ask(ids, max_tokens=2, cache_prompt=False)
        fourth = rig.ask(ids, max_tokens=2)
    assert [a.outcome.num_cached_tokens for a in (first, second, third, fourth)] == [0, 0, 0, len(ids) - 1]
