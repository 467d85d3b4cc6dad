"""Calibration: what is counted, and a real run of real workers on a tiny model."""

from pathlib import Path

import msgspec
import pytest

from lqs.config import Config
from lqs.engine.synth import Recipe, parse_shape, write
from lqs.simulate.calibrate import Experiment, bounded, calibrate, machine_name, occurrences
from lqs.simulate.cost import EXAMPLE, SlotShape

SHAPE = SlotShape(num_sequences=4, kv_tokens=4096, budget=16, batch_max=512, context_tokens=2048)
SIZES_MS = {16: 90.0, 32: 170.0, 64: 350.0, 128: 560.0}


def test_terms_are_counted_as_often_as_they_occur():
    first, rest = occurrences(Experiment(1, 32, 3), SHAPE)
    # Two steps of 16 tokens; the last token is drawn for.
    assert first == pytest.approx([2, 1, 31, 32 * 33 / 2, 16 * 16 + 16 * 32], rel=1e-3)
    assert rest == pytest.approx([2, 2, 0, 33 + 34, 33 + 34], rel=1e-3, abs=1e-3)


def test_a_rest_shorter_than_the_smallest_chunk_goes_along():
    first, _ = occurrences(Experiment(1, 24, 3), SHAPE)
    assert first == pytest.approx([1, 1, 23, 24 * 25 / 2, 24 * 24], rel=1e-3)


def test_equal_requests_share_their_steps():
    first, rest = occurrences(Experiment(4, 4, 3), SHAPE)
    assert first == pytest.approx([1, 4, 12, 40, 16 * 16], rel=1e-3)
    assert rest == pytest.approx([2, 8, 0, 4 * (5 + 6), 4 * 20 + 4 * 24], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(
    ("target_ms", "budget", "fine"),
    [(10.0, 16, 16), (100.0, 16, 16), (200.0, 32, 16), (400.0, 64, 128), (900.0, 128, 128)],
)
def test_the_step_is_bounded_as_a_worker_bounds_it(target_ms: float, budget: int, fine: int):
    """The largest size that meets the target; for long prompts the smallest that is not dearer."""
    found = bounded(SHAPE, SIZES_MS, target_ms)
    assert (found.budget, found.fine_budget, found.target_ms) == (budget, fine, target_ms)


def test_the_device_slots_are_measured_as_they_serve(tmp_path: Path):
    path = tmp_path / "tiny.gguf"
    write(path, Recipe(shape=parse_shape("tiny")), lambda *_: None)
    changed = {"devices": ("cpu:0", "cpu:1"), "parallel": 3, "ctx": 1024, "threads": 1}
    config = Config(engine=msgspec.structs.replace(Config().engine, **changed))
    seen: list[str] = []
    found = calibrate(config, path, seen.append)
    assert (found.model, found.threads, found.devices) == ("tiny", 1, 2)
    assert (found.shape.num_sequences, found.shape.kv_tokens) == (3, 1024)
    assert 16 <= found.shape.budget <= found.shape.batch_max == 512
    assert sum(msgspec.structs.astuple(found.cost)) > 0
    assert 0 <= found.error_p50 <= found.error_max
    assert seen[0] == "loading tiny.gguf"
    assert [text.split()[3] for text in seen[1:4]] == ["1", "2", "3"]
    assert seen[-1].startswith("3 of 3: 3 at once")
    assert found.machine == machine_name(int(found.machine.rpartition(", ")[2].split()[0]))


def test_the_example_is_such_a_calibration():
    assert msgspec.json.decode(msgspec.json.encode(EXAMPLE), type=type(EXAMPLE)) == EXAMPLE
