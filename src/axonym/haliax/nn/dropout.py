"""Dropout, as a function and as a layer."""

from ...nn import Dropout as Dropout, dropout as dropout
