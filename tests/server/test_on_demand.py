"""Models that come, leave and come again under requests and an admin's hands, also while the server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lqs.engine.synth import Recipe, parse_shape, write
from tests.server.client import collect
from tests.server.conftest import Start
from tests.server.process import Server, until
from tests.server.test_fleet import COMMON, ask, standing


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    shape = parse_shape("tiny,ctx=100000")
    return [write(folder / f"m{seed}.gguf", Recipe(shape=shape, seed=seed)) for seed in range(3)]


def num_opened(server: Server, device: str) -> int:
    """How often a device slot was opened."""
    return server.log.count(f"device slot opened device={device} ")


def test_all_first_requests_for_a_model_wait_for_its_load(start: Start, files: list[Path]) -> None:
    server = start(files[0], config=COMMON + f'[models.late]\npath = "{files[1]}"\non_demand = true\n')
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "model": "late", "stream": True}
    calls = [server.call("POST", "/v1/chat/completions", body) for _ in range(6)]
    assert all(collect(call).is_done for call in calls)
    assert num_opened(server, "cpu:0@late") == 1


@pytest.mark.parametrize("moment", ["listening", "loading weights"])
def test_a_load_that_is_ordered_while_the_server_starts_changes_nothing(
    start: Start, files: list[Path], moment: str
) -> None:
    server = start(files[0], config=COMMON + f'[models.other]\npath = "{files[1]}"\n', is_ready=False)
    until(lambda: moment in server.log)
    for name in ("m0", "other"):
        assert server.ask("POST", f"/admin/models/{name}/load").status == 202
    server.wait_ready()
    assert standing(server) == {"m0": "ready", "other": "ready"}
    assert [num_opened(server, f"cpu:{n}{of}") for n in range(2) for of in ("", "@other")] == [1, 1, 1, 1]
    assert ask(server, "other").status == 200


def test_an_unload_while_the_server_starts_holds_when_it_has_started(start: Start, files: list[Path]) -> None:
    server = start(files[0], config=COMMON + f'[models.other]\npath = "{files[1]}"\n', is_ready=False)
    _ = server.port
    assert server.ask("POST", "/admin/models/other/unload").status == 202
    until(lambda: standing(server) == {"m0": "ready", "other": "absent"})
    server.wait_ready()
    refused = ask(server, "other")
    assert (refused.status, refused.code) == (503, "no_device")
    assert server.ask("POST", "/admin/models/other/load").status == 202
    until(lambda: standing(server)["other"] == "ready")
    assert ask(server, "other").status == 200


def test_one_on_demand_that_is_asked_for_during_the_start_comes_after_it_and_leaves_whole(
    start: Start, files: list[Path]
) -> None:
    config = COMMON + f'[models.late]\npath = "{files[1]}"\non_demand = true\n'
    server = start(files[0], config=config, is_ready=False)
    _ = server.port
    asked = server.complete(3, model="late")
    assert asked.answer().status == 200
    assert server.ask("POST", "/admin/models/late/unload").status == 202
    until(lambda: standing(server) == {"m0": "ready", "late": "absent"})
    server.wait_ready()
    assert ask(server, "late").status == 200
    assert [num_opened(server, f"cpu:{n}@late") for n in range(2)] == [2, 2]


def test_a_budget_that_a_model_can_never_fit_into_is_refused_at_the_start(start: Start, files: list[Path]) -> None:
    config = COMMON + f'loaded_mb = 5\n[models.late]\npath = "{files[1]}"\non_demand = true\n'
    server = start(files[0], config=config, is_ready=False)
    assert server.wait() == 2
    assert "engine.loaded_mb: late can never be loaded. It takes" in server.log
