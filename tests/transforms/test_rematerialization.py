"""Checkpointing policies: the arrays that a scan keeps for its backward pass, and equal results."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.ad_checkpoint
import numpy as np
import pytest

import axonym as axn
from axonym.transforms.rematerialization import ScanCheckpointPolicy as Policy, tree_checkpoint_name
from axonym.transforms.scan import fold, scan

Step, Embed = axn.make_axes(step=16, embed=3)
START, XS = axn.ones(Embed) * 0.3, axn.ones((Step, Embed)) * 0.7


def body(c: Any, x: Any) -> Any:
    """Run a step with two named internals."""
    h = tree_checkpoint_name(axn.sin(c * x), "h")
    k = tree_checkpoint_name(axn.cos(h), "k")
    return axn.tanh(k) + c


def loss(remat: Any, unroll: int | bool = 1) -> Callable[..., Any]:
    return lambda c, x: fold(lambda c, x: body(c, x), Step, remat=remat, unroll=unroll)(c, x).sum().array


def kept(fn: Callable[..., Any], *args: Any) -> list[str]:
    """Return the types of the residuals that the backward pass gets, except the function's own arguments."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        jax.ad_checkpoint.print_saved_residuals(fn, *args)
    return sorted(line.split()[0] for line in printed.getvalue().splitlines() if " from the argument " not in line)


ALL, GROUPS, CUT = "f32[16,3]", "f32[4,3]", "f32[4,4,3]"
HOST = ALL.replace("[", "<host>[")


@pytest.mark.parametrize(
    ("remat", "expected"),
    [
        (True, [ALL]),
        ("recompute", [ALL]),
        ("full", [ALL]),
        (Policy(), [ALL]),
        (Policy(save_inputs=True), [ALL]),
        ("offload", [HOST, HOST]),
        ("nested", [GROUPS, CUT]),
        (Policy(nested=8), ["f32[8,2,3]", "f32[8,3]"]),
        (Policy(nested=True, save_block_internals=["h"]), [GROUPS, CUT]),
        (Policy(nested=True, save_carries="offload"), ["f32<host>[4,3]", CUT]),
        (Policy(save_carries=False), []),
        (Policy(save_carries=False, save_block_internals=["h"]), [ALL]),
        (Policy(save_carries=False, nested=True), []),
        (Policy(save_carries="offload"), [HOST]),
        (Policy(save_inputs="offload"), [HOST, ALL]),
        (Policy(save_block_internals=["h"]), [ALL, ALL]),
        (Policy(save_block_internals=["h", "k"]), [ALL, ALL, ALL]),
        (Policy(offload_block_internals=["h"]), [HOST, ALL]),
        (Policy(save_carries="offload", save_block_internals=["k"], offload_block_internals=["h"]), [HOST, HOST, ALL]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_kept_between_the_passes(remat: Any, expected: list[str]) -> None:
    assert kept(loss(remat), START, XS) == expected


def test_everything_is_kept_where_the_policy_says_so() -> None:
    everything = kept(jax.checkpoint(loss(False), policy=jax.checkpoint_policies.everything_saveable), START, XS)
    for remat in (False, "save_all", Policy(save_block_internals=True), Policy(disable=True, save_carries="offload")):
        found = kept(loss(remat), START, XS)
        assert len(found) >= 4 and set(found) == {ALL}
        assert len(found) <= len(everything) + 1
    moved = kept(loss(Policy(save_block_internals=True, save_carries="offload")), START, XS)
    assert moved.count(HOST) == 1 and len(moved) == len(found)


@pytest.mark.parametrize(
    ("remat", "sines"),
    [(False, 1), (True, 2), ("offload", 2), ("nested", 3), (Policy(save_block_internals=["h"]), 1),
     (Policy(save_carries=False), 3)],
    ids=str,
)  # fmt: skip
def test_what_is_computed_again(remat: Any, sines: int) -> None:
    """The program of the gradient, before it is optimized, has one sine for the derivative of the cosine besides."""
    program = str(jax.make_jaxpr(jax.value_and_grad(loss(remat)))(START, XS))
    assert len(re.findall(r" sin ", program)) == sines + 1


POLICIES = [
    True, "offload", "nested", "save_all", Policy(nested=2), Policy(save_carries=False), Policy(prevent_cse=True),
    Policy(save_block_internals=["h"], offload_block_internals=["k"], save_carries="offload"),
    Policy(save_block_internals=True, save_inputs="offload"), Policy(save_carries=False, save_block_internals=["h"]),
    Policy(nested=True, save_carries=False, offload_block_internals=["k"]),
]  # fmt: skip


@pytest.mark.parametrize("unroll", [1, True])
def test_gradients_do_not_depend_on_the_policy(unroll: int | bool) -> None:
    def raw(c: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, x: (jax.numpy.tanh(jax.numpy.cos(jax.numpy.sin(c * x))) + c, None), c, x)[0].sum()

    xs = XS["step", axn.ds(0, 4)]
    expected = jax.jit(jax.value_and_grad(raw, argnums=(0, 1)))(START.array, xs.array)
    several = {str(p): lambda c, x, p=p: fold(body, "step", remat=p, unroll=unroll)(c, x).sum().array for p in POLICIES}

    @jax.jit
    def everything(c: Any, x: Any) -> Any:
        return {name: jax.value_and_grad(fn, argnums=(0, 1))(c, x) for name, fn in several.items()}

    for found in everything(START, xs).values():
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def temporary(remat: Any, length: int, unroll: int | bool = 1) -> int:
    """Return the bytes that the compiled value and gradient needs besides its arguments and results."""
    xs, start = axn.ones({"step": length, "embed": 4096}), axn.ones({"embed": 4096})
    step = jax.jit(jax.value_and_grad(lambda c, x: fold(body, "step", remat=remat, unroll=unroll)(c, x).sum().array))
    needs: Any = step.lower(start, xs).compile().memory_analysis()
    return needs.temp_size_in_bytes


def test_memory_of_compiled_programs() -> None:
    row = 4096 * 4
    plain, simple, nested = (temporary(remat, 64) for remat in (False, True, "nested"))
    assert plain > 2.9 * 64 * row
    assert 64 * row <= simple < 80 * row
    assert nested < 40 * row, "eight carries of groups, eight of the steps of one, and working memory"
    # Four times the steps: twice the memory.
    assert temporary("nested", 256) < 2.2 * nested


def test_unrolled_steps_are_still_computed_again() -> None:
    """Without a loop the compiler could find the two computations of a step equal, and keep the first after all."""

    def program(remat: Any, unroll: int | bool) -> str:
        return jax.jit(jax.grad(loss(remat, unroll))).lower(START, XS).as_text()

    assert "optimization_barrier" in program(True, True) and "optimization_barrier" in program("nested", 16)
    assert "optimization_barrier" not in program(True, 4) and "optimization_barrier" not in program(False, True)


def test_a_prime_number_of_steps_is_not_cut() -> None:
    xs = axn.ones({"step": 7, "embed": 3})
    fn = lambda remat: lambda c, x: fold(body, "step", remat=remat)(c, x).sum().array
    assert kept(fn("nested"), START, xs) == kept(fn(True), START, xs) == ["f32[7,3]"]


@pytest.mark.parametrize(("length", "groups"), [(12, 3), (16, 4), (24, 4), (32, 4), (64, 8), (2, None), (1, None)])
def test_the_number_of_groups_keeps_least(length: int, groups: int | None) -> None:
    found = Policy(nested=True)._groups(length)
    assert found == groups
    if groups is not None:
        divisors = [d for d in range(1, length + 1) if length % d == 0]
        assert groups + length // groups == min(d + length // d for d in divisors)


def test_outputs_of_nested_scans_are_in_order() -> None:
    xs = axn.arange(axn.Axis("step", 12))
    for reverse in (False, True):
        plain, nested = (
            scan(lambda c, x: (c + x, 10 * c + x), "step", remat=r, reverse=reverse)(0, xs) for r in (False, "nested")
        )
        assert int(plain[0]) == int(nested[0])
        np.testing.assert_array_equal(plain[1].array, nested[1].array)


@pytest.mark.parametrize("nested", [3, 5, 17])
def test_steps_that_cannot_be_cut(nested: int) -> None:
    with pytest.raises(ValueError, match=r"16 steps cannot be cut into nested=.* Use a divisor \(2, 4, 8\), or True"):
        fold(body, Step, remat=Policy(nested=nested))(START, XS)


# --- the policy itself ---


@pytest.mark.parametrize("word", [True, False, "offload", "recompute", "full", "save_all", "nested"])
def test_words_for_policies(word: bool | str) -> None:
    policy = Policy.from_bool_or_str(word)
    assert hash(policy) == hash(Policy.from_bool_or_str(word))
    assert policy.disable == (word is False)
    assert policy.nested == (word == "nested")
    assert policy.simple == (word is True)
    assert ("offload" in (policy.save_carries, policy.save_inputs)) == (word == "offload")


@pytest.mark.parametrize("word", ["everything", 1, None])
def test_unknown_words(word: Any) -> None:
    with pytest.raises(ValueError, match=r"expected one of True, False, 'offload', .*, got"):
        Policy.from_bool_or_str(word)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"save_block_internals": "attention"}, TypeError, r"save_block_internals takes a list.*=\['attention'\]"),
        ({"offload_block_internals": "mlp"}, TypeError, r"offload_block_internals takes a list of names"),
        ({"save_carries": "host"}, ValueError, r"save_carries is True, False or 'offload', not 'host'"),
        ({"save_block_internals": ["a"], "offload_block_internals": ["a"]}, ValueError, "'a' cannot be both"),
        ({"save_block_internals": True, "save_carries": False}, ValueError, "keeps everything"),
        ({"nested": 1}, ValueError, "nested=1 is not a number of groups"),
        ({"nested": 0}, ValueError, "nested=0 is not a number of groups"),
        ({"simple": True, "save_carries": "offload"}, ValueError, "simple=True keeps only the arguments"),
        ({"simple": True, "save_block_internals": ["a"]}, ValueError, "leave the other fields out"),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Policy(**fields)


def test_a_policy_checkpoints_any_step() -> None:
    policy = Policy(save_carries="offload", save_inputs="offload")
    step = policy.checkpoint("the carry", "the input", lambda c, x, *, act: act(body(c, x)))
    fn = lambda c, x: step(c, x, act=axn.negative).sum().array
    x = axn.ones(Embed)
    np.testing.assert_allclose(fn(START, x), -body(START, x).array.sum(), rtol=1e-6)
    assert kept(fn, START, x) == ["f32<host>[3]", "f32<host>[3]"]
    assert "name=the carry" in str(jax.make_jaxpr(fn)(START, x))


def test_naming_a_tree() -> None:
    tree = {"named": START, "raw": START.array, "number": 1.5, "function": axn.sin, "nothing": None}
    found = tree_checkpoint_name(tree, "hidden")
    assert found["function"] is axn.sin and found["number"] == 1.5 and found["nothing"] is None
    assert found["named"].axes == START.axes
    program = str(jax.make_jaxpr(lambda x, y: tree_checkpoint_name((x, y), "hidden"))(START, START.array))
    assert program.count("name=hidden") == 2


NESTED = jax.jit(lambda x: jax.ad_checkpoint.checkpoint_name(jax.numpy.sin(x), "hidden"))
"""Gives a name without `tree_checkpoint_name`."""


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["hiden"],
            r"fold\(step\): .* has 'hiden', but .* It names 'h', 'hidden', 'k'\. Did you mean 'hidden'\?",
        ),
        (["h", "hiden"], r"has 'hiden', .* Did you mean 'hidden'\?"),
        (["mlp", "attention"], r"has 'mlp', 'attention', but"),
        (["h"], None),
        (["hidden"], None),
        (["h", "attention"], None),  # a policy for several bodies
    ],
)
def test_warns_of_names_that_nothing_has(names: list[str], message: str | None) -> None:
    def run() -> Any:
        return fold(lambda c, x: body(c, x) + NESTED(c.array[0]), Step, remat=Policy(save_block_internals=names))(
            START, XS
        )

    if message is None:
        run()
        return
    with pytest.warns(UserWarning, match=message):
        run()


def test_warns_where_there_are_no_names() -> None:
    with pytest.warns(UserWarning, match="no array such a name. `axonym.tree_checkpoint_name` gives names"):
        fold(lambda c, x: c + x, Step, remat=Policy(offload_block_internals=["h"]))(START, XS)
