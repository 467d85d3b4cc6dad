"""The comparison: its arithmetic, its rows and its command line, without a server."""

import json
import math
from pathlib import Path

import pytest

from bench.compare.__main__ import main
from bench.compare.flood import tokens_between
from bench.compare.gauge import ticks_of
from bench.compare.interference import gaps_ms
from bench.compare.metrics import Metrics
from bench.compare.quiet import Watch
from bench.compare.report import Row, fact, table, write_json
from bench.compare.rounds import LoadFailed, Runs, answers, compare
from bench.compare.scale import REFERENCE_NS, Scale
from bench.compare.server import Server, Setup
from bench.compare.throughput import parse_ceiling
from bench.load.prompts import Prompts
from bench.load.reply import Exchange, Reply

KEYS = {"goal", "what", "value", "unit", "peer", "peer_value", "ratio", "pass", "runs"}
PEER = Server("llama-server", "llama-server", ("llama-server",))
LQS = Server("lqs", "lqs", ("lqs",))


def runs(server: Server, *values: float, disturbed: tuple[str, ...] = ()) -> Runs:
    return Runs(server, {"key": list(values)}, list(disturbed))


def good(row: Row) -> bool:
    return row.ratio >= 0.98


def test_a_row_compares_medians_and_judges_their_ratio():
    row = compare("G1", "it", "x", "key", runs(LQS, 98, 99, 200), runs(PEER, 100, 100, 1), good)
    assert row.as_json() == {
        "goal": "G1",
        "what": "it",
        "value": 99.0,
        "unit": "x",
        "peer": "llama-server",
        "peer_value": 100.0,
        "ratio": 0.99,
        "pass": True,
        "runs": {
            "value": [98.0, 99.0, 200.0],
            "peer_value": [100.0, 100.0, 1.0],
            "disturbed": [],
            "note": "",
        },
    }


def test_a_disturbed_row_is_not_judged_and_says_so():
    mine = runs(LQS, 99, disturbed=("round 1: cc1 80%",))
    row = compare("G1", "it", "x", "key", mine, runs(PEER, 100), good)
    assert row.passed is None
    assert row.as_json()["runs"]["disturbed"] == ["round 1: cc1 80%"]
    assert "DISTURBED round 1: cc1 80%" in table([row])


def test_a_row_without_a_value_is_null_and_not_a_number():
    row = compare(None, "it", "x", "key", Runs(LQS), Runs(PEER))
    assert row.as_json()["value"] is None
    assert row.as_json()["ratio"] is None
    assert "none" in table([row])


def test_the_file_is_a_list_of_rows_with_the_same_keys(tmp_path):
    row = compare("G1", "it", "x", "key", runs(LQS, 1), runs(PEER, 2), good)
    write_json(tmp_path / "rows.json", [fact("flags of lqs", "lqs serve")], [row])
    content = json.loads((tmp_path / "rows.json").read_text())
    assert [set(entry) for entry in content] == [KEYS, KEYS]
    assert content[1]["pass"] is False


def test_answers_must_be_whole():
    with pytest.raises(LoadFailed, match="no response"):
        answers([Exchange(0.0)])


def reply(num_tokens: int, *times_s: float) -> Reply:
    return Reply(0.0, 9.0, 200, token_times_s=list(times_s), num_completion_tokens=num_tokens)


def test_tokens_of_an_answer_are_spread_over_its_events():
    assert tokens_between([reply(8, 1.0, 2.0, 3.0, 4.0), reply(2, 9.0)], 2.0, 3.0) == 4.0


def test_an_answer_that_was_broken_off_has_no_tokens():
    broken = reply(8, 1.0)
    broken.error = "response was cut"
    assert tokens_between([broken], 0.0, 2.0) == 0.0


def test_a_gap_over_the_edge_counts_whole():
    assert gaps_ms([[0.0, 1.0, 5.0, 6.0]], 2.0, 4.0) == [4000.0]
    assert gaps_ms([[0.0, 1.0], [0.5]], 2.0, 4.0) == []


def test_metrics_are_summed_over_labels_and_may_be_absent():
    before = Metrics.parse('# TYPE a counter\na{x="1 2"} 1\na{x="3"} 2\nb 5\n')
    after = Metrics.parse('a{x="1 2"} 4\na{x="3"} 2\nb 5\nc 1\n')
    assert before.get("a") == 3.0
    assert after.since(before).get("a") == 3.0
    assert after.since(before).get("c") == 1.0
    assert math.isnan(after.get("nothing"))
    assert math.isnan(after.host_us_per_token())


def test_host_time_is_the_step_without_its_decode():
    text = "lqs_step_seconds_total 3\nlqs_decode_seconds_total 2\nlqs_step_tokens_total 1e5\n"
    assert Metrics.parse(text).host_us_per_token() == pytest.approx(10.0)


def test_the_ceiling_counts_the_time_of_the_prompts():
    line = '{"pl": 8, "tg": 64, "pp": 28, "t": 4.0, "speed": 184}'
    assert parse_ceiling(f"noise\n{line}\n") == {8: 128.0}


def test_ticks_are_read_behind_a_name_with_brackets():
    assert ticks_of("7 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14") == 11 + 12


def test_a_goal_of_another_machine_is_scaled():
    assert Scale(2 * REFERENCE_NS).here(350.0) == 700.0
    assert Scale.measure().queue_ns > 0


def test_prompts_are_the_same_in_every_run():
    first, second = Prompts(28, 1), Prompts(28, 1)
    one, two = first.next(), first.next()
    assert one != two
    assert [one, two] == [second.next(), second.next()]
    assert len(one.split()) == 28


def test_a_server_is_named_by_its_kind():
    server = Server.parse("llama-server-old=/opt/llama-server")
    assert (server.name, server.kind) == ("llama-server-old", "llama-server")
    for text in ("vllm=/opt/vllm", "llama-server", "lqs="):
        with pytest.raises(ValueError, match="NAME=PATH"):
            Server.parse(text)


def test_both_servers_get_the_same_settings_and_the_report_hides_folders(tmp_path):
    setup = Setup(tmp_path / "model.gguf", threads=1, parallel=4, ctx=4096, unified=False)
    theirs = PEER.with_flags("-b 64", "-b", "64").flags(setup)
    ours = LQS.flags(setup)
    assert "-t 1 -tb 1 -np 4 -c 4096 --no-kv-unified" in theirs
    assert theirs.endswith("-b 64")
    assert "--threads 1 --parallel 4 --ctx 4096" in ours
    assert "kv_unified = false" in ours
    assert str(tmp_path) not in theirs + ours


def test_a_busy_stranger_is_named(monkeypatch):
    watch = Watch(session=0)
    watch._start_s -= 10.0
    watch._ticks_by_name.update({"cc1": 500, "top": 20})
    assert watch.disturbers() == ["cc1 50%"]


def test_wrong_use_ends_with_2(tmp_path, capsys):
    model = tmp_path / "model.gguf"
    model.touch()
    for wrong in (["--model", str(model)], ["--peer", "x=y", "--model", str(model)]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
    peer = ["--peer", "llama-server=nowhere"]
    for wrong in (["--model", str(Path("nowhere"))], ["--model", str(model), "--goals", "G99"]):
        with pytest.raises(SystemExit, match="2"):
            main([*peer, *wrong])
    assert "G99" in capsys.readouterr().err
