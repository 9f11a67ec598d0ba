"""examples/gateway.py: every answer it can give, and nothing stays held when a client leaves."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from tokenflow import (
    ApproximateCounter,
    Replica,
    TokenFlow,
    TokenRateLimiter,
    TokenRouter,
)
from tokenflow.testing import FakeProvider, Fault, first_calls

from .test_examples import load

httpx2: Any = pytest.importorskip("httpx2")
pytest.importorskip("starlette")
example: Any = load("gateway.py")

pytestmark = pytest.mark.anyio

TENANTS = {
    "key-a": example.Tenant("a", max_wait=600.0),
    "key-b": example.Tenant("b", max_wait=600.0, weight=3.0),
    "key-first": example.Tenant("first", max_wait=600.0, priority=-1),
    "key-hasty": example.Tenant("hasty", max_wait=5.0),
}


def chat(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": "gpt-5", "messages": messages, "max_tokens": 100, **more}


class Setting:
    """The gateway, a client of it, and the provider behind it."""

    def __init__(self, *, max_waiting: int = 10, tenants: Any = TENANTS, **fake: Any) -> None:
        self.provider = FakeProvider(**{"output": 50, "seed": 1, **fake})
        self.limits = example.shared(1_000, 500, tenants, 60.0, max_waiting)
        self.app = example.gateway(
            self.limits,
            tenants,
            base_url="http://fake/v1",
            transport=self.provider.transport(httpx2),
            counter=ApproximateCounter(4.0),
        )
        self.client = httpx2.AsyncClient(
            base_url="http://gateway", transport=httpx2.ASGITransport(self.app), timeout=None
        )

    async def ask(self, body: Any = None, key: str = "key-a") -> Any:
        headers = {"authorization": f"Bearer {key}"}
        content = body if isinstance(body, bytes) else json.dumps(body or chat()).encode()
        return await self.client.post(example.CHAT, content=content, headers=headers)

    async def fill(self) -> None:
        """Nothing fits any more, for a minute."""
        self.limits.acquire_nowait(1_000).release()

    @property
    def waiting(self) -> int:
        waiting: int = self.limits.statistics().waiting_calls
        return waiting


class Visit:
    """A client that speaks ASGI itself, so that it can hang up."""

    def __init__(self, setting: Setting, **body: Any) -> None:
        self._app = setting.app
        self._body = json.dumps(chat(**body)).encode()
        self._gone = anyio.Event()
        self._asked = False
        self.sent: list[Any] = []

    async def __call__(self) -> None:
        headers = [(b"authorization", b"Bearer key-a"), (b"host", b"gateway")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": example.CHAT,
            "raw_path": example.CHAT.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": headers,
            "server": ("gateway", 80),
            "client": ("test", 1),
        }
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self._gone.is_set():
            raise OSError("gone")
        self.sent.append(message)

    def hang_up(self) -> None:
        self._gone.set()


async def test_what_the_provider_says_is_passed_on() -> None:
    setting = Setting()
    direct = await setting.provider.respond("POST", example.CHAT, body=chat())
    response = await setting.ask()
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "req_1"
    expected = await direct.json()
    assert response.json()["usage"] == expected["usage"]
    assert set(response.json()) == set(expected)


async def test_a_stream_comes_piece_by_piece_and_is_charged_what_it_used() -> None:
    setting = Setting()
    visit = Visit(setting, stream=True)
    started = anyio.current_time()
    await visit()
    start, *pieces, end = visit.sent
    assert dict(start["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert len(pieces) > 50
    assert b"".join(piece["body"] for piece in pieces).endswith(b"data: [DONE]\n\n")
    assert end == {"type": "http.response.body"}
    assert anyio.current_time() - started == pytest.approx(0.5 + 49 / 50)
    assert (await stats(setting))["tenants"]["a"] == {
        "reconciled": 1,
        "tokens": sum(call.input_tokens + call.output_tokens for call in setting.provider.calls),
    }


async def stats(setting: Setting) -> Any:
    return (await setting.client.get("/stats")).json()


# A body that is not read to its end leaves a generator of the client's behind.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <async_generator object ByteStream"
    ":pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize(
    ("body", "key", "status", "says"),
    [
        (chat(), "key-x", 401, "unknown key"),
        (b"{", "key-a", 400, "JSON object"),
        (b"[" * 100_000, "key-a", 400, "JSON object"),
        ({"model": "m"}, "key-a", 400, "list of messages"),
        ({"model": "m", "messages": "hello"}, "key-a", 400, "list of messages"),
        (chat(tools=5), "key-a", 400, "iterable"),
        (b" " * 10_000_001, "key-a", 413, "bytes"),
        (chat(max_tokens=2_000), "key-a", 413, "can never pass"),
    ],
)
async def test_refused_by_the_gateway(body: Any, key: str, status: int, says: str) -> None:
    setting = Setting()
    response = await setting.ask(body, key)
    assert response.status_code == status
    assert says in response.json()["error"]["message"]
    assert setting.provider.calls == ()
    assert setting.waiting == 0


async def test_a_full_queue() -> None:
    setting = Setting(max_waiting=1)
    await setting.fill()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setting.ask)
        await wait_all_tasks_blocked()
        response = await setting.ask()
        assert response.status_code == 429
        assert response.headers["retry-after"] == "60"
        tasks.cancel_scope.cancel()


async def test_a_tenant_that_does_not_wait_so_long() -> None:
    setting = Setting()
    await setting.fill()
    response = await setting.ask(key="key-hasty")
    assert response.status_code == 429
    assert response.headers["retry-after"] == "60"


async def test_shares_and_priorities() -> None:
    arrived: list[str] = []
    setting = Setting(max_waiting=50, faults=lambda request: arrived.append(request.body["user"]))
    await setting.fill()
    async with anyio.create_task_group() as tasks:
        for name in ["a"] * 12 + ["b"] * 12 + ["first"] * 9:
            tasks.start_soon(setting.ask, chat(user=name), f"key-{name}")
            await wait_all_tasks_blocked()
    minutes = [Counter(arrived[at : at + 9]) for at in (0, 9)]  # nine fit into each
    assert minutes == [{"first": 9}, {"a": 3, "b": 6}]


@pytest.mark.parametrize("places", [20, 60])
async def test_a_flood_leaves_the_others_their_places(places: int) -> None:
    """In the queue, of which "paid" has three quarters, as it has of the tokens."""
    tenants = {
        "key-free": example.Tenant("free", max_wait=600.0),
        "key-paid": example.Tenant("paid", max_wait=600.0, weight=3.0),
    }
    setting = Setting(max_waiting=places, tenants=tenants)
    got: Counter[tuple[str, int]] = Counter()

    async def ask(name: str) -> None:
        response = await setting.ask(key=f"key-{name}")
        got[name, response.status_code] += 1

    await setting.fill()
    async with anyio.create_task_group() as tasks:
        for _ in range(600):
            tasks.start_soon(ask, "free")
        await wait_all_tasks_blocked()
        await anyio.sleep(5)
        for _ in range(20):
            tasks.start_soon(ask, "paid")
        await wait_all_tasks_blocked()
        assert setting.waiting <= 2 * places
    assert got["paid", 200] > 10
    assert got["paid", 200] + got["paid", 429] == 20
    assert got["free", 200] > 0
    assert got["free", 200] + got["free", 429] == 600
    assert setting.waiting == 0


async def test_the_providers_refusal_is_passed_on_and_heeded() -> None:
    setting = Setting(faults=first_calls(1, Fault(status=429, retry_after=7.0)))
    refused = await setting.ask()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
    started = anyio.current_time()
    assert (await setting.ask()).status_code == 200
    assert anyio.current_time() - started >= 7


async def test_a_provider_that_drops_the_connection() -> None:
    setting = Setting(faults=first_calls(1, Fault(drop=True)))
    response = await setting.ask()
    assert response.status_code == 502
    assert "does not answer" in response.json()["error"]["message"]


async def test_a_stream_that_breaks_off_breaks_off_for_the_client_too() -> None:
    visit = Visit(Setting(faults=lambda request: Fault(abort_after=3)), stream=True)
    with pytest.raises(ExceptionGroup) as raised:
        await visit()
    assert raised.group_contains(httpx2.RemoteProtocolError)
    assert visit.sent[-1].get("more_body")


class TestHangingUp:
    async def test_in_the_queue(self) -> None:
        setting = Setting()
        await setting.fill()
        visit = Visit(setting)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(visit)
            await wait_all_tasks_blocked()
            assert setting.waiting == 1
            visit.hang_up()
            await wait_all_tasks_blocked()
            assert setting.waiting == 0
        assert setting.provider.calls == ()

    @pytest.mark.parametrize("stream", [False, True])
    async def test_while_the_provider_works(self, stream: bool) -> None:
        setting = Setting(output=90)
        visit = Visit(setting, stream=stream)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(visit)
            await anyio.sleep(1)
            visit.hang_up()
        assert anyio.current_time() == pytest.approx(1)
        (call,) = setting.provider.calls
        assert call.outcome == "aborted"
        assert bool(visit.sent) == stream
        assert setting.waiting == 0

    async def test_before_the_body_is_there(self) -> None:
        setting = Setting()
        visit = Visit(setting)
        visit._asked = True
        visit.hang_up()
        await visit()
        assert visit.sent == []
        assert setting.provider.calls == ()


async def test_with_a_router() -> None:
    """What the docstring of `Chat` promises."""
    providers = {name: FakeProvider(output=20) for name in ("one", "two")}
    flow: TokenFlow

    def client_of(name: str) -> Any:
        transport = example.ThrottledTransport(lazily, providers[name].transport(httpx2))
        return httpx2.AsyncClient(base_url=f"http://{name}/v1", transport=transport, timeout=None)

    router = TokenRouter([])
    flow = lazily = TokenFlow(
        TokenRateLimiter(tokens_per_minute=100_000), router=router, counter=ApproximateCounter(4.0)
    )
    for name in providers:
        router.add(Replica(name, max_tokens=1_000, target=client_of(name)))
    setting = Setting()
    setting.app.routes[0].app = example.Chat(flow, TENANTS, None)
    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(setting.ask)
    assert [len(provider.calls) for provider in providers.values()] == [3, 3]
    assert flow.statistics().outcomes == {"reconciled": 6}
