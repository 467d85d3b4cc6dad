"""Several models in one process: their names and versions, who is in memory, and that a change loses nobody."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lqs.engine.synth import Recipe, parse_shape, write
from tests.server.client import collect
from tests.server.conftest import Start
from tests.server.process import Server, until

LONG = 20_000
COMMON = """
[engine]
ctx = 8192
parallel = 4
prefix_cache = false
devices = ["cpu:0", "cpu:1"]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models that answer differently."""
    folder = tmp_path_factory.mktemp("models")
    shape = parse_shape("tiny,ctx=100000")
    return [write(folder / f"m{seed}.gguf", Recipe(shape=shape, seed=seed)) for seed in range(3)]


def ask(server: Server, model: str | None = None, path: str = "/v1", **options: Any) -> Any:
    body = {"prompt": "hello", "max_tokens": 3, "temperature": 0, "ignore_eos": True} | (
        {"model": model} if model else {}
    )
    return server.ask("POST", f"{path}/completions", body, **options)


def standing(server: Server) -> dict[str, str]:
    listed = server.ask("GET", "/admin/models").json["data"]
    return {each["id"]: each["standing"] for each in listed}


@pytest.fixture(scope="module")
def versions(share: Start, files: list[Path]) -> Server:
    config = (
        COMMON
        + f"""
[models."qwen@v1"]
path = "{files[1]}"
share = 3
aliases = ["chat"]
[models."qwen@v2"]
path = "{files[2]}"
devices = ["cpu:1"]
[limits.old]
of = "requests"
amount = 1000
models = ["qwen"]
"""
    )
    return share(files[0], config=config)


def test_every_version_is_listed_and_answers_by_its_name(versions: Server) -> None:
    """S28."""
    listed = versions.ask("GET", "/v1/models").json["data"]
    assert [each["id"] for each in listed] == ["m0", "qwen@v1", "qwen@v2"]
    assert listed[2]["meta"]["devices"] == ["cpu:1@qwen@v2"]
    assert versions.ask("GET", "/v1/models/qwen@v2").json["id"] == "qwen@v2"
    texts = {name: ask(versions, name).text for name in ("m0", "qwen@v1", "qwen@v2")}
    assert len(set(texts.values())) == 3


@pytest.mark.parametrize(
    ("model", "path", "version", "answers"),
    [
        (None, "/v1", None, "m0"),
        ("qwen@v2", "/v1", None, "qwen@v2"),
        ("qwen", "/v1", "v2", "qwen@v2"),
        ("chat", "/v1", None, "qwen@v1"),
        (None, "/models/qwen@v2/v1", None, "qwen@v2"),
        ("m0", "/models/qwen/v1", "v2", "qwen@v2"),
        ("qwen", "/v1", "v3", None),
        ("m0", "/v1", "v1", None),
    ],
)
def test_a_version_is_named_in_the_body_the_path_or_the_header(
    versions: Server, model: str | None, path: str, version: str | None, answers: str | None
) -> None:
    """S28."""
    answer = ask(versions, model, path, headers={"x-lqs-model-version": version} if version else None)
    if answers is None:
        assert (answer.status, answer.code) == (404, "model_not_found")
    else:
        assert (answer.status, answer.json["model"]) == (200, answers)


def test_versions_share_their_name_as_their_weights_say(versions: Server) -> None:
    answered = Counter(ask(versions, "qwen").json["model"] for _ in range(40))
    assert answered == {"qwen@v1": 30, "qwen@v2": 10}


def test_an_unknown_model_in_a_limit_is_refused_at_the_start(start: Start, files: list[Path]) -> None:
    config = '[limits.x]\nof = "requests"\namount = 1\nmodels = ["nobody"]\n'
    server = start(files[0], config=config, is_ready=False)
    assert server.wait() == 2
    assert "limits.x.models: there is no model nobody; there are: m0" in server.log


def test_an_admin_unloads_and_loads_and_a_running_answer_is_finished_first(start: Start, files: list[Path]) -> None:
    server = start(files[0], config=COMMON + f'[models.other]\npath = "{files[1]}"\n')
    whole = ask(server, "other").text
    running = server.complete(400, model="other", stream=True)
    server.wait_running()
    assert server.ask("POST", "/admin/models/other/unload").status == 202
    refused = ask(server, "other")
    assert (refused.status, refused.code) == (503, "no_device")
    assert "not loaded" in refused.json["error"]["message"]
    told = collect(running)
    assert (told.finish, told.is_done) == ("length", True)
    until(lambda: standing(server) == {"m0": "ready", "other": "absent"})
    assert ask(server, "m0").status == 200
    assert server.ask("POST", "/admin/models/other/load").status == 202
    until(lambda: standing(server)["other"] == "ready")
    assert ask(server, "other").text == whole
    assert server.ask("POST", "/admin/models/nobody/load").code == "model_not_found"


def on_demand(files: list[Path], **keys: Any) -> str:
    """Two models that come on demand, with memory for one of them."""
    tables = "".join(
        f'[models.{name}]\npath = "{path}"\non_demand = true\n' for name, path in zip("ab", files[1:], strict=True)
    )
    more = "".join(f"{name} = {value}\n" for name, value in keys.items())
    return COMMON + more + tables


def test_a_model_on_demand_comes_with_the_first_request_and_the_idle_one_leaves(
    start: Start, files: list[Path]
) -> None:
    probe = start(files[0], config=on_demand(files))
    takes = {each["id"]: each["needs"]["system"] for each in probe.ask("GET", "/admin/models").json["data"]}
    assert standing(probe) == {"m0": "ready", "a": "absent", "b": "absent"}
    probe.stop()
    room_mb = (takes["m0"] + takes["a"]) // 1_000_000 + 1
    server = start(files[0], config=on_demand(files, loaded_mb=room_mb, load_patience_s=0.5))
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "model": "a"}
    assert server.ask("POST", "/v1/chat/completions", body).status == 200
    assert standing(server) == {"m0": "ready", "a": "ready", "b": "absent"}
    assert ask(server, "b").status == 200
    assert standing(server) == {"m0": "ready", "a": "absent", "b": "ready"}
    # One that is used stays until it is done, although another waits; then the other comes.
    running = server.complete(LONG, model="b", stream=True)
    server.wait_running()
    waiting = server.complete(3, model="a")
    until(lambda: standing(server) == {"m0": "ready", "a": "waiting", "b": "closed"})
    behind = server.complete(3, model="b")
    running.close()
    assert waiting.answer().status == 200
    assert behind.answer().status == 200
    assert server.ask("POST", "/tokenize", {"content": "hi", "model": "a"}).status == 200


def test_a_load_that_fails_is_told_to_who_waits_and_not_repeated_at_once(
    start: Start, files: list[Path], tmp_path: Path
) -> None:
    broken = tmp_path / "late.gguf"
    broken.write_bytes(files[1].read_bytes())
    config = COMMON + f'[models.late]\npath = "{broken}"\non_demand = true\n'
    server = start(files[0], config=config)
    broken.write_bytes(b"GGUF")
    for _ in range(2):
        refused = ask(server, "late")
        assert (refused.status, refused.code) == (503, "no_device")
        assert int(refused.headers["retry-after"]) <= 6
    assert server.log.count("model not loaded") == 1
    assert ask(server, "m0").status == 200


def test_a_model_that_leaves_gives_all_its_memory_back(start: Start, default_model: Path) -> None:
    config = (
        f'[engine]\nctx = 1024\ninter_token_target_ms = 20\n[models.late]\npath = "{default_model}"\non_demand = true\n'
    )
    server = start(default_model, config=config)
    before = server.memory_bytes
    for _ in range(3):
        assert ask(server, "late").status == 200
        assert server.ask("POST", "/admin/models/late/unload").status == 202
        until(lambda: standing(server)["late"] == "absent")
    # Without giving it back by hand it was 80 MB more after four times, scattered over what threads left behind.
    assert server.memory_bytes < before + 25_000_000
