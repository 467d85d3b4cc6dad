"""The door to libllama, with a tiny model of random weights."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lqs.engine import library
from lqs.engine.library import Model, SchedulerBody, make_worker
from lqs.engine.synth import Recipe, parse_shape, write
from lqs.errors import BadRequest, DeviceError, EngineFailed, ModelFileError
from lqs.request import Sampling
from lqs.scheduling.core import make_scheduler
from lqs.settings import load


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write(path, Recipe(shape=parse_shape("tiny")), lambda *_: None)
    library.start(verbose=False)
    loaded = Model(path)
    loaded.load()
    yield loaded
    loaded.close()


def test_a_loaded_model_tells_what_admission_needs(model: Model) -> None:
    assert model.progress == 1.0
    assert model.n_vocab > 256
    assert "<|im_start|>" in model.control_texts
    assert model.markers is not None
    assert model.markers.findall("a<|im_end|>b") == ["<|im_end|>"]
    assert model.chat_template is not None
    assert model.longest_piece_bytes is not None
    assert model.longest_piece_bytes >= len("<|im_start|>")


def test_text_becomes_tokens_and_comes_back(model: Model) -> None:
    ids = model.tokenize("héllo <|im_end|>".encode(), False, True)
    assert model.detokenize(ids).decode() == "héllo <|im_end|>"
    (end,) = model.tokenize(b"<|im_end|>", False, True)
    assert model.token_text(end) == "<|im_end|>"
    assert len(model.tokenize(b"<|im_end|>", False, False)) > 1


@pytest.mark.parametrize("ids", [[-1], [10**6], [1 << 40]])
def test_ids_that_are_no_tokens_are_the_clients_fault(model: Model, ids: list[int]) -> None:
    with pytest.raises(BadRequest):
        model.detokenize(ids)


def test_a_wrong_grammar_is_the_clients_fault(model: Model) -> None:
    assert model.grammar('root ::= "a"') is not None
    with pytest.raises(BadRequest, match="grammar"):
        model.grammar("root ::= (")


def test_work_is_made_of_all_that_sampling_has(model: Model) -> None:
    sampling = Sampling(stop=(b"x",), logit_bias=((1, -1.0),), num_logprobs=2)
    made: Any = model.work(array("i", [1, 2]), 0, sampling, seed=1, grammar=None, max_tokens=3)
    assert (made.num_prompt_tokens, made.max_tokens) == (2, 3)
    with pytest.raises(BadRequest):
        model.work(array("i", [1]), 0, Sampling(num_logprobs=21), seed=1, grammar=None, max_tokens=3)


def test_a_damaged_file_never_reaches_libllama(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00")
    with pytest.raises(ModelFileError, match=r"cut\.gguf"):
        Model(path).load()


def test_what_libllama_refuses_is_an_error_with_a_name(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("no model")
    monkeypatch.setattr(library, "read_header", lambda path: None)
    with pytest.raises(ModelFileError, match=r"text\.gguf"):
        Model(path).load()


def test_another_version_of_libllama_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.llama_cpp, "__version__", "0.0.1")
    with pytest.raises(DeviceError, match=r"0\.0\.1"):
        library.start(verbose=False)


def test_a_text_that_cannot_be_tokenised_is_the_engines_fault(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed):
        Model(tmp_path / "not-loaded.gguf").tokenize(b"x", False, False)


def test_only_lossless_tokenizers_bound_the_tokens_by_bytes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model.meta, "tokenizer.ggml.model", "t5")
    assert model._longest_piece_bytes() is None


def test_a_worker_that_cannot_be_opened_says_why(model: Model) -> None:
    scheduler = make_scheduler(load(), [1.0])
    settings = {"n_ctx": 256, "n_batch": 32, "n_ubatch": 32, "threads": 1, "kv_unified": True, "prefix_cache": False}
    settings |= {"prefix_sequences": 0, "flash_attention": True, "inter_token_target_ms": 200.0}
    settings |= {"n_extra": 0, "swap_bytes": 0, "kv_block": 0, "is_cpu": True}
    with pytest.raises(DeviceError, match="sequences"):
        make_worker(scheduler, 0, model, n_seq=999, **settings)  # type: ignore[arg-type]


def test_the_schedulers_thread_ends_when_it_is_told() -> None:
    body = SchedulerBody(make_scheduler(load(), [1.0]))
    body.stop()
    body.run()
    assert body.snapshot()["seconds"] == 0


def test_rounds_are_counted_by_the_time_they_took() -> None:
    scheduler = make_scheduler(load(), [1.0])
    body = SchedulerBody(scheduler)
    thread = threading.Thread(target=body.run)
    thread.start()
    try:
        while not body.snapshot()["counts"][-1][1]:
            time.sleep(0.001)
    finally:
        body.stop()
        thread.join(10)
    seen = body.snapshot()
    assert seen["seconds"] > 0
    assert [bound for bound, _ in seen["counts"]][:3] == pytest.approx([1e-6, 4e-6, 16e-6])
    counts = [count for _, count in seen["counts"]]
    assert counts == sorted(counts)
    assert counts[-1] == scheduler.snapshot()["num_rounds"]
