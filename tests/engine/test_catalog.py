"""Which models a config names, and how all of them fit beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from lqs.engine.catalog import Entry, catalog_of, check_all, plan_all
from lqs.engine.plan import Machine
from lqs.engine.store import Store
from lqs.engine.synth import Recipe, parse_shape, write
from lqs.errors import ConfigError, StartError
from lqs.settings import load

GB = 1_000_000_000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    for name in ("one", "two", "three"):
        write(folder / f"{name}.gguf", Recipe(shape=parse_shape("tiny")), lambda *_: None)
    return Store(folder)


def read(store: Store, tmp_path: Path, text: str) -> tuple[Entry, ...]:
    file = tmp_path / "lqs.toml"
    file.write_text(text)
    return catalog_of(load(str(file)), store)


def test_models_are_named_by_their_tables_and_see_their_own_part_of_the_config(store: Store, tmp_path: Path) -> None:
    """S28."""
    text = """
model.path = "one"
model.ctx = 512
[models."chat@v1"]
path = "two"
devices = ["cpu:1"]
[models."chat@v2"]
path = "three"
fallback = "one"
[engine]
devices = ["cpu:0", "cpu:1"]
ctx = 1024
"""
    entries = read(store, tmp_path, text)
    assert [entry.name for entry in entries] == ["one", "chat@v1", "chat@v2"]
    assert [entry.config.engine.ctx for entry in entries] == [512, 1024, 1024]
    assert [len(entry.config.engine.devices) for entry in entries] == [2, 1, 2]
    assert [entry.fallback for entry in entries] == ["", "", "one"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[models.a]\npath = "one"\n[models."a b"]\npath = "two"', "models.a b: a name is letters"),
        ('[models.a]\naliases = ["x"]', "models.a.path: which file is it?"),
        ('[models.a]\npath = "one"\nname = "b"', "models.a.name: the table's name is the model's"),
        ('[models.a]\npath = "one"\naliases = ["b@2"]', "models.a.aliases: b@2"),
        ('model.name = "x"\n[models.a]\npath = "one"', "model.path: is empty"),
        ("model.on_demand = true", "model.on_demand: the only model"),
        ('model.path = "one"\n[models.one]\npath = "two"', "model.name: one is there twice"),
        (
            '[models.a]\npath = "one"\naliases = ["b"]\n[models.b]\npath = "two"',
            "models.a.aliases: b is the name of",
        ),
        ('[models.a]\npath = "one"\nfallback = "c"\n[models.b]\npath = "two"', "models.a.fallback: c is not another"),
        ('[models.a]\npath = "one"\nfallback = "a"', "models.a.fallback: a is not another"),
        (
            '[models.a]\npath = "one"\nfallback = "b"\n[models.b]\npath = "two"\non_demand = true',
            "models.a.fallback: b is not another model that is there all the time",
        ),
        ('[models.a]\npaht = "one"', "models.a.paht: there is no such setting"),
        ("[models.a]\npath = 1", "models.a.path"),
    ],
)
def test_what_is_wrong_with_models_is_named(store: Store, tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(store, tmp_path, text)
    assert says in str(caught.value)


def test_more_device_slots_than_there_may_be_are_told(store: Store, tmp_path: Path) -> None:
    """Whatever `auto` comes to, and over all models."""
    devices = ", ".join(f'"cpu:{number}"' for number in range(33))
    engine = f"[engine]\nctx = 256\nparallel = 1\ndevices = [{devices}]\n"
    text = '[models.a]\npath = "one"\n[models.b]\npath = "two"\n' + engine
    entries = read(store, tmp_path, text)
    with pytest.raises(ConfigError, match="66 device slots of all models; at most 64"):
        check_all(entries, plan_all(entries, Machine(4, 64 * GB)))


def test_a_limit_may_name_a_model_or_all_its_versions_and_nothing_else(store: Store, tmp_path: Path) -> None:
    text = '[models."a@1"]\npath = "one"\n[limits.x]\nof = "requests"\namount = 1\nmodels = ["{}"]\n'
    for name in ("a", "a@1"):
        assert read(store, tmp_path, text.format(name))
    with pytest.raises(ConfigError, match=r"limits\.x\.models: there is no model b; there are: a, a@1"):
        read(store, tmp_path, text.format("b"))


def test_models_share_what_is_left_and_those_on_demand_have_it_in_turns(store: Store, tmp_path: Path) -> None:
    tables = (
        '[models.one]\npath = "one"\n[models.two]\npath = "two"\n[models.three]\npath = "three"\non_demand = true\n'
    )
    entries = read(store, tmp_path, tables + "[engine]\nkv_margin_mb = 0\n")
    big = plan_all(entries, Machine(4, 16 * GB))
    needs, (slot,) = big[0].needs, big[0].slots
    each, a_token = needs.weights_bytes + needs.compute_bytes(slot.group), needs.token_bytes(slot.group)
    room = 3 * each + 3000 * a_token
    plans = plan_all(entries, Machine(4, room))
    check_all(entries, plans)
    # Of what the least that the others take leaves, a third and so on; the last has the rest.
    assert [plan.kv_tokens for plan in plans] == [768, 768, 1280]
    assert sum(plan.takes["system"] for plan in plans) <= room
    with pytest.raises(StartError):
        plan_all(entries, Machine(4, 2 * each))
