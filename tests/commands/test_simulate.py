"""`lqs simulate` plays traces and says what came of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lqs.cli import main
from lqs.simulate.cost import EXAMPLE, save_calibration


@pytest.fixture(autouse=True)
def _models_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is calibrated."""
    monkeypatch.setenv("LQS_MODELS_DIR", str(tmp_path / "models"))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    lines = [
        f"{at / 2},{40 + at % 7},{10 + at % 5},{'critical' if at % 5 == 0 else 'low'},k{at % 2}" for at in range(60)
    ]
    path.write_text("\n".join(["arrival,prompt_tokens,completion_tokens,class,key", *lines]) + "\n")
    return str(path)


def test_all_policies_stand_side_by_side(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", trace, "--load", "0.8", "--load", "1.5"]) == 0
    text = capsys.readouterr().out
    for words in ("load 0.8", "load 1.5", "fifo", "priority", "lqs", "critical", "low", "key k0", "capacity", "TTFT"):
        assert words in text
    assert "an example" in text


def test_rows_and_a_picture_are_written(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost, found, picture = tmp_path / "cost.json", tmp_path / "rows.json", tmp_path / "picture.svg"
    save_calibration(cost, EXAMPLE)
    flags = [
        "--cost",
        str(cost),
        "--json",
        str(found),
        "--picture",
        str(picture),
        "--policy",
        "lqs",
        "--policy",
        "fifo",
    ]
    assert main(["simulate", "--trace", trace, "--devices", "2", *flags]) == 0
    read = json.loads(found.read_text())
    assert {row["peer"] for row in read} == {None, "lqs"}
    assert any("fifo, critical: TTFT P99" in row["what"] and row["value"] > 0 for row in read)
    assert picture.read_text().startswith("<svg")
    text = capsys.readouterr().out
    assert "devices  2 x 32 sequences" in text
    assert "an example" not in text


def test_a_trace_is_made_where_none_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--policy", "lqs", "--load", "1", "--seed", "3", "--keys", "2", "--requests", "300"]) == 0
    first = capsys.readouterr().out
    assert main(["simulate", "--policy", "lqs", "--load", "1", "--seed", "3", "--keys", "2", "--requests", "300"]) == 0
    assert capsys.readouterr().out == first
    assert "key key-1" in first
    assert "background" in first


def test_a_recipe_is_played_with_the_classes_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--classes", "high=0.5,low=0.5", "--policy", "lqs", "--scale", "0.5"]
    assert main(["simulate", "--generate", "poisson requests=50 rate=1", *flags]) == 0
    text = capsys.readouterr().out
    assert "50 requests" in text
    assert "lengths x 0.5" in text
    assert "high" in text


def test_the_bounds_are_those_of_the_config(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "lqs.toml"
    config.write_text("[queue]\ncaps = [1]\ntotal = 1\n")
    assert main(["simulate", "--trace", trace, "--load", "20", "--policy", "lqs", "--config", str(config)]) == 0
    assert "breaker" in capsys.readouterr().out
    config.write_text("[queue]\ncaps = [1]\ntotal = 1\nbreak_at = 0\nevict = [false]\nplace_wait_s = [0]\n")
    assert main(["simulate", "--trace", trace, "--load", "20", "--policy", "lqs", "--config", str(config)]) == 0
    assert "refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--trace", "nowhere.csv"], "nowhere.csv: cannot be read"),
        (["--generate", "sine"], "there is no 'sine'"),
        (["--classes", "vip=1"], "'vip=1' is not understood"),
        (["--classes", "low=0"], "at least one share"),
        (["--scale", "-1"], "--scale: -1 is out of bounds"),
        (["--load", "0"], "--load: 0 is out of bounds"),
        (["--devices", "0"], "--devices: 0 is out of bounds; at least 1, at most 64"),
        (["--requests", "1"], "--requests: 1 is out of bounds; at least 2"),
        (["--cost", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--generate", "poisson requests=9 prompt=99999"], "no request of the trace fits"),
        (
            ["--json", "nowhere/rows.json", "--policy", "fifo", "--requests", "50"],
            "nowhere/rows.json: cannot be written",
        ),
    ],
)
def test_wrong_use_is_named_and_ends_with_2(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt_tokens,completion_tokens\n0,1,1\n1,one,1\n")
    assert main(["simulate", "--trace", str(path)]) == 2
    assert "trace.csv, line 3: prompt_tokens" in capsys.readouterr().err


def test_a_trace_of_one_moment_wants_a_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt_tokens,completion_tokens\n5,1,1\n5,1,1\n")
    assert main(["simulate", "--trace", str(path)]) == 2
    assert "one moment" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--slo-ttft", "nan"], ["--slo-ttft", "-1"], ["--slo-token", "inf"]])
def test_a_goal_that_is_no_time_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == 2
    assert f"{flags[0]}: {float(flags[1]):g} is out of bounds" in capsys.readouterr().err


def test_what_was_calibrated_of_the_configs_model_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, config = tmp_path / "tiny.gguf", tmp_path / "lqs.toml"
    model.touch()
    config.write_text(f'[model]\npath = "{model}"\n[engine]\nparallel = 4\n')
    play = ["simulate", "--config", str(config), "--policy", "lqs", "--load", "1", "--requests", "50"]
    assert main(play) == 0
    assert "an example" in capsys.readouterr().out
    (tmp_path / "models" / "calibrations").mkdir(parents=True)
    save_calibration(tmp_path / "models" / "calibrations" / "tiny.json", EXAMPLE)
    assert main(play) == 0
    text = capsys.readouterr().out
    assert "an example;" not in text
    assert "measured with 32 sequences, and the config has 4: calibrate again" in text
