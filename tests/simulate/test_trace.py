"""Traces are read in four formats, known by their first line; what is wrong is named with its line."""

from pathlib import Path

import pytest

from lqs.simulate.read import read_trace
from lqs.simulate.trace import TraceInvalid

AZURE = '{"TIMESTAMP": "2024-01-01", "ContextTokens": 4, "GeneratedTokens": 4}\n'
LEVELS = ("critical", "normal", "low")


def read(folder: Path, text: str, **options):
    path = folder / "trace"
    path.write_text(text)
    return read_trace(str(path), LEVELS, default_level=1, **options)


def columns(trace):
    return list(
        zip(trace.arrival_ns, trace.prompt_tokens, trace.completion_tokens, trace.max_tokens, trace.level, strict=True)
    )


def test_our_own_csv(tmp_path: Path):
    text = (
        "arrival,prompt_tokens,completion_tokens,max_tokens,class,key\n"
        "1.5,10,20,,critical,a\n\n1.0,1,2,64,2,b\n2.25,3,4,0,,a\n"
    )
    trace = read(tmp_path, text)
    assert columns(trace) == [(0, 1, 2, 64, 2), (500_000_000, 10, 20, 20, 0), (1_250_000_000, 3, 4, 4, 1)]
    assert [trace.keys[key] for key in trace.key] == ["b", "a", "a"]
    assert (trace.span_s, trace.rate) == (1.25, 1.6)


def test_our_own_json_lines(tmp_path: Path):
    text = (
        '{"arrival": 0, "prompt_tokens": 5, "completion_tokens": 6}\n\n'
        '{"arrival": 0.5, "prompt_tokens": 7, "completion_tokens": 8, "max_tokens": 9, "class": "low", "key": "k"}\n'
    )
    trace = read(tmp_path, text)
    assert columns(trace) == [(0, 5, 6, 6, 1), (500_000_000, 7, 8, 9, 2)]
    assert [trace.keys[key] for key in trace.key] == ["", "k"]


def test_azure(tmp_path: Path):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    trace = read(tmp_path, text)
    assert columns(trace)[0] == (0, 374, 44, 44, 1)
    assert trace.arrival_ns[1] == pytest.approx(4_314_579_000, abs=1000)


def test_mooncake(tmp_path: Path):
    text = (
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
        '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46]}\n'
    )
    trace = read(tmp_path, text)
    assert [prompt for _, prompt, *_ in columns(trace)] == [6955, 6472]
    assert trace.arrival_ns[1] == pytest.approx(3_053_000_000, abs=1000)


def test_burst_gpt_leaves_out_failures(tmp_path: Path):
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n118,GPT-4,417,276,693,API log\n"
    )
    trace = read(tmp_path, text)
    assert columns(trace) == [(0, 472, 18, 18, 1), (113_000_000_000, 417, 276, 276, 1)]
    assert trace.num_skipped == 1


def test_a_file_may_begin_with_a_byte_order_mark_and_end_lines_as_windows_does(tmp_path: Path):
    trace = read(tmp_path, "\ufeffarrival,prompt_tokens,completion_tokens\r\n0,1,2\r\n")
    assert columns(trace) == [(0, 1, 2, 2, 1)]


def test_of_a_long_trace_the_first_so_many_are_taken(tmp_path: Path):
    text = "arrival,prompt_tokens,completion_tokens\n" + "".join(f"{i},1,2\n" for i in range(9))
    assert len(read(tmp_path, text, num_max=4)) == 4


def test_lengths_are_scaled_to_at_least_a_token(tmp_path: Path):
    trace = read(tmp_path, "arrival,prompt_tokens,completion_tokens,max_tokens\n0,100,4,200\n")
    assert columns(trace.with_lengths(0.1)) == [(0, 10, 1, 20, 1)]


def test_another_rate_keeps_the_rhythm(tmp_path: Path):
    trace = read(tmp_path, "arrival,prompt_tokens,completion_tokens\n0,1,2\n1,1,2\n4,1,2\n")
    assert list(trace.at_rate(2 * trace.rate).arrival_ns) == [0, 500_000_000, 2_000_000_000]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a,b\n1,2\n", 1, "no known format"),
        ("arrival,prompt_tokens,completion_tokens\n0,1,2\n0,1\n", 3, "has 2 columns"),
        ("arrival,prompt_tokens,completion_tokens\n0,x,2\n", 2, "prompt_tokens is no number of tokens: 'x'"),
        ("arrival,prompt_tokens,completion_tokens\n0,1.5,2\n", 2, "prompt_tokens is no number"),
        ("arrival,prompt_tokens,completion_tokens\n0,1,-2\n", 2, "completion_tokens is no number"),
        ("arrival,prompt_tokens,completion_tokens\nnan,1,2\n", 2, "arrival is no time"),
        ("arrival,prompt_tokens,completion_tokens,class\n0,1,2,vip\n", 2, "no class 'vip'; there are critical, normal"),
        ("arrival,prompt_tokens,completion_tokens,max_tokens\n0,1,2,many\n", 2, "max_tokens is no number"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n{"timestamp": 1}\n', 2, "input_length is no number"),
        ('{"arrival": 1\n', 1, "is not a JSON object"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", 2, "no date and time: 'yesterday'"),
        ('{"TIMESTAMP":5,"ContextTokens":4,"GeneratedTokens":4}\n', 1, "no date and time: '5'"),
        (AZURE + '{"ContextTokens":4,"GeneratedTokens":4}\n', 2, "no date and time: 'None'"),
        (f'{{"arrival": {"[" * 100_000}\n', 1, "is not a JSON object"),
        (f"arrival,prompt_tokens,completion_tokens\n{'0' * 200_000},1,2\n", 1, "is not CSV: field larger"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, line: int, what: str, tmp_path: Path):
    with pytest.raises(TraceInvalid, match=rf"trace, line {line}: .*{what}") as caught:
        read(tmp_path, text)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "arrival,prompt_tokens,completion_tokens\n"])
def test_a_trace_without_requests_is_refused(text: str, tmp_path: Path):
    with pytest.raises(TraceInvalid, match=r"holds no request|no known format"):
        read(tmp_path, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(TraceInvalid, match="nowhere"):
        read_trace(str(tmp_path / "nowhere"), LEVELS)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceInvalid, match="UTF-8"):
        read_trace(str(tmp_path / "bytes"), LEVELS)


def test_more_time_than_the_virtual_clock_has_is_refused(tmp_path: Path):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01,1,2\n9999-12-31,1,2\n"
    with pytest.raises(TraceInvalid, match="can be played"):
        read(tmp_path, text)
    short = read(tmp_path, "arrival,prompt_tokens,completion_tokens\n0,1,2\n9,1,2\n")
    with pytest.raises(TraceInvalid, match="can be played"):
        short.at_rate(1e-12)
