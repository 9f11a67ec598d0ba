"""One job, twice: summarise every passage of some text files, under a provider's token quota.

    python examples/quickstart.py [FILE_OR_FOLDER ...]

First as it is often written: everything at once, and what is refused tries again when the
server says, six times at most. Then the same code through tokenflow's transport. The calls are
made by the OpenAI SDK if it is installed, and by httpx2 otherwise. The provider is a fake in
this process, so nothing is sent anywhere; its quota is enforced in real time. Without arguments
it reads this project's README and docs.

Look at who was answered, and at the bars: unthrottled, most calls give up while the quota of the
periods to come lies idle; with tokenflow each period takes what the quota has.
"""

import argparse
import asyncio
import importlib
import mimetypes
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

openai: Any = importlib.import_module("openai") if find_spec("openai") else None
HTTP = "httpx2" if openai is None or int(openai.__version__.partition(".")[0]) >= 3 else "httpx"

try:
    from tokenflow import ApproximateCounter, Quota, TokenFlow, TokenRateLimiter
    from tokenflow.testing import FakeProvider, FakeQuota

    httpx: Any = importlib.import_module(HTTP)
    throttling: Any = importlib.import_module(f"tokenflow.integrations.{HTTP}")
except ImportError as error:
    sys.exit(
        f"quickstart: {error}\n"
        "This needs the package tokenflow-limits, with httpx2:\n"
        "    pip install tokenflow-limits[httpx2]      (here: pip install -e .[httpx2])\n"
        "Another one, called tokenflow, is imported by the same name; if you have that, remove\n"
        "both first: pip uninstall tokenflow tokenflow-limits"
    )

PERIOD = 2.0  # seconds; a real quota is per 60, and this demo would take minutes
PERIODS = 7  # the quota is set so that the job is worth about so many
TRIES = 6
PASSAGE_LENGTH = 1_000
MAX_PASSAGES = 300
SUMMARY_TOKENS = 100  # at most

Call = Callable[[str], Awaitable[None]]


# -- the job, which knows nothing of limits ----------------------------------------------


def calls_by_sdk(transport: Any) -> Call:
    client = openai.AsyncOpenAI(
        base_url="http://fake/v1",
        api_key="none",
        max_retries=TRIES - 1,
        http_client=openai.DefaultAsyncHttpxClient(transport=transport),
    )

    async def call(passage: str) -> None:
        with suppress(openai.RateLimitError):  # given up; the provider has it in its books
            await client.chat.completions.create(**request(passage))

    return call


def calls_by_httpx(transport: Any) -> Call:
    client = httpx.AsyncClient(base_url="http://fake/v1", transport=transport, timeout=600)

    async def call(passage: str) -> None:
        for _ in range(TRIES):
            response = await client.post("/chat/completions", json=request(passage))
            if response.status_code != 429:
                response.raise_for_status()
                break
            await asyncio.sleep(float(response.headers["retry-after-ms"]) / 1000)

    return call


def request(passage: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Summarise this:\n\n{passage}"}]
    return {"model": "gpt-5", "messages": messages, "max_tokens": SUMMARY_TOKENS}


# -- its way to the provider, without and with tokenflow ---------------------------------


def fake_provider(limit: int) -> FakeProvider:
    """A bucket that refills evenly, and is charged input and declared maximum at arrival."""
    return FakeProvider(
        FakeQuota(limit, per=PERIOD, name="tokens"),
        output=SUMMARY_TOKENS,
        first_token_seconds=PERIOD / 120,
        tokens_per_second=6_000 / PERIOD,
    )


def throttled(transport: Any, limit: int) -> Any:
    # The leeway is for what passes between our clock's reading and the provider's.
    quota = Quota(limit, per=PERIOD, settle="reserved", leeway=0.02 * PERIOD)
    flow = TokenFlow(TokenRateLimiter(quota), counter=ApproximateCounter(4.0))
    return throttling.ThrottledTransport(flow, transport)


async def compare(passages: list[str], limit: int) -> None:
    by = calls_by_httpx if openai is None else calls_by_sdk
    plain, paced = fake_provider(limit), fake_provider(limit)
    calls = by(plain.transport(httpx)), by(throttled(paced.transport(httpx), limit))
    runs = [
        (plain, await run("unthrottled", calls[0], plain, passages)),
        (paced, await run("tokenflow", calls[1], paced, passages)),
    ]
    report(runs, len(passages), limit)


async def run(name: str, call: Call, provider: FakeProvider, passages: list[str]) -> float:
    """All calls at once; returns how long it took."""
    print(f"{name} ...", flush=True)
    progress = asyncio.create_task(show_progress(provider, len(passages)))
    begin = time.monotonic()
    await asyncio.gather(*map(call, passages))
    took = time.monotonic() - begin
    progress.cancel()
    await asyncio.wait([progress])
    return took


async def show_progress(provider: FakeProvider, calls: int) -> None:
    """On a terminal only."""
    if not sys.stderr.isatty():
        return
    try:
        while True:
            now = provider.statistics()
            text = f"  {now.completed} of {calls} answered, {now.refused} refusals"
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
            await asyncio.sleep(0.1)
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


# -- what happened, by the provider's books ----------------------------------------------


def report(runs: list[tuple[FakeProvider, float]], calls: int, limit: int) -> None:
    # Compared over the same time, which is that of the longer run, without its last moments.
    periods = max(1, int(max(took for _, took in runs) / PERIOD))
    columns = [numbers(provider, took, calls, limit, periods) for provider, took in runs]
    print(f"\n{'':30}{'unthrottled':>15}{'tokenflow':>15}")
    for label in columns[0]:
        print(f"{label:30}{columns[0][label]:>15}{columns[1][label]:>15}".rstrip())
    if runs[0][0].statistics().refused == 0:
        print("\nNothing was refused: too little text to meet the quota. Try a whole folder.")
    print(f"\nTokens taken in each {PERIOD:g} s; the mark is the quota:")
    print(f"{'':8}{'unthrottled':33}tokenflow")
    pictures = [sums(provider) for provider, _ in runs]
    for i in range(max(map(len, pictures))):
        drawn = (bar(each[i] / limit if i < len(each) else 0) for each in pictures)
        print(f"{i * PERIOD:4g} s  {'  '.join(drawn)}".rstrip())


def numbers(
    provider: FakeProvider, took: float, calls: int, limit: int, periods: int
) -> dict[str, str]:
    now = provider.statistics()
    share = sum(sums(provider)[:periods]) / periods / limit
    return {
        "calls": f"{calls:,}",
        "answered": f"{now.completed:,}",
        f"given up after {TRIES} tries": f"{calls - now.completed:,}",
        "refusals (429)": f"{now.refused:,}",
        "over after": f"{took:.1f} s",
        f"quota used in {periods * PERIOD:g} s": f"{share:.0%}",
    }


def sums(provider: FakeProvider) -> list[int]:
    """Tokens taken in each period since the first call."""
    calls = provider.calls
    found: Counter[int] = Counter()
    for call in calls:
        found[int((call.arrived - calls[0].arrived) / PERIOD)] += call.charged.get("tokens", 0)
    return [found[i] for i in range(max(found) + 1)]


def bar(share: float) -> str:
    """20 characters are the quota, 30 the most that is drawn."""
    full, mark = ("█", "│") if "utf" in (sys.stdout.encoding or "").lower() else ("#", "|")
    drawn = (full * round(min(share, 1.5) * 20)).ljust(30)
    return f"{drawn[:20]}{mark}{drawn[20:]}"


# -- the input --------------------------------------------------------------------------


def read_passages(paths: list[Path]) -> tuple[list[str], int]:
    """The first passages of all text files in there, and how many files they are from."""
    passages: list[str] = []
    files = 0
    for file in chain.from_iterable(map(files_in, paths)):
        found = split(read(file))
        files += bool(found)
        passages += found
        if len(passages) >= MAX_PASSAGES:
            break
    return passages[:MAX_PASSAGES], files


def files_in(path: Path) -> Iterator[Path]:
    """Itself, or all that is below, except what is hidden or by its name no text."""
    if path.is_file():
        yield path
    elif path.is_dir():
        for child in sorted(path.iterdir()):
            if not child.name.startswith(".") and not child.is_symlink() and may_be_text(child):
                yield from files_in(child)


def may_be_text(path: Path) -> bool:
    """An SVG is a picture, though its bytes would pass; what nobody knows is worth a look."""
    kind, _ = mimetypes.guess_type(path.name)
    return kind is None or kind.startswith("text/")


def read(file: Path) -> str:
    """Its text, as much as could matter; none, if it is binary or not ours to read."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_PASSAGES * PASSAGE_LENGTH)
    except OSError as error:
        print(f"left out {file}: {error.strerror}", file=sys.stderr)
        return ""
    return "" if b"\0" in data else data.decode(errors="replace")


def split(text: str) -> list[str]:
    """Paragraphs, as many together as fit."""
    passages = [""]
    for paragraph in re.split(r"\n\s*\n", text):
        for at in range(0, len(paragraph), PASSAGE_LENGTH):
            piece = paragraph[at : at + PASSAGE_LENGTH]
            if len(passages[-1]) + len(piece) > PASSAGE_LENGTH:
                passages.append("")
            passages[-1] += piece + "\n\n"
    return [passage.strip() for passage in passages if passage.strip()]


def main() -> None:
    project = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="text files, or folders of them")
    paths = parser.parse_args().paths or [*sorted(project.glob("*.md")), *project.glob("docs")]
    for path in paths:
        if not path.exists():
            parser.error(f"no such file or folder: {path}")
    passages, files = read_passages(paths)
    if not passages:
        parser.error(f"no text in {', '.join(map(str, paths))}: empty, or binary")

    costs = [len(passage.encode()) // 4 + SUMMARY_TOKENS for passage in passages]
    limit = max(2 * max(costs), sum(costs) // PERIODS)
    by = f"httpx2 {httpx.__version__}" if openai is None else f"openai {openai.__version__}"
    print(f"{len(passages)} passage(s) from {files} file(s), about {sum(costs):,} tokens, by {by}")
    print(f"the provider takes {limit:,} tokens in {PERIOD:g} s, and answers 429 beyond that\n")
    asyncio.run(compare(passages, limit))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
