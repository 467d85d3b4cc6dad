"""`lqs check` prints the plan and starts nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lqs.cli import main
from lqs.engine import plan
from lqs.engine.budget import num_together
from lqs.engine.synth import Recipe, parse_shape, write
from lqs.simulate.cost import EXAMPLE, save_calibration


@pytest.fixture(autouse=True)
def models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where nothing was calibrated before."""
    monkeypatch.setenv("LQS_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "tiny.gguf"
    write(path, Recipe(shape=parse_shape("tiny")), lambda *_: None)
    return str(path)


@pytest.mark.parametrize("key", ["fallback", "chat_template"])
def test_every_file_that_serve_would_read_must_be_there(model: str, tmp_path: Path, key: str) -> None:
    config = tmp_path / "lqs.toml"
    config.write_text(f'model.{key} = "nowhere"\n')
    assert main(["check", model, "--config", str(config), "--ctx", "512"]) == 1


def test_the_plan_names_what_matters(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", model, "--device", "cpu:0", "--device", "cpu:1", "--ctx", "512"]) == 0
    text = capsys.readouterr().out
    for words in ("tiny.gguf", "cpu:0, cpu:1", "512 tokens x", "64 in all", "normal 100", "none: this machine only"):
        assert words in text


def test_the_plan_tells_the_limits(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "lqs.toml"
    config.write_text('[limits.rpm]\nof = "requests"\namount = 10\n[limits.two]\nof = "parallel"\namount = 2\n')
    assert main(["check", model, "--config", str(config)]) == 0
    text = capsys.readouterr().out
    assert "limits     rpm: 10 requests in 1m0s for each key\n           two: 2 at once for each key\n" in text


def test_a_plan_that_does_not_fit_fails(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "probe_machine", lambda: plan.Machine(1, 1_000_000_000))
    assert main(["check", model, "--ctx", "16777216"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_a_context_beyond_the_memory_of_its_cores_fails(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "lqs.toml"
    config.write_text("engine.memory_mb = [30]\n")
    assert main(["check", model, "--config", str(config), "--ctx", "100000"]) == 1
    assert "engine.memory_mb: 30 MB for cpu:0, and engine.ctx 100000 takes" in capsys.readouterr().out
    assert main(["check", model, "--config", str(config)]) == 0


def test_fewer_sequences_for_want_of_memory_are_told_with_the_reason(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "lqs.toml"
    config.write_text('engine.devices = ["cpu:0", "cpu:1"]\nengine.memory_mb = [0, 2]\n')
    assert main(["check", model, "--config", str(config)]) == 0
    text = capsys.readouterr().out
    (told,) = [line for line in text.splitlines() if "instead of 32" in line]
    num, kv_tokens = map(int, re.findall(r"cpu:1: (\d+) sequences .* memory for (\d+) tokens", told)[0])
    assert 1 <= num == kv_tokens // 256 < 32
    assert f"sequences  cpu:0 32, cpu:1 {num}, {32 + num} in all" in text
    assert main(["check", model, "--ctx", "512"]) == 0
    assert "sequences  32 per device slot, 32 in all" in capsys.readouterr().out


def test_what_is_allowed_and_hardly_meant_is_remarked(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core, num = min(os.sched_getaffinity(0)), len(os.sched_getaffinity(0))
    config = tmp_path / "lqs.toml"
    tables = "".join(f'[models."qwen@v{n}"]\npath = "{model}"\nshare = 0\n' for n in (1, 2))
    config.write_text(
        f'[engine]\nctx = 512\ndevices = ["cpu:0", "cpu:1", "cpu:999"]\ncores = ["{core}", "{core}"]\n{tables}'
    )
    assert main(["check", "--config", str(config)]) == 0
    remarks = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line[:6] == "remark"]
    assert remarks == [
        "share: is 0 for all that qwen means; qwen@v1 gets its requests.",
        f"engine.cores: cpu:0 and cpu:1 both have {core}, and take turns there.",
        f"engine.devices: cpu:999 is only a name: it computes on any of the {num} cores.",
    ]
    config.write_text('[engine]\nctx = 512\ndevices = ["cpu:0"]\n' + tables.replace("share = 0", "", 1))
    assert main(["check", "--config", str(config)]) == 0
    assert "remark" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "code", "named"),
    [
        ('devices = ["tpu:0"]', 2, "models.b.devices: 'tpu:0' is not a device"),
        ('devices = ["cpu:0", "cpu:0"]', 2, "models.b.devices: cpu:0 is there twice"),
        ("ctx = 16777216", 1, "models.b.ctx 16777216 is too large here"),
    ],
)
def test_what_is_wrong_with_one_of_several_models_is_named_by_its_table(
    keys: str, code: int, named: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(plan, "probe_machine", lambda: plan.Machine(1, 1_000_000_000))
    config = tmp_path / "lqs.toml"
    config.write_text(f'engine.ctx = 512\n[models.b]\npath = "{model}"\n{keys}\n[models.a]\npath = "{model}"\n')
    assert main(["check", "--config", str(config)]) == code
    said = capsys.readouterr()
    assert named in said.out + said.err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nowhere.gguf"]) == 1
    assert "nowhere.gguf" in capsys.readouterr().err


def test_an_open_address_without_keys_gets_its_plan_and_a_note(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", model, "--host", "0.0.0.0"]) == 2
    said = capsys.readouterr()
    assert "keys       none yet" in said.out
    assert "`lqs serve` will not start so: server.host" in said.err
    assert "lqs keys add --name NAME --config FILE" in said.err


def test_an_open_address_that_is_meant_is_no_mistake(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", model, "--host", "0.0.0.0", "--insecure"]) == 0
    assert "none: open to everybody" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model_keys", "said"),
    [
        ("", "without max_tokens: 4 at once, 2048 tokens are kept for each; set model.default_max_tokens"),
        ("default_max_tokens = 512", "without max_tokens: 16 at once, 512 tokens"),
        ("default_max_tokens = 512", "lower model.default_max_tokens"),
        ("max_tokens_max = 1024", "without max_tokens: 8 at once"),
        ("default_max_tokens = 256", None),
    ],
)
def test_what_a_request_without_max_tokens_costs_is_told(
    model_keys: str, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "m.gguf", Recipe(shape=parse_shape("layer=1,ctx=2048")), lambda *_: None)
    config = tmp_path / "lqs.toml"
    config.write_text(f'[model]\n{model_keys}\n[engine]\nkv_mode = "guaranteed"\n')
    assert main(["check", str(path), "--ctx", "8192", "--config", str(config)]) == 0
    text = capsys.readouterr().out
    assert "promised   prompt and longest answer" in text
    assert said in text if said else "without max_tokens" not in text


def test_how_kv_is_promised_is_told(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", model, "--ctx", "8192"]) == 0
    text = capsys.readouterr().out
    assert "promised   as answers come out, in blocks of 32 tokens; 256 MB to swap" in text
    assert "without max_tokens" not in text


def test_split_memory_has_a_part_for_every_sequence(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "lqs.toml"
    config.write_text("[engine]\nkv_unified = false\n")
    assert main(["check", model, "--ctx", "8192", "--config", str(config)]) == 0
    assert "without max_tokens" not in capsys.readouterr().out


SMALL = ("--ctx", "1024", "--parallel", "4", "--threads", "1")


def test_what_is_calibrated_is_kept_and_limits_are_proposed_from_it(
    model: str, models_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """S6: the bounds come from measured tokens a second, sequences and the tolerable wait."""
    assert main(["check", model, *SMALL]) == 0
    assert "proposals  none: nothing is measured here yet" in capsys.readouterr().out
    assert main(["check", model, *SMALL, "--calibrate", "--lengths", "40,10"]) == 0
    said = capsys.readouterr()
    assert f"calibrated {models_folder / 'calibrations' / 'tiny.json'}" in said.out
    assert "4 at once, 24 tokens in, 16 tokens out" in said.err
    assert main(["check", model, *SMALL, "--lengths", "40,10"]) == 0
    again = capsys.readouterr().out
    for words in (
        "a drawn token",
        "KV tokens: ",
        "requests/s of 40 + 10 tokens, 4 at once",
        "proposals  queue.total",
        'per = "key", where 1 share',
    ):
        assert words in said.out
        assert words in again
    assert "calibrate again" not in again
    assert main(["check", model, *SMALL, "--parallel", "2"]) == 0
    assert "calibrate again" in capsys.readouterr().out


def test_a_calibration_may_lie_elsewhere(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_calibration(tmp_path / "cost.json", EXAMPLE)
    assert main(["check", model, "--cost", str(tmp_path / "cost.json")]) == 0
    assert "proposals  queue.total" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lengths", "40"], "--lengths: '40' is not understood"),
        (["--lengths", "0,5"], "--lengths: '0,5' is not understood"),
        (["--cost", "nowhere.json"], "nowhere.json: cannot be read"),
    ],
)
def test_wrong_lengths_and_a_missing_calibration_are_named(
    flags: list[str], said: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", model, *flags]) == 2
    assert said in capsys.readouterr().err


def test_what_models_on_demand_take_and_how_many_fit_together_is_told(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "lqs.toml"
    tables = "".join(
        f'[models.{name}]\npath = "{model}"\non_demand = true\nctx = {ctx}\n'
        for name, ctx in (("small", 16384), ("large", 65536))
    )
    config.write_text(tables)
    assert main(["check", model, "--config", str(config), "--ctx", "512"]) == 0
    text = capsys.readouterr().out
    assert text.count(" in all, while it is loaded\n") == 2
    assert "of this machine for them: any 2 of 2 in memory at once\n" in text
    stays, small, large = (int(mb) for mb in re.findall(r"^takes +(\d+) MB of this machine in all", text, re.MULTILINE))
    assert large > small
    # Rounded up three times.
    fits = stays + small + large
    for loaded_mb, said in ((fits, "any 2 of 2 in"), (fits - 4, "any 1 of 2 in")):
        config.write_text(f"engine.loaded_mb = {loaded_mb}\n{tables}")
        assert main(["check", model, "--config", str(config), "--ctx", "512"]) == 0
        assert f"for them (engine.loaded_mb {loaded_mb}): {said}" in capsys.readouterr().out
    config.write_text(f"engine.loaded_mb = {stays + large - 2}\n{tables}")
    assert main(["check", model, "--config", str(config), "--ctx", "512"]) == 2
    said = capsys.readouterr().out
    assert f"engine.loaded_mb: large can never be loaded. It takes {large} MB of this machine" in said
    assert f"and the models that stay {stays} MB; {stays + large - 2} MB are for all" in said
    least = int(re.findall(r"Set at least (\d+)", said)[0])
    # What it says adds up, and is enough.
    assert least == stays + large
    config.write_text(f"engine.loaded_mb = {least}\n{tables}")
    assert main(["check", model, "--config", str(config), "--ctx", "512"]) == 0


def test_more_small_models_fit_together_than_large_ones() -> None:
    takes = [{"m": 5}, {"m": 1}, {"m": 2, "n": 1}]
    assert num_together(takes, {"m": 8, "n": 1}) == (3, 3)
    assert num_together(takes, {"m": 5, "n": 1}) == (1, 2)
    assert num_together(takes, {"m": 4, "n": 1}) == (0, 2)
    assert num_together(takes, {"m": 9, "n": 0}) == (0, 2)
