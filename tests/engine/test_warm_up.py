"""What is computed before anybody is let in: the widest batch that there will ever be, and a failure of it."""

from __future__ import annotations

from typing import Any

import pytest

from lqs import _core, _engine
from lqs.engine import library
from lqs.engine.synth import Recipe, parse_shape, write
from lqs.errors import NoRoom
from lqs.scheduling.core import make_scheduler
from lqs.settings import load

_CTX, _BATCH, _UBATCH, _SEQS, _EXTRA = 1024, 512, 63, 4, 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> library.Model:
    path = write(tmp_path_factory.mktemp("model") / "tiny.gguf", Recipe(shape=parse_shape("tiny,ctx=4096")))
    model = library.Model(path)
    model.load()
    return model


@pytest.fixture
def core() -> _core.Scheduler:
    scheduler = make_scheduler(load(None, None, {}), [1.0])
    scheduler.add_device_slot(kv_tokens=_CTX, num_sequences=_SEQS, num_extra=_EXTRA)
    return scheduler


def settings(*, is_cpu: bool = True, **more: Any) -> dict[str, Any]:
    """As a load gives them."""
    return {
        "n_ctx": _CTX,
        "n_seq": _SEQS,
        "n_batch": _BATCH,
        "n_ubatch": _UBATCH,
        "n_extra": _EXTRA,
        "threads": 1,
        "kv_unified": True,
        "prefix_cache": True,
        "prefix_sequences": 8,
        "flash_attention": True,
        "inter_token_target_ms": 200.0,
        "swap_bytes": 1 << 20,
        "kv_block": 64,
        "is_cpu": is_cpu,
    } | more


@pytest.mark.parametrize(("is_cpu", "width"), [(True, _UBATCH), (False, _BATCH)])
def test_all_that_is_ever_computed_at_once_is_computed_first(
    tiny: library.Model, core: _core.Scheduler, is_cpu: bool, width: int
) -> None:
    """B50: cores compute in parts of n_ubatch, and a GPU a whole batch; each with a token of every sequence."""
    worker = library.make_worker(core, 0, tiny, **settings(is_cpu=is_cpu))
    assert worker.warmed == (width, _SEQS + _EXTRA)
    assert worker.state == "ready"
    worker.close()


@pytest.mark.parametrize("rc", [-100, -3, -2, 1, 2])
def test_a_failure_at_full_width_is_a_failure_of_the_load_for_want_of_memory(
    tiny: library.Model, core: _core.Scheduler, rc: int
) -> None:
    """B50: whatever llama_decode says in the warm-up, nobody is let in, and less context may be tried."""
    made = settings()
    names = ("n_ctx", "n_seq", "n_batch", "n_ubatch", "n_extra")
    worker = _engine.Worker(core, 0, tiny.native, **{name: made[name] for name in names})
    worker.break_at("rc", rc=rc, times=-1, tokens=_UBATCH)
    with pytest.raises(_engine.NoRoom, match=f"the warm-up of {_UBATCH} tokens failed with code {rc}"):
        worker.open()
    assert worker.state == "new"
    # Everything was freed, so that a smaller one can be tried; one that breaks beyond that width opens.
    worker.break_at("rc", rc=rc, times=-1, tokens=_UBATCH + 1)
    worker.open()
    assert worker.state == "ready"
    worker.close()


def test_more_sequences_than_are_computed_at_once_all_have_a_token_in_it(
    tiny: library.Model, core: _core.Scheduler
) -> None:
    """B50: all of them at once, also where that is more than n_ubatch."""
    worker = library.make_worker(core, 0, tiny, **settings(n_ubatch=2))
    assert worker.warmed == (_SEQS + _EXTRA, _SEQS + _EXTRA)
    worker.close()


def test_a_split_cache_is_measured_with_no_more_than_a_sequence_may_hold(
    tiny: library.Model, core: _core.Scheduler
) -> None:
    """A batch larger than the cells of one sequence is no lack of memory."""
    worker = library.make_worker(core, 0, tiny, **settings(kv_unified=False, inter_token_target_ms=1e6, n_extra=0))
    assert max(worker.calibration) == worker.n_ctx_seq == _CTX // _SEQS
    worker.close()


def test_without_memory_for_that_width_no_worker_is_made(
    tiny: library.Model, core: _core.Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B50: the load hears `no room`, on which it tries half of the context."""

    def broken(*args: Any, **made: Any) -> _engine.Worker:
        worker = real(*args, **made)
        worker.break_at("rc", times=-1, tokens=_UBATCH)
        return worker

    real = _engine.Worker
    monkeypatch.setattr(_engine, "Worker", broken)
    with pytest.raises(NoRoom, match="the device slot cannot be opened: the warm-up of 63 tokens"):
        library.make_worker(core, 0, tiny, **settings())
