"""Every example runs, as its readers would run it: a program in a directory of its own.

In real time, since that is what they show; so with little input.
"""

import asyncio
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tokenflow

EXAMPLES = Path(__file__).parent.parent / "examples"
LIBRARY = Path(tokenflow.__file__).parents[1]

# Script: its arguments, relative to a directory with a text and a binary file, and what it says.
TABLE: dict[str, tuple[list[str], list[str]]] = {
    "embed_corpus.py": (
        ["."],
        ["1 chunks, 1 to embed in 1 requests", "1 vectors in corpus.jsonl"],
    ),
    "quickstart.py": (
        ["text.md"],
        ["1 passage(s) from 1 file(s)", "refusals (429)", "quota used"],
    ),
    "plan_capacity.py": (
        ["--gpu", "H100", "--gap", "40"],
        ["Llama-3.1-8B on 1 x H100, 40 ms", "2,463", "prefill          memory", "On other GPUs"],
    ),
    "route_replicas.py": (
        ["--calls", "60"],
        ["round robin: 60 of 60, TokenRouter: 60 of 60", "p99", "fast   medium     slow"],
    ),
    "calibrate.py": ([], ["12,000 calls", "declared 4,096", "historical 0.9, margin 1.1"]),
    "openai_sdk.py": (["--tpm", "12000"], ["chat", "embed", "stream", "provider refused 0"]),
    "anthropic_sdk.py": (["--otpm", "8000"], ["message", "stream", "provider refused 0"]),
    "batch_jsonl.py": (
        ["--tpm", "1000000", "--rpm", "10000"],
        ["0 lines have a result, 1,000 are to be sent", "refused 0", "1,000 answered, 0 failed"],
    ),
    "gateway.py": (["--tpm", "20000"], ["free", "paid", "ops", "GET /stats: {"]),
    "agents.py": (
        ["--burst", "30", "--tokens-per-minute", "20000"],
        ["FairShare", "refused by the provider                    0           0"],
    ),
}

TEXT = "A paragraph about tokens, and about who may go now.\n\n"


def run(
    script: str, *arguments: str, cwd: Path, path: Path | str = LIBRARY
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / script), *arguments],
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": str(path),
            "PYTHONIOENCODING": "utf-8",
        },
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=45,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.md").write_text(TEXT)
    (tmp_path / "empty.md").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0" + bytes(range(256)) * 40)
    (tmp_path / "picture.svg").write_text("<svg/>")
    (tmp_path / "empty").mkdir()
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "latin1.txt").write_bytes("Größe".encode("latin-1"))
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "text.md").write_text(TEXT)
    (tmp_path / ".hidden" / "wrong.csv").write_text("a,b\n1,2\n")
    (tmp_path / ".hidden" / "torn.csv").write_text("ContextTokens,GeneratedTokens\n1,2\n3\n")
    (tmp_path / ".hidden" / "header.csv").write_text("ContextTokens,GeneratedTokens\n")
    return tmp_path


def test_no_example_is_left_out() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(TABLE)


NEEDS = {
    "openai_sdk.py": "openai",
    "anthropic_sdk.py": "anthropic",
    "batch_jsonl.py": "httpx2",
    "gateway.py": "starlette",
    "agents.py": "openai",
}


def needs(script: str) -> None:
    if script in NEEDS:
        pytest.importorskip(NEEDS[script])


@pytest.mark.parametrize("script", TABLE)
def test_an_example(script: str, folder: Path) -> None:
    needs(script)
    arguments, telling = TABLE[script]
    done = run(script, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for words in telling:
        assert words in done.stdout


@pytest.mark.parametrize("script", TABLE)
def test_help_says_what_the_docstring_says_first(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert status_of(script, "--help", monkeypatch) == 0
    first = (EXAMPLES / script).read_text().partition("\n")[0].removeprefix('"""')
    usage, description, options = capsys.readouterr().out.partition(f"\n\n{first}\n\n")
    assert usage.startswith(f"usage: {script}")
    assert description
    assert options.startswith(("options:", "positional arguments:"))


REFUSED = [
    ("agents.py", "--burst -1", "argument --burst: must be at least 0, not -1"),
    ("agents.py", "--tokens-per-minute 10", "must be at least 250, not 10"),
    ("anthropic_sdk.py", "--otpm 10", "argument --otpm: must be at least 1,000, not 10"),
    ("anthropic_sdk.py", "--itpm 10", "argument --itpm: must be at least 200, not 10"),
    (
        "anthropic_sdk.py",
        "--base-url nowhere",
        "must be as http://127.0.0.1:8000 is, not 'nowhere'",
    ),
    ("batch_jsonl.py", "--tpm 0", "argument --tpm: must be at least 1, not 0"),
    ("batch_jsonl.py", "--tpm 10", "--tpm must be at least 500 for the lines made up, not 10"),
    ("batch_jsonl.py", "--max-pending 0", "--max-pending: must be at least 1, not 0"),
    ("batch_jsonl.py", "text.md no/where", "must be a file, in a folder that is there"),
    ("batch_jsonl.py", "text.md --base-url=", "must be as http://127.0.0.1:8000/v1 is, not ''"),
    ("batch_jsonl.py", "text.md --base-url http://a:99999", "invalid url value"),
    ("calibrate.py", "--trace nope.csv", "nope.csv: No such file"),
    (
        "calibrate.py",
        "--trace .hidden/wrong.csv",
        "wrong.csv, line 2: expected whole numbers in columns",
    ),
    (
        "calibrate.py",
        "--trace .hidden/torn.csv",
        "torn.csv, line 3: expected whole numbers in columns",
    ),
    ("calibrate.py", "--trace picture.png", "picture.png, line 0: expected whole numbers"),
    ("calibrate.py", "--trace .hidden/header.csv", "header.csv has no calls"),
    ("calibrate.py", "--quantile 9", "must be between 0 and 1, such as 0.9, not 9"),
    ("calibrate.py", "--quantile nan", "must be between 0 and 1, such as 0.9, not nan"),
    ("embed_corpus.py", "nowhere", "no such folder: nowhere"),
    ("embed_corpus.py", "text.md", "no such folder: text.md"),
    ("embed_corpus.py", "empty", "no .txt files in empty"),
    ("embed_corpus.py", ". --out .", "--out must be a file, in a folder that is there, not ."),
    ("embed_corpus.py", ". --tokens-per-minute 5", "must be at least 400, not 5"),
    ("gateway.py", "--serve foo", "must be HOST:PORT, as in 127.0.0.1:8000, not foo"),
    ("gateway.py", "--serve localhost:99999", "must be HOST:PORT"),
    ("gateway.py", "--base-url http://", "must be as http://127.0.0.1:8000/v1 is, not 'http://'"),
    ("openai_sdk.py", "--tpm 0", "argument --tpm: must be at least 400, not 0"),
    ("openai_sdk.py", "--rpm many", "argument --rpm: invalid number value: 'many'"),
    ("plan_capacity.py", "--workload chat:200", "is NAME:INPUT:OUTPUT, not 'chat:200'"),
    ("plan_capacity.py", "--workload chat:a:b", "could not convert string to float: 'a'"),
    ("plan_capacity.py", "--workload chat:0:0", "needs tokens, and 'chat:0:0' has none"),
    ("plan_capacity.py", "--gap 4", "max_step_seconds = 0.004 is less than the 0.00479 s"),
    ("plan_capacity.py", "--model Llama-3-70B", "leaves nothing of 72.0 GB for a KV cache"),
    ("quickstart.py", "nowhere.md", "no such file or folder: nowhere.md"),
    ("quickstart.py", "text.md no/where", f"no such file or folder: {Path('no/where')}"),
    ("quickstart.py", "empty.md", "no text in empty.md"),
    ("quickstart.py", "picture.png empty.md", "no text in picture.png, empty.md"),
    ("route_replicas.py", "--calls 0", "--calls must be at least 1, not 0"),
]


@pytest.mark.parametrize(("script", "arguments", "says"), REFUSED)
def test_what_it_cannot_use_is_refused(
    script: str,
    arguments: str,
    says: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert status_of(script, arguments, monkeypatch) == 2
    out, error = capsys.readouterr()
    assert says in error
    assert out == ""


def status_of(script: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """What it ends with; run in this process, which has imported what it needs."""
    needs(script)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / script), *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("script", NEEDS)
def test_without_the_package_it_shows(script: str, tmp_path: Path) -> None:
    (tmp_path / f"{NEEDS[script]}.py").write_text("raise ImportError('it is not there')")
    done = run(script, cwd=tmp_path, path=f"{tmp_path}{os.pathsep}{LIBRARY}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{script.removesuffix('.py')}: it is not there: ")
    assert re.search(f"pip install .*{NEEDS[script]}", line)


LONG = [script for script in TABLE if script not in ("plan_capacity.py", "calibrate.py")]
LONGER = {"embed_corpus.py": ["--tokens-per-minute", "20000"]}


@pytest.mark.skipif(sys.platform == "win32", reason="no process can be sent a Ctrl-C there")
@pytest.mark.parametrize("script", LONG)
def test_a_ctrl_c_ends_it_in_a_line(script: str, tmp_path: Path) -> None:
    """In real time, for it is a process that is interrupted, once it is at work."""
    needs(script)
    process = subprocess.Popen(
        [
            *(sys.executable, "-W", "error", "-c", AT_WORK),
            *(str(EXAMPLES / script), *LONGER.get(script, [])),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(LIBRARY), "PYTHONIOENCODING": "utf-8"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, error = process.communicate(timeout=45)
    assert process.returncode == 130, error
    assert error.strip().startswith("interrupted")
    assert len(error.strip().splitlines()) == 1


# Runs the script of its first argument, and when it has been at work for 0.3 seconds sends the
# process SIGINT, which is what a Ctrl-C is.
AT_WORK = """
import argparse, os, runpy, signal, sys, threading

parse = argparse.ArgumentParser.parse_args

def parse_args(parser, *arguments):
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    return parse(parser, *arguments)

argparse.ArgumentParser.parse_args = parse_args
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class TestEmbedCorpus:
    def test_a_second_run_goes_on(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """What was embedded when it was interrupted is not sent again."""
        example = load("embed_corpus.py")
        sent: list[str] = []
        interrupts = [KeyboardInterrupt()]

        async def embed(self: object, texts: list[str]) -> list[list[float]]:
            if len(sent) > 200 and interrupts:
                raise interrupts.pop()
            sent.extend(texts)
            return [[float(len(text))] for text in texts]

        monkeypatch.setattr(example.FakeProvider, "embed", embed)
        monkeypatch.setattr(example, "CONCURRENT_REQUESTS", 1)
        monkeypatch.setattr(sys, "argv", ["embed_corpus.py"])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit, match="130"):
            example.main()
        assert not (tmp_path / "corpus.jsonl").exists()
        before = len(sent)
        example.main()
        rows = (tmp_path / "corpus.jsonl").read_text().splitlines()
        assert len(rows) == len(sent) == len(set(sent)) > before > 200

    @pytest.mark.parametrize("letter", ["a", "ß", "字", "😀"])
    def test_a_chunk_is_never_larger_than_it_may_be(self, letter: str) -> None:
        example = load("embed_corpus.py")
        text = "\n\n".join(letter * length for length in range(1, 2_000, 37))
        chunks = list(example.split(text))
        assert max(map(example.count, chunks)) <= example.MAX_CHUNK_TOKENS
        assert "".join(chunks).replace("\n", "") == text.replace("\n", "")


def test_a_gateway_that_serves_nobody_says_so(tmp_path: Path) -> None:
    needs("gateway.py")
    done = run("gateway.py", "--tpm", "10", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ops            0     0     5                    -            -" in done.stdout


class TestQuickstart:
    def test_a_folder_with_all_kinds_of_files(self, folder: Path) -> None:
        done = run("quickstart.py", ".", cwd=folder)
        assert done.returncode == 0, done.stderr
        assert "2 passage(s) from 2 file(s)" in done.stdout

    def test_another_package_called_tokenflow(self, tmp_path: Path) -> None:
        (tmp_path / "tokenflow").mkdir()
        (tmp_path / "tokenflow" / "__init__.py").write_text("__version__ = '0.3'\n")
        done = run("quickstart.py", cwd=tmp_path, path=tmp_path)
        assert done.returncode == 1
        assert "pip uninstall tokenflow tokenflow-limits" in done.stderr
        assert "Traceback" not in done.stderr

    def test_the_difference_is_plain(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """In real time, at a quarter of its length."""
        demo = load("quickstart.py")
        monkeypatch.setattr(demo, "PERIOD", 0.5)
        passages = [f"{i} {TEXT * 5}" for i in range(60)]
        asyncio.run(demo.compare(passages, 2_000))
        rows = {
            line[:30].strip(): line[30:].split() for line in capsys.readouterr().out.split("\n")
        }
        unthrottled, throttled = map(int, rows["answered"])
        assert unthrottled < throttled
        refused, refused_throttled = map(int, rows["refusals (429)"])
        assert refused > 60
        assert refused_throttled < refused / 4  # none, but on a machine that stalls


def load(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py"), EXAMPLES / script)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
