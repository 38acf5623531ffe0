"""Linear layers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from ...named_array import NamedArray
from ...nn import Linear as Linear, MoELinear as _MoELinear


class MoELinear(_MoELinear):
    """A linear layer for each expert; with `use_gmm`, platforms other than TPUs use `jax.lax.ragged_dot`.

    >>> Experts, Embed, Mlp = hax.make_axes(experts=2, embed=3, mlp=4)
    >>> layer = hax.nn.MoELinear.init(Experts, Embed, Mlp, key=jax.random.key(0), use_gmm=True)
    >>> layer(hax.ones({"tokens": 8, "embed": 3}), hax.named([5, 3], Experts)).shape
    {'tokens': 8, 'mlp': 4}
    """

    @staticmethod
    @functools.wraps(_MoELinear.init)
    def init(*args: Any, **kwargs: Any) -> MoELinear:  # pyright: ignore[reportIncompatibleMethodOverride]
        made = _MoELinear.init(*args, **kwargs)
        return MoELinear(**{f.name: getattr(made, f.name) for f in dataclasses.fields(made)})

    def __call__(self, inputs: NamedArray, group_sizes: Any, *, key: Any = None) -> NamedArray:
        use_gmm = self.use_gmm and jax.default_backend() == "tpu"
        layer = _MoELinear(self.weight, self.bias, self.Experts, self.In, self.Out, use_gmm)
        return layer(inputs, group_sizes, key=key)
