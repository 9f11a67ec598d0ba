"""The providers' own libraries take a fake for the real thing, in whatever version is installed.

They leave unfinished the async generators that they parse streams with; trio remarks upon it.
"""

from importlib import import_module
from typing import Any

import anyio
import pytest

from tokenflow import Usage
from tokenflow.testing import FakeProvider, Fault, first_calls

openai: Any = pytest.importorskip("openai")
anthropic: Any = pytest.importorskip("anthropic")

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:.*async_generator:pytest.PytestUnraisableExceptionWarning"),
]

HELLO = [{"role": "user", "content": "hello, who are you?"}]  # 19 bytes: 5 tokens


def http_client(sdk: Any, provider: FakeProvider) -> Any:
    """The SDK's own client, of the library it is built on: httpx or httpx2."""
    classes = sdk.DefaultAsyncHttpxClient.__mro__
    module = next(each.__module__ for each in classes if each.__name__ == "AsyncClient")
    httpx = import_module(module.partition(".")[0])
    return sdk.DefaultAsyncHttpxClient(transport=provider.transport(httpx))


class TestOpenAI:
    @staticmethod
    def client(provider: FakeProvider, **options: Any) -> Any:
        options = {"base_url": "http://fake/v1", "max_retries": 0, **options}
        return openai.AsyncOpenAI(api_key="k", http_client=http_client(openai, provider), **options)

    async def test_chat(self) -> None:
        async with self.client(FakeProvider.openai(output=30)) as client:
            answer = await client.chat.completions.create(
                model="m", messages=HELLO, n=2, max_tokens=9
            )
        assert [choice.message.content for choice in answer.choices] == ["tok " * 9] * 2
        assert answer.choices[0].finish_reason == "length"
        assert Usage.from_response(answer) == Usage(input_tokens=5, output_tokens=18)

    async def test_a_streamed_chat(self) -> None:
        provider = FakeProvider.openai(output=6)
        async with self.client(provider) as client:
            stream = await client.chat.completions.create(
                model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(deltas) == "tok " * 6
        assert Usage.from_response(chunks) == Usage(input_tokens=5, output_tokens=6)
        assert provider.calls[0].outcome == "completed"

    async def test_its_own_reading_of_streams(self) -> None:
        async with self.client(FakeProvider.openai(output=6)) as client:
            async with client.chat.completions.stream(model="m", messages=HELLO) as stream:
                completion = await stream.get_final_completion()
            async with client.responses.stream(model="m", input="hello") as stream:
                response = await stream.get_final_response()
        assert completion.choices[0].message.content == "tok " * 6
        assert response.output_text == "tok " * 6
        assert Usage.from_response(response) == Usage(input_tokens=2, output_tokens=6)

    async def test_completions(self) -> None:
        async with self.client(FakeProvider.openai(output=6)) as client:
            answer = await client.completions.create(model="m", prompt="hello", max_tokens=3)
            stream = await client.completions.create(model="m", prompt="hello", stream=True)
            texts = [chunk.choices[0].text async for chunk in stream]
        assert answer.choices[0].text == "tok " * 3
        assert "".join(texts) == "tok " * 6

    async def test_responses(self) -> None:
        async with self.client(FakeProvider.openai(output=6)) as client:
            answer = await client.responses.create(model="m", input="hello", max_output_tokens=4)
            stream = await client.responses.create(model="m", input="hello", stream=True)
            events = [event async for event in stream]
        assert (answer.status, answer.output_text) == ("incomplete", "tok " * 4)
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "tok " * 6

    async def test_embeddings_and_models(self) -> None:
        async with self.client(FakeProvider.openai()) as client:
            answer = await client.embeddings.create(model="m", input=["a", "b"], dimensions=3)
            models = [model.id async for model in client.models.list()]
        assert [len(item.embedding) for item in answer.data] == [3, 3]
        assert models == ["fake"]

    async def test_azure(self) -> None:
        provider = FakeProvider.azure(tpm=1_000, output=1)
        async with openai.AsyncAzureOpenAI(
            api_key="k",
            api_version="2024-10-21",
            azure_endpoint="http://fake",
            http_client=http_client(openai, provider),
        ) as client:
            await client.chat.completions.create(model="mine", messages=HELLO, max_tokens=9)
        assert provider.calls[0].model == "mine"

    async def test_it_waits_as_it_is_told(self) -> None:
        provider = FakeProvider.openai(rpm=1, output=0)
        async with self.client(provider, max_retries=1) as client:
            for _ in range(2):
                await client.chat.completions.create(model="m", messages=HELLO)
        assert [call.status for call in provider.calls] == [200, 429, 200]
        assert anyio.current_time() > 60

    async def test_its_errors(self) -> None:
        faults = {
            Fault(drop=True): openai.APIConnectionError,
            Fault(unreachable=True): openai.APIConnectionError,
            Fault(delay=900.0): openai.APITimeoutError,
            Fault(status=500): openai.InternalServerError,
            Fault(status=429, code="insufficient_quota"): openai.RateLimitError,
        }
        for fault, error in faults.items():
            async with self.client(FakeProvider.openai(faults=first_calls(1, fault))) as client:
                with pytest.raises(error) as caught:
                    await client.chat.completions.create(model="m", messages=HELLO)
            assert getattr(caught.value, "code", None) == fault.code


class TestAnthropic:
    @staticmethod
    def client(provider: FakeProvider) -> Any:
        return anthropic.AsyncAnthropic(
            api_key="k",
            base_url="http://fake",
            http_client=http_client(anthropic, provider),
            max_retries=0,
        )

    async def test_messages(self) -> None:
        provider = FakeProvider.anthropic(output=30, cached_tokens=lambda request: 2)
        async with self.client(provider) as client:
            answer = await client.messages.create(model="m", max_tokens=9, messages=HELLO)
        assert answer.content[0].text == "tok " * 9
        assert answer.stop_reason == "max_tokens"
        used = Usage(input_tokens=5, output_tokens=9, cached_tokens=2)
        assert Usage.from_response(answer) == used

    async def test_streamed_messages(self) -> None:
        provider = FakeProvider.anthropic(output=6)
        async with self.client(provider) as client:
            stream = await client.messages.create(
                model="m", max_tokens=9, messages=HELLO, stream=True
            )
            events = [event async for event in stream]
            async with client.messages.stream(model="m", max_tokens=9, messages=HELLO) as whole:
                message = await whole.get_final_message()
        assert events[-1].type == "message_stop"
        assert Usage.from_response(events) == Usage(input_tokens=5, output_tokens=6)
        assert message.content[0].text == "tok " * 6

    async def test_its_errors(self) -> None:
        faults = {
            Fault(status=529): "OverloadedError",
            Fault(status=500): "InternalServerError",
            Fault(status=429, retry_after=3.0): "RateLimitError",
            Fault(drop=True): "APIConnectionError",
        }
        for fault, error in faults.items():
            async with self.client(FakeProvider.anthropic(faults=first_calls(1, fault))) as client:
                with pytest.raises(anthropic.APIError) as caught:
                    await client.messages.create(model="m", max_tokens=9, messages=HELLO)
            assert error in [each.__name__ for each in type(caught.value).__mro__]
