"""Random numbers by name.

Samplers take a key, the axes of the result, and parameters that broadcast by name. They draw the same values as the
function of the same name in `jax.random` for these sizes, except for `categorical`, which never all-gathers its logits.
The values do not depend on the mesh, the active mapping or jit. The result is sharded by the active mapping, and each
device draws only its own shard.

>>> rate = axn.named([1.0, 10.0], "kind")
>>> axn.random.poisson(jax.random.key(0), {"batch": 8, "kind": 2}, rate).shape
{'batch': 8, 'kind': 2}
"""

import typing as _typing

from .distributions import (
    ball as ball,
    bernoulli as bernoulli,
    beta as beta,
    cauchy as cauchy,
    exponential as exponential,
    gamma as gamma,
    gumbel as gumbel,
    laplace as laplace,
    loggamma as loggamma,
    logistic as logistic,
    normal as normal,
    pareto as pareto,
    poisson as poisson,
    rademacher as rademacher,
    randint as randint,
    t as t,
    truncated_normal as truncated_normal,
    uniform as uniform,
    weibull_min as weibull_min,
)
from .sampling import categorical as categorical
from .selecting import choice as choice, permutation as permutation

if not _typing.TYPE_CHECKING:  # so that type checkers refuse a name that does not exist

    def __getattr__(name: str) -> object:
        from ..core.lazy_loading import missing_name

        raise AttributeError(missing_name(__name__, name, globals()))
