"""examples/batch_jsonl.py: every id once, whatever happens to the process, in bounded memory."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import pytest

from tokenflow import ApproximateCounter, TokenFlow, providers
from tokenflow.providers import Provider
from tokenflow.testing import FakeProvider, Fault, Faults

from .conftest import Run, run_virtual
from .test_examples import EXAMPLES, LIBRARY, load

httpx2: Any = pytest.importorskip("httpx2")
batch: Any = load("batch_jsonl.py")

ACCOUNT = providers.openai(tpm=2_000_000, rpm=10_000)


def request(custom_id: str, question: str = "hello", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    body = {"model": "gpt-5", "messages": messages, "max_tokens": 100}
    return {"custom_id": custom_id, "method": "POST", "url": batch.CHAT, "body": body, **more}


def written(path: Path, rows: Iterable[Any]) -> Path:
    with path.open("w") as file:
        for row in rows:
            file.write((row if isinstance(row, str) else json.dumps(row)) + "\n")
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Job:
    """One input, one output; each `run` is what one start of the script does."""

    def __init__(self, folder: Path, rows: Iterable[Any], **fake: Any) -> None:
        self.input = written(folder / "in.jsonl", rows)
        self.output = folder / "out.jsonl"
        self.provider = FakeProvider.openai(
            tpm=2_000_000, rpm=10_000, **{"output": 50, "first_token_seconds": 0.1, **fake}
        )

    async def run(
        self, *, retry_failed: bool = False, attempts: int = 8, account: Provider = ACCOUNT
    ) -> Any:
        todo = batch.Todo(self.input, batch.resume(self.output, retry_failed=retry_failed))
        flow = TokenFlow(account, counter=ApproximateCounter(4.0))
        client = httpx2.AsyncClient(
            base_url="http://fake/v1",
            transport=batch.ThrottledTransport(flow, self.provider.transport(httpx2)),
            timeout=None,
        )
        with self.output.open("a") as out:
            async with client:
                return await batch.run(todo, out, flow, client, account, attempts=attempts)

    def ids(self) -> Counter[str | None]:
        return Counter(row["custom_id"] for row in results(self.output))


def faults(*each: Fault) -> Faults:
    """For the first calls, in order."""
    left = iter(each)
    return lambda request: next(left, None)


class TestLines:
    def test_a_result_has_the_form_of_the_batch_api(self, run: Run, tmp_path: Path) -> None:
        job = Job(tmp_path, [request("a")])
        tally = run(job.run)
        assert (tally.answered, tally.failed) == (1, 0)
        (row,) = results(job.output)
        assert set(row) == {"id", "custom_id", "response", "error"}
        assert (row["custom_id"], row["error"]) == ("a", None)
        assert set(row["response"]) == {"status_code", "request_id", "body"}
        assert row["response"]["status_code"] == 200
        assert row["response"]["request_id"] == "req_0"
        assert row["response"]["body"]["usage"]["completion_tokens"] == 50
        assert tally.tokens == row["response"]["body"]["usage"]["total_tokens"]

    def test_embeddings(self, run: Run, tmp_path: Path) -> None:
        body = {"model": "text-embedding-3-small", "input": ["one", "two"]}
        job = Job(tmp_path, [request("a", url="/v1/embeddings", body=body)])
        run(job.run)
        assert len(results(job.output)[0]["response"]["body"]["data"]) == 2

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("this is no JSON", "line 2 is no JSON"),
            ('{"custom_id": "cut of', "line 2 is no JSON"),
            ("[" * 100_000, "line 2 is no JSON"),
            ("[]", "line 2 has no custom_id"),
            (request(3), "line 2 has no custom_id"),  # type: ignore[arg-type]
            (request("b", url="http://elsewhere/v1"), "url must be a path"),
            (request("b", url=None), "url must be a path"),
            (request("b", method="GET"), "method must be POST"),
            (request("b", body="text"), "body must be an object"),
            (request("b", body={"stream": True}), "stream nothing"),
        ],
    )
    def test_one_that_cannot_be_sent(self, line: Any, says: str, run: Run, tmp_path: Path) -> None:
        job = Job(tmp_path, [request("a"), line, "", request("c")])
        tally = run(job.run)
        assert (tally.answered, tally.failed) == (2, 1)
        (bad,) = (row for row in results(job.output) if row["error"])
        assert says in bad["error"]["message"]
        assert (bad["id"], bad["response"], bad["error"]["line"]) == ("line_2", None, 2)
        assert len(job.provider.calls) == 2
        assert run(job.run).failed == 0  # it has its result, and is not looked at again
        assert len(results(job.output)) == 3

    def test_an_id_that_was_there_before(self, run: Run, tmp_path: Path) -> None:
        job = Job(tmp_path, [request("a"), request("b"), request("a", "another question")])
        assert batch.Todo(job.input, set()).repeated == 1
        run(job.run)
        assert job.ids() == {"a": 1, "b": 1}

    @pytest.mark.parametrize(
        "base", ["http://fake/v1", "http://fake/v1/", "http://fake", "http://fake/"]
    )
    def test_the_url_below_either_kind_of_base(self, base: str) -> None:
        client = httpx2.AsyncClient(base_url=base)
        path = batch.path_below(client.base_url, "/v1/embeddings")
        assert str(client.build_request("POST", path).url) == "http://fake/v1/embeddings"

    def test_a_url_leads_nowhere_else(self) -> None:
        client = httpx2.AsyncClient(base_url="http://fake/v1")
        path = batch.path_below(client.base_url, "//elsewhere/v1")
        assert client.build_request("POST", path).url.host == "fake"


def test_a_job_stays_within_its_part_of_the_account(run: Run, tmp_path: Path) -> None:
    job = Job(tmp_path, [request(str(n), "word" * 900) for n in range(40)])
    tally = run(partial(job.run, account=providers.openai(tpm=10_000)))
    assert (tally.answered, tally.failed) == (40, 0)
    assert 8_000 <= job.provider.worst_window("TPM") <= 10_000


class TestFailures:
    def test_a_refused_line_is_sent_again(self, run: Run, tmp_path: Path) -> None:
        wait = Fault(status=429, retry_after=3.0)
        job = Job(tmp_path, [request("a")], faults=faults(wait, Fault(status=503), wait))
        tally = run(job.run)
        assert (tally.answered, tally.again) == (1, 3)
        assert [call.status for call in job.provider.calls] == [429, 503, 429, 200]

    def test_a_line_that_is_refused_for_ever(self, run: Run, tmp_path: Path) -> None:
        bad = request("b", body={"model": "gpt-5", "messages": [], "max_tokens": -1})
        job = Job(tmp_path, [request("a"), bad, request("c")])
        tally = run(job.run)
        assert (tally.answered, tally.failed, tally.again) == (2, 1, 0)
        (row,) = (row for row in results(job.output) if row["custom_id"] == "b")
        assert row["response"]["status_code"] == 400
        assert "max_tokens" in row["response"]["body"]["error"]["message"]

    def test_a_line_larger_than_the_limit(self, run: Run, tmp_path: Path) -> None:
        job = Job(tmp_path, [request("a", "x" * 10_000_000), request("b")])
        tally = run(job.run)
        assert (tally.answered, tally.failed, tally.stopped) == (1, 1, "")
        (row,) = (row for row in results(job.output) if row["custom_id"] == "a")
        assert row["response"]["status_code"] == 413
        assert len(job.provider.calls) == 1

    @pytest.mark.parametrize(
        ("fault", "says"),
        [
            (Fault(body=b"<html>"), "JSON"),
            (Fault(status=500), None),
        ],
    )
    def test_what_may_have_been_paid_is_not_sent_again(
        self, fault: Fault, says: str | None, run: Run, tmp_path: Path
    ) -> None:
        job = Job(tmp_path, [request("a")], faults=faults(fault))
        tally = run(job.run)
        assert (tally.answered, tally.failed, tally.again) == (0, 1, 0)
        (row,) = results(job.output)
        if says:
            assert says in row["error"]["message"] or "Expecting value" in row["error"]["message"]
        else:
            assert row["response"]["status_code"] == 500

    @pytest.mark.parametrize("fault", [Fault(drop=True), Fault(abort_after=0)])
    def test_a_connection_that_breaks_is_tried_once_more(
        self, fault: Fault, run: Run, tmp_path: Path
    ) -> None:
        job = Job(tmp_path, [request("a"), request("b")], faults=faults(fault, fault, fault))
        tally = run(job.run)
        assert (tally.answered, tally.failed, tally.again) == (1, 1, 0)
        (row,) = (row for row in results(job.output) if row["error"])
        assert row["error"]["code"] == "RemoteProtocolError"
        assert len(job.provider.calls) == 4

    def test_what_failed_has_another_go_on_demand(self, run: Run, tmp_path: Path) -> None:
        broken = faults(Fault(status=500), Fault(), Fault(status=500))
        job = Job(tmp_path, [request(name) for name in "abcd"], faults=broken)
        assert run(job.run).failed == 2
        assert run(job.run).answered == 0

        async def again() -> Any:
            return await job.run(retry_failed=True)

        tally = run(again)
        assert (tally.answered, tally.failed) == (2, 0)
        assert job.ids() == dict.fromkeys("abcd", 1)
        assert all(batch.has_succeeded(row) for row in results(job.output))

    @pytest.mark.parametrize(
        "fault",
        [
            Fault(status=401, message="wrong key"),
            Fault(status=429, code="insufficient_quota"),
            Fault(status=429, retry_after=5_000.0),
        ],
    )
    def test_where_none_would_get_through_it_stops(
        self, fault: Fault, run: Run, tmp_path: Path
    ) -> None:
        """And has recorded nothing that would keep the next run from sending it."""
        rows = [request(f"{number}") for number in range(1_000)]
        job = Job(tmp_path, rows, faults=lambda request: fault)
        assert run(job.run).stopped
        assert len(job.provider.calls) <= 256
        assert results(job.output) == []

    def test_no_server_there(self, run: Run, tmp_path: Path) -> None:
        job = Job(tmp_path, [request("a")])
        job.provider.transport = lambda stack: Unreachable()  # type: ignore[method-assign, assignment]
        assert run(job.run).stopped == "http://fake/v1/: nobody there"
        assert results(job.output) == []


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"])
def test_somebody_who_answers_no_head(says: bytes) -> None:
    """Is there all the same. On sockets of this machine, for that is what is looked at."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1_000)
                connection.sendall(says)

        thread = Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        assert anyio.run(batch.unreachable, url) == ""
        thread.join()


class Unreachable(httpx2.AsyncBaseTransport):  # type: ignore[misc]
    async def handle_async_request(self, request: Any) -> Any:
        raise httpx2.ConnectError("nobody there")


class TestResuming:
    def test_what_has_a_result_is_not_sent_again(self, run: Run, tmp_path: Path) -> None:
        job = Job(tmp_path, [request(name) for name in "ab"])
        run(job.run)
        written(job.input, [request(name) for name in "abc"])
        assert run(job.run).answered == 1
        assert job.ids() == dict.fromkeys("abc", 1)
        assert len(job.provider.calls) == 3

    @pytest.mark.parametrize(
        "torn", [b'{"id": "line_2", "custom', b"\0" * 99, b"\xff", b"{}", b"7"]
    )
    def test_a_torn_last_line(self, torn: bytes, run: Run, tmp_path: Path) -> None:
        job = Job(tmp_path, [request(name) for name in "ab"])
        run(job.run)
        first, _ = job.output.read_bytes().splitlines(keepends=True)
        job.output.write_bytes(first + torn)
        assert run(job.run).answered == 1
        assert job.ids() == {"a": 1, "b": 1}

    def test_a_last_line_without_its_end(self, run: Run, tmp_path: Path) -> None:
        job = Job(tmp_path, [request(name) for name in "ab"])
        run(job.run)
        job.output.write_bytes(job.output.read_bytes().rstrip(b"\n"))
        written(job.input, [request(name) for name in "abc"])
        assert run(job.run).answered == 1
        assert job.ids() == dict.fromkeys("abc", 1)

    def test_a_file_that_is_something_else(self, tmp_path: Path) -> None:
        output = written(tmp_path / "out.jsonl", [request("a"), request("b")])
        before = output.read_bytes()
        with pytest.raises(SystemExit, match="line 1, is no result: is this the right file"):
            batch.resume(output, retry_failed=False)
        assert output.read_bytes() == before


# -- large ones --------------------------------------------------------------------------


MANY = 20_000 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 2_000


@pytest.mark.timeout(600)
def test_many_lines(run: Run, tmp_path: Path) -> None:
    """20,000 of them take a minute, of computing: that is for the soak profile."""
    job = Job(tmp_path, (request(f"{number}") for number in range(MANY)))
    tally = run(job.run)
    assert (tally.answered, tally.failed, tally.again) == (MANY, 0, 0)
    assert job.ids() == {f"{number}": 1 for number in range(MANY)}
    assert job.provider.statistics().refused == 0


class Canned:
    """A client, of which nothing is left behind that would count as memory of the job."""

    base_url: Any = httpx2.URL("http://fake/v1")
    response: Any = httpx2.Response(
        200, json={"usage": {}}, request=httpx2.Request("POST", "http://fake/v1")
    )

    async def post(self, path: str, *, json: Any) -> Any:
        await anyio.sleep(1)
        return self.response


def peak(folder: Path, lines: int) -> int:
    """The most memory that a job of so many lines takes at a time."""
    path = written(folder / f"{lines}.jsonl", (request(f"{number}") for number in range(lines)))

    async def job() -> Any:
        todo, flow = batch.Todo(path, set()), TokenFlow(ACCOUNT)
        with (folder / f"{lines}.out").open("w") as out:
            return await batch.run(todo, out, flow, Canned(), ACCOUNT)

    tracemalloc.start()
    try:
        assert run_virtual("asyncio", job).answered == lines
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.timeout(300)
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """Of lines that are through, the ids stay, each with its place in a set; a line takes 1,500."""
    few, many = peak(tmp_path, 2_000), peak(tmp_path, 20_000)
    assert many - few < 18_000 * 250


# -- the process -------------------------------------------------------------------------

FAST = ["--tpm", "100000000", "--rpm", "1000000", "--max-pending", "32"]


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLES / "batch_jsonl.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(LIBRARY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_at(process: subprocess.Popen[str], output: Path, size: int) -> None:
    while process.poll() is None:
        if output.exists() and output.stat().st_size >= size:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.001)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it was through before it could be killed"


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_and_started_again(tmp_path: Path) -> None:
    """In real time, for it is a process that dies; twice, at random points of the output."""
    lines = 600
    rows = written(tmp_path / "in.jsonl", (request(f"{number}") for number in range(lines)))
    output = tmp_path / "out.jsonl"
    for _ in range(2):
        size = output.stat().st_size if output.exists() else 0
        kill_at(start(rows, output, *FAST), output, size + random.randint(1, 50_000))
    done = start(rows, output, *FAST)
    told, error = done.communicate(timeout=50)
    assert (done.returncode, error) == (0, "")
    counts = re.match(r"(\d+) lines have a result, (\d+) are to be sent", told)
    assert counts is not None
    before, left = counts.groups()
    assert int(before) + int(left) == lines
    assert int(before) > 0
    ids = Counter(row["custom_id"] for row in results(output))
    assert ids == {f"{number}": 1 for number in range(lines)}


class TestCommandLine:
    def run(self, *arguments: str | Path) -> tuple[int, str, str]:
        process = start(*arguments)
        out, error = process.communicate(timeout=50)
        assert "Traceback" not in error
        return process.returncode, out, error

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        status, _, error = self.run(tmp_path / "none.jsonl")
        assert status == 2
        assert "no such file" in error

    def test_input_and_output_are_one_file(self, tmp_path: Path) -> None:
        rows = written(tmp_path / "in.jsonl", [request("a")])
        before = rows.read_bytes()
        status, _, error = self.run(rows, rows)
        assert status == 2
        assert "the same file" in error
        assert rows.read_bytes() == before

    def test_nobody_at_the_url(self, tmp_path: Path) -> None:
        """In real time, of which the attempts of a line would take a minute and a half."""
        rows = written(tmp_path / "in.jsonl", [request("a")])
        with socket.create_server(("127.0.0.1", 0)) as taken:
            url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        status, _, error = self.run(rows, "--base-url", url)
        assert status == 2
        assert error.startswith(f"stopped: nobody answers at {url}: ")
        assert not (tmp_path / "in.results.jsonl").exists()

    def test_nobody_is_asked_for_nothing(self, tmp_path: Path) -> None:
        rows = written(tmp_path / "in.jsonl", [request("a")])
        assert self.run(rows)[0] == 0
        assert self.run(rows, "--base-url", "http://127.0.0.1:9/v1")[0] == 0

    def test_failures_show_in_the_status(self, tmp_path: Path) -> None:
        rows = written(tmp_path / "in.jsonl", [request("a"), "no JSON", request("a")])
        status, out, _ = self.run(rows)
        assert status == 1
        assert "1 are left out" in out
        assert "1 answered, 1 failed" in out
        assert len(results(tmp_path / "in.results.jsonl")) == 2
