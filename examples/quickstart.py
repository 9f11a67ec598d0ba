"""One job, twice: summarise every passage of some text files, under a provider's token quota.

    python examples/quickstart.py [FILE_OR_FOLDER ...]

First as it is often written: everything at once, and a refused call tries again, later and
later. Then through tokenflow. The provider is a fake inside this file, so nothing is sent
anywhere; its quota is enforced in real time. Without arguments it reads this project's README
and docs.
"""

import argparse
import asyncio
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import chain
from pathlib import Path

try:
    from tokenflow import Quota, TokenRateLimiter, Usage
except ImportError as error:
    sys.exit(
        f"quickstart: {error}\n"
        "This needs the package tokenflow-limits. Another one, called tokenflow, is imported by\n"
        "the same name; if you have that, remove both, and install ours again:\n"
        "    pip uninstall tokenflow tokenflow-limits\n"
        "    pip install tokenflow-limits      (here: pip install -e .)"
    )

PERIOD = 2.0  # seconds; a real quota is per 60, and this demo would take minutes
SECOND = PERIOD / 60  # what is a second there is this much
PERIODS = 7  # the quota is set so that the job is worth about so many
PASSAGE_LENGTH = 1_000
MAX_PASSAGES = 300
SUMMARY_TOKENS = 100  # at most


# -- the job, both ways -----------------------------------------------------------------


async def with_retries(provider: "Provider", passage: str) -> None:
    """Six tries, with a random and growing wait between: the usual advice.

    Trying for ever gets everything through as well, after a thousand refusals, where a
    provider does not count those against a quota. Many do.
    """
    for longest_wait in (1, 2, 4, 8, 16):
        try:
            await provider.summarise(passage)
            return
        except TooManyRequests:
            await asyncio.sleep(random.uniform(0, longest_wait) * SECOND)
    await provider.summarise(passage)


def with_tokenflow(limit: int) -> Callable[["Provider", str], Awaitable[None]]:
    # The leeway is for what passes between our clock's reading and the provider's.
    limiter = TokenRateLimiter(Quota(limit, per=PERIOD, leeway=0.02 * PERIOD))

    async def call(provider: "Provider", passage: str) -> None:
        async with limiter.reserve(estimate(passage)) as lease:
            lease.reconcile(await provider.summarise(passage))

    return call


def estimate(passage: str) -> Usage:
    """Before the call: three bytes a token is cautious for most languages."""
    return Usage(input_tokens=len(passage.encode()) // 3 + 1, output_tokens=SUMMARY_TOKENS)


# -- the provider -----------------------------------------------------------------------


class TooManyRequests(Exception):
    """429."""


class Provider:
    """Enforces a quota as real ones do: a bucket of tokens that refills evenly."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.level = float(limit)
        self.started = self.updated = time.monotonic()
        self.asked: list[tuple[float, int]] = []  # (when, tokens)
        self.taken: list[tuple[float, int]] = []
        self.answered = 0

    async def summarise(self, passage: str) -> Usage:
        usage = self.real_usage(passage)
        now = time.monotonic()
        self.level = min(self.limit, self.level + (now - self.updated) / PERIOD * self.limit)
        self.updated = now
        self.asked.append((now - self.started, usage.total_tokens))
        if usage.total_tokens > self.level:
            raise TooManyRequests
        self.level -= usage.total_tokens
        self.taken.append(self.asked[-1])
        await asyncio.sleep((0.5 + usage.output_tokens / 100) * SECOND)
        self.answered += 1
        return usage

    def real_usage(self, passage: str) -> Usage:
        chance = random.Random(passage)  # the same in both runs
        return Usage(
            input_tokens=int(len(passage.encode()) / chance.uniform(3.2, 4.5)) + 1,
            output_tokens=chance.randint(SUMMARY_TOKENS // 3, SUMMARY_TOKENS),
        )


# -- one run ----------------------------------------------------------------------------


async def run(
    name: str,
    call: Callable[[Provider, str], Awaitable[None]],
    provider: Provider,
    passages: list[str],
) -> float:
    """All calls at once; returns how long it took."""
    print(f"{name} ...", flush=True)
    progress = asyncio.create_task(show_progress(provider, len(passages)))
    begin = time.monotonic()
    results = await asyncio.gather(
        *(call(provider, passage) for passage in passages), return_exceptions=True
    )
    took = time.monotonic() - begin
    progress.cancel()
    await asyncio.wait([progress])
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, TooManyRequests):
            raise result
    return took


async def show_progress(provider: Provider, calls: int) -> None:
    """On a terminal only."""
    if not sys.stderr.isatty():
        return
    try:
        while True:
            refused = len(provider.asked) - len(provider.taken)
            text = f"  {provider.answered} of {calls} answered, {refused} refusals"
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
            await asyncio.sleep(0.1)
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


# -- what happened ----------------------------------------------------------------------


def report(runs: list[tuple[Provider, float]], calls: int) -> None:
    # Compared over the same time, which is that of the longer run, without its last moments.
    periods = max(1, int(max(took for _, took in runs) / PERIOD))
    columns = [numbers(provider, took, calls, periods) for provider, took in runs]
    print(f"\n{'':30}{'unthrottled':>15}{'tokenflow':>15}")
    for label in columns[0]:
        print(f"{label:30}{columns[0][label]:>15}{columns[1][label]:>15}".rstrip())
    if len(runs[0][0].asked) == calls:
        print("\nNothing was refused: too little text to meet the quota. Try a whole folder.")
    print(f"\nTokens taken in each {PERIOD:g} s; the mark is the quota:")
    print(f"{'':8}{'unthrottled':33}tokenflow")
    pictures = [sums(provider) for provider, _ in runs]
    for i in range(max(map(len, pictures))):
        drawn = (bar(each[i] / runs[0][0].limit if i < len(each) else 0) for each in pictures)
        print(f"{i * PERIOD:4g} s  {'  '.join(drawn)}".rstrip())


def numbers(provider: Provider, took: float, calls: int, periods: int) -> dict[str, str]:
    tokens = sum(sums(provider)[:periods])
    return {
        "calls": f"{calls:,}",
        "answered": f"{provider.answered:,}",
        "given up after six tries": f"{calls - provider.answered:,}",
        "refusals (429)": f"{len(provider.asked) - len(provider.taken):,}",
        "over after": f"{took:.1f} s",
        f"in the first {periods * PERIOD:g} s:": "",
        "  tokens per second": f"{tokens / periods / PERIOD:,.0f}",
        "  share of the quota": f"{tokens / periods / provider.limit:.0%}",
        f"most asked for in {PERIOD:g} s": f"{greatest(provider.asked) / provider.limit:.2f}x",
    }


def greatest(events: list[tuple[float, int]]) -> int:
    """The largest sum in any PERIOD, wherever it starts."""
    most = total = first = 0
    for when, tokens in events:
        total += tokens
        while when - events[first][0] >= PERIOD:
            total -= events[first][1]
            first += 1
        most = max(most, total)
    return most


def sums(provider: Provider) -> list[int]:
    """Tokens taken in each period since the first call."""
    found = [0] * (int(provider.taken[-1][0] / PERIOD) + 1)
    for when, tokens in provider.taken:
        found[int(when / PERIOD)] += tokens
    return found


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
    """Itself, or all that is below, except what is hidden."""
    if path.is_file():
        yield path
    elif path.is_dir():
        for child in sorted(path.iterdir()):
            if not child.name.startswith(".") and not child.is_symlink():
                yield from files_in(child)


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
    parser = argparse.ArgumentParser(description="The same calls, unthrottled and throttled.")
    parser.add_argument("paths", nargs="*", type=Path, help="text files, or folders of them")
    paths = parser.parse_args().paths or [*sorted(project.glob("*.md")), *project.glob("docs")]
    for path in paths:
        if not path.exists():
            parser.error(f"no such file or folder: {path}")
    passages, files = read_passages(paths)
    if not passages:
        parser.error(f"no text in {', '.join(map(str, paths))}: empty, or binary")

    costs = [estimate(passage).total_tokens for passage in passages]
    limit = max(*costs, sum(costs) // PERIODS)
    print(f"{len(passages)} passage(s) from {files} file(s), about {sum(costs):,} tokens in all")
    print(f"the provider takes {limit:,} tokens in {PERIOD:g} s, and answers 429 beyond that\n")
    asyncio.run(compare(passages, limit))


async def compare(passages: list[str], limit: int) -> None:
    results = []
    for name, call in (("unthrottled", with_retries), ("tokenflow", with_tokenflow(limit))):
        provider = Provider(limit)
        results.append((provider, await run(name, call, provider, passages)))
    report(results, len(passages))


if __name__ == "__main__":
    main()
