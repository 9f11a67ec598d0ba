"""The code in README.md, in docs/*.md and in the docstrings runs.

In Markdown, what begins with ```` ```python ```` runs. The blocks of a page run in order and
share their names, so that a block is a program or continues those before it. A block may
`await` outside of functions, as one does in a notebook. ```` ```python no-run ```` (it needs a
key, a network, a library that is no dependency) only has to compile. `asyncio.run`, `anyio.run`
and `trio.run` are in virtual time here, and so is what awaits: an hour's sleep costs nothing.
The working directory is an empty one.
"""

import ast
import asyncio
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import CodeType
from typing import Any

import anyio
import pytest
import trio

import tokenflow

from .conftest import Backend, VirtualEventLoop, virtual_time

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MODULES = [
    "tokenflow",
    *sorted(found.name for found in pkgutil.walk_packages(tokenflow.__path__, "tokenflow.")),
]
FENCE = re.compile(r"^( *)```python( no-run)? *\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)


_anyio_run, _trio_run = anyio.run, trio.run


def run_asyncio(main: Coroutine[Any, Any, Any], *, debug: bool | None = None) -> Any:
    with asyncio.Runner(loop_factory=VirtualEventLoop, debug=debug) as runner:
        return runner.run(main)


def run_anyio(
    func: Callable[..., Awaitable[Any]], *args: Any, backend: Backend = "asyncio", **_: Any
) -> Any:
    if backend == "trio":
        return run_trio(func, *args)
    return _anyio_run(func, *args, backend_options=virtual_time("asyncio"))


def run_trio(func: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
    return _trio_run(func, *args, **{**options, **virtual_time("trio")})


@pytest.fixture(autouse=True)
def _in_virtual_time_and_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(asyncio, "run", run_asyncio)
    monkeypatch.setattr(anyio, "run", run_anyio)
    monkeypatch.setattr(trio, "run", run_trio)
    monkeypatch.chdir(tmp_path)


def blocks(page: str, name: str) -> list[tuple[CodeType, bool]]:
    """The compiled blocks of a page, and whether they are to run."""
    found = []
    for match in FENCE.finditer(page):
        indent, no_run, source = match.groups()
        lines = [line.removeprefix(indent) for line in source.splitlines()]
        before = page.count("\n", 0, match.start(3))  # so that a traceback names the page's line
        code = compile(
            "\n" * before + "\n".join(lines),
            name,
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            dont_inherit=True,
        )
        found.append((code, not no_run))
    return found


def run_page(page: str, name: str = "page.md") -> dict[str, Any]:
    """Run a page's blocks; returns the names that they leave."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for code, runs in blocks(page, name):
        if runs:
            result = eval(code, names)
            if code.co_flags & inspect.CO_COROUTINE:
                run_anyio(_awaiting, result)
    return names


async def _awaiting(result: Awaitable[None]) -> None:
    await result


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page(page: Path) -> None:
    try:
        run_page(page.read_text(encoding="utf-8"), str(page))
    except ModuleNotFoundError as error:
        if error.name not in ("httpx2", "openai"):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if not name.startswith("tokenflow.integrations."):
            raise
        pytest.skip(str(error))
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert failed == 0, "see the captured output"


PAGE = """\
```python
import asyncio, anyio, trio
seen = []
async def main(name):
    await anyio.sleep(3_600)
    seen.append(name)
asyncio.run(main("asyncio"))
anyio.run(main, "anyio")
trio.run(main, "trio")
```

1. In a list, and as in a notebook:

   ```python
   await main("await")
   async with anyio.create_task_group() as tasks:
       tasks.start_soon(main, "task")
   ```

```python no-run
raise AssertionError
```

```text
raise AssertionError
```
"""


class TestTheRunner:
    def test_it_runs_what_it_should(self) -> None:
        assert run_page(PAGE)["seen"] == ["asyncio", "anyio", "trio", "await", "task"]

    def test_a_block_that_fails(self) -> None:
        with pytest.raises(ZeroDivisionError) as caught:
            run_page("# Title\n\n```python\n\n1 / 0\n```\n")
        assert caught.traceback[-1].lineno + 1 == 5

    def test_a_block_that_does_not_run_has_to_compile(self) -> None:
        with pytest.raises(SyntaxError):
            run_page("```python no-run\nawait = 1\n```\n")
