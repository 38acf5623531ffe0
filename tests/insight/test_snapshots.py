"""Snapshots of a step's communication on a mesh, and the fixture that keeps them beside the tests."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import axonym as axn

pytest_plugins = ["pytester"]

FSDP = ({"embed": "data"}, {"batch": "data"})
TEXT = """\
on the mesh data=4

arguments: 1.5 KiB on each device
  weights/up  float32[embed=16 over data, mlp=32]  512 B
  x           float32[batch=64 over data, embed=16]  1 KiB

sent by each device:
  1 x 1.5 KiB  all-gather over data, forward, f32[embed=16, mlp=32] in dot[batch, embed; embed, mlp -> batch, mlp]: \
embed is stored sharded over data, and all-gathered where it is used
  1 x 1.5 KiB  reduce-scatter over data, backward, f32[embed=16, mlp=32] in \
dot[batch, embed; embed, mlp -> batch, mlp]: the gradient of [embed, mlp] sums over batch, which is sharded over data"""


def step(weights: dict[str, axn.NamedArray], x: axn.NamedArray) -> Any:
    return jax.grad(lambda weights: axn.sum(axn.square(axn.dot(x, weights["up"], axis="embed"))).scalar())(weights)


def arguments() -> tuple[Any, ...]:
    Batch, Embed, Mlp = axn.make_axes(batch=64, embed=16, mlp=32)
    return jax.eval_shape(lambda: ({"up": axn.ones((Embed, Mlp))}, axn.ones((Batch, Embed))))


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_text(explicit: bool) -> None:
    mesh = axn.make_mesh({"data": 4}, explicit=explicit, devices=jax.devices()[:4])
    found = axn.insight.snapshot(step, *arguments(), mapping=FSDP, mesh=mesh)
    assert [" ".join(line.split()) for line in found.splitlines()] == [" ".join(x.split()) for x in TEXT.splitlines()]


def test_steps_that_are_compiled_and_what_is_not_distributed() -> None:
    x = arguments()[1]
    with jax.set_mesh(axn.make_mesh({"data": 4}, devices=jax.devices()[:4])):
        placed = axn.insight.snapshot(jax.jit(lambda x: x * 2), axn.shard(x, {"batch": "data"}))
    assert "float32[batch=64 over data, embed=16]  1 KiB" in placed
    alone = axn.insight.snapshot(lambda x: x * 2, x)
    assert alone.startswith("on one device") and alone.endswith("nothing is sent between devices")


TESTS = """
import jax
import axonym as axn

MAPPING = {"batch": "data"}

def test_sums(mapping_snapshot):
    x = jax.eval_shape(lambda: axn.ones({"batch": 8, "embed": 8}))
    mesh = axn.make_mesh({"data": 4, "model": 2})
    mapping_snapshot.check(lambda x: axn.sum(x, "embed"), x, mapping=MAPPING, mesh=mesh)
    mapping_snapshot.check(lambda x: axn.sum(x, "batch"), x, mapping=MAPPING, mesh=mesh)
"""


def test_fixture(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["axonym.insight.pytest_plugin"]')
    module = pytester.makepyfile(TESTS)
    missing = pytester.runpytest_inprocess()
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*run pytest with --update-snapshots*"])
    pytester.runpytest_inprocess("--update-snapshots").assert_outcomes(passed=1)
    files = sorted(path.name for path in (pytester.path / "snapshots").iterdir())
    assert files == ["test_fixture.test_sums.2.txt", "test_fixture.test_sums.txt"]
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
    module.write_text(TESTS.replace('{"batch": "data"}', '{"batch": "data", "embed": "model"}'))
    changed = pytester.runpytest_inprocess()
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(
        [
            "*float32[[]batch=8 over data, embed=8 over model]*",
            "*+*all-reduce over model*sums over embed*",
        ]
    )


CONTRACTS = """
import jax
import axonym as axn

def rules(mapping_contract):
    mesh = axn.make_mesh({"data": 4, "model": 2})
    return mapping_contract(never_gathers=["batch"], mapping={"batch": "data"}, mesh=mesh)

def checked(mapping_contract, step):
    rules(mapping_contract).check(step, jax.eval_shape(lambda: axn.ones({"batch": 8, "embed": 8})))

def test_keeps(mapping_contract):
    checked(mapping_contract, lambda x: x * 2)

def test_breaks(mapping_contract):
    checked(mapping_contract, lambda x: axn.shard(x, {"batch": None}) * 2)

def test_forgets(mapping_contract):
    rules(mapping_contract)
"""


def test_contracts_as_a_fixture(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["axonym.insight.pytest_plugin"]')
    pytester.makepyfile(CONTRACTS)
    found = pytester.runpytest_inprocess()
    found.assert_outcomes(passed=2, failed=1, errors=1)
    found.stdout.fnmatch_lines(["*nothing was checked by a contract*", "*BrokenContract: *gathers batch: all-gather*"])
