"""Every route: who may use it, what it answers, and what no route is."""

import struct

import pytest
from starlette.routing import Route

from lqs.api.app import routes
from lqs.api.services import Services
from tests.api.harness import HI, House, driven

CHAT = "/v1/chat/completions"
PUBLIC = {"/livez", "/readyz", "/health", "/metrics"}


def all_routes():
    house = House()
    services = Services(
        config=house.config, gate=house.gate, desk=house.desk, keys=house.ring, models=house.models,
        metrics=house.metrics, alerts=house.alerts, log=None, fleet=house.fleet, keeper=house.keeper, control=None,
    )  # fmt: skip
    return [route for route in routes(services) if isinstance(route, Route)]


def concrete(path):
    return path.replace("{model:path}", "M").replace("{id}", "x").replace("{slot}", "0")


SHAPES = [
    lambda path: path,
    lambda path: "/" + path,
    lambda path: path.upper(),
    lambda path: path + "/",
    lambda path: path + "/../livez",
    lambda path: "/livez/.." + path,
    lambda path: "/livez/%2e%2e" + path,
    lambda path: path + "\x00",
]


@driven
async def test_only_the_listed_routes_answer_without_a_key(tmp_path):
    """B60: every route x method x spelling; a new route fails here until it is listed or guarded."""
    house = House(keys=["right"], tmp_path=tmp_path)
    for route in all_routes():
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
            for shape in SHAPES:
                path = shape(concrete(route.path))
                override = [(b"x-http-method-override", b"GET")]
                call = await house.ask(method, path, headers=override)
                assert call.status == 401 or path in PUBLIC, (method, path)


@driven
async def test_metrics_want_a_key_when_the_server_can_be_reached_from_elsewhere(tmp_path):
    house = House(keys=["right"], tmp_path=tmp_path, server={"host": "0.0.0.0"})
    assert (await house.ask("GET", "/metrics")).status == 401
    shown = await house.ask("GET", "/metrics", key="right")
    assert shown.status == 200
    assert shown.headers["content-type"].startswith("text/plain")
    assert b"vllm:num_requests_running" in shown.body
    assert b"right" not in shown.body


AUTHORIZATIONS = [
    ([b"Bearer caf\xe9"], 401),
    ([b"Bearer \xf0\x9f\x98\x80"], 401),
    ([b"Bearer"], 401),
    ([b"Bearer "], 401),
    ([b"bearer KEY"], 200),
    ([b"Bearer KEY"], 200),
    ([b"Bearer  KEY"], 401),
    ([b"Basic KEY"], 401),
    ([b"KEY"], 401),
    ([b"Bearer KEY", b"Bearer KEY"], 401),
    ([b"Bearer " + b"x" * 65536], 401),
    ([], 401),
]


@pytest.mark.parametrize(("values", "status"), AUTHORIZATIONS, ids=range(len(AUTHORIZATIONS)))
def test_only_the_right_key_gets_in(tmp_path, values, status):
    """B58: non-ASCII, empty, doubled, huge and absent headers: 401 with WWW-Authenticate, never 500."""

    @driven
    async def run():
        house = House(keys=["KEY"], tmp_path=tmp_path)
        headers = [(b"authorization", value) for value in values]
        call = await house.ask("GET", "/v1/models", headers=headers)
        assert call.status == status
        if status == 401:
            assert call.error["type"] == "authentication_error"
            assert call.headers["www-authenticate"].startswith("Bearer")

    run()


@driven
async def test_nothing_secret_is_logged_or_echoed(tmp_path):
    """B59: keys in the query, wrong and right keys, a prompt in every kind of error, at level debug."""
    house = House(keys=["RIGHT3"], tmp_path=tmp_path, log={"level": "debug"}, template="{{ 1 // 0 }}")
    seen = []
    call = await house.ask("GET", "/v1/models", query=b"api_key=SECRET1&key=%53ECRET1")
    assert call.status == 401
    seen.append(call)
    seen.append(await house.ask("GET", "/v1/models\r\n\x1b[31mFORGED", key="SECRET2"))
    bad = {"messages": [{"role": "user", "content": "PROMPT9"}]}
    seen.append(await house.ask("POST", CHAT, bad | {"temperature": "PROMPT9"}, key="RIGHT3"))
    seen.append(await house.ask("POST", CHAT, bad, key="RIGHT3"))
    house.gate.admit = None  # A crash inside the handler.
    crash = await house.ask("POST", "/v1/completions", {"prompt": "PROMPT9"}, key="RIGHT3")
    assert (crash.status, crash.error["code"]) == (500, "internal_error")
    seen.append(crash)
    seen.append(await house.ask("GET", "/metrics"))
    text = house.log_text.getvalue() + "".join(call.body.decode() for call in seen)
    for marker in ("SECRET1", "ECRET1", "SECRET2", "RIGHT3", "Bearer R", "PROMPT9", "\x1b", "Traceback"):
        assert marker not in text
    assert all(
        line.startswith(("info", "error", "debug", "warning")) for line in house.log_text.getvalue().splitlines()
    )


@driven
async def test_unknown_paths_and_methods_are_json_errors():
    house = House()
    for path in ("/nope", "/v1/", "//v1/models", "/V1/models", "/v1/chat", "/v1/embeddings"):
        call = await house.ask("GET", path)
        assert (call.status, call.error["code"]) == (404, "not_found")
    call = await house.ask("GET", CHAT)
    assert (call.status, call.error["code"], call.headers["allow"]) == (405, "method_not_allowed", "POST")
    assert (await house.ask("PUT", "/v1/models")).status == 405


@driven
async def test_health_answers_in_each_state():
    house = House()
    for path in ("/livez", "/readyz", "/health"):
        call = await house.ask("GET", path)
        assert (call.status, call.json) == (200, {"status": "ok"})
    house.models.has_healthy_device = False
    assert (await house.ask("GET", "/readyz")).json == {"status": "no_device"}
    assert (await house.ask("GET", "/livez")).status == 200
    house.models.is_loading = True
    health = await house.ask("GET", "/health")
    assert (health.status, health.json["error"]["message"]) == (503, "Loading model")


@driven
async def test_models_are_listed_shown_and_not_found():
    house = House()
    for path in ("/v1/models", "/models"):
        (shown,) = (await house.ask("GET", path)).json["data"]
        assert (shown["id"], shown["object"], shown["meta"]["n_ctx"]) == ("M", "model", 4096)
    assert (await house.ask("GET", "/v1/models/M")).json["id"] == "M"
    # With the model in its base URL, as a client may have it.
    listed = (await house.ask("GET", "/models/M/v1/models")).json
    assert [entry["id"] for entry in listed["data"]] == ["M"]
    assert (await house.ask("GET", "/models/M/v1/models/M")).json["id"] == "M"
    nowhere = await house.ask("GET", "/models/N/v1/models")
    assert (nowhere.status, nowhere.error["code"]) == (404, "model_not_found")
    missing = await house.ask("GET", "/v1/models/a/b")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    for path, body in [(CHAT, HI | {"model": "x" * 999}), ("/models/N/v1/chat/completions", HI)]:
        call = await house.ask("POST", path, body)
        assert (call.status, call.error["code"], len(call.error["message"]) < 300) == (404, "model_not_found", True)


@driven
async def test_a_model_is_named_by_path_by_body_or_not_at_all():
    house = House()
    unnamed = {"messages": HI["messages"]}
    for path, body in [
        ("/chat/completions", HI),
        ("/v1/chat/completions", unnamed),
        ("/models/M/v1/chat/completions", unnamed | {"model": "other"}),
    ]:
        call = await house.serve(house.call("POST", path, body), "x")
        assert (call.status, call.json["model"]) == (200, "M")


@driven
async def test_tokenize_detokenize_and_apply_template_speak_llama_servers_shapes():
    house = House(add_bos=True)
    text = "h\u00e9"
    call = await house.ask("POST", "/tokenize", {"content": text})
    assert call.json == {"tokens": list(text.encode())}
    assert (await house.ask("POST", "/detokenize", call.json)).json == {"content": text}
    special = {"content": "<|im_end|>", "parse_special": True, "add_special": True, "with_pieces": True}
    tokens = (await house.ask("POST", "/tokenize", special)).json["tokens"]
    assert tokens == [{"id": 258, "piece": "<s>"}, {"id": 257, "piece": "<|im_end|>"}]
    pieces = (await house.ask("POST", "/tokenize", {"content": "\u00e9", "with_pieces": True})).json["tokens"]
    assert pieces == [{"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]
    for tokens in ([-1], [2**31], ["a"], [True]):
        assert (await house.ask("POST", "/detokenize", {"tokens": tokens})).status == 400
    assert "<|im_start|>user\nhi" in (await house.ask("POST", "/apply-template", HI)).json["prompt"]


@driven
async def test_tokenize_and_detokenize_are_bounded():
    house = House()
    for path, fits, too_much in [
        ("/tokenize", {"content": "a" * 1_048_576}, {"content": "a" * 1_048_577}),
        ("/tokenize", {"content": "a" * 65_536, "with_pieces": True}, {"content": "a" * 65_537, "with_pieces": True}),
        ("/detokenize", {"tokens": [65] * 65_536}, {"tokens": [65] * 65_537}),
        ("/detokenize", {"tokens": [65] * 65_536}, {"tokens": [65] * 300_000}),
    ]:
        assert (await house.ask("POST", path, fits)).status == 200
        call = await house.ask("POST", path, too_much)
        assert (call.status, call.error["code"]) == (413, "body_too_large")
        assert "at most" in call.error["message"]


@driven
async def test_every_answer_carries_an_id_and_takes_the_clients_if_it_is_sane():
    house = House()
    for sent, kept in [(b"abc-1_2.3", True), (b"a b", False), (b"x" * 65, False), (b"\xff", False), (b"", False)]:
        call = await house.ask("GET", "/livez", headers=[(b"x-request-id", sent)])
        assert (call.headers["x-request-id"].encode() == sent) == kept
    assert len((await house.ask("GET", "/nope")).headers["x-request-id"]) == 24


@driven
async def test_a_wish_above_the_keys_bound_is_clamped_and_said(tmp_path):
    house = House()
    call = await house.serve(house.call("POST", CHAT, HI | {"priority": 0}), "x")
    assert call.headers["x-lqs-priority"] == "2"
    call = await house.serve(house.call("POST", CHAT, HI | {"priority": 4}), "x")
    assert "x-lqs-priority" not in call.headers


@driven
async def test_pages_of_other_origins_may_call_only_if_named():
    asks = [(b"origin", b"http://page"), (b"access-control-request-method", b"POST")]
    silent = await House().ask("OPTIONS", CHAT, headers=asks)
    assert silent.status == 405
    assert "access-control-allow-origin" not in silent.headers
    house = House(server={"cors_origins": ["http://page"]})
    preflight = await house.ask("OPTIONS", CHAT, headers=asks)
    assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (204, "http://page")
    call = await house.ask("GET", "/nope", headers=asks[:1])
    assert (call.status, call.headers["access-control-allow-origin"]) == (404, "http://page")
    for headers in ([], [(b"origin", b"http://evil")]):
        call = await house.ask("GET", "/v1/models", headers=headers)
        assert "access-control-allow-origin" not in call.headers
    assert (await house.ask("OPTIONS", CHAT, headers=asks[:1])).status == 405


def record(piece, logprob, *alternatives):
    packed = struct.pack("<ifHH", 1, logprob, len(alternatives), len(piece)) + piece
    return packed + b"".join(struct.pack("<ifH", 2, p, len(text)) + text for text, p in alternatives)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_come_in_openais_shapes(stream):
    @driven
    async def run():
        house = House()
        records = record(b"a", -0.5, (b"a", -0.5), (b"\xc3", -2.0)) + record(b"b", float("-inf"))
        for path, body in [
            (CHAT, HI | {"logprobs": True, "top_logprobs": 2}),
            ("/v1/completions", {"prompt": "q", "logprobs": 2}),
        ]:
            call = house.call("POST", path, body | {"stream": stream})
            (handle,) = await house.starts()
            house.emit(handle, "a", "b", logprobs=records)
            house.finish(handle, num_completion_tokens=2)
            await call.done()
            answers = call.events[:-1] if stream else [call.json]
            (shape,) = [a["choices"][0]["logprobs"] for a in answers if a["choices"][0]["logprobs"]]
            if path == CHAT:
                first, second = shape["content"]
                assert (first["token"], first["logprob"], first["bytes"]) == ("a", -0.5, [97])
                assert first["top_logprobs"][1] == {"token": "\ufffd", "logprob": -2.0, "bytes": [0xC3]}
                assert (second["logprob"], second["top_logprobs"]) == (-9999.0, [])
            else:
                assert (shape["tokens"], shape["text_offset"]) == (["a", "b"], [0, 1])
                assert shape["token_logprobs"] == [-0.5, -9999.0]
                assert shape["top_logprobs"][0] == {"a": -0.5, "\ufffd": -2.0}

    run()


@driven
async def test_no_logprobs_are_sent_when_not_asked_and_zero_means_the_token_alone():
    house = House()
    for body in ({"prompt": "q"}, {"prompt": "q", "logprobs": None}, {"prompt": "q", "logprobs": False}):
        call = await house.serve(house.call("POST", "/v1/completions", body), "x")
        assert call.json["choices"][0]["logprobs"] is None
    await house.serve(house.call("POST", "/v1/completions", {"prompt": "q", "logprobs": 0}), "x")
    assert house.model.works[-1]["sampling"].num_logprobs == 0
    for wrong in (True, 21, -1):
        call = await house.ask("POST", "/v1/completions", {"prompt": "q", "logprobs": wrong})
        assert (call.status, call.error["param"]) == (400, "logprobs")


@driven
async def test_only_http_is_served():
    house = House()
    for kind in ("websocket", "lifespan"):
        await house.app({"type": kind, "path": "/v1/models", "headers": []}, pytest.fail, pytest.fail)
