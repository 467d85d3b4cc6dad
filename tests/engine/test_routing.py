"""Which model a name means, and how versions share the requests for theirs."""

from __future__ import annotations

from collections import Counter

import pytest

from lqs.engine.routing import Routing

CHAT = [
    ("qwen@v1", 9.0, ("chat",)),
    ("qwen@v2", 1.0, ("chat", "new")),
    ("qwen@old", 0.0, ()),
    ("llama", 1.0, ()),
]


@pytest.fixture
def routing() -> Routing:
    return Routing(CHAT)


def all_can(name: str) -> bool:
    return True


def test_versions_share_their_name_exactly_and_never_in_bursts(routing: Routing) -> None:
    answered = [routing.route("qwen", "", all_can) for _ in range(100)]
    for first in range(0, 100, 10):
        assert Counter(answered[first : first + 10]) == {"qwen@v1": 9, "qwen@v2": 1}


def test_what_cannot_serve_leaves_its_share_to_the_others(routing: Routing) -> None:
    answered = Counter(routing.route("qwen", "", lambda name: name != "qwen@v1") for _ in range(10))
    assert answered == {"qwen@v2": 10}
    # Where nobody can, somebody has to say so.
    assert routing.route("qwen", "", lambda name: False) in ("qwen@v1", "qwen@v2")


@pytest.mark.parametrize(
    ("name", "version", "found"),
    [
        ("qwen@v2", "", "qwen@v2"),
        ("qwen@old", "", "qwen@old"),
        ("qwen", "old", "qwen@old"),
        ("qwen@v1", "v1", "qwen@v1"),
        ("qwen@v1", "v2", None),
        ("chat", "v2", "qwen@v2"),
        ("chat", "old", None),
        ("new", "", "qwen@v2"),
        ("llama", "", "llama"),
        ("llama", "v1", None),
        ("qwen@v3", "", None),
        ("nobody", "", None),
        ("", "", None),
    ],
)
def test_a_name_and_a_version_mean_one_model(routing: Routing, name: str, version: str, found: str | None) -> None:
    assert routing.route(name, version, all_can) == found


def test_to_look_a_model_up_is_nobodys_turn(routing: Routing) -> None:
    for _ in range(5):
        assert routing.find("qwen") == "qwen@v1"
    assert [routing.route("qwen", "", all_can) for _ in range(10)].index("qwen@v2") == 5
    assert routing.find("qwen@v2") == "qwen@v2"
    assert routing.find("nobody") is None


def test_a_model_without_a_version_may_have_versions_beside_it() -> None:
    routing = Routing([("m", 1.0, ()), ("m@2", 1.0, ())])
    assert routing.find("m") == "m"
    assert Counter(routing.route("m", "", all_can) for _ in range(10)) == {"m": 5, "m@2": 5}


def test_without_a_name_it_is_the_first_by_its_bare_name(routing: Routing) -> None:
    assert routing.first == "qwen"
