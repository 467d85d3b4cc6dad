"""`lqs check` prints the plan and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from lqs.cli import main
from lqs.engine.synth import Recipe, parse_shape, write


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "tiny.gguf"
    write(path, Recipe(shape=parse_shape("tiny")), lambda *_: None)
    return str(path)


def test_the_plan_names_what_matters(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", model, "--device", "cpu:0", "--device", "cpu:1", "--ctx", "512"]) == 0
    text = capsys.readouterr().out
    for words in ("tiny.gguf", "cpu:0, cpu:1", "512 tokens x", "64 in all", "normal 100", "none: this machine only"):
        assert words in text


def test_a_plan_that_does_not_fit_fails(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", model, "--ctx", "900000000"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nowhere.gguf"]) == 1
    assert "nowhere.gguf" in capsys.readouterr().err


def test_an_open_address_without_keys_is_wrong_use(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", model, "--host", "0.0.0.0"]) == 2
    assert "lqs keys add" in capsys.readouterr().err
