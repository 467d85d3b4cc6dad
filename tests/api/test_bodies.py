"""Bodies: their size, their time, their JSON, and every field's type and range."""

import asyncio
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lqs.api.depth import depths, is_surely_flat
from tests.api.harness import HI, House, driven, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = '"messages":[{"role":"user","content":"hi"}]'


async def refused(house, body, path=CHAT, status=400):
    """The answer is a 4xx with a strict JSON error; returns the error."""
    call = await house.ask("POST", path, body)
    assert call.status == status, call.body
    return call.error


FIELDS = ["temperature", "top_p", "min_p", "presence_penalty", "repeat_penalty", "seed", "timeout", "priority"]
VALUES = ["NaN", "Infinity", "-Infinity", "1e999", "18446744073709551616", "-9223372036854775809", '"NaN"']


@driven
async def test_numbers_that_are_none_or_too_wide_are_refused():
    """B18: NaN, infinities, 1e999, integers beyond 64 bits and "NaN" in eight fields: 400 each."""
    house = House()
    for field in FIELDS:
        for value in VALUES:
            await refused(house, f'{{"model":"M",{MESSAGES},"{field}":{value}}}'.encode())
    assert await house.is_well()


@driven
async def test_seeds_in_range_reach_the_sampler():
    """B18: a seed is 64 bits; -1 and null mean random."""
    house = House()
    for seed, given_seed in [(7, 7), (2**64 - 1, 2**64 - 1), (-2, 2**64 - 2), (-1, None), (None, None)]:
        await house.serve(house.call("POST", CHAT, HI | {"seed": seed}), "x")
        assert house.model.works[-1]["sampling"].seed == given_seed


def nested(depth):
    return b'{"model":"M","messages":[{"role":"user","content":"hi"}],"tools":' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize("depth", [100, 3000, 100_000, 2_000_000])
def test_deep_nesting_is_refused_before_it_is_parsed(depth):
    """B20: N nested brackets in `tools`: 400 each, the loop is never held for 100 ms."""

    @driven
    async def run():
        house = House()
        body = nested(depth)
        worst_s = 0.0
        task = house.call("POST", CHAT, body)
        while not task.task.done():
            before_s = time.perf_counter()
            await asyncio.sleep(0)
            worst_s = max(worst_s, time.perf_counter() - before_s)
        await task.done()
        assert (task.status, task.error["code"]) == (400, "too_deep")
        assert len(task.body) < 300
        assert worst_s < 0.1

    run()


def test_five_million_brackets_are_too_large_at_once():
    """B20, N = 5,000,000: above the body limit, so 413."""

    @driven
    async def run():
        house = House()
        assert (await house.ask("POST", CHAT, nested(5_000_000))).status == 413
        assert await house.is_well()

    run()


RAW = [
    b'{"model":"M","messages":[{"role":"user","content":"\xc3\x28"}]}',
    b'{"model":"M",' + MESSAGES.encode() + b',"unknown":"\xc3\x28"}',
    '{"model":"M","messages":[{"role":"user","content":"\u4f60\u597d"}]}'.encode("gbk"),
    b"{:",
    b"",
    b"null",
    b"[]",
    b"\xef\xbb\xbf" + json.dumps(HI).encode(),
    b'{"seed":' + b"1" * 100_000 + b"}",
    b'{"messages":[{"role":"user","content":"\\ud800"}]}',
]


@driven
async def test_half_of_a_surrogate_pair_is_named_wherever_it_stands():
    house = House()
    for text in (r"\ud800", r"\ud800x", r"\ud800xyzabcdefgh", r"\udc00", r"\uD800\u0041"):
        for raw in ('{"prompt":"%s"}', '{"prompt":"%s","model":"M"}'):
            call = await house.ask("POST", "/v1/completions", (raw % text).encode())
            assert (call.status, call.error["code"]) == (400, "invalid_json")
            assert "half of a surrogate pair" in call.error["message"]
    call = await house.ask("POST", "/v1/completions", b'{"prompt":"abc')
    assert "surrogate" not in call.error["message"]


@pytest.mark.parametrize("raw", RAW, ids=range(len(RAW)))
def test_what_is_not_json_in_utf8_is_refused_without_an_echo(raw):
    """B20: invalid UTF-8, GBK, '{:', empty, null, [], a BOM, 100,000 digits: 400, nothing echoed."""

    @driven
    async def run():
        house = House()
        call = await house.ask("POST", CHAT, raw)
        assert call.status == 400
        assert call.error["message"]
        assert b"111111" not in call.body
        assert b"\\u4f60" not in call.body
        assert len(call.body) < 400
        assert await house.is_well()

    run()


@driven
async def test_of_duplicate_keys_the_last_counts_and_unknown_fields_are_ignored():
    """B20's rule for duplicate keys; contract: a field nobody knows is ignored."""
    house = House()
    body = f'{{"model":"M",{MESSAGES},"seed":1,"seed":2,"brand_new":{{"x":[1]}}}}'.encode()
    await house.serve(house.call("POST", CHAT, body), "x")
    assert house.model.works[-1]["sampling"].seed == 2


@given(st.recursive(st.text(alphabet='[]{}"\\a', max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=20))
def test_depth_is_that_of_the_value_whatever_its_strings_hold(value):
    def depth(part):
        return 1 + max(map(depth, part), default=0) if isinstance(part, list) else 0

    body = json.dumps(value).encode()
    assert max(depths(body), default=0) == depth(value)
    assert depth(value) <= 3 or not is_surely_flat(body, 3)


def test_depth_is_measured_across_slices():
    body = b"[" * 40_000 + b'"' + b"[" * 100_000 + b'"' + b"[" * 40_000
    assert max(depths(body)) == 80_000


@driven
async def test_a_body_over_the_limit_ends_as_soon_as_it_is():
    """B21: by Content-Length before a byte is read; chunked, at the first chunk over it; exact is fine."""
    house = House(server={"body_bytes_max": 2048})
    told = house.call("POST", CHAT, b"", complete=False, headers=[(b"content-length", b"10000000000")])
    await told.done()
    assert (told.status, told.error["code"], told.num_received) == (413, "body_too_large", 0)
    assert told.headers["connection"] == "close"
    endless = house.call("POST", CHAT, None, chunks=[b"x" * 1024] * 100, complete=False)
    await endless.done()
    assert endless.status == 413
    assert endless.num_received == 3 * 1024
    padded = json.dumps(HI).encode().ljust(2048)
    exact = await house.serve(house.call("POST", CHAT, padded, headers=[(b"content-length", b"02048")]), "x")
    assert exact.status == 200
    assert (await house.ask("POST", CHAT, padded + b" ")).status == 413


@driven
async def test_the_key_is_checked_before_the_body(tmp_path):
    """B21 with a wrong key: 401, and not a byte of the body is read."""
    house = House(keys=["right"], tmp_path=tmp_path, server={"body_bytes_max": 2048})
    for chunks, headers in [([b"x" * 4096], []), ([b""], [(b"content-length", b"10000000000")])]:
        call = house.call("POST", CHAT, None, key="wrong", chunks=chunks, complete=False, headers=headers)
        await call.done()
        assert (call.status, call.num_received, call.headers["connection"]) == (401, 0, "close")


@driven
async def test_a_stalled_upload_ends_and_holds_nothing():
    """B21: 408 at the read timeout; no place in the queue is taken meanwhile."""
    house = House(server={"body_timeout_s": 1})
    call = house.call("POST", CHAT, None, chunks=[b'{"mod'], complete=False)
    await until(lambda: call.num_received == 5)
    assert house.desk.scheduler.num_entered(2) == 0
    await call.done()
    assert (call.status, call.error["code"]) == (408, "body_timeout")


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (b"text/plain", 415),
        (b"application/x-www-form-urlencoded", 415),
        (b"multipart/form-data; boundary=x", 415),
        (b"application/json; charset=utf-8", 400),
        (b"Application/JSON", 400),
        (b"application/problem+json", 400),
    ],
)
def test_only_json_is_taken(content_type, status):
    @driven
    async def run():
        call = await House().ask("POST", CHAT, b"{", headers=[(b"content-type", content_type)])
        assert call.status == status
        assert call.error

    run()


WRONG = [
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"timeout": 0}, "timeout"),
    ({"queue_timeout": -1}, "queue_timeout"),
    ({"priority": 10**30}, "priority"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"task_type": "tiny"}, "task_type"),
    ({"stop": [""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a" * 1025]}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {"999999": -100}}, "logit_bias"),
    ({"logit_bias": {"AI": -100}}, "logit_bias"),
    ({"logit_bias": {"1": 1e308}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
    ({"logit_bias": [[1, True]]}, "logit_bias"),
    ({"logit_bias": {str(n): 1 for n in range(961)}}, "logit_bias"),
    ({"repeat_last_n": -2}, "repeat_last_n"),
    ({"repeat_last_n": 4097}, "repeat_last_n"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"seed": 2**64}, "seed"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"json_schema": {}}, "json_schema"),
    ({"n": 2}, "n"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"guided_json": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}, "guided_json"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[f"{p}-{n}" for n, (_, p) in enumerate(WRONG)])
def test_a_wrong_field_is_refused_by_name(fields, param):
    """B16 (logit_bias), B10 (stop), contract (known but not honoured): 400, nothing is queued."""

    @driven
    async def run():
        house = House()
        error = await refused(house, HI | fields)
        assert error["param"] == param
        assert param.partition("[")[0] in error["message"] or param == "logit_bias"
        assert house.desk.num_inside == 0

    run()


NEUTRAL = {
    "tools": [], "tool_choice": "none", "functions": None, "response_format": {"type": "text"}, "n": 1,
    "best_of": None, "echo": False, "suffix": "", "modalities": ["text"], "store": False, "logit_bias": {},
    "stop": None, "grammar": "", "stream": None, "stream_options": None, "user": "u", "service_tier": "auto",
    "max_tokens": None, "metadata": {"a": "b"}, "parallel_tool_calls": True, "temperature": 0, "top_p": 1,
}  # fmt: skip


@driven
async def test_fields_that_ask_for_what_is_done_anyway_are_fine():
    house = House()
    assert (await house.serve(house.call("POST", CHAT, HI | NEUTRAL), "x")).status == 200


@driven
async def test_the_longest_window_and_the_longest_bias_reach_the_sampler():
    house = House()
    bias = [[n % 200, 1] for n in range(960)]
    for asked, found in [(-1, 4096), (0, 0), (4096, 4096)]:
        await house.serve(house.call("POST", CHAT, HI | {"repeat_last_n": asked, "logit_bias": bias}), "x")
        sampling = house.model.works[-1]["sampling"]
        assert (sampling.repeat_last_n, len(sampling.logit_bias)) == (found, 960)


@driven
async def test_every_sampling_field_reaches_the_sampler():
    house = House()
    fields = {
        "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.25, "typical_p": 0.75, "repeat_penalty": 1.5,
        "repeat_last_n": 8, "presence_penalty": -1, "frequency_penalty": 1, "ignore_eos": True,
        "cache_prompt": False, "grammar": 'root ::= "a"',
    }  # fmt: skip
    extra = {"logit_bias": [[1, 2.5], [3, False]], "stop": "\n", "logprobs": True, "top_logprobs": 3}
    await house.serve(house.call("POST", CHAT, HI | fields | extra), "x")
    sampling = house.model.works[-1]["sampling"]
    # A grammar is handed on as it was read.
    assert {name: getattr(sampling, name) for name in fields} == fields | {"grammar": '\nroot ::= "a"\n'}
    assert sampling.logit_bias == ((1, 2.5), (3, -100.0))
    assert (sampling.stop, sampling.num_logprobs) == ((b"\n",), 3)


@pytest.mark.parametrize(
    ("fields", "granted"),
    [
        ({"max_tokens": 0}, None),
        ({"max_tokens": -2}, None),
        ({"max_tokens": 1.5}, None),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": 10**30}, None),
        ({"max_tokens": 2147483648}, None),
        ({"max_completion_tokens": 0}, None),
        ({"max_tokens": -1}, 16),
        ({"max_tokens": None}, 16),
        ({}, 16),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 1000}, 16),
        ({"max_tokens": 9, "max_completion_tokens": 3}, 3),
        ({"n_predict": 4}, 4),
    ],
)
def test_max_tokens_by_rule_and_never_over_the_ceiling(fields, granted):
    """B14: 0, -2, 1.5, "5", true, 2^31, 10^30 are 400; -1 is absent; the ceiling of 16 always holds."""

    @driven
    async def run():
        house = House(model={"max_tokens_max": 16})
        body = {"model": "M", "prompt": "a"} | fields
        if granted is None:
            assert (await refused(house, body, COMPLETIONS))["param"] in fields
        else:
            await house.serve(house.call("POST", COMPLETIONS, body), "x")
            assert house.model.works[-1]["max_tokens"] == granted
        assert await house.is_well()

    run()


@driven
async def test_prompt_and_answer_share_the_context_by_rule():
    """B15: budget 64; prompts of 62 to 65 and 100,000 tokens; clamp, or 400 with the true counts."""
    house = House(n_ctx=64)
    for num_prompt, wish, granted in [
        (62, 1, 1), (62, 2, 2), (62, 10, 2), (62, None, 2), (63, 1, 1), (63, 10, 1), (64, 1, 0), (65, 1, 0),
        (100_000, None, 0),
    ]:  # fmt: skip
        body = {"prompt": "a" * num_prompt, "stream": True} | ({} if wish is None else {"max_tokens": wish})
        if granted:
            await house.serve(house.call("POST", COMPLETIONS, body), "x", finish=2)
            assert house.model.works[-1]["max_tokens"] == granted
        else:
            error = await refused(house, body, COMPLETIONS)
            assert error["code"] == "context_length_exceeded"
            assert "64" in error["message"]
            assert str(num_prompt) in error["message"]


PROMPTS = [
    ([999999], 400), ([-1], 400), ([1099511627776], 400), ([1, "a"], 400), ([1.0, True], 400), ([True], 400),
    (["", ""], 400), (["a", "b"], 400), ([[1], [2]], 400), (None, 400), ({"a": 1}, 400), ([[]], 400), ("", 400),
    ([], 400), ([["a"]], 400), ("\u0000", 200), (["a"], 200), ([[1, 2]], 200), ([1, 2], 200), ("a", 200),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "status"), PROMPTS, ids=range(len(PROMPTS)))
def test_prompts_of_every_form(prompt, status):
    """B16 (ids outside the vocabulary, mixed types) and B13 (empty prompts, no start token): by rule."""

    @driven
    async def run():
        house = House()
        call = house.call("POST", COMPLETIONS, {"model": "M", "prompt": prompt})
        if status == 200:
            await house.serve(call, "x")
        await call.done()
        assert call.status == status
        assert await house.is_well()

    run()


@driven
async def test_an_empty_prompt_is_the_start_token_where_the_model_has_one():
    """B13: "" and [] are 200 from the start token alone."""
    house = House(add_bos=True)
    for prompt in ("", []):
        call = await house.serve(house.call("POST", COMPLETIONS, {"prompt": prompt}), "x")
        assert (call.status, call.json["usage"]["prompt_tokens"]) == (200, 1)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template_has_bos", [True, False])
def test_there_is_one_start_token_or_none(add_bos, template_has_bos):
    """B26: add_bos x template with its own: exactly one where the model wants one."""

    @driven
    async def run():
        template = ("{{ bos_token }}" if template_has_bos else "") + "{{ messages[0].content }}"
        house = House(template=template, add_bos=add_bos)
        call = await house.serve(house.call("POST", CHAT, HI), "x")
        prompt = house.model.works[-1]["prompt"]
        assert prompt.count(house.model.bos) == int(add_bos or template_has_bos)
        assert call.json["usage"]["prompt_tokens"] == len(prompt)
        await house.serve(house.call("POST", COMPLETIONS, {"prompt": "<s>hi"}), "x")
        assert house.model.works[-1]["prompt"].count(house.model.bos) == 1

    run()


GRAMMARS = [
    "root ::= " + "(" * 60000 + '"a"' + ")" * 60000,
    "root ::= " + "(" * 65 + '"a"' + ")" * 65,
    "\n".join(f"r{n} ::= r{n + 1}" for n in range(5000)),
    "\n".join(f"r{n} ::= r{n + 1}" for n in range(1001)),
    'root ::= "a"{1,1000000}',
    'root ::= "a"{,99999999999999}',
    'root ::= ("a"{1000}){1000}',
    'root ::= "a"{1000}{1000}',
    "\n".join(f'r{n} ::= "a"{{999}}' for n in range(60)),
    "root ::= +",
    "root ::= | *",
    'root ::= ("a"',
    'root ::= ("a"\nb ::= "c"',
    'root ::= "a")',
    "root",
    "\x00",
    'root ::= "a',
]  # fmt: skip


@pytest.mark.parametrize("grammar", GRAMMARS, ids=range(len(GRAMMARS)))
def test_a_grammar_that_would_hurt_the_parser_never_reaches_it(grammar):
    """B63: depth, rules, repetitions and size are checked before the native parser: 400."""

    @driven
    async def run():
        house = House()
        house.model.grammar = pytest.fail
        error = await refused(house, HI | {"grammar": grammar})
        assert (error["param"], error["code"]) == ("grammar", "invalid_grammar")

    run()


SCHEMAS = [
    {"type": "string", "pattern": "^a\\!$"}, {"type": "string", "pattern": "^+[a-z]$"}, {"$ref": "#/nope"},
    {"type": "bogus"}, {"properties": {"x": "y"}}, {"type": "string", "maxLength": 2000000},
    {"$ref": "http://127.0.0.1/s"}, True, {},
]  # fmt: skip


@driven
async def test_structured_output_is_refused_and_never_ignored():
    """B23: until it is built, every response_format other than text is a 400, never an unbound 200."""
    house = House()
    for schema in SCHEMAS:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        assert (await refused(house, HI | {"response_format": form}))["param"] == "response_format"
        assert (await refused(house, HI | {"json_schema": schema}))["param"] == "json_schema"
    assert await house.is_well()
