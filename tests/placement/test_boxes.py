"""The three boxes of docs/devices.md: `lqs check` accepts their configs on machines of that kind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lqs.cli import main
from lqs.commands import check
from lqs.engine import plan
from lqs.engine.synth import Recipe, parse_shape, write
from tests.fake_nvml import Driver, card

PAGE = Path(__file__).parents[2] / "docs" / "devices.md"
GB = 1_000_000_000
BOXES = {
    "no GPU": ([], ["devices    cpu:0, cpu:1, 16 threads each", "devices    cpu:0, 16"]),
    "one card": ([card("GPU-8932f937", free_gb=23.5)], ["devices    cuda:0", "on demand"]),
    "four cards": (
        [card(f"GPU-{name}", bus=bus, free_gb=47, total_gb=48) for bus, name in enumerate("abcd", start=1)],
        ["devices    cuda:0+cuda:1\n", "layers split 50%, 50%", "devices    cuda:2, cuda:3", "as chat@v1"],
    ),
}


def config_of(box: str) -> str:
    """The config that the page shows for a box."""
    found = re.search(rf"\*\*{re.escape(box)}\*\*.*?```toml\n(.*?)```", PAGE.read_text(), re.DOTALL | re.IGNORECASE)
    assert found is not None, f"docs/devices.md shows no config for {box}"
    return found[1]


@pytest.mark.parametrize("box", BOXES)
def test_the_config_of_a_box_is_accepted_there(
    box: str, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cards, devices = BOXES[box]
    driver.says("driver 570", *cards)
    models = tmp_path / "models"
    models.mkdir()
    text = config_of(box)
    for name in re.findall(r'path = "([^"/]+)"', text):
        write(models / f"{name}.gguf", Recipe(shape=parse_shape("tiny")), lambda *_: None)
    monkeypatch.setenv("LQS_MODELS_DIR", str(models))
    monkeypatch.setattr(check, "has_cuda", lambda: bool(cards))
    monkeypatch.setattr(plan, "probe_machine", lambda: plan.Machine(32, 64 * GB))
    # The cores of the box, which need not be this machine's.
    monkeypatch.setattr("lqs.engine.cores.os.sched_getaffinity", lambda _: set(range(32)))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "PCI_BUS_ID" if name.endswith("ORDER") else "")
        monkeypatch.delenv(name)
    file = tmp_path / "lqs.toml"
    file.write_text(text)
    assert main(["check", "--config", str(file)]) == 0
    said = capsys.readouterr().out
    for words in devices:
        assert words in said
    assert "not fit" not in said
