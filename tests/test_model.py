"""Limiters that share gates, against a naive model, under random operations."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import BACKENDS, run_virtual
from tests.model import OPS, Op, drive

ops = st.lists(
    st.tuples(st.sampled_from(OPS), st.integers(0, 30), st.integers(0, 120)), max_size=60
)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=150)
@given(ops=ops)
def test_any_operations_agree_with_the_naive_model(backend: str, ops: list[Op]) -> None:
    run_virtual(backend, drive, ops)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_random_operations_wait_and_grant(backend: str) -> None:
    rng = random.Random(7)
    ops = [(rng.choice(OPS), rng.randrange(30), rng.randrange(120)) for _ in range(4000)]
    world = run_virtual(backend, drive, ops)  # type: ignore[arg-type]
    assert world.grants > 150
    assert world.waits > 50
