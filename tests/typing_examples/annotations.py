"""Types that checkers see for annotations with axes and dtypes: named arrays."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import equinox as eqx
import jax

import axonym as axn
from axonym import NamedArray
from axonym.typing import Float, Int, Shaped, f32

x = axn.ones({"batch": 2, "embed": 3})


def centred(x: f32[NamedArray, "batch embed"]) -> Float[NamedArray, "batch embed"]:
    assert_type(x, NamedArray)
    assert_type(x.array, jax.Array)
    return x - x.mean("embed")


def looked_up(table: Shaped[NamedArray, "vocab embed"], ids: Int[NamedArray, "..."]) -> Shaped[NamedArray, "... embed"]:
    return table["vocab", ids]


class Scale(eqx.Module):
    weight: Float[NamedArray, " embed"]

    def __call__(self, x: Float[NamedArray, "... embed"]) -> Float[NamedArray, "... embed"]:
        assert_type(self.weight, NamedArray)
        return self.weight * x


assert_type(centred(x), NamedArray)
assert_type(centred(x) + 1, NamedArray)
assert_type(looked_up(axn.ones({"vocab": 4, "embed": 3}), axn.named([1], "batch")), NamedArray)
assert_type(Scale(axn.ones({"embed": 3}))(x), NamedArray)


def refused() -> None:
    """Calls that type checkers reject: an unnecessary `ignore` is an error."""
    centred(1.0)  # type: ignore[arg-type]
    centred(x).typo  # type: ignore[attr-defined]
