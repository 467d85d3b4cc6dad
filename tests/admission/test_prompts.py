"""Prompts are made off the loop, measured before and after, and cut to what fits."""

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lqs.admission.prompts import Prompts, check_bytes, grant, prepare
from lqs.config import ModelConfig, PromptsConfig
from lqs.errors import BadRequest, LqsError, PromptTooLong, RequestRefused
from lqs.request import PromptSource, Sampling, Segment
from tests.admission.parts import N_VOCAB, ByteModel, ByteServed, a_request, text


@pytest.fixture
def prompts() -> Iterator[Prompts]:
    pool = Prompts(PromptsConfig(threads=1, num_pending_max=1))
    yield pool
    pool.close()


def test_a_prompt_gets_its_tokens_and_what_the_context_leaves() -> None:
    request, served = a_request(sampling=Sampling(seed=5)), ByteServed()
    prepare(request, text("abcd"), served)
    assert list(request.prompt) == list(b"abcd")
    assert (request.num_prompt_tokens, request.max_tokens_granted, request.footprint_tokens) == (4, 60, 64)
    (work,) = served.loaded.worked
    assert (work["scope"], work["seed"], work["grammar"], work["max_tokens"]) == (3, 5, None, 60)


@pytest.mark.parametrize("num_prompt_tokens", [62, 63, 64, 65, 100_000])
@pytest.mark.parametrize("max_tokens", [1, 2, 10, None])
def test_prompt_and_answer_share_the_context(num_prompt_tokens: int, max_tokens: int | None) -> None:
    request = a_request(max_tokens=max_tokens)
    if num_prompt_tokens <= 63:
        prepare(request, text("a" * num_prompt_tokens), ByteServed())
        assert request.num_prompt_tokens == num_prompt_tokens
        assert request.max_tokens_granted == min(max_tokens or 64, 64 - num_prompt_tokens)
        return
    with pytest.raises(PromptTooLong) as caught:
        prepare(request, PromptSource(ids=[1] * num_prompt_tokens), ByteServed())
    assert (caught.value.num_prompt_tokens, caught.value.limit) == (num_prompt_tokens, 64)


@pytest.mark.parametrize(
    ("wish", "default", "ceiling", "granted"),
    [(None, 0, 0, 60), (None, 16, 0, 16), (8, 16, 0, 8), (None, 0, 16, 16), (50, 0, 16, 16), (2**40, 0, 0, 60)],
)
def test_no_wish_gets_past_the_ceiling(wish: int | None, default: int, ceiling: int, granted: int) -> None:
    config = ModelConfig(default_max_tokens=default, max_tokens_max=ceiling)
    assert grant(wish, 4, ByteServed(config=config)) == granted  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[N_VOCAB], [-1], [1 << 40], [1, 2, 999_999]])
def test_ids_that_the_model_does_not_have_are_refused(ids: list[int]) -> None:
    with pytest.raises(BadRequest, match="from 0 to 255") as caught:
        prepare(a_request(), PromptSource(ids=ids), ByteServed())
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("token", [-1, N_VOCAB, 1 << 40])
def test_a_bias_on_a_token_that_the_model_does_not_have_is_refused(token: int) -> None:
    request = a_request(sampling=Sampling(logit_bias=((token, -100.0),)))
    with pytest.raises(BadRequest) as caught:
        prepare(request, text("a"), ByteServed())
    assert caught.value.param == "logit_bias"


def test_an_empty_prompt_is_the_start_token_or_an_error() -> None:
    with_start = ByteServed(loaded=ByteModel(add_bos=True, bos=1))
    for source in (text(""), PromptSource(ids=[])):
        request = a_request()
        prepare(request, source, with_start)
        assert list(request.prompt) == [1]
        with pytest.raises(BadRequest, match="no start token"):
            prepare(a_request(), source, ByteServed())


def test_bytes_alone_refuse_what_can_never_fit() -> None:
    served = ByteServed(loaded=ByteModel(longest_piece_bytes=4))
    check_bytes(63 * 4, served)
    with pytest.raises(PromptTooLong, match="at least 64") as caught:
        check_bytes(63 * 4 + 1, served)
    assert not caught.value.message.startswith("at least")
    check_bytes(1 << 40, ByteServed(loaded=ByteModel(longest_piece_bytes=None)))


def test_what_a_template_adds_is_measured_before_it_is_tokenised() -> None:
    source = PromptSource(render=lambda: [Segment("x" * 1000, True)])
    with pytest.raises(PromptTooLong, match="at least 1000"):
        prepare(a_request(), source, ByteServed())


def test_a_grammar_is_compiled_and_a_shared_cache_has_one_scope() -> None:
    served = ByteServed(is_prefix_shared=True)
    prepare(a_request(sampling=Sampling(grammar="root ::= 'a'", seed=-1)), text("a"), served)
    (work,) = served.loaded.worked
    assert (work["grammar"], work["scope"], work["seed"]) == ("compiled root ::= 'a'", 0, 2**64 - 1)


def test_requests_without_a_seed_get_different_ones() -> None:
    served = ByteServed()
    for _ in range(2):
        prepare(a_request(), text("a"), served)
    first, second = served.loaded.worked
    assert first["seed"] != second["seed"]


async def _prepared(prompts: Prompts, source: PromptSource, served: Any) -> str:
    await prompts.prepare(a_request(), source, served)
    return threading.current_thread().name


def test_a_prompt_is_made_in_a_thread_of_the_pool(prompts: Prompts) -> None:
    names = []

    def render() -> list[Segment]:
        names.append(threading.current_thread().name)
        return [Segment("a", True)]

    asyncio.run(_prepared(prompts, PromptSource(render=render), ByteServed()))
    assert names[0].startswith("lqs-prompts")
    assert prompts.num_pending == 0


def test_the_pool_steps_back_behind_the_loop(prompts: Prompts) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert asyncio.run(prompts.run(niceness)) == min(niceness() + 5, 19)


def test_an_absurd_prompt_never_reaches_the_pool(prompts: Prompts) -> None:
    def render() -> list[Segment]:
        raise AssertionError

    source = PromptSource(render=render, num_bytes_min=5_000_000)
    with pytest.raises(PromptTooLong):
        asyncio.run(_prepared(prompts, source, ByteServed()))


def test_calls_beside_the_queue_are_bounded_and_cancelled_with_their_caller(prompts: Prompts) -> None:
    release, ran = threading.Event(), []

    async def scene() -> None:
        first = asyncio.create_task(prompts.run(release.wait, 10))
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused) as caught:
            await prompts.run(ran.append, 1)
        assert caught.value.reason == "queue_full"
        behind = asyncio.create_task(_prepared(prompts, PromptSource(render=lambda: ran.append(2) or []), ByteServed()))  # type: ignore[func-returns-value]
        await asyncio.sleep(0)
        behind.cancel()
        with pytest.raises(asyncio.CancelledError):
            await behind
        release.set()
        assert await first

    asyncio.run(scene())
    assert (prompts.num_pending, ran) == (0, [])


def test_an_error_of_the_client_passes_through_the_pool(prompts: Prompts) -> None:
    def render() -> list[Segment]:
        raise BadRequest("no")

    with pytest.raises(LqsError, match="no"):
        asyncio.run(_prepared(prompts, PromptSource(render=render), ByteServed()))
