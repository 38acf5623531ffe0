"""Type aliases for the parameters of functions."""

from typing import TypeAlias

import numpy as np
from jax.lax import Precision as Precision
from jax.typing import DTypeLike as DTypeLike

from ..typing import (
    FilterSpec as FilterSpec,
    FilterTree as FilterTree,
    GatherScatterModeStr as GatherScatterModeStr,
    IntScalar as IntScalar,
    PrecisionLike as PrecisionLike,
    Scalar as Scalar,
)

DType: TypeAlias = np.dtype
