"""Every example runs, as its readers would run it: a program in a directory of its own.

In real time, since that is what they show; so with little input.
"""

import asyncio
import importlib.util
import os
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
        [".", "--out", "corpus.jsonl"],
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
    script: str, *arguments: str, cwd: Path, path: Path = LIBRARY
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / script), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path), "PYTHONIOENCODING": "utf-8"},
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
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "latin1.txt").write_bytes("Größe".encode("latin-1"))
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "text.md").write_text(TEXT)
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


@pytest.mark.parametrize("script", TABLE)
def test_an_example(script: str, folder: Path) -> None:
    if script in NEEDS:
        pytest.importorskip(NEEDS[script])
    arguments, telling = TABLE[script]
    done = run(script, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for words in telling:
        assert words in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workload", "chat:200"], "a workload is NAME:INPUT:OUTPUT, not 'chat:200'"),
        (["--workload", "chat:a:b"], "could not convert string to float: 'a'"),
        (["--gap", "4"], "max_step_seconds = 0.004 is less than the 0.00479 s"),
        (["--model", "Llama-3-70B"], "leaves nothing of 72.0 GB for a KV cache"),
    ],
)
def test_a_plan_that_cannot_be_made(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = run("plan_capacity.py", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


class TestQuickstart:
    def test_a_folder_with_all_kinds_of_files(self, folder: Path) -> None:
        done = run("quickstart.py", ".", cwd=folder)
        assert done.returncode == 0, done.stderr
        assert "2 passage(s) from 2 file(s)" in done.stdout

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["nowhere.md"], "no such file or folder: nowhere.md"),
            (["text.md", "no/where"], f"no such file or folder: {Path('no/where')}"),
            (["empty.md"], "no text in empty.md"),
            (["picture.png", "empty.md"], "no text in picture.png, empty.md"),
        ],
    )
    def test_input_it_cannot_use(self, arguments: list[str], says: str, folder: Path) -> None:
        done = run("quickstart.py", *arguments, cwd=folder)
        assert done.returncode == 2
        assert says in done.stderr
        assert "Traceback" not in done.stderr

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
