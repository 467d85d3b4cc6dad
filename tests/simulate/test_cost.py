"""The cost model: its fit, its file, and what is proposed from it."""

from pathlib import Path

import msgspec
import pytest

from lqs.config import Config
from lqs.errors import ConfigError
from lqs.simulate.cost import EXAMPLE, Calibration, SlotShape, StepCost, fit, load_calibration, save_calibration
from lqs.simulate.propose import Lengths, proposal_lines, propose


def test_a_fit_finds_what_the_values_were_made_from():
    terms = [3e6, 8e6, 5e6, 1500.0, 0.0]
    rows = [
        [10, 16, 30, 900, 2e5],
        [4, 40, 0, 1e4, 3e6],
        [7, 1, 500, 125_000, 1e5],
        [1, 1, 7, 36, 64],
        [9, 99, 3, 5, 7],
    ]
    values = [sum(term * cell for term, cell in zip(terms, row, strict=True)) for row in rows]
    assert fit(rows, values) == pytest.approx(terms, rel=1e-6, abs=1.0)


def test_no_term_is_below_0():
    """What would be is taken out, and the others do as well as they can without it."""
    found = fit([[1, 1], [1, 2], [1, 3]], [3.0, 2.0, 1.0])
    assert found[1] == 0.0
    assert found[0] == pytest.approx((1 / 3 + 1 / 2 + 1) / (1 / 9 + 1 / 4 + 1))


def test_a_term_that_never_occurs_is_0():
    assert fit([[1, 0], [2, 0]], [5.0, 10.0]) == pytest.approx([5.0, 0.0])


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path):
    path = tmp_path / "folder" / "cost.json"
    save_calibration(path, EXAMPLE)
    assert load_calibration(path) == EXAMPLE
    assert [name.name for name in path.parent.iterdir()] == ["cost.json"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"model": 3}'])
def test_what_is_no_calibration_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cost\.json: is no calibration"):
        load_calibration(path)


def test_a_calibration_of_another_version_is_refused(tmp_path: Path):
    path = tmp_path / "cost.json"
    save_calibration(path, EXAMPLE)
    path.write_text(path.read_text().replace('"version": 1', '"version": 99'))
    with pytest.raises(ConfigError, match="another version"):
        load_calibration(path)


def test_files_that_cannot_be_used_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_calibration(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_calibration(tmp_path / "file" / "cost.json", EXAMPLE)


def calibration(**shape: int) -> Calibration:
    """Two device slots whose step of 4 decodes takes 100 ms, whose prompts cost 1 ms a token."""
    bounds = {"num_sequences": 4, "kv_tokens": 4096, "budget": 64, "batch_max": 512, "context_tokens": 2048} | shape
    return Calibration("m", "box", 1, 2, StepCost(20e6, 20e6, 1e6), SlotShape(**bounds))


def test_limits_are_proposed_from_what_was_measured():
    """S6: from tokens a second, sequences and the tolerable wait."""
    found = propose(calibration(), Config(), Lengths(101, 50))
    # A request takes its slot 100 ms for its prompt, 50 x 20 ms for its tokens and its part of the steps.
    shared_steps = 50 * 0.020 / 4
    assert found.requests_per_s == pytest.approx(2 / (0.1 + 1.0 + shared_steps), rel=0.05)
    assert found.tokens_per_s == pytest.approx(151 * found.requests_per_s)
    assert found.answer_tokens_per_s == pytest.approx(50 * found.requests_per_s)
    assert found.num_parallel == 8
    assert found.queue_total == int(found.requests_per_s * Config().queue.timeout_s)


def test_memory_bounds_how_many_run_at_once():
    assert propose(calibration(kv_tokens=300), Config(), Lengths(101, 50)).num_parallel == 2


def test_a_request_that_fits_nowhere_gets_no_proposal():
    (line,) = proposal_lines(calibration(kv_tokens=100), Config(), Lengths(101, 50), 1)
    assert "fits no device slot" in line


@pytest.mark.parametrize(("num_keys", "period_s"), [(1, 60), (10_000, 3600)])
def test_what_is_proposed_can_be_set(num_keys, period_s):
    """The lines are the config's own: whole amounts, and a longer period where a minute would have too few."""
    lines = list(proposal_lines(calibration(), Config(), Lengths(101, 50), num_keys))[3:]
    text = "".join(f"[limits.l{n}]\nper = 'key'\n" + line.replace(", ", "\n") + "\n" for n, line in enumerate(lines))
    limits = msgspec.toml.decode(text, type=Config).limits
    assert [limit.of for limit in limits.values()] == ["requests", "tokens", "parallel"]
    assert all(limit.amount >= 1 for limit in limits.values())
    assert limits["l0"].period_s == period_s


def test_the_lines_say_what_to_set():
    text = "\n".join(proposal_lines(calibration(), Config(), Lengths(101, 50), 3))
    assert "requests/s of 101 + 50 tokens, 8 at once" in text
    assert "queue.total" in text
    assert 'per = "key", where 3 share the machine' in text
    assert 'of = "parallel", amount = 2' in text
    assert "now 256" in text
