"""The meshes for operations over a vocabulary: Auto and Explicit, with no axis sharded, one, or both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

import axonym as axn

# The most demanding ones are tested with every version of JAX.
MAPPINGS: list[Any] = [
    {"batch": "data", "vocab": "model"},
    {"vocab": ("data", "model")},
    *(pytest.param(m, marks=pytest.mark.oldest) for m in ({"batch": "data"}, {"vocab": "model"}, {"batch": None})),
]


@pytest.fixture(params=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest, auto_mesh: Mesh, explicit_mesh: Mesh) -> Iterator[Mesh]:
    mesh = {"auto": auto_mesh, "explicit": explicit_mesh}[request.param]
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(params=MAPPINGS, ids=lambda m: "+".join(n for n, a in m.items() if a) or "neither")
def mapping(request: pytest.FixtureRequest) -> Iterator[axn.sharding.ResourceMapping]:
    with axn.axis_mapping(request.param):
        yield request.param
