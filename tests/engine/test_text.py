"""Text leaves as whole characters, and nothing of a stop string with it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lqs._engine import TextProbe


def run(pieces: list[bytes], stop: list[bytes] = (), eog: int | None = None) -> tuple[str, str | None, list[bytes]]:
    """(joined text, how it ended, releases) of feeding every piece once; `eog` names one that ends the turn."""
    probe = TextProbe(list(pieces), list(stop), {eog} if eog is not None else set())
    releases = []
    for token in range(len(pieces)):
        releases.append(probe.feed(token))
        if probe.stopped:
            break
    end = probe.end
    releases.append(probe.flush())
    fed = token + 1 if pieces else 0
    assert sum(probe.num_tokens) == (fed - 1 if end == "end_of_turn" else fed)
    # Each release is valid on its own.
    return "".join(release.decode() for release in releases), end, releases


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


def test_a_character_split_over_tokens_leaves_whole():
    pieces = [bytes.fromhex(token) for token in ("48 69 20", "f0 9f", "98 80", "21", "e6 ad", "aa")]
    text, end, releases = run(pieces)
    assert text == "Hi 😀!歪"
    assert end is None
    assert releases[:6] == [b"Hi ", b"", "😀".encode(), b"!", b"", "歪".encode()]


def test_the_whole_part_before_a_split_character_leaves_at_once():
    assert run([b"a\xf0\x9f", b"\x98\x80b"])[2][:2] == [b"a", "😀b".encode()]


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "end"),
    [
        ([b"ABC", b"DEF", b"G", b"HI", b"J", b"KL"], [b"DEFGHIJ"], "ABC", "stop_string"),
        ([b"a", b"\n", b" b"], [b"\n"], "a", "stop_string"),
        ([b"xx", b"y"], [b"xy", b"xxz"], "x", "stop_string"),
        ([b"a"], [b""], "a", None),
        ([b"AB", b"DE"], [b"DEF"], "ABDE", None),
        ([b"abc"], [b"c", b"bc", b"abcd"], "a", "stop_string"),
        ([b"aab", b"aac"], [b"aaac", b"abaac"], "a", "stop_string"),
        (["né".encode()[:2], "né".encode()[2:], b"x"], ["é".encode()], "n", "stop_string"),
        ([b"\xff", b"!"], ["\ufffd!".encode()], "", "stop_string"),
    ],
)
def test_stop_strings_over_several_tokens(pieces, stop, text, end):
    assert run(pieces, stop)[:2] == (text, end)


def test_held_back_text_is_flushed_at_the_end_of_the_turn():
    text, end, releases = run([b"AB", b"DE", b"", b"never"], [b"DEF"], eog=2)
    assert (text, end) == ("ABDE", "end_of_turn")
    assert releases[:3] == [b"AB", b"", b"DE"]


def test_no_more_is_held_back_than_could_become_a_stop_string():
    probe = TextProbe([b"abc", b"d", b"x"], [b"bcdef"])
    assert [probe.feed(0), probe.feed(1), probe.feed(2)] == [b"a", b"", b"bcdx"]


def test_a_stop_marker_stops_although_its_token_prints_nothing():
    probe = TextProbe([b"Hello", b"", b"assistant"], [b"<|eot_id|>"], markers={1: b"<|eot_id|>"})
    assert (probe.feed(0), probe.end) == (b"Hello", None)
    assert (probe.feed(1), probe.end) == (b"", "stop_string")
    assert probe.feed(2) == b""
    assert sum(probe.num_tokens) == 2


def test_a_control_token_that_no_stop_string_names_prints_nothing_and_counts():
    text, end, _ = run([b"a", b"", b"b"], [b"zz"])
    assert (text, end) == ("ab", None)


def test_nothing_is_taken_after_an_end():
    probe = TextProbe([b"a", b"STOP"], [b"STOP"])
    assert [probe.feed(0), probe.feed(1), probe.feed(0), probe.flush()] == [b"a", b"", b"", b""]
    assert probe.end == "stop_string"


def test_a_token_outside_of_the_vocabulary_prints_nothing():
    probe = TextProbe([b"a"])
    assert [probe.feed(-1), probe.feed(1), probe.feed(0)] == [b"", b"", b"a"]
    assert probe.num_tokens == [0, 0, 3]


@pytest.mark.parametrize("stop", [[b"x"] * 17, [b"x" * 1025], [b"\xff"]])
def test_bad_stop_strings_blame_the_caller(stop):
    with pytest.raises(ValueError, match=r"stop string|utf-8"):
        TextProbe([b"a"], stop)


@given(st.text(max_size=40), st.lists(st.integers(0, 200), max_size=20))
def test_any_split_of_a_text_gives_the_text(text, cuts):
    assert run(split(text.encode(), cuts))[0] == text


@given(
    st.lists(
        st.sampled_from(
            [
                b"\x80",
                b"\xbf",
                b"\xc2",
                b"\xe0",
                b"\xa0",
                b"\xed",
                b"\xf0",
                b"\x90",
                b"\xf4",
                b"\x8f",
                b"\xff",
                b"a",
                b"\0",
            ]
        )
        | st.binary(max_size=5),
        max_size=30,
    )
)
def test_broken_bytes_are_replaced_as_python_does(pieces):
    assert run(pieces)[0] == b"".join(pieces).decode(errors="replace")


texts = st.text(alphabet="abé😀", max_size=40)
stops = st.lists(st.text(alphabet="abé😀", max_size=6), max_size=5)


@given(texts, stops, st.lists(st.integers(0, 200), max_size=20))
def test_the_first_stop_string_to_be_complete_ends_the_text(text, stop, cuts):
    found = [(text.find(s) + len(s), text.find(s)) for s in stop if s and s in text]
    expected = text[: min(found)[1]] if found else text
    joined, end, _ = run(split(text.encode(), cuts), [s.encode() for s in stop])
    assert joined == expected
    assert end == ("stop_string" if found else None)


@given(texts, st.text(alphabet="abé😀", min_size=1, max_size=6), st.lists(st.integers(0, 200), max_size=20))
def test_one_stop_string_is_found_where_find_finds_it(text, stop, cuts):
    joined = run(split(text.encode(), cuts), [stop.encode()])[0]
    assert joined == (text[: text.find(stop)] if stop in text else text)


@given(texts, st.text(alphabet="abé😀", min_size=1, max_size=6), st.lists(st.integers(0, 200), max_size=20))
def test_what_is_held_back_is_shorter_than_the_stop_string(text, stop, cuts):
    pieces = split(text.encode(), cuts)
    probe = TextProbe(pieces, [stop.encode()])
    fed = released = 0
    for token, piece in enumerate(pieces):
        fed += len(piece)
        released += len(probe.feed(token))
        if probe.stopped:
            break
        # Three more bytes at most: the beginning of a character.
        assert fed - released <= len(stop.encode()) - 1 + 3
