"""The cost of a scan: the compiled program, recompilation, memory and garbage collection."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym.core import function_cache
from axonym.transforms.scan import fold, map, scan
from benchmarks.program import instructions
from tests.helpers import compilations
from tests.transforms.scan_cases import LATE, START, WEIGHT, XS, Case, Time, loss_of, raw_step, step


@pytest.mark.parametrize("remat", [False, True])
def test_the_program_is_that_of_the_positional_form(remat: bool) -> None:
    body = jax.checkpoint(raw_step, prevent_cse=False) if remat else raw_step

    def theirs(start: Any, xs: Any, w: Any) -> Any:
        return jax.lax.scan(lambda h, x: body(h, x, w), start, xs)

    ours = Case(XS, remat=remat).ours
    a = jax.jit(jax.grad(loss_of(ours), argnums=(0, 1, 2))).lower(START, XS, WEIGHT).compile()
    raw = START.array, XS.array, WEIGHT.array
    b = jax.jit(jax.grad(loss_of(theirs), argnums=(0, 1, 2))).lower(*raw).compile()
    assert instructions(a) == instructions(b)
    needs: list[Any] = [program.memory_analysis() for program in (a, b)]
    assert needs[0].temp_size_in_bytes <= needs[1].temp_size_in_bytes


def test_a_leading_axis_is_not_moved() -> None:
    text = str(jax.make_jaxpr(lambda *args: Case(XS).ours(*args))(START, XS, WEIGHT))
    assert "transpose" not in text and "jit[" not in text
    assert "transpose" in str(jax.make_jaxpr(lambda *args: Case(LATE).ours(*args))(START, LATE, WEIGHT))


def test_a_second_call_compiles_nothing() -> None:
    def body(c: Any, x: Any, w: Any) -> tuple[Any, Any]:
        return step(c, x, w)

    scan(body, "time")(START, XS, WEIGHT)
    with compilations() as seen:
        scan(body, Time)(START, XS, WEIGHT)
    assert not seen
    with compilations() as seen:
        scan(body, "time", reverse=True)(START, XS, WEIGHT)
    assert seen


def test_true_and_one_are_different_numbers_of_steps() -> None:
    for unroll, shown in ((1, 1), (True, 8), (2, 2), (False, 1)):
        program = str(jax.make_jaxpr(lambda x, u=unroll: fold(lambda c, x: c + x.sum(), Time, unroll=u)(0.0, x))(XS))
        again = str(jax.make_jaxpr(lambda x, u=unroll: scan(step, Time, unroll=u)(START, x, WEIGHT))(XS))
        assert f"unroll={shown}\n" in program and f"unroll={shown}\n" in again


def test_a_changed_mapping_is_seen() -> None:
    mappings = []

    def body(c: Any, x: Any) -> Any:
        mappings.append(axn.current_mapping())
        return c

    for mapping in ({}, {"batch": "model"}, {}):
        with axn.axis_mapping(mapping):
            fold(body, "time")(0.0, XS)
    assert len(mappings) == 2 and mappings[0] != mappings[1]


def test_functions_and_what_they_close_over_can_be_collected() -> None:
    def use() -> list[weakref.ref[Any]]:
        big = jnp.ones(8)

        def body(c: Any, x: Any) -> Any:
            return c + x.sum() * big[0]

        fold(body, "time")(0.0, XS)
        jax.jit(lambda x: fold(body, "time")(0.0, x))(XS)
        return [weakref.ref(body), weakref.ref(big)]

    references = use()
    gc.collect()
    assert [r() for r in references] == [None, None]


def test_what_is_kept_for_a_function_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_cache, "_LIMIT", 2)

    def body(c: Any, x: Any, k: int) -> Any:
        return c + k

    for k in range(4):
        assert int(fold(body, "time")(0, XS, k)) == 8 * k
    assert len(function_cache._CACHES[body]) == 2


def test_callables_that_define_equality_are_not_confused() -> None:
    class Adds(eqx.Module):
        by: jax.Array

        def __call__(self, c: Any, x: Any) -> Any:
            return c + self.by

    assert [int(fold(Adds(jnp.int32(k)), "time")(0, XS)) for k in (1, 2)] == [8, 16]
    assert [int(fold(Adds(jnp.int32(k)).__call__, "time")(0, XS)) for k in (1, 2)] == [8, 16]


def test_nothing_traced_is_kept() -> None:
    with jax.checking_leaks():
        found = jax.jit(lambda x, w: fold(lambda c, r: c + (r * w).sum(), "time", remat="nested")(0.0, x))(XS, 2.0)
    np.testing.assert_allclose(found, 2 * XS.array.sum(), rtol=1e-4)


def test_the_wrapper_keeps_the_name_of_the_body() -> None:
    assert scan(step, "time").__name__ == fold(step, "time").__name__ == map(step, "time").__name__ == "step"


def test_leaves_that_cannot_be_hashed_are_handed_on() -> None:
    class Listing:
        def __eq__(self, other: object) -> bool:  # and so no hash
            return self is other

    listing = Listing()
    for fn in (lambda x, leaf: (x, leaf), lambda x, leaf: (-x, leaf)):
        found = jax.jit(lambda xs, fn=fn: map(fn, "time", remat=True)(xs, listing)[0])(XS)
        assert found.axes == XS.axes
        assert map(fn, "time")(XS, listing)[1] is listing
