"""Usage and Request: the values, and reading them from what providers send."""

import pickle
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow._usage import (
    Request,
    Usage,
    finite_seconds,
    positive_int,
    positive_seconds,
    token_count,
)
from tokenflow._wire import UsageReader

counts = st.integers(0, 1 << 40)


class TestTokenCount:
    class Index:
        def __index__(self) -> int:
            return 7

    def test_accepts_what_is_an_integer(self) -> None:
        assert token_count(0, "n") == 0
        assert token_count(self.Index(), "n") == 7

    @pytest.mark.parametrize("value", [True, False, 1.0, float("nan"), "1", None])
    def test_refuses_other_types(self, value: object) -> None:
        with pytest.raises(TypeError, match="n must be an int >= 0, not"):
            token_count(value, "n")

    def test_refuses_negative(self) -> None:
        with pytest.raises(ValueError, match="n must be an int >= 0, not -1"):
            token_count(-1, "n")

    def test_positive(self) -> None:
        assert positive_int(1, "n") == 1
        with pytest.raises(ValueError, match="n must be an int >= 1, not 0"):
            positive_int(0, "n")


class TestSeconds:
    def test_accepts_finite_numbers(self) -> None:
        assert (finite_seconds(0, "wait"), positive_seconds(1, "wait")) == (0.0, 1.0)

    @pytest.mark.parametrize("value", [True, "1", None])
    def test_refuses_other_types(self, value: object) -> None:
        with pytest.raises(TypeError, match="wait must be a number of seconds"):
            finite_seconds(value, "wait")

    @pytest.mark.parametrize("value", [-1, float("inf"), float("nan")])
    def test_refuses_other_numbers(self, value: float) -> None:
        with pytest.raises(ValueError, match="wait must be a finite number of seconds >= 0"):
            finite_seconds(value, "wait")

    def test_refuses_zero_where_it_makes_no_sense(self) -> None:
        with pytest.raises(ValueError, match="wait must be more than 0 seconds, not 0"):
            positive_seconds(0, "wait")


class TestUsage:
    def test_total(self) -> None:
        assert Usage(input_tokens=3, output_tokens=4, cached_tokens=2).total_tokens == 7

    def test_adds_up(self) -> None:
        usages = [
            Usage(input_tokens=3, cached_tokens=1, cache_write_tokens=2, max_output_tokens=5),
            Usage(output_tokens=4, requests=0, max_output_tokens=6),
        ]
        assert sum(usages) == Usage(
            input_tokens=3,
            output_tokens=4,
            cached_tokens=1,
            cache_write_tokens=2,
            max_output_tokens=11,
        )

    def test_an_unknown_maximum_stays_unknown_in_a_sum(self) -> None:
        assert (Usage() + Usage(max_output_tokens=6)).max_output_tokens is None

    def test_adds_only_to_its_like(self) -> None:
        with pytest.raises(TypeError):
            Usage() + 1
        with pytest.raises(TypeError):
            1 + Usage()

    def test_cache_counts_are_parts_of_the_input(self) -> None:
        with pytest.raises(ValueError, match="= 5 exceeds input_tokens = 4"):
            Usage(input_tokens=4, cached_tokens=2, cache_write_tokens=3)

    @pytest.mark.parametrize("name", ["input_tokens", "requests", "max_output_tokens"])
    def test_bad_counts_are_refused(self, name: str) -> None:
        with pytest.raises(TypeError, match=f"{name} must be an int >= 0"):
            Usage(**{name: 1.5})  # type: ignore[arg-type]

    def test_integers_of_other_kinds_become_int(self) -> None:
        index: Any = TestTokenCount.Index()
        assert type(Usage(input_tokens=index).input_tokens) is int

    @pytest.mark.parametrize(
        ("usage", "shown"),
        [
            (Usage(), "Usage()"),
            (Usage(input_tokens=3, requests=0), "Usage(input_tokens=3, requests=0)"),
            (Usage(requests=2, max_output_tokens=0), "Usage(requests=2, max_output_tokens=0)"),
        ],
    )
    def test_repr_shows_what_is_not_the_default(self, usage: Usage, shown: str) -> None:
        assert repr(usage) == shown
        assert eval(shown) == usage

    def test_pickles(self) -> None:
        usage = Usage(input_tokens=3, max_output_tokens=5)
        assert pickle.loads(pickle.dumps(usage)) == usage


class TestRequest:
    def test_content_shows_in_no_repr(self) -> None:
        assert "secret" not in repr(Request(input_tokens=1, content="secret"))

    @pytest.mark.parametrize(
        ("kwargs", "error"),
        [
            ({"input_tokens": -1}, ValueError),
            ({"input_tokens": None}, TypeError),
            ({"input_tokens": 1, "max_output_tokens": -1}, ValueError),
            ({"input_tokens": 1, "max_output_tokens": True}, TypeError),
            ({"input_tokens": 1, "choices": 0}, ValueError),
            ({"input_tokens": 1, "choices": 1.0}, TypeError),
        ],
    )
    def test_bad_counts_are_refused(self, kwargs: Any, error: type[Exception]) -> None:
        with pytest.raises(error):
            Request(**kwargs)

    def test_integers_of_other_kinds_become_int(self) -> None:
        index: Any = TestTokenCount.Index()
        request = Request(input_tokens=index, max_output_tokens=index, choices=index)
        assert (request.input_tokens, request.max_output_tokens, request.choices) == (7, 7, 7)
        assert type(request.input_tokens) is int


class TestFromBody:
    @pytest.mark.parametrize(
        ("body", "maximum", "choices"),
        [
            ({}, None, 1),
            ({"max_tokens": 9}, 9, 1),
            ({"max_tokens": 0}, 0, 1),
            ({"max_output_tokens": 9, "n": None}, 9, 1),
            ({"max_tokens": 1, "max_completion_tokens": 738}, 738, 1),  # litellm 34223
            ({"max_completion_tokens": 9, "n": 5}, 9, 5),  # openai-python 605
            ({"max_tokens": 9, "n": 2, "best_of": 4}, 9, 4),
            ({"generationConfig": {"maxOutputTokens": 9, "candidateCount": 2}}, 9, 2),
            ({"inferenceConfig": {"maxTokens": 9}}, 9, 1),
            ({"parameters": {"max_new_tokens": 9}}, 9, 1),
            ({"max_tokens": "many", "n": -1}, None, 1),
            ({"max_tokens": 12.0}, 12, 1),
            (None, None, 1),
            (SimpleNamespace(max_tokens=9), 9, 1),
        ],
    )
    def test_maxima_and_choices(self, body: object, maximum: int | None, choices: int) -> None:
        request = Request.from_body(body, input_tokens=80, task="chat")
        expected = Request(input_tokens=80, max_output_tokens=maximum, choices=choices, task="chat")
        assert request == expected

    def test_model(self) -> None:
        assert Request.from_body({"model": "gpt-5"}, input_tokens=1).model == "gpt-5"
        assert Request.from_body({"model": 5}, input_tokens=1).model is None


def as_object(found: Any) -> Any:
    """The same data with attributes, as SDKs return it."""
    if isinstance(found, dict):
        return SimpleNamespace(**{name: as_object(value) for name, value in found.items()})
    return [as_object(each) for each in found] if isinstance(found, list) else found


CHAT = {
    "prompt_tokens": 90,
    "completion_tokens": 30,
    "total_tokens": 120,
    "prompt_tokens_details": {"cached_tokens": 64, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 20},
}
ANTHROPIC = {
    "input_tokens": 10,
    "cache_creation_input_tokens": 50,
    "cache_read_input_tokens": 100,
    "output_tokens": 7,
}
GEMINI = {
    "promptTokenCount": 40,
    "candidatesTokenCount": 5,
    "thoughtsTokenCount": 60,
    "cachedContentTokenCount": 32,
    "totalTokenCount": 105,
}
GEMINI_SDK = {
    "prompt_token_count": 40,
    "candidates_token_count": 5,
    "thoughts_token_count": None,
    "tool_use_prompt_token_count": 8,
    "cached_content_token_count": 32,
}
COHERE = {
    "billed_units": {"input_tokens": 3, "output_tokens": 4},
    "tokens": {"input_tokens": 66.0, "output_tokens": 5.0},
}
RESPONSES = {
    "input_tokens": 36,
    "input_tokens_details": {"cached_tokens": 16},
    "output_tokens": 87,
    "output_tokens_details": {"reasoning_tokens": 64},
    "total_tokens": 123,
}
BEDROCK = {
    "inputTokens": 30,
    "outputTokens": 628,
    "totalTokens": 661,
    "cacheReadInputTokens": 3,
    "cacheWriteInputTokens": 0,
}
OF_CHAT = Usage(input_tokens=90, output_tokens=30, cached_tokens=64)
OF_ANTHROPIC = Usage(input_tokens=160, output_tokens=7, cached_tokens=100, cache_write_tokens=50)
OF_RESPONSES = Usage(input_tokens=36, output_tokens=87, cached_tokens=16)

SHAPES = {
    "chat completion": ({"id": "x", "usage": CHAT}, OF_CHAT),
    "last chunk of a stream": ({"choices": [], "usage": CHAT}, OF_CHAT),
    "groq stream": ({"choices": [], "x_groq": {"usage": CHAT}}, OF_CHAT),
    "deepseek": (
        {"usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_cache_hit_tokens": 4}},
        Usage(input_tokens=9, output_tokens=2, cached_tokens=4),
    ),
    "cache counts beside a prompt that includes them": (
        {"usage": {**CHAT, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 6}},
        Usage(input_tokens=90, output_tokens=30, cached_tokens=64, cache_write_tokens=6),
    ),
    "both families of names count once": ({"usage": {**ANTHROPIC, **CHAT}}, None),
    "embeddings": ({"usage": {"prompt_tokens": 8, "total_tokens": 8}}, Usage(input_tokens=8)),
    "reranker": ({"usage": {"total_tokens": 8}}, Usage(input_tokens=8)),
    "responses": ({"object": "response", "usage": RESPONSES}, OF_RESPONSES),
    "response.completed": (
        {"type": "response.completed", "response": {"usage": RESPONSES}},
        OF_RESPONSES,
    ),
    "batch line": ({"response": {"status_code": 200, "body": {"usage": CHAT}}}, OF_CHAT),
    "anthropic": ({"type": "message", "usage": ANTHROPIC}, OF_ANTHROPIC),
    "message_start": ({"message": {"usage": ANTHROPIC}}, OF_ANTHROPIC),
    "anthropic batch line": ({"result": {"message": {"usage": ANTHROPIC}}}, OF_ANTHROPIC),
    "anthropic without caching": (
        {"usage": {**ANTHROPIC, "cache_read_input_tokens": None, "cache_creation_input_tokens": 0}},
        Usage(input_tokens=10, output_tokens=7),
    ),
    "gemini": (
        {"usageMetadata": GEMINI},
        Usage(input_tokens=40, output_tokens=65, cached_tokens=32),
    ),
    "gemini SDK": (
        {"usage_metadata": GEMINI_SDK},
        Usage(input_tokens=48, output_tokens=5, cached_tokens=32),
    ),
    "cohere": ({"usage": COHERE}, Usage(input_tokens=66, output_tokens=5)),
    "cohere stream": (
        {"type": "message-end", "delta": {"usage": COHERE}},
        Usage(input_tokens=66, output_tokens=5),
    ),
    "cohere embeddings": (
        {"meta": {"billed_units": {"input_tokens": 3}}},
        Usage(input_tokens=3),
    ),
    "bedrock": (
        {"usage": BEDROCK},
        Usage(input_tokens=33, output_tokens=628, cached_tokens=3),
    ),
    "bedrock stream": (
        {"metadata": {"usage": BEDROCK}},
        Usage(input_tokens=33, output_tokens=628, cached_tokens=3),
    ),
    "usage alone": (CHAT, OF_CHAT),
    "zero output": (
        {"usage": {"prompt_tokens": 8, "completion_tokens": 0}},
        Usage(input_tokens=8),
    ),
}
STREAMS: dict[str, tuple[list[dict[str, Any]], Usage]] = {
    "chat completions": (
        [{"choices": [{}], "usage": None}, {"choices": []}, {"choices": [], "usage": CHAT}],
        OF_CHAT,
    ),
    "vLLM, cumulative on every chunk": (
        [{"usage": {"prompt_tokens": 9, "completion_tokens": n}} for n in range(4)],
        Usage(input_tokens=9, output_tokens=3),
    ),
    "anthropic": (
        [
            {"type": "message_start", "message": {"usage": {**ANTHROPIC, "output_tokens": 1}}},
            {"type": "content_block_delta", "delta": {"text": "hi"}},
            {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 5}},
            {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 7}},
            {"type": "message_stop"},
        ],
        OF_ANTHROPIC,
    ),
    "anthropic through a proxy that repeats the input as 0": (
        [
            {"message": {"usage": {**ANTHROPIC, "output_tokens": 1}}},
            {"usage": {**dict.fromkeys(ANTHROPIC, 0), "output_tokens": 7}},
        ],
        OF_ANTHROPIC,
    ),
    "responses": (
        [
            {"type": "response.created", "response": {"usage": None}},
            {"type": "response.output_text.delta", "delta": "hi"},
            {"type": "response.completed", "response": {"usage": RESPONSES}},
        ],
        OF_RESPONSES,
    ),
    "gemini": (
        [{"usageMetadata": {"promptTokenCount": 40}}, {"usageMetadata": GEMINI}],
        Usage(input_tokens=40, output_tokens=65, cached_tokens=32),
    ),
}
NONE: dict[str, object] = {
    "nothing": None,
    "text": "usage",
    "a number": 5,
    "a broken stream": [{"choices": [{}]}, {"choices": [{}], "usage": None}],
    "no events": [],
    "empty usage": {"usage": {}},
    "an error": {"error": {"message": "overloaded"}},
    "search units": {"meta": {"billed_units": {"search_units": 1}}},
    "nonsense": {"usage": {"prompt_tokens": "9", "completion_tokens": -1}},
    "more nonsense": {"usage": {"prompt_tokens": True, "completion_tokens": float("nan")}},
    "absurd": {"usage": {"prompt_tokens": 1e300, "completion_tokens": 10**30}},
    "a mock that has every attribute": MagicMock(),
    "a list in the wrong place": {"usage": [1, 2], "message": [], "meta": "x"},
}


class TestFromResponse:
    @pytest.mark.parametrize("make", [dict, as_object])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_shapes(self, shape: str, make: Any) -> None:
        response, expected = SHAPES[shape]
        usage = Usage.from_response(make(response))
        if expected is None:
            assert usage.total_tokens == OF_CHAT.total_tokens
        else:
            assert usage == expected

    @pytest.mark.parametrize("make", [list, tuple, as_object])
    @pytest.mark.parametrize("stream", STREAMS)
    def test_streams(self, stream: str, make: Any) -> None:
        events, expected = STREAMS[stream]
        assert Usage.from_response(make(events)) == expected

    @pytest.mark.parametrize("stream", STREAMS)
    def test_streams_as_they_come(self, stream: str) -> None:
        events, expected = STREAMS[stream]
        reader = UsageReader()
        assert reader.usage is None
        for event in events:
            reader.feed(event)
        assert reader.usage == expected

    @pytest.mark.parametrize("found", NONE)
    def test_says_when_there_is_none(self, found: str) -> None:
        with pytest.raises(ValueError, match=r"no token usage in this \w+: "):
            Usage.from_response(NONE[found])

    @pytest.mark.parametrize(
        ("given", "remedy"),
        [
            (SimpleNamespace(status_code=200, json=dict), r"pass what its json\(\) returns"),
            ('{"usage": {}}', "its JSON as a dictionary"),
            (None, "as the SDK returns it"),
            ({"choices": []}, "include_usage"),
        ],
    )
    def test_says_what_to_pass_instead(self, given: object, remedy: str) -> None:
        with pytest.raises(ValueError, match=remedy):
            Usage.from_response(given)

    @pytest.mark.parametrize("nothing", [{}, {"cost": 0.1}, None])
    def test_a_usage_without_numbers_hides_no_other(self, nothing: object) -> None:
        reader = UsageReader()
        reader.feed({"usage": {"prompt_tokens": 10, "completion_tokens": 1}})
        reader.feed({"usage": nothing})
        assert not reader.is_fed
        groq = {"usage": {"prompt_tokens": 30, "completion_tokens": 50}}
        reader.feed({"usage": nothing, "x_groq": groq})
        assert reader.is_fed
        assert reader.usage == Usage(input_tokens=30, output_tokens=50)

    def test_reasoning_is_in_the_output(self) -> None:
        """LibreChat 4194."""
        assert Usage.from_response({"usage": RESPONSES}).output_tokens == 87
        assert Usage.from_response({"usageMetadata": GEMINI}).output_tokens == 65

    def test_a_usage_is_returned_as_it_is(self) -> None:
        usage = Usage(input_tokens=3)
        assert Usage.from_response(usage) is usage

    @given(st.dictionaries(st.sampled_from([*CHAT, *ANTHROPIC, *GEMINI, *BEDROCK]), counts))
    def test_any_numbers_make_a_consistent_usage(self, numbers: dict[str, int]) -> None:
        reader = UsageReader()
        reader.feed({"usage": numbers})
        usage = reader.usage or Usage()
        assert usage.cached_tokens + usage.cache_write_tokens <= usage.input_tokens

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "usage",
                        "tokens",
                        "prompt_tokens",
                        "input_tokens",
                        "response",
                        "message",
                        "prompt_tokens_details",
                        "cached_tokens",
                        "usageMetadata",
                        "output_tokens",
                    ]
                ),
                inner,
            )
        ),
        max_leaves=20,
    )

    @given(json_values)
    def test_never_fails_otherwise(self, response: object) -> None:
        reader = UsageReader()
        reader.feed(response)
        reader.feed_usage(response)
        assert reader.usage is None or reader.usage.total_tokens >= 0
