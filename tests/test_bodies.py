"""Bodies that pass through a transport: whatever the bytes, nothing raises, and little is kept."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow import Usage
from tokenflow.flow import Meter
from tokenflow.integrations._bodies import Compressed, Document, Events, described, parsed, reader

NAMES = """
    model messages input prompt contents system instructions tools n max_tokens stream role
    content type text usage choices delta function id response message status
"""
names = st.sampled_from(NAMES.split())
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


class Call:
    """What a Meter needs of a call."""

    def __init__(self) -> None:
        self.usage = Usage(input_tokens=10)
        self.request = self.usage
        self.charged: list[Any] = []

    def progress(self, usage: Usage) -> None:
        self.charged.append(usage)

    def reconcile(self, actual: object) -> None:
        self.charged.append(Usage.from_response(actual))


class Letters:
    def count(self, text: str) -> int:
        return len(text)


def meter() -> tuple[Meter, Call]:
    call = Call()
    return Meter(call, Letters()), call  # type: ignore[arg-type]


class TestHostileRequests:
    @given(st.dictionaries(names, json_values, max_size=6), st.sampled_from(
        ["/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/models/m:generate", "/", ""]
    ))  # fmt: skip
    def test_any_body_is_described(self, body: dict[str, Any], path: str) -> None:
        content = json.dumps(body).encode()
        options = described(path, content, True, parsed(content))
        inputs = {"messages", "prompt", "input_tokens"} & set(options)
        assert len(inputs) == 1
        assert options["choices"] >= 1

    @given(st.binary(max_size=200))
    def test_any_bytes_count_by_their_size(self, content: bytes) -> None:
        options = described("/", content, True, None)
        assert options == {"input_tokens": -(-len(content) // 3), "max_output_tokens": 0}

    @pytest.mark.parametrize(
        "path",
        [
            "/v1/moderations",
            "/v2/rerank",
            "/v1/audio/speech",
            "/v1/images/generations",
            "/openai/deployments/mine/embeddings",
            "/model/cohere.embed-english-v3/invoke",
        ],
    )
    def test_what_generates_no_tokens(self, path: str) -> None:
        body = {"input": "abc", "n": 4}
        described_as = described(path, b"{}", True, body)
        assert (described_as["max_output_tokens"], described_as["choices"]) == (0, 1)

    @pytest.mark.parametrize(
        "path", ["/openai/deployments/embedder/chat/completions", "/images/v1/chat/completions"]
    )
    def test_what_generates_tokens_under_a_name_that_sounds_otherwise(self, path: str) -> None:
        assert described(path, b"{}", True, {"input": "abc"})["max_output_tokens"] is None

    @pytest.mark.parametrize(
        ("path", "model"),
        [
            ("/openai/deployments/mine/chat/completions", "mine"),
            ("/v1beta/models/gemini-2.5-pro:generateContent", "gemini-2.5-pro"),
            ("/model/anthropic.claude/invoke", "anthropic.claude"),
            ("/v1/models", None),
            ("/deployments/", None),
            ("/", None),
        ],
    )
    def test_models_in_paths(self, path: str, model: str | None) -> None:
        assert described(path, b"{}", True, {})["model"] == model


class TestHostileResponses:
    @given(st.lists(st.binary(max_size=60), max_size=9), st.sampled_from(
        ["text/event-stream", "application/json", "", "x"]
    ), st.sampled_from(["gzip", "br", "identity", "", "deflate", "x, gzip"]))  # fmt: skip
    def test_any_bytes(self, chunks: list[bytes], kind: str, encoding: str) -> None:
        measured, call = meter()
        headers = {"content-type": kind, "content-encoding": encoding}
        found = reader(headers, lambda: measured, call.reconcile)
        for chunk in chunks:
            found.feed(chunk)
        found.finish()
        found.close()
        assert call.charged in ([], [call.usage])

    @given(st.lists(st.dictionaries(names, json_values, max_size=5), max_size=6))
    def test_any_events(self, events: list[dict[str, Any]]) -> None:
        measured, call = meter()
        found = Events(measured)
        for event in events:
            found.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
        found.finish()
        assert measured.is_over
        assert call.charged  # what it says, or at least what was reserved

    @given(json_values, st.integers(1, 30))
    def test_any_document(self, value: Any, size: int) -> None:
        _, call = meter()
        content = json.dumps(value).encode()
        found = Document(call.reconcile)
        for i in range(0, len(content), size):
            found.feed(content[i : i + size])
        found.finish()
        assert len(call.charged) <= 1

    def test_a_line_without_end_is_not_kept(self) -> None:
        measured, _ = meter()
        found = Events(measured)
        for _ in range(300):
            found.feed(b"data: " + b"x" * 10_000)
        assert len(found._rest) <= 1 << 20

    @pytest.mark.parametrize("where", ["first", "last"])
    def test_a_long_document_is_not_kept_either(self, where: str) -> None:
        _, call = meter()
        found = Document(call.reconcile)
        usage = b'"usage" : {"input_tokens": 5, "output_tokens": 6}'
        found.feed(b"{" + (usage if where == "first" else b'"x": 1') + b', "data": [')
        for _ in range(400):
            found.feed(b"1, " * 5_000)
        found.feed(b"1]" + (b"" if where == "first" else b", " + usage) + b"}")
        assert len(found._head) + len(found._tail) < 2_000_000
        found.finish()
        assert call.charged == [Usage(input_tokens=5, output_tokens=6)]

    def test_usage_as_text_in_a_long_document_is_none(self) -> None:
        _, call = meter()
        found = Document(call.reconcile)
        found.feed(b'{"data": "' + b"x" * 2_000_000 + b'the \\"usage\\": {broken"}')
        found.finish()
        assert call.charged == []

    def test_what_comes_after_a_compressed_body_is_not_kept(self) -> None:
        _, call = meter()
        found = Compressed(Document(call.reconcile), readable=True)
        found.feed(gzip.compress(b'{"usage": {"input_tokens": 5}}') + b"x")
        for _ in range(100):
            found.feed(b"x" * 1_000)
        assert found._zlib is not None
        assert found._zlib.unused_data == b"x"
        found.finish()
        assert call.charged == [Usage(input_tokens=5)]

    def test_compressed_anywhere(self) -> None:
        _, call = meter()
        packer = zlib.compressobj(wbits=31)
        packed = packer.compress(b'{"usage": {"input_tokens": 5}}') + packer.flush()
        found = Compressed(Document(call.reconcile), readable=True)
        for byte in packed:
            found.feed(bytes([byte]))
        found.finish()
        assert call.charged == [Usage(input_tokens=5)]
