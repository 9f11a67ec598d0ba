"""Send a file of requests to an OpenAI-compatible server, as fast as its limits allow.

    python examples/batch_jsonl.py requests.jsonl results.jsonl \\
        --base-url https://api.openai.com/v1 --tpm 200000 --rpm 500

Both files are in the format of OpenAI's batch API. A line of the input

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

becomes a line of the output, in the order in which the answers come:

    {"id": "line_1", "custom_id": "a", "response": {"status_code": 200, ...}, "error": null}

Kill it when you like and start it again: what has a result is not sent again. A line that
fails has its error as its result; --retry-failed has another go at those. Where nobody answers,
the key is wrong or the account empty, it stops: nothing would get through. The exit status is 0,
1 where a line has failed, 2 where it stopped and 130 where it was interrupted.

The input is read line by line, and results are written as they come: 20,000 lines took 61 MB at
most, 1,000 took 43 MB.

Without --base-url it talks to a fake provider in this process, whose minute is a second long;
without INPUT it makes a thousand requests up, and keeps no results. The key comes from the
environment's OPENAI_API_KEY unless it is given.

Look at what the provider refused: nothing, or next to it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from random import Random
from typing import Any, Final, TextIO
from urllib.parse import urlsplit

try:
    import httpx2
except ImportError as error:
    sys.exit(f"batch_jsonl: {error}: it needs pip install httpx2")

import anyio

from tokenflow import ApproximateCounter, TokenFlow, providers
from tokenflow.integrations.httpx2 import ThrottledTransport
from tokenflow.providers import Provider, Refusal
from tokenflow.testing import FakeProvider, lognormal

CHAT: Final = "/v1/chat/completions"
Key = str | int
"""What tells a line from others: its custom_id, or its number where it has none."""


# -- the files --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input; `wrong` says why it cannot be sent."""

    number: int
    custom_id: str | None = None
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    wrong: str = ""

    @property
    def key(self) -> Key:
        return self.number if self.custom_id is None else self.custom_id


def read_line(number: int, text: bytes) -> Line:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return Line(number, wrong=f"line {number} is no JSON")
    custom_id = row.get("custom_id") if isinstance(row, dict) else None
    if not isinstance(custom_id, str):
        return Line(number, wrong=f"line {number} has no custom_id that is a string")
    url, body = row.get("url"), row.get("body")
    if row.get("method", "POST") != "POST":
        return Line(number, custom_id, wrong="method must be POST")
    if not isinstance(url, str) or not url.startswith("/"):
        return Line(number, custom_id, wrong="url must be a path, such as /v1/chat/completions")
    if not isinstance(body, dict) or body.get("stream"):
        return Line(number, custom_id, wrong="body must be an object, and stream nothing")
    return Line(number, custom_id, url, body)


class Todo:
    """The lines of a file that have no result yet, read one by one; each id once."""

    def __init__(self, path: Path, done: set[Key]) -> None:
        self._path = path
        self._done = done
        self.repeated = 0
        self._left = sum(1 for _ in self)  # read once ahead: then progress knows what is left

    def __len__(self) -> int:
        return self._left

    def __iter__(self) -> Iterator[Line]:
        self.repeated, seen = 0, set[Key]()
        with self._path.open("rb") as lines:
            for number, text in enumerate(lines, 1):
                if not text.strip():
                    continue
                line = read_line(number, text)
                self.repeated += line.key in seen
                if line.key not in seen and line.key not in self._done:
                    yield line
                seen.add(line.key)


def resume(output: Path, *, retry_failed: bool) -> set[Key]:
    """The lines that have a result; the last one of the file, if it was torn, is taken out."""
    done: set[Key] = set()
    if not output.exists():
        return done
    kept = output.with_name(f"{output.name}.kept")
    with output.open("rb") as old, kept.open("wb") as new:
        for number, text in enumerate(old, 1):
            try:
                row = json.loads(text)
                key, answered = key_of(row), has_succeeded(row)
            except (ValueError, LookupError, TypeError):
                if old.read(1):
                    sys.exit(f"{output}, line {number}, is no result: is this the right file?")
                break
            if answered or not retry_failed:
                new.write(text.rstrip(b"\n") + b"\n")
                done.add(key)
    kept.replace(output)
    return done


def key_of(row: dict[str, Any]) -> Key:
    key: Key = row["error"]["line"] if row["custom_id"] is None else row["custom_id"]
    return key


def has_succeeded(row: dict[str, Any]) -> bool:
    return row["error"] is None and row["response"]["status_code"] < 400


def result(line: Line, response: httpx2.Response | None, error: Exception | None) -> dict[str, Any]:
    """A line of the output: the response if there was one, whatever its status, or the error."""
    row: dict[str, Any] = {"id": f"line_{line.number}", "custom_id": line.custom_id}
    if isinstance(error, httpx2.HTTPStatusError):
        response, error = error.response, None
    if response is not None:
        try:
            told = {
                "status_code": response.status_code,
                "request_id": response.headers.get("x-request-id", ""),
                "body": response.json(),
            }
            return row | {"response": told, "error": None}
        except ValueError as no_json:
            error = no_json
    told = {"code": type(error).__name__, "message": str(error), "line": line.number}
    return row | {"response": None, "error": told}


# -- the job ----------------------------------------------------------------------------


def path_below(base: httpx2.URL, url: str) -> str:
    """The path to append to `base`, which mostly ends in the /v1 that `url` begins with."""
    return url.removeprefix("/v1") if base.path.rstrip("/").endswith("/v1") else url


class BadLine(ValueError):
    """A line that cannot be sent."""


@dataclass(slots=True)
class Tally:
    """What became of a job; `stopped` says why, if it was before its end."""

    answered: int = 0
    failed: int = 0
    tokens: int = 0
    again: int = 0
    stopped: str = ""


async def run(
    todo: Todo,
    out: TextIO,
    flow: TokenFlow,
    client: httpx2.AsyncClient,
    account: Provider,
    *,
    max_pending: int = 256,
    attempts: int = 8,
    progress: bool = False,
) -> Tally:
    """Send what is to do, and write each result as it comes."""

    async def send(line: Line) -> httpx2.Response:
        if line.wrong:
            raise BadLine(line.wrong)
        path = path_below(client.base_url, line.url)
        try:
            response = await client.post(path, json=line.body)
        except (httpx2.ReadError, httpx2.RemoteProtocolError):
            # Mostly an idle connection that the server closed just then; once more, and no more,
            # for it may have been paid.
            response = await client.post(path, json=line.body)
        return response.raise_for_status()

    tally = Tally()
    async with flow.map(
        send, todo, max_pending=max_pending, attempts=attempts, progress=progress
    ) as results:
        async for each in results:
            refusal = None if each.error is None else account.classify(each.error)
            if refusal is not None and hopeless(refusal):
                tally.stopped = f"{client.base_url}: {refusal.message or refusal.kind}"
                break  # what is on its way is cancelled, and has no result
            row = result(each.item, each.value, each.error)
            out.write(json.dumps(row) + "\n")
            out.flush()  # to the system: a kill tears the line being written, at most
            tally.again += each.attempts - 1
            tally.answered += has_succeeded(row)
            tally.failed += not has_succeeded(row)
    tally.tokens = flow.statistics().tokens
    return tally


def hopeless(refusal: Refusal) -> bool:
    """Would no other line get through either? The key, the account, the connection."""
    return refusal.kind in ("exhausted", "unsent") or refusal.status_code == HTTPStatus.UNAUTHORIZED


async def unreachable(base_url: str) -> str:
    """Why nobody can be asked there, if so: else each line would find out, again and again."""
    try:
        async with httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(), timeout=3) as client:
            await client.head(base_url)  # outside the limits, for it costs nothing
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        return f"nobody answers at {base_url}: {str(error) or type(error).__name__}"
    except httpx2.TransportError:
        pass  # somebody is there, and may answer what it is meant for
    return ""


# -- from the command line --------------------------------------------------------------


def fake_provider(tpm: int | None, rpm: int | None) -> FakeProvider:
    """OpenAI's rules, but a minute is a second."""
    quotas = FakeProvider.openai(tpm=tpm, rpm=rpm).quotas
    return FakeProvider(
        *(replace(quota, per=1.0) for quota in quotas),
        output=lognormal(80),
        first_token_seconds=0.02,
        tokens_per_second=2_000,
    )


def in_seconds(account: Provider) -> Provider:
    """The same, but a minute is a second."""
    return replace(account, quotas=tuple(replace(quota, per=1.0) for quota in account.quotas))


def made_up(path: Path, lines: int = 1_000) -> Path:
    """Questions of all lengths."""
    random = Random(1)
    with path.open("w") as file:
        for number in range(lines):
            question = "How many tokens are there in this? " * random.randint(1, 30)
            body = {
                "model": "gpt-5",
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 200,
            }
            row = {"custom_id": f"request-{number}", "method": "POST", "url": CHAT, "body": body}
            file.write(json.dumps(row) + "\n")
    return path


async def job(asked: argparse.Namespace, todo: Todo) -> Tally:
    account = providers.openai(tpm=asked.tpm, rpm=asked.rpm)
    fake = None if asked.base_url else fake_provider(asked.tpm, asked.rpm)
    if fake is None:
        flow, below = TokenFlow(account), None
    else:
        flow = TokenFlow(in_seconds(account), counter=ApproximateCounter(4.0))
        below = fake.transport(httpx2)
    client = httpx2.AsyncClient(
        base_url=asked.base_url or "http://fake/v1",
        headers={"authorization": f"Bearer {asked.api_key}"} if asked.api_key else {},
        transport=ThrottledTransport(flow, below),
        timeout=httpx2.Timeout(10, read=600),  # from when it is sent: the queue does not count
    )
    with asked.output.open("a") as out:
        async with client:
            tally = await run(
                todo,
                out,
                flow,
                client,
                account,
                max_pending=asked.max_pending,
                attempts=asked.attempts,
                progress=sys.stderr.isatty(),
            )
    if fake is not None:
        print(f"the provider, a fake, refused {fake.statistics().refused:,}")
    return tally


def work(asked: argparse.Namespace) -> int:
    """The job from end to end; returns the exit status."""
    done = resume(asked.output, retry_failed=asked.retry_failed)
    todo = Todo(asked.input, done)
    print(f"{len(done):,} lines have a result, {len(todo):,} are to be sent")
    if todo.repeated:
        print(f"{todo.repeated:,} are left out: their custom_id was there before")
    if asked.base_url and len(todo) and (why := anyio.run(unreachable, asked.base_url)):
        print(f"stopped: {why}", file=sys.stderr)
        return 2
    started = time.monotonic()
    tally = anyio.run(job, asked, todo)
    print(
        f"{tally.answered:,} answered, {tally.failed:,} failed; {tally.again:,} sent again, "
        f"{tally.tokens:,} tokens, {time.monotonic() - started:.1f} s"
    )
    if not asked.is_made_up:
        print(f"results: {asked.output}")
        if tally.failed:
            print("what has failed is sent again with --retry-failed")
    if tally.stopped:
        print(f"stopped: {tally.stopped}", file=sys.stderr)
        return 2
    return int(tally.failed > 0)


def at_least(least: int) -> Callable[[str], int]:
    """For argparse: a whole number, and none that is too small for what follows."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least:,}, not {text}")
        return int(text)

    return number


def url(text: str) -> str:
    """For argparse."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise argparse.ArgumentTypeError(f"must be as http://127.0.0.1:8000/v1 is, not {text!r}")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("input", type=Path, nargs="?", help="a .jsonl file of requests")
    parser.add_argument("output", type=Path, nargs="?", help="a .jsonl file for the results")
    parser.add_argument("--base-url", type=url, help="such as https://api.openai.com/v1")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        help="by default the environment's OPENAI_API_KEY",
    )
    count = at_least(1)
    parser.add_argument(
        "--tpm", type=count, help="tokens per minute, or what the server allows, if less"
    )
    parser.add_argument("--rpm", type=count, help="requests per minute, likewise")
    parser.add_argument(
        "--max-pending",
        type=count,
        default=256,
        metavar="N",
        help="lines on their way at once: %(default)s",
    )
    parser.add_argument(
        "--attempts",
        type=count,
        default=8,
        metavar="N",
        help="for a line that is told to wait: %(default)s",
    )
    parser.add_argument("--retry-failed", action="store_true", help="send what has failed again")
    asked = parser.parse_args()
    asked.is_made_up = asked.input is None
    with tempfile.TemporaryDirectory() as folder:
        if asked.is_made_up:
            if asked.base_url:
                parser.error("a real server needs a real input file")
            asked.input = made_up(Path(folder) / "requests.jsonl")
            asked.tpm, asked.rpm = asked.tpm or 60_000, asked.rpm or 600
            if asked.tpm < 500:
                parser.error(f"--tpm must be at least 500 for the lines made up, not {asked.tpm}")
        asked.output = asked.output or asked.input.with_suffix(".results.jsonl")
        if not asked.input.is_file():
            parser.error(f"no such file: {asked.input}")
        if asked.output.is_dir() or not asked.output.parent.is_dir():
            parser.error(f"the output must be a file, in a folder that is there: {asked.output}")
        if asked.output.exists() and asked.output.samefile(asked.input):
            parser.error("input and output are the same file")
        try:
            return work(asked)
        except KeyboardInterrupt:
            again = "" if asked.is_made_up else "; start it again, and it goes on from here"
            print(f"interrupted{again}", file=sys.stderr)
            return 130


if __name__ == "__main__":
    sys.exit(main())
