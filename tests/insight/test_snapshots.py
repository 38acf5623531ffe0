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


def test_a_contract_to_keep_a_snapshot() -> None:
    mesh = axn.make_mesh({"data": 4}, devices=jax.devices()[:4])
    exact = axn.insight.snapshot(step, *arguments(), mapping=FSDP, mesh=mesh)
    assert axn.insight.contract(snapshot=f"{exact}\n", mapping=FSDP, mesh=mesh).check(step, *arguments()).collectives
    kept = axn.insight.contract(snapshot=exact.replace("1 KiB", "2 KiB"), mapping=FSDP, mesh=mesh)
    with pytest.raises(
        axn.insight.BrokenContract, match=r"step: differs from its snapshot:\n-   x .*2 KiB\n\+   x .*1 KiB$"
    ):
        kept.check(step, *arguments())
    other = axn.insight.contract(snapshot=exact, mapping=({}, {"batch": "data"}), mesh=mesh)
    with pytest.raises(axn.insight.BrokenContract, match=r"(?s)\+ .*all-reduce over data, backward"):
        other.check(step, *arguments())
    with pytest.raises(ValueError, match="Make two contracts"):
        axn.insight.contract(snapshot=exact, max_memory="1 MiB")


def test_raw_arrays_are_sharded_as_the_step_places_them() -> None:
    two = axn.make_mesh({"data": 2, "model": 2}, devices=jax.devices()[:4])
    rule = axn.sharding.TreePathShardingRule(("w", jax.P(None, "model")), (".*", jax.P("data")))
    placed = axn.named_jit(lambda tree: tree["x"] @ tree["w"], in_placement=rule)
    tree = {"w": jax.ShapeDtypeStruct((4, 8), "float32"), "x": jax.ShapeDtypeStruct((2, 4), "float32")}
    text = axn.insight.snapshot(placed, tree, mesh=two)
    assert "tree/w  float32[4, 8 over model]  64 B" in text and "tree/x  float32[2 over data, 4]   16 B" in text


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
