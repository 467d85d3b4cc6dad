"""The official client takes what the app answers."""

import asyncio

import httpx2
import openai
import pytest

from tests.api.harness import House, driven

MESSAGES = [{"role": "user", "content": "hi"}]


def client_of(house):
    transport = httpx2.ASGITransport(app=house.app)
    return openai.AsyncOpenAI(
        api_key="KEY",
        base_url="http://lqs/v1",
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=transport),
    )


async def played(house, question, *texts):
    """Ask, with the test as the worker."""
    asked = asyncio.ensure_future(question)
    (handle,) = await house.starts()
    house.emit(handle, *texts)
    house.finish(handle, num_completion_tokens=len(texts))
    return await asked


@driven
async def test_chat_whole_and_streamed():
    house = House()
    async with client_of(house) as client:
        whole = await played(
            house, client.chat.completions.create(model="M", messages=MESSAGES, max_completion_tokens=9), "Hel", "lo"
        )
        assert whole.choices[0].message.content == "Hello"
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        stream = await played(
            house,
            client.chat.completions.create(
                model="M", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            ),
            "Hel",
            "lo",
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
        assert chunks[-1].usage.completion_tokens == 2
        assert chunks[-2].choices[0].finish_reason == "stop"


@driven
async def test_completions_models_and_errors():
    house = House()
    async with client_of(house) as client:
        done = await played(house, client.completions.create(model="M", prompt="a"), "b")
        assert done.choices[0].text == "b"
        stream = await played(house, client.completions.create(model="M", prompt="a", stream=True), "b", "c")
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "bc"
        assert [model.id async for model in client.models.list()] == ["M"]
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.chat.completions.create(model="M", messages=MESSAGES, n=2)
        assert refusal.value.param == "n"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=MESSAGES)


@driven
async def test_an_error_inside_a_stream_is_raised_by_the_client():
    """B07: the client sees a failure, not a finished answer."""
    house = House()
    async with client_of(house) as client:
        asked = asyncio.ensure_future(client.chat.completions.create(model="M", messages=MESSAGES, stream=True))
        (handle,) = await house.starts()
        house.emit(handle, "ab")
        house.finish(handle, 5)
        stream = await asked
        with pytest.raises(openai.APIError, match="engine failed"):
            _ = [chunk async for chunk in stream]
