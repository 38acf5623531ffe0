"""`in_context`: the active mesh and mapping in threads and executors; and tasks, which share them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

import axonym as axn

THREADS = 32
MAPPINGS = [{"batch": "data"}, {"batch": "model"}, {"embed": "data"}, {"batch": "data", "embed": "model"}]
X = {"batch": 8, "embed": 8}


@jax.jit
def placed() -> axn.NamedArray:
    return axn.shard(axn.ones(X))


ONE_AT_A_TIME = threading.Lock()


def spec() -> tuple[Any, ...]:
    """Return the spec of an array from a compiled function under the active mesh and mapping."""
    with ONE_AT_A_TIME:  # JAX itself does not support many threads that run on several simulated devices at once
        return tuple(jax.block_until_ready(placed()).array.sharding.spec)


def expected(mapping: dict[str, str]) -> tuple[Any, ...]:
    found = tuple(mapping.get(name) for name in X)
    return found


def is_right(found: tuple[Any, ...], mapping: dict[str, str]) -> bool:
    return found + (None,) * (2 - len(found)) == expected(mapping)


def here() -> Any:
    return axn.current_mapping(), axn.current_mesh()


def test_32_threads_each_have_their_own(mesh: Mesh) -> None:
    """All at a time, again and again; nothing is left active in the threads."""
    start = threading.Barrier(THREADS)

    def work(fn: Any) -> Any:
        start.wait()
        return [fn() for _ in range(20)], here()

    fns = []
    for i in range(THREADS):
        with axn.set_mesh(mesh), axn.axis_mapping(MAPPINGS[i % 4]):
            fns.append(axn.in_context(spec))
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for i, (found, after) in enumerate(pool.map(work, fns)):
            assert all(is_right(one, MAPPINGS[i % 4]) for one in found), (i, found)
            assert after == (None, None)


def test_one_function_in_many_threads(auto_mesh: Mesh) -> None:
    """Threads may share what `in_context` made, and context variables come along."""
    variable = contextvars.ContextVar("variable", default=0)
    token = variable.set(5)
    with axn.set_mesh(auto_mesh), axn.axis_mapping(MAPPINGS[0]):
        fn = axn.in_context(lambda i: (here(), variable.get(), i))
    variable.reset(token)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for i, found in enumerate(pool.map(fn, range(4 * THREADS))):
            assert found == ((MAPPINGS[0], auto_mesh.abstract_mesh), 5, i)


def test_in_a_thread_that_has_its_own(auto_mesh: Mesh) -> None:
    """What is carried replaces what is active there, also if it is nothing; then that is active again."""
    nothing = axn.in_context(here)
    with axn.set_mesh(auto_mesh), axn.axis_mapping(MAPPINGS[0]):
        first = axn.in_context(here)
        before = here()
        assert nothing() == (None, None) and here() == before
        with axn.axis_mapping(MAPPINGS[1]):
            assert first() == before and axn.current_mapping() == MAPPINGS[1]
    assert first() == before and here() == (None, None)


def test_meshes_without_devices(auto_mesh: Mesh) -> None:
    with axn.set_mesh(auto_mesh.abstract_mesh):
        abstract = axn.in_context(axn.current_mesh)
    assert abstract() == auto_mesh.abstract_mesh and axn.current_mesh() is None


def test_tasks_see_each_other() -> None:
    """Which is an error where their blocks are not nested: JAX has one mesh and one context for each thread."""

    async def enters(seconds: float) -> None:
        with axn.axis_mapping(MAPPINGS[0]):
            with axn.axis_mapping(MAPPINGS[1]):  # does not wait
                pass
            await asyncio.sleep(seconds)

    async def main() -> Any:
        tasks = [asyncio.create_task(enters(0.01 * (i + 1))) for i in range(2)]
        await asyncio.sleep(0)
        seen = here()
        for task in tasks:
            with pytest.raises(RuntimeError, match=r"^axis_mapping: .* `await`.*to_thread\(axn\.in_context\(fn\)\)`"):
                await task
        tasks = [asyncio.create_task(enters(0.01 * (i + 1))) for i in range(2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):  # another error is not replaced
            await tasks[0]
        with pytest.raises(RuntimeError, match="await"):
            await tasks[1]
        assert here() == (None, None)
        return seen

    assert asyncio.run(main()) == (MAPPINGS[0], None)
    assert here() == (None, None)


def test_tasks_of_which_one_uses_blocks() -> None:
    """Others may wait for it, run beside it without blocks, or have blocks inside of its own."""

    async def idle() -> None:
        await asyncio.sleep(0.02)

    async def enters(*inside: Any) -> None:
        with axn.axis_mapping(MAPPINGS[0]):
            await asyncio.gather(*(fn() for fn in inside))
            await asyncio.wait_for(asyncio.sleep(0), 60)

    async def main() -> None:
        background = asyncio.create_task(idle())
        await asyncio.wait_for(enters(), 60)
        await asyncio.create_task(enters(idle, enters))
        await background

    asyncio.run(main())
    assert here() == (None, None)


def test_executors_of_event_loops(auto_mesh: Mesh) -> None:
    async def main() -> Any:
        with axn.set_mesh(auto_mesh), axn.axis_mapping(MAPPINGS[0]):
            fn = axn.in_context(spec)
        return await asyncio.gather(*(asyncio.to_thread(fn) for _ in range(8)))

    assert all(is_right(found, MAPPINGS[0]) for found in asyncio.run(main()))


def test_what_it_refuses(auto_mesh: Mesh) -> None:
    def generator():
        yield 1

    async def coroutine() -> None: ...

    for fn in (generator, coroutine):
        with pytest.raises(TypeError, match=rf"in_context: .*{fn.__name__} runs between other code, which .* Wrap the"):
            axn.in_context(fn)
    with axn.set_mesh(auto_mesh), pytest.raises(ValueError, match="in_context: the mesh cannot be carried out of jit"):
        jax.jit(lambda: axn.in_context(here)())()
