"""Servers and the models they serve: the real default model, and made-up ones that load in no time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lqs.engine.store import DEFAULT_MODEL, Store, store_folder
from lqs.engine.synth import Recipe, parse_shape, write
from tests.server.process import Server

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The real default model; the Makefile has fetched it."""
    return Store(store_folder(os.environ)).resolve(DEFAULT_MODEL.name)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with room for answers that last: some 2,000 tokens a second, 100,000 at most."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return write(path, Recipe(shape=parse_shape("tiny,ctx=100000")))


def started(make_folder: Callable[[], Path], servers: list[Server]) -> Start:
    def start(model: Path, *flags: str, is_ready: bool = True, **options: Any) -> Server:
        server = Server(make_folder(), model, *flags, **options)
        servers.append(server)
        return server.wait_ready() if is_ready else server

    return start


def ended(servers: list[Server]) -> None:
    """Stop all that still run. The first that is not as it should be is the failure."""
    failures = []
    for server in servers:
        try:
            if server.process.poll() is None:
                server.stop()
        except AssertionError as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a server for one test."""
    servers: list[Server] = []
    yield started(lambda: tmp_path_factory.mktemp("server"), servers)
    ended(servers)


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a server for all tests of a module."""
    servers: list[Server] = []
    yield started(lambda: tmp_path_factory.mktemp("server"), servers)
    ended(servers)
