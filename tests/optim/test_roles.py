from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import axonym as axn
from tests.optim.models import Embed, Mlp, gradients, model

TABLE = """\
table/weight                 no matrix: Embedding.weight
blocks/stacked/norm/weight   no matrix: RmsNorm.weight
blocks/stacked/norm/bias     no matrix: RmsNorm.bias
blocks/stacked/query/weight  embed=8 x heads=2 head_size=4   each of layers=8
blocks/stacked/query/bias    no matrix: Linear.bias
blocks/stacked/up/weight     embed=8 x mlp=16   each of layers=8
blocks/stacked/up/bias       no matrix: Linear.bias
blocks/stacked/down/weight   mlp=16 x embed=8   each of layers=8
experts/weight               embed=8 x mlp=16   each of experts=4
head/weight                  no matrix: predicts vocab
head/bias                    no matrix: Linear.bias"""


def second_updates(tx: Any, params: Any) -> Any:
    grads = gradients(params)
    _, state = tx.update(grads, tx.init(params), params)
    return tx.update(grads, state, params)[0]


def test_table() -> None:
    assert str(axn.optim.roles(model())) == TABLE


def test_one_matrix_for_each_head() -> None:
    role = next(r for r in axn.optim.roles(model(), batch="heads") if "query/weight" in r.path)
    assert (role.rows, role.columns, role.batch) == (("embed",), ("head_size",), ("layers", "heads"))


def test_convolutions_sum_over_their_window() -> None:
    In, Out = axn.make_axes(channels=3, out=4)
    conv = axn.nn.Conv.init("width", In, Out, 5, key=jax.random.key(0))
    role = axn.optim.roles(conv)[0]
    assert (set(role.rows), role.columns, role.batch) == ({"channels", "width"}, ("out",), ())


def test_an_axis_on_both_sides_is_stored_under_two_names() -> None:
    role = axn.optim.roles(axn.nn.Linear.init(Embed, Embed, key=jax.random.key(0)))[0]
    assert (role.rows, role.columns) == (("embed_in",), ("embed",))


def test_told() -> None:
    tree = {"w": axn.ones({"embed": 4, "mlp": 8}), "positions": axn.ones({"pos": 2, "embed": 4})}
    found = axn.optim.roles(tree, matrix={"^w$": ("embed", "mlp"), "positions": None})
    assert isinstance(found, axn.optim.Roles) and isinstance(found[0], axn.optim.Role)
    assert str(found) == "positions  no matrix: matrix= says so\nw          embed=4 x mlp=8"


@pytest.mark.parametrize(
    ("tree", "options", "message"),
    [
        ({"w": axn.ones({"embed": 4, "mlp": 8})}, {}, "w (embed=4, mlp=8) is in no layer"),
        ({"w": np.ones((4, 8))}, {}, "w of shape (4, 8) is in no layer"),
        ({"w": axn.ones({"embed": 4, "mlp": 8})}, {"matrix": {"w": ("embd", "mlp")}}, "Did you mean 'embed'?"),
        ({"w": axn.ones({"embed": 4, "mlp": 8})}, {"matrix": {"w": ("embed", "mlp"), "x": None}}, "contains 'x'"),
        ({"w": axn.ones({"embed": 4})}, {"batch": "embd"}, "Did you mean 'embed'?"),
    ],
)
def test_refused(tree: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        axn.optim.roles(tree, **options)
    assert message in str(raised.value)


@pytest.mark.parametrize("batch", [(), "heads"])
def test_optax_told_by_names_gives_the_updates_of_muon(batch: Any) -> None:
    """Heads are matrices of their own, too; Optax's Adam has Nesterov momentum, so only matrices are compared."""
    params = model()
    numbers = functools.partial(axn.optim.dimension_numbers, batch=batch)
    told = second_updates(optax.contrib.muon(2e-2, muon_weight_dimension_numbers=numbers), params)
    ours = second_updates(axn.optim.muon(2e-2, batch=batch), params)
    compared = 0
    for role, a, b in zip(axn.optim.roles(params), jax.tree.leaves(told), jax.tree.leaves(ours), strict=True):
        if not role.no_matrix:
            compared += 1
            assert np.linalg.norm(a - b) < 1e-6 * np.linalg.norm(b), role.path
    assert compared == 4


def test_renamed_axes_change_nothing() -> None:
    layer = axn.nn.Linear.init(Embed, Mlp, key=jax.random.key(0))
    other = axn.nn.Linear.init(axn.Axis("a", 8), axn.Axis("b", 16), key=jax.random.key(0))
    a, b = (second_updates(axn.optim.muon(2e-2), x).weight.array for x in (layer, other))
    assert (a == b).all()


def test_a_convolution_with_groups_is_no_matrix() -> None:
    In, Out = axn.make_axes(channels=4, features=8)
    for groups, expected in ((1, ""), (2, "Conv.weight has groups, whose outputs see different inputs")):
        layer = axn.nn.Conv.init("time", In, Out, 3, groups=groups, use_bias=False, key=jax.random.key(0))
        assert axn.optim.roles(layer)[0].no_matrix == expected
