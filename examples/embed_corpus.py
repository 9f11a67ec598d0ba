"""Embed a folder of text: split, count, pack, send under a rate limit, restore the order, write.

    python examples/embed_corpus.py [FOLDER] [--out corpus.jsonl] [--tokens-per-minute 1000000]

FOLDER is one of .txt files, in it or below; without it a small corpus is made up. The provider
is a fake inside this file, with the per-request limits of a real one, so no key and no network
are needed.

Look at how few requests it takes. With --tokens-per-minute 60000 it takes minutes: interrupt it
and start it again, and what was embedded is not sent twice.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

import tokenflow
from tokenflow import providers

LIMITS = providers.OPENAI_EMBEDDINGS
MAX_CHUNK_TOKENS = 400
CONCURRENT_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document; `key` tells it from others, also in a later run."""

    document: str
    place: int
    text: str

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.document}\0{self.place}\0{self.text}".encode()).hexdigest()


def count(text: str) -> int:
    """Tokens, estimated from bytes; a real job counts with the model's own tokenizer."""
    return len(text.encode()) // 3 + 1


def split(text: str) -> Iterator[str]:
    """Paragraphs, joined up to MAX_CHUNK_TOKENS; one that is longer is cut."""
    size = MAX_CHUNK_TOKENS // 2  # characters, of which each has four bytes at most
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    pieces = (part[i : i + size] + "\n\n" for part in paragraphs for i in range(0, len(part), size))
    for batch in tokenflow.pack_stream(pieces, MAX_CHUNK_TOKENS, tokens=count, open_batches=1):
        yield "".join(batch.items).strip()


def chunks(folder: Path) -> list[Chunk]:
    return [
        Chunk(path.relative_to(folder).as_posix(), place, text)
        for path in sorted(folder.rglob("*.txt"))
        for place, text in enumerate(split(path.read_text(encoding="utf-8", errors="replace")))
    ]


class FakeProvider:
    """Answers like an embeddings endpoint, and refuses what a real one would."""

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        tokens = sum(map(count, texts))
        if not texts or len(texts) > LIMITS.max_items or tokens > LIMITS.max_tokens:  # type: ignore[operator]
            raise ValueError(f"400: {len(texts)} inputs with {tokens} tokens in one request")
        await anyio.sleep(0.05)
        return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> list[float]:
        rng = random.Random(text)
        return [round(rng.uniform(-1, 1), 4) for _ in range(8)]


class Progress:
    """A bar, in tokens, where somebody is looking."""

    def __init__(self, total: int) -> None:
        self.done, self.total = 0, max(1, total)

    def add(self, tokens: int) -> None:
        self.done += tokens
        filled = 30 * self.done // self.total
        bar = "#" * filled + "." * (30 - filled)
        if sys.stderr.isatty():
            print(f"\r[{bar}] {self.done:,} of {self.total:,} tokens", end="", file=sys.stderr)


def embedded_before(partial: Path) -> dict[str, list[float]]:
    """What an earlier run has written; a line that it was interrupted in is dropped."""
    found: dict[str, list[float]] = {}
    for line in partial.read_text().splitlines() if partial.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["key"]] = row["vector"]
    return found


async def embed(corpus: list[Chunk], out: Path, tokens_per_minute: int) -> None:
    partial = out.with_suffix(".partial")
    vectors = embedded_before(partial)
    todo = [chunk for chunk in corpus if chunk.key not in vectors]
    budget = min(tokens_per_minute, 20_000)  # smaller than the provider's, for a livelier bar
    batches = tokenflow.pack(
        todo,
        tokens=lambda chunk: count(chunk.text),
        strategy="best_fit",
        **LIMITS.pack_arguments(budget),
    )
    print(f"{len(corpus)} chunks, {len(todo)} to embed in {len(batches)} requests")
    provider = FakeProvider()
    limiter = tokenflow.TokenRateLimiter(tokens_per_minute=tokens_per_minute)
    slots = anyio.CapacityLimiter(CONCURRENT_REQUESTS)
    progress = Progress(sum(batch.tokens for batch in batches))
    results: list[list[list[float]]] = [[] for _ in batches]

    with partial.open("a") as log:

        async def send(number: int, batch: tokenflow.Batch[Chunk]) -> None:
            async with slots, limiter.reserve(batch.tokens):
                results[number] = await provider.embed([chunk.text for chunk in batch.items])
            for chunk, vector in zip(batch.items, results[number], strict=True):
                log.write(json.dumps({"key": chunk.key, "vector": vector}) + "\n")
            log.flush()
            progress.add(batch.tokens)

        async with anyio.create_task_group() as tasks:
            for number, batch in enumerate(batches):
                tasks.start_soon(send, number, batch)

    in_order = tokenflow.restore(batches, results)
    vectors |= {chunk.key: vector for chunk, vector in zip(todo, in_order, strict=True)}
    with out.open("w") as rows:
        for chunk in corpus:
            row = {"document": chunk.document, "place": chunk.place, "vector": vectors[chunk.key]}
            rows.write(json.dumps(row) + "\n")
    partial.unlink()
    print(f"\n{len(corpus)} vectors in {out}")


def made_up(folder: Path) -> Path:
    """A corpus of a few dozen documents."""
    rng = random.Random(7)
    words = ("token", "budget", "batch", "limit", "queue", "window", "lease", "replica", "prompt")
    for number in range(40):
        paragraphs = [
            " ".join(rng.choices(words, k=rng.randint(20, 200))) for _ in range(rng.randint(3, 25))
        ]
        (folder / f"document-{number:02}.txt").write_text("\n\n".join(paragraphs))
    return folder


def at_least(least: int) -> Callable[[str], int]:
    """For argparse: a whole number, and none that is too small for what follows."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least:,}, not {text}")
        return int(text)

    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of .txt files")
    parser.add_argument(
        "--out", type=Path, default="corpus.jsonl", metavar="FILE", help="to write: %(default)s"
    )
    parser.add_argument(
        "--tokens-per-minute",
        type=at_least(MAX_CHUNK_TOKENS),
        default=1_000_000,
        metavar="N",
        help=f"%(default)s, and at least {MAX_CHUNK_TOKENS}, which a piece of text takes",
    )
    asked = parser.parse_args()
    if asked.out.is_dir() or not asked.out.parent.is_dir():
        parser.error(f"--out must be a file, in a folder that is there, not {asked.out}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or made_up(Path(temporary))
        if not folder.is_dir():
            parser.error(f"no such folder: {folder}")
        corpus = chunks(folder)
    if not corpus:
        parser.error(f"no .txt files in {folder} with text in them")
    try:
        anyio.run(embed, corpus, asked.out, asked.tokens_per_minute)
    except KeyboardInterrupt:
        print("\ninterrupted: what is done is kept, and the same again goes on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
