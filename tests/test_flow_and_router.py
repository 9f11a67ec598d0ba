"""A flow with a router: one atomic step, the replica that failed is spared, URLs are followed."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from tokenflow import (
    ApproximateCounter,
    NoReplica,
    Replica,
    TokenFlow,
    TokenLimits,
    TokenRateLimiter,
    TokenRouter,
    TokenSemaphore,
    WaitTimeout,
    call_options,
)
from tokenflow._errors import TokenflowError

from .calls import Refused

pytestmark = pytest.mark.anyio


def pair(**options: Any) -> TokenRouter:
    return TokenRouter(
        [Replica("a", max_tokens=1_000, **options), Replica("b", max_tokens=2_000, **options)]
    )


def name_of(replica: object) -> str:
    assert isinstance(replica, Replica)
    return replica.name


async def go(flow: TokenFlow, tokens: int = 100, **options: Any) -> str:
    async with flow.request(input_tokens=tokens, max_output_tokens=0, **options) as call:
        return name_of(call.replica)


async def test_limits_and_replica_in_one_step() -> None:
    semaphore, router = TokenSemaphore(3_000), pair()
    flow = TokenFlow(semaphore, router=router)
    async with flow.request(input_tokens=1_500, max_output_tokens=0) as call:
        assert name_of(call.replica) == "b"
        assert semaphore.statistics().tokens_in_flight == 1_500
        with pytest.raises(WaitTimeout):  # the semaphore has room, no replica has
            await go(flow, 1_200, max_wait=0)
        assert semaphore.statistics().tokens_in_flight == 1_500
    assert [each.tokens_in_flight for each in router.statistics().replicas] == [0, 0]


async def test_what_no_replica_takes() -> None:
    flow = TokenFlow(TokenSemaphore(9_000), router=pair())
    with pytest.raises(TokenflowError) as raised:
        await go(flow, 5_000)
    assert isinstance(raised.value, (NoReplica, ValueError))
    with pytest.raises(NoReplica):
        await go(TokenFlow(router=pair(model="m")), model="other")


async def test_the_order_and_bounds_are_those_of_the_limits() -> None:
    flow = TokenFlow(TokenSemaphore(100, max_waiting=0), router=pair())
    with pytest.raises(TokenflowError, match="wait"):
        async with flow.request(input_tokens=100, max_output_tokens=0):
            await go(flow)


@pytest.mark.parametrize(
    ("error", "spared"),
    [
        (Refused(429, retry_after="5"), True),
        (Refused(500), True),
        (ConnectionRefusedError(), True),
        (Refused(400), False),
        (ZeroDivisionError(), False),
    ],
)
async def test_a_replica_that_fails_is_spared_and_the_others_are_not(
    error: Exception, spared: bool
) -> None:
    quota, router = TokenRateLimiter(tokens_per_minute=100_000), pair()
    flow = TokenFlow(quota, router=router)
    with pytest.raises(type(error)):
        async with flow.request(input_tokens=10, max_output_tokens=0) as call:
            failed = name_of(call.replica)
            raise error
    states = {each.name: each.state for each in router.statistics().replicas}
    assert states[failed] == ("cooling" if spared else "up")
    assert quota.statistics().quotas[0].paused_for == 0  # it was one replica's word
    started = anyio.current_time()
    if spared:
        assert await go(flow) != failed
        assert anyio.current_time() == started


async def test_affinity_region_and_exclude_reach_the_router() -> None:
    router = TokenRouter(
        [Replica("a", region="eu"), Replica("b", region="us"), Replica("c", region="us")]
    )
    flow = TokenFlow(router=router)
    assert await go(flow, exclude=["a", "b"]) == "c"
    with pytest.raises(TypeError, match="exclude must be a collection of replicas' names"):
        await go(flow, exclude="ab")
    with call_options(region="eu"):
        assert await go(flow) == "a"
        assert await go(flow, region="us") in "bc"
    with call_options(affinity="session"):
        first = await go(flow)
        assert [await go(flow) for _ in range(5)] == [first] * 5


async def test_a_limiter_shared_by_replicas_and_the_flow_is_charged_once() -> None:
    """(litellm 34399, 7669)"""
    shared = TokenRateLimiter(tokens_per_minute=1_000)
    router = TokenRouter([Replica("a", limiter=shared), Replica("b", limiter=shared)])
    flow = TokenFlow(TokenLimits(shared), router=router)
    await go(flow, 300)
    assert shared.statistics().quotas[0].used == 300


async def test_one_models_wait_is_not_anothers() -> None:
    router = TokenRouter(
        [Replica("a", max_tokens=100, model="A"), Replica("b", max_tokens=100, model="B")]
    )
    flow = TokenFlow(TokenSemaphore(10_000), router=router)
    went: list[str] = []

    async def call(model: str) -> None:
        went.append(await go(flow, model=model))

    async with flow.request(input_tokens=100, max_output_tokens=0, model="A"):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, "A")
            await wait_all_tasks_blocked()
            tasks.start_soon(call, "B")
            await wait_all_tasks_blocked()
            assert went == ["b"]
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("name", ["httpx", "httpx2"])
async def test_a_transport_sends_to_the_replica_that_was_chosen(name: str) -> None:
    stack: Any = pytest.importorskip(name)
    module = pytest.importorskip(f"tokenflow.integrations.{name}")
    asked: list[tuple[str, str]] = []

    class Below(stack.AsyncBaseTransport):  # type: ignore[misc]
        async def handle_async_request(self, request: Any) -> Any:
            asked.append((str(request.url), request.headers["host"]))
            return stack.Response(200, json={"usage": {"total_tokens": 5}})

    router = TokenRouter(
        [
            Replica("a", target="http://10.0.0.1:8000"),
            Replica("b", target="https://b.example/base/"),
            Replica("c", target=object()),
        ]
    )
    flow = TokenFlow(router=router, counter=ApproximateCounter())
    async with stack.AsyncClient(transport=module.ThrottledTransport(flow, Below())) as client:
        for _ in range(3):
            await client.post("http://any/v1/embeddings?x=1", json={"input": "a", "model": "m"})
    assert asked == [
        ("http://10.0.0.1:8000/v1/embeddings?x=1", "10.0.0.1:8000"),
        ("https://b.example/base/v1/embeddings?x=1", "b.example"),
        ("http://any/v1/embeddings?x=1", "any"),
    ]
