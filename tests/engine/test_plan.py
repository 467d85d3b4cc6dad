"""What a config means on a machine, from the model's header alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lqs.engine import cores
from lqs.engine.fitting import Size, smaller
from lqs.engine.plan import Machine, check_fits, make_plan, probe_machine
from lqs.engine.synth import Recipe, parse_shape, write
from lqs.errors import ConfigError, ModelFileError, StartError
from lqs.placement.gpus import SYSTEM_POOL, Gpu, Snapshot
from lqs.placement.survey import survey_of
from lqs.settings import load

BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
BIG = Machine(num_cores=8, memory_free_bytes=16_000_000_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write(path, Recipe(shape=parse_shape("layer=2,embd=64,head=4,head_kv=2,ff=128,ctx=1024,vocab=0")), lambda *_: None)
    return path


def test_the_header_tells_what_a_token_of_context_costs(model: Path) -> None:
    plan = make_plan(load(), model, BIG)
    # Two layers, two KV heads of 16 values each, keys and values, two bytes a value.
    assert plan.kv_bytes_per_token == 2 * 2 * (16 + 16) * 2
    assert plan.n_ctx_train == 1024
    assert 0 < plan.weights_bytes < model.stat().st_size
    assert (plan.kv_tokens, plan.request_tokens_max) == (4 * 1024, 1024)
    assert (plan.devices, plan.threads) == (("cpu:0",), 8)
    assert plan.kv_bytes == plan.kv_tokens * plan.kv_bytes_per_token


def test_device_slots_share_the_cores_and_the_memory(model: Path) -> None:
    config = load(None, None, {"engine.devices": ["cpu:0", "cpu:1"]})
    plan = make_plan(config, model, BIG)
    assert (plan.threads, len(plan.devices)) == (4, 2)
    assert plan.kv_bytes == 2 * plan.kv_tokens * plan.kv_bytes_per_token


def test_what_is_set_is_taken(model: Path) -> None:
    config = load(None, None, {"engine.ctx": 300, "engine.threads": 3})
    plan = make_plan(config, model, BIG)
    assert (plan.kv_tokens, plan.request_tokens_max, plan.threads) == (300, 300, 3)
    assert plan.num_cells == 512


def test_split_kv_gives_each_sequence_its_part(model: Path) -> None:
    config = load(None, None, {"engine.ctx": 1024, "engine.kv_unified": False, "engine.parallel": 4})
    assert make_plan(config, model, BIG).request_tokens_max == 256


def test_little_memory_means_less_context_and_none_an_error(model: Path) -> None:
    config = load(None, None, {"engine.kv_margin_mb": 0})
    plan = make_plan(config, model, BIG)
    (slot,) = plan.slots
    room = plan.weights_bytes + plan.needs.compute_bytes(slot.group) + 1000 * plan.needs.token_bytes(slot.group)
    assert make_plan(config, model, Machine(1, room)).kv_tokens == 768
    with pytest.raises(ConfigError, match="does not fit"):
        make_plan(config, model, Machine(1, 1000))


@pytest.mark.parametrize("name", ["cuda:0", "cpu:x", "cpu:", "gpu", "auto+cpu:1", "cpu:0+cpu:1"])
def test_a_device_slot_that_does_not_exist_is_named(model: Path, name: str) -> None:
    with pytest.raises(StartError, match=re.escape(name.partition("+")[0])):
        make_plan(load(None, None, {"engine.devices": [name]}), model, BIG)


def test_auto_is_the_first_cpu_and_stands_once(model: Path) -> None:
    assert make_plan(load(), model, BIG).devices == ("cpu:0",)
    with pytest.raises(ConfigError, match="twice"):
        make_plan(load(None, None, {"engine.devices": ["auto", "cpu:0"]}), model, BIG)


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"x\.gguf"):
        make_plan(load(), path, BIG)


def test_the_machine_has_cores_and_memory() -> None:
    machine = probe_machine()
    assert machine.num_cores >= 1
    assert machine.memory_free_bytes > 0


def test_a_container_has_no_more_memory_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    monkeypatch.setattr(cores, "_CGROUP", tmp_path)
    assert probe_machine().memory_free_bytes == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert probe_machine().memory_free_bytes > 3000


def test_a_plan_that_does_not_fit_says_what_would(model: Path) -> None:
    config = load(None, None, {"engine.ctx": 10_000, "engine.kv_margin_mb": 0})
    plan = make_plan(config, model, BIG)
    fixed = plan.weights_bytes + plan.needs.compute_bytes(plan.slots[0].group)
    room = Machine(1, fixed + 1000 * plan.needs.token_bytes(plan.slots[0].group))
    with pytest.raises(StartError, match=r"engine\.ctx 10000 is too large here; at most (768|1024)") as caught:
        check_fits(config, make_plan(config, model, room))
    assert caught.value.exit_code == 1
    with pytest.raises(StartError, match="a smaller model"):
        check_fits(config, make_plan(config, model, Machine(1, 1000)))
    check_fits(config, make_plan(config, model, BIG))


def on_cards(*free_gb: float | None) -> Machine:
    """A machine with cards that have so much free; None: nobody can tell."""
    gpus = tuple(
        Gpu(
            uuid=f"GPU-{n}",
            bus_id=f"00000000:0{n}:00.0",
            name="T4",
            memory_free_bytes=None if free is None else int(free * 1e9),
        )
        for n, free in enumerate(free_gb)
    )
    return Machine(8, 16_000_000_000, survey_of(Snapshot(1, "", "570", gpus), BY_BUS, has_cuda=True))


def test_each_card_gets_the_context_that_its_own_memory_holds(model: Path) -> None:
    config = load(None, None, {"engine.devices": ["cuda:0", "cuda:1"], "engine.gpu_margin_mb": 0})
    plan = make_plan(config, model, on_cards(10, 10))
    fixed = plan.weights_bytes + plan.needs.compute_bytes(plan.slots[0].group)
    a_token = plan.needs.token_bytes(plan.slots[0].group)
    plan = make_plan(config, model, on_cards((fixed + 1000 * a_token) / 1e9, 10))
    assert [slot.kv_tokens for slot in plan.slots] == [768, 4096]
    assert [slot.threads for slot in plan.slots] == [1, 1]
    assert plan.takes["GPU-0"] == fixed + 768 * a_token
    assert plan.request_tokens_max == 1024
    check_fits(config, plan)
    set_ctx = load(None, None, {"engine.devices": ["cuda:0"], "engine.gpu_margin_mb": 0, "engine.ctx": 4096})
    too_large = make_plan(set_ctx, model, on_cards((fixed + 1000 * a_token) / 1e9))
    with pytest.raises(StartError, match=r"It does not fit on GPU-0: engine\.ctx 4096 is too large here; at most"):
        check_fits(set_ctx, too_large)


def test_a_model_over_two_cards_is_split_as_their_memory_stands(model: Path) -> None:
    plan = make_plan(load(None, None, {"engine.devices": ["cuda:0+cuda:1"]}), model, on_cards(9, 3))
    (slot,) = plan.slots
    assert (str(slot.group), slot.parts) == ("cuda:0+cuda:1", (9e9, 3e9))
    assert set(plan.takes) == {"GPU-0", "GPU-1"}
    unknown = make_plan(load(None, None, {"engine.devices": ["cuda:0+cuda:1"]}), model, on_cards(9, None))
    assert unknown.slots[0].parts == (1.0, 1.0)


def test_where_nobody_can_tell_what_is_free_the_load_finds_out(model: Path) -> None:
    plan = make_plan(load(None, None, {"engine.devices": ["cuda:0"]}), model, on_cards(None))
    assert plan.kv_tokens == 4096
    check_fits(load(), plan)


def test_auto_is_every_card_that_may_be_used(model: Path) -> None:
    assert make_plan(load(), model, on_cards(10, 10)).devices == ("cuda:0", "cuda:1")


@pytest.mark.parametrize("devices", [["cuda:0", "cpu:0"], ["cpu:0", "cuda:0"]])
@pytest.mark.parametrize("margins", [(512, 4096), (4096, 512)])
def test_of_a_memory_that_cores_and_a_gpu_share_the_larger_margin_is_left(
    model: Path, devices: list[str], margins: tuple[int, int]
) -> None:
    gpu = Gpu(uuid="GPU-a", bus_id="00000000:01:00.0", name="GB10", is_unified=True, memory_free_bytes=16_000_000_000)
    survey = survey_of(Snapshot(1, "", "570", (gpu,)), BY_BUS, has_cuda=True)
    flags = {"engine.devices": devices, "engine.kv_margin_mb": margins[0], "engine.gpu_margin_mb": margins[1]}
    plan = make_plan(load(None, None, flags), model, Machine(8, 16_000_000_000, survey))
    assert plan.room == {SYSTEM_POOL: 16_000_000_000 - 4_096_000_000}


def test_unified_memory_and_cores_take_from_one_memory(model: Path) -> None:
    """B45: it is not counted twice."""
    gpu = Gpu(uuid="GPU-a", bus_id="00000000:01:00.0", name="GB10", is_unified=True, memory_free_bytes=16_000_000_000)
    survey = survey_of(Snapshot(1, "", "570", (gpu,)), BY_BUS, has_cuda=True)
    config = load(None, None, {"engine.devices": ["cuda:0", "cpu:0"]})
    plan = make_plan(config, model, Machine(8, 16_000_000_000, survey))
    assert list(plan.takes) == [SYSTEM_POOL]
    assert plan.takes[SYSTEM_POOL] >= 2 * plan.weights_bytes + plan.kv_bytes


def test_a_group_of_cores_has_its_cores_and_a_memory_of_its_own(model: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    flags = {"engine.devices": ["cpu:0", "cpu:1"], "engine.cores": [str(mine[0])], "engine.memory_mb": [0, 2]}
    plan = make_plan(load(None, None, flags), model, BIG)
    assert [(slot.cores, slot.threads) for slot in plan.slots] == [({mine[0]}, 1), (frozenset(), 4)]
    free, bounded = (slot.kv_tokens for slot in plan.slots)
    assert free == 4096
    assert bounded < free
    assert plan.slots[1].takes[SYSTEM_POOL] <= 2_000_000
    with pytest.raises(ConfigError, match="this process has not core 9999"):
        make_plan(load(None, None, flags | {"engine.cores": ["9999"]}), model, BIG)


def test_cores_that_are_not_there_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"this process has not core 9000-9011,9020\.$"):
        cores.cores_of(["9000-9011,9020"], 0)
    assert cores.in_ranges({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"


@pytest.mark.parametrize("bounds", [[2], [0, 2]])
def test_a_context_that_was_set_by_hand_must_keep_to_the_memory_of_its_cores(model: Path, bounds: list[int]) -> None:
    flags = {"engine.devices": ["cpu:0", "cpu:1"], "engine.memory_mb": bounds}
    config = load(None, None, flags | {"engine.ctx": 100_000})
    with pytest.raises(StartError) as caught:
        check_fits(config, make_plan(config, model, BIG))
    assert caught.value.exit_code == 1
    said = str(caught.value)
    assert f"2 MB for cpu:{len(bounds) - 1}, and engine.ctx 100000 takes" in said
    most = int(re.findall(r"set at most (\d+), or 0 for what fits", said)[0])
    for ctx, fits in ((most, True), (most + 256, False)):
        config = load(None, None, flags | {"engine.ctx": ctx})
        plan = make_plan(config, model, BIG)
        assert (plan.slots[-1].takes[SYSTEM_POOL] <= 2_000_000) == fits
        if fits:
            check_fits(config, plan)
        else:
            with pytest.raises(StartError, match=r"engine\.memory_mb"):
                check_fits(config, plan)


def test_memory_for_less_than_any_context_is_told(model: Path) -> None:
    config = load(None, None, {"engine.memory_mb": [1], "engine.ctx": 512, "engine.n_ubatch": 512})
    with pytest.raises(StartError, match="set more memory"):
        check_fits(config, make_plan(config, model, BIG))


def short_of(model: Path, tokens: int, **flags: object) -> Machine:
    """A machine on which so many tokens of context fit."""
    plan = make_plan(load(None, None, {"engine.kv_margin_mb": 0} | flags), model, BIG)
    group = plan.slots[0].group
    return Machine(1, plan.weights_bytes + plan.needs.compute_bytes(group) + tokens * plan.needs.token_bytes(group))


@pytest.mark.parametrize(
    ("tokens", "num"), [(256, 1), (511, 1), (512, 2), (1000, 3), (2048, 8), (4095, 15), (4096, 32), (50_000, 32)]
)
def test_where_memory_is_short_each_sequence_has_256_tokens_at_least(model: Path, tokens: int, num: int) -> None:
    """4,096 tokens are all that is useful for this model: then memory is not what is short."""
    config = load(None, None, {"engine.kv_margin_mb": 0})
    plan = make_plan(config, model, short_of(model, tokens))
    assert [(slot.num_sequences, slot.kv_tokens >= 256 * min(num, 16)) for slot in plan.slots] == [(num, True)]
    check_fits(config, plan)
    few = load(None, None, {"engine.kv_margin_mb": 0, "engine.parallel": 2})
    assert make_plan(few, model, short_of(model, tokens, **{"engine.parallel": 2})).num_sequences == min(num, 2)


def test_a_context_set_by_hand_is_for_all_sequences(model: Path) -> None:
    assert make_plan(load(None, None, {"engine.ctx": 512}), model, BIG).num_sequences == 32


def test_the_memory_of_a_group_of_cores_makes_its_own_sequences_few(model: Path) -> None:
    flags = {"engine.devices": ["cpu:0", "cpu:1"], "engine.memory_mb": [0, 2]}
    plan = make_plan(load(None, None, flags), model, BIG)
    free, bounded = plan.slots
    assert (free.num_sequences, bounded.num_sequences) == (32, bounded.kv_tokens // 256)
    assert plan.num_sequences == 32 + bounded.num_sequences


def test_a_split_cache_has_a_part_for_each_of_the_sequences_that_are_left(model: Path) -> None:
    config = load(None, None, {"engine.kv_margin_mb": 0, "engine.kv_unified": False})
    plan = make_plan(config, model, short_of(model, 1024, **{"engine.kv_unified": False}))
    assert (plan.num_sequences, plan.request_tokens_max) == (4, 256)


@pytest.mark.parametrize(
    ("tried", "then"),
    [
        ((8192, 32), (4096, 16)),
        ((8192, 4), (4096, 4)),
        ((1024, 4), (512, 2)),
        ((700, 2), (256, 1)),
        ((256, 4), (256, 1)),
        ((256, 1), None),
    ],
)
def test_the_next_smaller_size_has_half_of_the_context_and_what_it_is_good_for(
    tried: tuple[int, int], then: tuple[int, int] | None
) -> None:
    assert smaller(Size(*tried)) == (Size(*then) if then else None)
