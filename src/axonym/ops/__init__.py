"""The operations, a file for each family; those that existing code imports from here are here."""

from .comparing import (
    allclose as allclose,
    array_equal as array_equal,
    array_equiv as array_equiv,
    isclose as isclose,
)
from .diagonals import trace as trace, tril as tril, triu as triu
from .joining import pad as pad, pad_left as pad_left
from .selection import clip as clip, nonzero as nonzero, searchsorted as searchsorted, where as where
from .sets import (
    bincount as bincount,
    packbits as packbits,
    unique as unique,
    unique_all as unique_all,
    unique_counts as unique_counts,
    unique_inverse as unique_inverse,
    unique_values as unique_values,
    unpackbits as unpackbits,
)
