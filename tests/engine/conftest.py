"""llama_cpp comes first: `lqs._engine` must find its libllama already loaded, or it is mapped twice."""

import os

import llama_cpp  # noqa: F401
import pytest

from lqs import _engine
from lqs.engine.store import DEFAULT_MODEL, Store, store_folder


@pytest.fixture(scope="session", autouse=True)
def callbacks():
    _engine.install_callbacks()


@pytest.fixture(scope="session")
def default_model():
    """The real default model, loaded once; the Makefile has fetched it."""
    model = _engine.Model(str(Store(store_folder(os.environ)).resolve(DEFAULT_MODEL.name)))
    model.load()
    return model
