"""Model files in memory, and workers on models that the default one does not stand for."""

import array
from concurrent.futures import ThreadPoolExecutor

import pytest

from lqs import _core, _engine
from lqs.engine import synth
from tests.engine.rig import Rig


def load(path) -> _engine.Model:
    model = _engine.Model(str(path))
    model.load()
    return model


@pytest.fixture
def tiny(tmp_path):
    return load(synth.write(tmp_path / "tiny.gguf", synth.Recipe()))


def test_the_header_is_told_as_it_stands(default_model):
    assert default_model.n_vocab == 49152
    assert default_model.n_ctx_train == 8192
    assert default_model.eog == {0, 2, 4}
    assert default_model.meta["general.architecture"] == "llama"
    assert len(default_model.meta["tokenizer.chat_template"]) > 256
    assert "<|im_start|>" in default_model.special_texts
    assert default_model.token_text(2) == "<|im_end|>"
    # 30 layers, 3 KV heads of 64, keys and values in two bytes.
    assert default_model.kv_bytes_per_token == 30 * 3 * 64 * 2 * 2
    assert default_model.progress == 1.0
    assert default_model.n_params == 134_515_008
    assert 90_000_000 < default_model.size_bytes < 110_000_000
    assert "Q4_1" in default_model.desc
    assert (default_model.bos, default_model.eos, default_model.eot) == (1, 2, 0)
    assert not default_model.add_bos


def test_text_goes_to_tokens_and_back_unchanged(default_model):
    for text in ("", "hello", "naïve 😀 歪\n\t", "a" * 5000, "<|im_start|>"):
        assert default_model.detokenize(default_model.tokenize(text.encode())).decode() == text


def test_control_tokens_are_parsed_and_printed_only_on_request(default_model):
    plain = default_model.tokenize(b"<|im_end|>", False, False)
    parsed = default_model.tokenize(b"<|im_end|>", False, True)
    assert list(parsed) == [2]
    assert len(plain) > 1
    assert default_model.detokenize(parsed) == b""
    assert default_model.detokenize(parsed, special=True) == b"<|im_end|>"


def test_ids_outside_the_vocabulary_are_refused(default_model):
    for ids in ([-1], [49152], [2**31 - 1]):
        with pytest.raises(_engine.EngineError, match="vocabulary"):
            default_model.detokenize(ids)
    with pytest.raises(_engine.EngineError, match="vocabulary"):
        default_model.token_text(49152)


def test_a_file_that_llama_cpp_refuses_is_an_error_not_the_end(tmp_path):
    path = tmp_path / "no.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(_engine.EngineError, match="could not load"):
        load(path)


def test_what_is_not_loaded_says_so(tmp_path):
    model = _engine.Model(str(tmp_path / "never.gguf"))
    with pytest.raises(_engine.EngineError, match="not loaded"):
        model.tokenize(b"a")
    with pytest.raises(_engine.EngineError, match="not loaded"):
        _ = model.n_params


def test_a_model_is_loaded_once_and_closed_after_its_workers(tiny):
    with pytest.raises(_engine.EngineError, match="already"):
        tiny.load()
    with Rig(tiny, n_ctx=256, n_seq=1), pytest.raises(_engine.EngineError, match="still used"):
        tiny.close()
    tiny.close()
    with pytest.raises(_engine.EngineError, match="not loaded"):
        tiny.tokenize(b"a")


def test_weights_of_one_file_load_at_the_same_time(tmp_path):
    path = synth.write(tmp_path / "tiny.gguf", synth.Recipe())
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(load, [path] * 4))
    assert len({tuple(model.tokenize(b"a red fox")) for model in models}) == 1
    assert all(model.progress == 1 for model in models)


def test_a_device_that_libllama_does_not_know_holds_no_weights(tmp_path):
    """Weights that are asked onto a GPU never end up elsewhere."""
    model = _engine.Model(str(synth.write(tmp_path / "tiny.gguf", synth.Recipe())))
    with pytest.raises(_engine.EngineError, match="could not load"):
        model.load(devices=["CUDA99"], parts=[1.0])
    for parts in ([], [1.0, 1.0], [0.0], [-1.0]):
        with pytest.raises(ValueError, match="a part above 0 for each"):
            model.load(devices=["CUDA0"], parts=parts)
    with pytest.raises(ValueError, match="at most 16 devices"):
        model.load(devices=["CUDA0"] * 17, parts=[1.0] * 17)
    model.load()
    assert model.n_vocab > 0
    assert all(isinstance(place, str) for place in _engine.gpu_places())


@pytest.mark.parametrize("architecture", ["gemma2", "mamba"])
def test_models_that_cannot_cut_a_sequence_run_without_a_prefix_cache(tmp_path, architecture):
    model = load(synth.write(tmp_path / "m.gguf", synth.Recipe(architecture=architecture)))
    assert not model.can_reuse_prefix
    ids = list(range(40, 80))
    with Rig(model, n_ctx=1024, n_seq=4) as rig:
        first = rig.ask(ids, max_tokens=6, temperature=0.0, ignore_eos=True)
        others = [rig.submit([*ids, 50 + i], max_tokens=6, temperature=0.0, ignore_eos=True) for i in range(6)]
        again = rig.submit(ids, max_tokens=6, temperature=0.0, ignore_eos=True)
        rig.finish(again, *others)
        assert again.text == first.text
        assert again.outcome.num_cached_tokens == 0
        assert {a.outcome.finish for a in others} == {_core.Finish.FINISH_LENGTH}
        assert rig.worker.snapshot()["num_cached_sequences"] == 0


def test_256_sequences_run_in_one_context(tiny):
    with Rig(tiny, n_ctx=256 * 32, n_seq=256) as rig:
        answers = [
            rig.submit([40 + i % 100, 41, 42], max_tokens=8, temperature=0.0, ignore_eos=True) for i in range(300)
        ]
        rig.finish(*answers)
    assert [a.outcome.num_completion_tokens for a in answers] == [8] * 300
    assert {a.outcome.finish for a in answers} == {_core.Finish.FINISH_LENGTH}


def test_a_context_that_cannot_be_made_is_an_error(tiny):
    with pytest.raises(ValueError, match="256"):
        Rig(tiny, n_seq=257)
    with pytest.raises(ValueError, match="at least 1"):
        Rig(tiny, n_ctx=0)


def test_a_split_cache_gives_the_same_text_and_goes_on_in_whole_sequences(tiny):
    ids = list(range(40, 90))
    with Rig(tiny, n_ctx=1024, n_seq=4) as rig:
        whole = rig.ask(ids, max_tokens=8, temperature=0.0, ignore_eos=True)
    with Rig(tiny, n_ctx=1024, n_seq=4, kv_unified=False) as rig:
        assert rig.worker.n_ctx_seq == 256
        first = rig.ask(ids, max_tokens=8, temperature=0.0, ignore_eos=True)
        again = rig.ask(ids, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert first.text == again.text == whole.text
        assert again.outcome.num_cached_tokens == len(ids) - 1


def test_the_budget_is_the_most_tokens_that_meet_the_target(tiny):
    rig = Rig(tiny, n_ctx=512, n_seq=2, n_batch=128)
    rig.worker.open()
    found = rig.worker.calibrate(target_ms=1e9)
    assert rig.worker.budget == max(found) == 128
    rig.worker.calibrate(target_ms=0.0)
    assert rig.worker.budget == 16
    rig.worker.budget = 20
    assert rig.worker.budget == 20
    with pytest.raises(ValueError, match="budget"):
        rig.worker.budget = 129
    rig.worker.close()


def test_a_worker_is_opened_once_and_runs_only_open(tiny):
    rig = Rig(tiny, n_ctx=256, n_seq=1)
    with pytest.raises(_engine.EngineError, match="not open"):
        rig.worker.run()
    rig.worker.open()
    with pytest.raises(_engine.EngineError, match="open already"):
        rig.worker.open()
    assert rig.worker.state == "ready"
    rig.worker.close()


def test_a_drill_is_named(tiny):
    rig = Rig(tiny, n_ctx=256, n_seq=1)
    with pytest.raises(ValueError, match="drill"):
        rig.worker.break_at("earthquake")


def test_what_was_compiled_is_held_against_what_is_installed():
    with pytest.raises(_engine.EngineError, match="compiled against"):
        _engine.check_abi("0.0.1", {})
    import llama_cpp

    with pytest.raises(_engine.EngineError, match="rebuild"):
        _engine.check_abi(llama_cpp.__version__, {"llama_batch": 1})


def test_a_prompt_must_be_an_array_of_ids(tiny):
    with pytest.raises(ValueError, match="type 'i'"):
        _engine.Completion(tiny, array.array("d", [1.0]), max_tokens=1)
