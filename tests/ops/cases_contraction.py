"""Contractions: `dot` and `einsum`, compared with `jax.numpy.einsum` with the letters written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axonym as axn
from tests.ops.case import Case, Operand, f, of

# Cases about names and dtypes: they compile to the same programs as the other cases.
LIGHT: dict[str, Any] = {"grad": False, "sharded": False, "vmap": False}

X = f("batch", "pos", "embed")
W = f("embed", "heads")


def _einsum(equation: str, **options: Any) -> Callable[..., Any]:
    return jax.jit(lambda *arrays: jnp.einsum(equation, *arrays, **options))


def _dot(
    label: str,
    operands: tuple[Operand, ...],
    equation: str,
    names: tuple[str, ...],
    *,
    reference: Callable[..., Any] | None = None,
    light: bool = False,
    **options: Any,
) -> Case:
    return Case(
        "dot",
        operands,
        lambda *arrays: axn.dot(*arrays, **options),
        reference or _einsum(equation),
        label,
        names=names,
        **(LIGHT if light else {"grad": all(o.kind == "float" for o in operands)}),
    )


DOT = [
    _dot("matmul", (X, W), "bpe,eh->bph", ("batch", "pos", "heads"), axis="embed"),
    _dot("other layouts", (f("embed", "batch"), f("heads", "embed")), "eb,he->bh", ("batch", "heads"), axis="embed"),
    _dot(
        "attention",
        (f("batch", "pos", "heads", "embed"), f("batch", "x", "heads", "embed")),
        "bphe,bxhe->bhpx",
        ("batch", "heads", "pos", "x"),
        axis="embed",
        out_axes=("batch", "heads", ..., "x"),
    ),
    _dot(
        "several axes",
        (f("batch", "heads", "embed"), f("heads", "embed", "y")),
        "bhe,hey->by",
        ("batch", "y"),
        axis=(axn.Axis("embed", 8), "heads"),
    ),
    _dot("all axes", (X, f("embed", "batch")), "bpe,eb->", (), axis=None),
    _dot("no axes", (X, f("embed", "heads")), "bpe,eh->bpeh", ("batch", "pos", "embed", "heads"), axis=()),
    _dot("elementwise", (X, f("embed", "batch", "pos")), "bpe,ebp->bpe", ("batch", "pos", "embed"), axis=()),
    _dot("one operand", (X,), "bpe->ep", ("embed", "pos"), axis="batch", out_axes=("embed", "pos")),
    _dot("in one of two", (X, f("heads", "batch")), "bpe,hb->", (), axis=None),
    _dot("three", (X, W, f("heads", "y")), "bpe,eh,hy->bpy", ("batch", "pos", "y"), axis=("embed", "heads")),
    _dot(
        "four",
        (f("batch", "embed"), W, f("heads", "batch", "y"), f("pos", "y")),
        "be,eh,hby,py->pb",
        ("pos", "batch"),
        axis=("embed", "heads", "y"),
        out_axes=("pos", "batch"),
    ),
    _dot(
        "precision",
        (X, W),
        "",
        ("batch", "pos", "heads"),
        axis="embed",
        precision=jax.lax.Precision.HIGHEST,
        reference=_einsum("bpe,eh->bph", precision="highest"),
        light=True,
    ),
    _dot("mixed", (X, of("int", "embed", "heads")), "bpe,eh->bph", ("batch", "pos", "heads"), axis="embed", light=True),
    _dot("integers", (of("int", "batch", "pos"), of("int", "pos", "x")), "bp,px->bx", ("batch", "x"), axis="pos"),
    _dot(
        "booleans",
        (of("bool", "batch", "pos"), of("bool", "pos", "x"), of("bool", "x")),
        "bp,px,x->b",
        ("batch",),
        axis=("pos", "x"),
        light=True,
    ),
    _dot("boolean", (of("bool", "batch", "pos"),), "bp->b", ("batch",), axis="pos", light=True),
    _dot("complex", (of("complex", "batch", "x"), of("complex", "x")), "bx,x->b", ("batch",), axis="x", light=True),
    _dot(
        "accumulated",
        (of("bits", "batch", "x"), of("bits", "x", "y")),
        "",
        ("batch", "y"),
        axis="x",
        preferred_element_type=jnp.int32,
        reference=lambda a, b: a.astype(np.int32) @ b.astype(np.int32),
        light=True,
    ),
    _dot(
        "accumulated products",
        (of("bits", "batch", "x"), of("bits", "y")),
        "",
        ("batch", "x", "y"),
        axis=(),
        preferred_element_type="int32",
        reference=lambda a, b: a[:, :, None].astype(np.int32) * b.astype(np.int32),
        light=True,
    ),
    _dot(
        "accumulated sum",
        (of("bits", "batch", "x"),),
        "",
        ("x",),
        axis="batch",
        preferred_element_type="int32",
        reference=lambda a: a.sum(0, dtype=np.int32),
        light=True,
    ),
    Case(
        "dot",
        (X, W),
        lambda x, w: (axn.dot("embed", x, w), axn.dot(("embed", "pos"), x, w, x), x.dot(w, axis="embed")),
        lambda x, w: (x @ w, np.einsum("bpe,eh->bh", x * x, w), x @ w),
        "ways of writing",
        names=(("batch", "pos", "heads"), ("batch", "heads"), ("batch", "pos", "heads")),
        **LIGHT,
    ),
]

EINSUM = [
    Case(
        "einsum",
        (X, W),
        lambda x, w: (
            axn.einsum("batch pos embed, embed heads -> batch pos heads", x, w),
            axn.einsum("b p e, e h -> h b", x, w),
            axn.einsum("...  e,e h ->h ... ", x, w),
            axn.einsum("b ..., ... h -> b h", x, w),
        ),
        lambda x, w: (x @ w, (x @ w).sum(1).T, jnp.moveaxis(jnp.asarray(x) @ w, 2, 0), (x @ w).sum(1)),
        "in order",
        names=(("batch", "pos", "heads"), ("heads", "batch"), ("heads", "batch", "pos"), ("batch", "heads")),
        layout=False,
        grad=False,
        vmap=False,
    ),
    Case(
        "einsum",
        (X, W),
        lambda x, w: (
            axn.einsum("{embed} ->", x, w),
            axn.einsum("{embed heads} -> heads", x, w),
            axn.einsum("{embed pos} -> ... pos", x, w),
            axn.einsum("{embed, ...} -> embed", x, w),
            axn.einsum("{} ->", x, w),
            axn.einsum("-> heads batch", x, w),
            axn.einsum("-> heads ...", x, w),
            axn.einsum("->", x, w),
        ),
        lambda x, w: (
            x @ w,
            x @ w,
            jnp.swapaxes(x @ w, 1, 2),
            x.sum((0, 1)) * w.sum(1),
            x[..., None] * w,
            (x @ w).sum(1).T,
            jnp.moveaxis(x[..., None] * w, 3, 0),
            (x @ w).sum(),
        ),
        "by name",
        names=(
            ("batch", "pos", "heads"),
            ("batch", "pos", "heads"),
            ("batch", "heads", "pos"),
            ("embed",),
            ("batch", "pos", "embed", "heads"),
            ("heads", "batch"),
            ("heads", "batch", "pos", "embed"),
            (),
        ),
        rtol=1e-4,
        **LIGHT,
    ),
    Case(
        "einsum",
        (X, W),
        lambda x, w: (
            axn.einsum("b p E, E h -> b p h", x, w, E="embed"),
            axn.einsum("{E} -> ...", x, w, E=axn.Axis("embed", 8)),
            axn.einsum("-> H B", x, w, H="heads", B="batch"),
            axn.einsum("{E, P} -> P ...", x, w, E="embed", P="pos", preferred_element_type=jnp.float32),
        ),
        lambda x, w: (x @ w, x @ w, (x @ w).sum(1).T, jnp.swapaxes(x @ w, 0, 1)),
        "aliases",
        names=(("batch", "pos", "heads"), ("batch", "pos", "heads"), ("heads", "batch"), ("pos", "batch", "heads")),
        layout=False,
        **LIGHT,
    ),
    Case(
        "einsum",
        (f("batch", "embed"), f("embed", "y"), f("batch", "y", "heads")),
        lambda x, w, v: (
            axn.einsum("b e, e y, b y h -> h b", x, w, v),
            axn.einsum("-> batch y", x, w, v, precision="highest"),
            axn.einsum("{embed y heads} -> heads y", x["batch", 0], w, v["batch", 0]),
        ),
        lambda x, w, v: (
            jnp.einsum("be,ey,byh->hb", x, w, v),
            jnp.einsum("be,ey,byh->by", x, w, v),
            jnp.einsum("e,ey,yh->hy", x[0], w, v[0]),
        ),
        "three",
        names=(("heads", "batch"), ("batch", "y"), ("heads", "y")),
        layout=False,
        **LIGHT,
    ),
]

CASES: list[Case] = [*DOT, *EINSUM]
