"""Models with one thing about them: no template, another end of turn, a start token, split characters, little room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lqs.engine.synth import TEMPLATES, Recipe, parse_shape, write
from tests.server.client import Answer, collect
from tests.server.conftest import Start
from tests.server.process import Server

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BOS = "<|begin_of_text|>"
Serve = Callable[..., Server]


@pytest.fixture
def serve(start: Start, tmp_path: Path) -> Serve:
    """Serve a model made by a recipe."""

    def serve(config: str = "", shape: str = "tiny", **recipe: Any) -> Server:
        return start(write(tmp_path / "made.gguf", Recipe(shape=parse_shape(shape), **recipe)), config=config)

    return serve


def chat(server: Server, **fields: Any) -> Answer:
    return server.ask("POST", "/v1/chat/completions", CHAT | fields)


def test_a_character_that_is_split_over_tokens_leaves_whole(serve: Serve) -> None:
    """B01: tokens 48 69 20 | f0 9f | 98 80 | 21 | e6 ad | aa, streamed and whole."""
    server = serve(script=(b"Hi ", b"\xf0\x9f", b"\x98\x80", b"!", b"\xe6\xad", b"\xaa"))
    deltas = []
    for event in server.call("POST", "/v1/chat/completions", CHAT | {"stream": True}).events():
        if event != "[DONE]":
            deltas += [choice["delta"].get("content", "") for choice in event["choices"]]
    assert "".join(deltas) == "Hi 😀!歪"
    assert not any("\ufffd" in delta for delta in deltas)
    whole = chat(server)
    assert (whole.text, whole.finish, whole.usage[1]) == ("Hi 😀!歪", "stop", 6)


def test_a_token_with_a_whole_character_and_half_of_one_gives_the_whole_one(serve: Serve) -> None:
    """B01: the whole part leaves at once; what is never completed is shown as such, once, at the end."""
    server = serve(script=(b"ab\xe6", b"\xad\xaac", b"\xf0\x9f"))
    told = collect(server.call("POST", "/v1/chat/completions", CHAT | {"stream": True}))
    assert told.text == chat(server).text == "ab歪c\ufffd"


@pytest.mark.parametrize(
    ("script", "stop", "text"),
    [
        (["ABC", "DEF", "G", "HI", "J", "KL"], ["DEFGHIJ"], "ABC"),
        (["AB", "DE"], ["DEF"], "ABDE"),
        (["a", "\n", " b"], "\n", "a"),
        (["xx", "y"], ["xy", "xxz"], "x"),
        (["q歪", "歪r"], ["歪歪"], "q"),
    ],
)
def test_a_stop_string_over_several_tokens_is_cut_and_nothing_is_lost(
    serve: Serve, script: list[str], stop: Any, text: str
) -> None:
    """B10: streamed and whole."""
    server = serve(script=tuple(token.encode() for token in script))
    body = {"prompt": "hi", "stop": stop}
    told = collect(server.call("POST", "/v1/completions", body | {"stream": True}))
    whole = server.ask("POST", "/v1/completions", body)
    assert (told.text, told.finish, told.is_done) == (text, "stop", True)
    assert (whole.text, whole.finish) == (text, "stop")


def test_a_turn_ends_at_the_end_of_turn_token_that_is_not_the_end_of_text(serve: Serve) -> None:
    """B30: eos <|end_of_text|>, eot <|eot_id|>; Hello, <|eot_id|>, assistant."""
    server = serve(eot="<|eot_id|>", script=(b"Hello", b"<|eot_id|>", b"assistant"))
    whole = chat(server)
    assert (whole.text, whole.finish) == ("Hello", "stop")
    told = collect(server.call("POST", "/v1/chat/completions", CHAT | {"stream": True}))
    assert (told.text, told.finish) == ("Hello", "stop")
    done = server.ask("POST", "/v1/completions", {"prompt": "hi"})
    assert (done.text, done.finish) == ("Hello", "stop")
    # A stop string that the token would print as, if it printed.
    assert chat(server, stop=["<|eot_id|>"]).text == "Hello"


@pytest.mark.parametrize("template", [None, TEMPLATES["broken"], "{{ x | nofilter }}", "{% include 'x' %}"])
def test_a_model_without_a_good_template_says_so_and_completes(serve: Serve, template: str | None) -> None:
    """B29: told when it is loaded, in the log and in /v1/models, not at the first request."""
    server = serve(chat_template=template)
    shown = server.ask("GET", "/v1/models").json["data"][0]["meta"]["chat_template"]
    assert (shown == "none") == (template is None)
    assert shown != "ok"
    assert "chat template" in server.log
    answer = chat(server)
    assert (answer.status, answer.code) == (400, "no_chat_template")
    assert server.complete(2).answer().status == 200


HOSTILE = [
    "{{ cycler.__init__.__globals__ }}",
    TEMPLATES["hostile"],
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'x'*10**10 }}",
    "{% include '/etc/passwd' %}",
    "{{ messages.append(1) }}",
]


def test_a_hostile_template_reaches_nothing(serve: Serve) -> None:
    """B65: a 400 in a moment, nothing of the machine in it, and the server lives."""
    choices = [
        f"{{% if messages[0].content == '{number}' %}}{part}{{% endif %}}" for number, part in enumerate(HOSTILE)
    ]
    server = serve(chat_template="".join(choices[:4] + choices[5:]))
    for number in (0, 1, 2, 3, 5):
        messages = [{"role": "user", "content": str(number)}]
        answer = server.ask("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert answer.status == 400, HOSTILE[number]
        assert "uid=" not in answer.body.decode()
    assert server.complete(2).answer().status == 200


def test_a_template_that_includes_a_file_cannot_be_used(serve: Serve) -> None:
    """B65: no loader, so it does not even compile."""
    server = serve(chat_template=HOSTILE[4])
    answer = chat(server, max_tokens=1)
    assert answer.status == 400
    assert "root:" not in answer.body.decode()


def test_a_template_that_refuses_says_why(serve: Serve) -> None:
    """B28: the template's own message, as a 400; and an error of its own is no traceback."""
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[0].content }}{% if messages[0].content == '1' %}{{ 1 // 0 }}{% endif %}"
    )
    server = serve(chat_template=template)
    refused = server.ask("POST", "/v1/chat/completions", {"messages": [{"role": "system", "content": "a"}]})
    assert refused.status == 400
    assert "no system role" in refused.json["error"]["message"]
    failed = server.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}]})
    assert failed.status == 400
    assert "ZeroDivision" not in failed.body.decode()
    assert chat(server, max_tokens=1).status == 200


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template_has_bos", [True, False])
def test_there_is_one_start_token_or_none(serve: Serve, add_bos: bool, template_has_bos: bool) -> None:
    """B26: add_bos x a template with its own; and one that the user types in a completion. B13: empty prompts."""
    template = ("{{ bos_token }}" if template_has_bos else "") + "{{ messages[0].content }}"
    server = serve(add_bos=add_bos, chat_template=template)
    num_hi = len(server.ask("POST", "/tokenize", {"content": "hi"}).json["tokens"])
    assert chat(server, max_tokens=1).usage[0] == num_hi + int(add_bos or template_has_bos)
    typed = server.ask("POST", "/v1/completions", {"prompt": BOS + "hi", "max_tokens": 1})
    assert typed.usage[0] == num_hi + 1
    for prompt in ("", []):
        answer = server.ask("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert (answer.status, answer.json.get("usage", {}).get("prompt_tokens")) == (
            (200, 1) if add_bos else (400, None)
        )


@pytest.fixture(scope="module")
def small(share: Start, tiny: Path) -> Server:
    """300 tokens for a request, although llama.cpp makes 512 cells; answers of at most 16."""
    return share(tiny, config="engine.ctx = 300\nengine.parallel = 4\nmodel.max_tokens_max = 16\n")


@pytest.mark.parametrize("max_tokens", [1, 2, 10, None])
@pytest.mark.parametrize("num_prompt", [286, 298, 299, 300, 301, 100_000])
def test_prompt_and_answer_fit_the_context_or_are_refused_with_the_true_numbers(
    small: Server, num_prompt: int, max_tokens: int | None
) -> None:
    """B15: a prompt that leaves no room is a 400; one that leaves some gets an answer that fits. B14: ceiling 16."""
    answer = small.complete(max_tokens, prompt=[65] * num_prompt).answer()
    if num_prompt > 299:
        assert (answer.status, answer.code) == (400, "context_length_exceeded")
        assert "300 tokens" in answer.json["error"]["message"]
        assert str(num_prompt) in answer.json["error"]["message"]
        assert "retry-after" not in answer.headers
        assert answer.headers["x-should-retry"] == "false"
        return
    assert answer.usage == (num_prompt, min(max_tokens or 16, 16, 300 - num_prompt))
    assert answer.finish == "length"


def test_one_that_never_fits_does_not_stand_before_those_that_do(small: Server) -> None:
    """B31: 400 tokens for a ledger of 300 are refused at the door; ten of 5 finish."""
    big = small.complete(1, prompt=[65] * 400)
    little = [small.complete(2, prompt=[65] * 5) for _ in range(10)]
    assert big.answer().status == 400
    assert [call.answer().status for call in little] == [200] * 10


@pytest.mark.parametrize("value", [0, -2, 1.5, "5", True, 2**31, 10**30])
def test_a_length_that_is_none_is_refused(small: Server, value: Any) -> None:
    """B14: 0, -2, 1.5, "5", true, 2^31 and 10^30."""
    assert small.complete(value).answer().status == 400


@pytest.mark.parametrize(("fields", "num"), [({"max_tokens": -1}, 16), ({"max_tokens": None}, 16), ({}, 16)])
def test_an_absent_length_is_the_ceiling(small: Server, fields: dict[str, Any], num: int) -> None:
    """B14: -1 and null are absent; a model that never ends stops at the ceiling of 16."""
    body = {"prompt": "a", "ignore_eos": True} | fields
    assert small.ask("POST", "/v1/completions", body).usage[1] == num


def test_the_longest_bias_and_the_longest_window_are_taken_with_ignore_eos(small: Server) -> None:
    bias = [[n % 250, 1] for n in range(960)]
    answer = small.complete(5, logit_bias=bias, repeat_last_n=-1, repeat_penalty=1.2).answer()
    assert answer.usage[1] == 5


def test_a_grammar_that_ends_before_the_answer_may_is_a_400(small: Server) -> None:
    answer = small.complete(16, grammar='root ::= "ab"').answer()
    assert (answer.status, answer.code) == (400, "grammar_dead_end")


def test_max_completion_tokens_wins(small: Server) -> None:
    """B14."""
    answer = chat(small, max_tokens=9, max_completion_tokens=3, ignore_eos=True)
    assert answer.usage[1] == 3


@pytest.fixture(scope="module")
def batched(share: Start, tiny: Path) -> Server:
    """Steps of 32 tokens at most, computed 16 at a time."""
    return share(tiny, config="engine.n_batch = 32\nengine.n_ubatch = 16\nengine.ctx = 1024\nengine.parallel = 4\n")


@pytest.mark.parametrize("num_prompt", [31, 32, 33, 64, 65, 200])
def test_a_prompt_longer_than_a_batch_is_computed_in_parts(batched: Server, num_prompt: int) -> None:
    """B36: n_batch 32, n_ubatch 16, 4 slots; alone and beside others the same text."""
    ids = [65 + (num_prompt + n) % 50 for n in range(num_prompt)]
    alone = batched.complete(8, prompt=ids).answer()
    others = [batched.complete(100, prompt=[70 + n]) for n in range(3)]
    beside = batched.complete(8, prompt=ids, cache_prompt=False).answer()
    assert [call.answer().status for call in others] == [200] * 3
    assert (alone.text, alone.usage) == (beside.text, beside.usage)
