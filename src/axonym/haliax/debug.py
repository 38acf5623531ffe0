"""Looking at trees: how their arrays lie on devices, and what is wrong with them."""

from ..debug import *  # noqa: F403
from .util import is_jax_or_hax_array_like as is_jax_or_hax_array_like
