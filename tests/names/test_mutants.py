"""Programs in which one operation uses another axis of the same size, which names must find."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import axonym as axn
from axonym.names._sources import names_of_leaves
from axonym.names.inferring import follow
from tests.names.models import EQUAL, MODELS

MUTATED = ("gpt2", "resnet", "gnn", "lstm", "nnx_mlp", "equinox_transformer")

pytestmark = pytest.mark.usefixtures("promotes_ranks")


def changed(eqn: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield other parameters of an equation, each with the kind of the mistake."""
    name, params = eqn.primitive.name, eqn.params
    shape = eqn.invars[0].aval.shape if eqn.invars else ()
    if name == "transpose":  # an operand is transposed otherwise
        (a, b), order = (0, 1) if len(shape) == 2 else (len(shape) - 2, len(shape) - 1), list(params["permutation"])
        order[a], order[b] = order[b], order[a]
        if shape[order[a]] == shape[order[b]]:
            yield "operand", {"permutation": tuple(order)}
    if name == "dot_general":
        ((left, right), batch), (x, y) = params["dimension_numbers"], (v.aval.shape for v in eqn.invars)
        for side, (own, dims, size) in enumerate(((left, x, batch[0]), (right, y, batch[1]))):
            free = [i for i in range(len(dims)) if i not in (*own, *size) and len(own) == 1 and dims[i] == dims[own[0]]]
            for i in free[:1]:
                new = ((i,), right) if side == 0 else (left, (i,))
                yield "operand", {"dimension_numbers": (new, batch)}
    if name in ("reduce_sum", "reduce_max") and len(params["axes"]) == 1:
        (at,) = params["axes"]
        for i in [i for i in range(len(shape)) if i != at and shape[i] == shape[at]][:1]:
            yield "axis", {"axes": (i,)}
    if name == "broadcast_in_dim" and shape:
        at, out = params["broadcast_dimensions"], params["shape"]
        free = [i for i in range(len(out)) if i not in at and out[i] == shape[-1]]
        if free and shape[-1] > 1:
            order = sorted((*at[:-1], free[-1]))
            if order[-1] == free[-1] or len(at) == 1:
                yield "broadcast", {"broadcast_dimensions": tuple(order)}


def mutants(jaxpr: Any, constant: set[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield mutants of a jaxpr: the kind, the equation, and the program. Equations of constants alone stay."""
    for i, eqn in enumerate(jaxpr.eqns):
        fixed = [hasattr(v, "val") or v in constant for v in eqn.invars]
        if all(fixed):
            constant.update(eqn.outvars)
            continue
        if eqn.primitive.name == "jit":
            closed = eqn.params["jaxpr"]
            inner = {v for v, is_fixed in zip(closed.jaxpr.invars, fixed, strict=True) if is_fixed}
            found = [(kind, at, {"jaxpr": closed.replace(jaxpr=new)}) for kind, at, new in mutants(closed.jaxpr, inner)]
        else:
            found = [(kind, eqn, params) for kind, params in changed(eqn)]
        for kind, at, params in found:
            eqns = [*jaxpr.eqns]
            eqns[i] = eqn.replace(params={**eqn.params, **params})
            yield kind, at, jaxpr.replace(eqns=eqns)


def found_in(model: str) -> list[tuple[str, bool, str]]:
    """Return, for each mutant of a model, its kind, whether it is found, and its equation."""
    case = MODELS[model](EQUAL)
    program = axn.names.infer(case.loss, *case.loss_args, names=case.loss_names)
    assert not program.mix_ups
    said = names_of_leaves(case.loss, case.loss_args, {}, case.loss_names)
    names = [own for x, own in zip(jax.tree.leaves(case.loss_args), said, strict=True) if hasattr(x, "shape")]
    found = []
    for kind, eqn, mutant in mutants(program.traced.jaxpr.jaxpr, set()):
        traced = dataclasses.replace(program.traced, jaxpr=program.traced.jaxpr.replace(jaxpr=mutant))
        found.append((kind, bool(follow(traced, names).mix_ups), str(eqn)))
    return found


def test_mutants_are_found() -> None:
    found = [row for model in MUTATED for row in found_in(model)]
    assert {"operand", "axis"} <= {kind for kind, _, _ in found}
    assert len(found) > 50
    assert sum(is_found for _, is_found, _ in found) / len(found) >= 0.95


if __name__ == "__main__":
    for name in sys.argv[1:] or MUTATED:
        with jax.numpy_rank_promotion("allow"):
            rows = found_in(name)
        print(name, sum(is_found for _, is_found, _ in rows), "of", len(rows))
        for kind, is_found, text in rows:
            if not is_found:
                print("   ", kind, " ".join(text.split())[:300])
