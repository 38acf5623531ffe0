"""Models in the layouts of other programs: on meshes, against NumPy, and with mistakes in the tables.

That the layout of the Hugging Face Hub is that of `transformers`, entry by entry, is tested in `test_models.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonym as axn
from axonym.state import WeightLayout, from_torch_compatible_state_dict
from examples.models import families, layouts, llama
from tests.interop.test_models import FOLDER

MESHES = [({"data": 4}, False), ({"data": 4}, True), ({"data": 2, "model": 2}, False), ({"data": 2, "model": 2}, True)]
MAPPING = {"embed": "data", "kv_heads": "model", "mlp": "model", "(kv_heads group head_size)": "model"}


def by_numpy(hub: dict[str, np.ndarray], program: str) -> dict[str, np.ndarray]:
    """Return what a program makes of the entries of the hub, of those that it joins: two layers, two heads of keys."""

    def joined(*names: str) -> Any:
        parts = [hub[name] for name in names]
        if program == "megatron" and "q_proj" in names[0]:
            return np.concatenate([x.reshape(2, -1, *x.shape[1:]) for x in parts], 1).reshape(-1, *parts[0].shape[1:])
        return np.concatenate(parts)

    found = {}
    for i in range(2):
        old = f"model.layers.{i}"
        new = f"decoder.layers.{i}" if program == "megatron" else old
        qkv, up = (
            ("self_attention.linear_qkv", "linear_fc1")
            if program == "megatron"
            else ("self_attn.qkv_proj", "gate_up_proj")
        )
        for kind in ("weight", "bias"):
            if f"{old}.self_attn.q_proj.{kind}" in hub:
                found[f"{new}.{qkv}.{kind}"] = joined(*(f"{old}.self_attn.{n}_proj.{kind}" for n in "qkv"))
        experts = sorted({int(e[1]) for key in hub if (e := re.match(rf"{old}\.mlp\.experts\.(\d+)", key))})
        ups = [joined(*(f"{old}.mlp.experts.{e}.{n}_proj.weight" for n in ("gate", "up"))) for e in experts]
        downs = [hub[f"{old}.mlp.experts.{e}.down_proj.weight"] for e in experts]
        if not experts:
            found[f"{new}.mlp.{up}.weight"] = joined(*(f"{old}.mlp.{n}_proj.weight" for n in ("gate", "up")))
        elif program == "serving":
            found |= {f"{new}.mlp.experts.w13_weight": np.stack(ups), f"{new}.mlp.experts.w2_weight": np.stack(downs)}
        else:
            prefix = f"{new}.mlp.experts.local_experts"
            found |= {f"{prefix}.{e}.linear_fc1.weight": x for e, x in enumerate(ups)}
            found |= {f"{prefix}.{e}.linear_fc2.weight": x for e, x in enumerate(downs)}
    return found


@pytest.mark.parametrize(("shape", "explicit"), MESHES)
@pytest.mark.parametrize("name", ["llama_linear", "qwen3_moe", "gemma2"])
def test_there_and_back_on_meshes(name: str, shape: dict[str, int], explicit: bool) -> None:
    """From the hub's layout to the others in turn, and back, to the last bit."""
    with np.load(FOLDER / f"{name}.npz") as kept:
        weights = {k.removeprefix("weights/"): x for k, x in kept.items() if k.startswith("weights/")}
        config = families.from_huggingface(json.loads(str(kept["config"])))
    like = jax.eval_shape(lambda key: llama.Llama.init(config, key=key), jax.random.key(0))
    every = {program: layouts.layout(like, program) for program in layouts.PROGRAMS}

    @axn.named_jit
    def converted(model: llama.Llama) -> Any:
        found = {}
        for program, layout in every.items():
            found[program] = layout.pack(model)
            model = layout.unpack(found[program], like)
        return found, model

    mapping = {axis: mesh_axis for axis, mesh_axis in MAPPING.items() if mesh_axis in shape}
    with jax.set_mesh(axn.make_mesh(shape, explicit=explicit)), axn.axis_mapping(mapping):
        model = from_torch_compatible_state_dict(like, weights, layout=every["hub"])
        entries, back = jax.block_until_ready(converted(model))
        query = model.blocks.stacked.attention.q_proj.weight.array
        assert query.sharding.spec == jax.P(None, mapping.get("kv_heads"), None, None, "data")
        assert back.blocks.stacked.attention.q_proj.weight.array.sharding == query.sharding
        output = entries["hub"]["model.layers.1.self_attn.o_proj.weight"].array
        assert output.sharding.is_equivalent_to(
            jax.NamedSharding(query.sharding.mesh, jax.P("data", mapping.get("kv_heads"))), 2
        )
    assert eqx.tree_equal(axn.to_host(back), axn.to_host(model))
    assert entries["hub"].keys() == weights.keys()
    for program, found in axn.to_host(entries).items():
        expected = weights if program == "hub" else by_numpy(weights, program)
        assert len(expected) >= 4
        for key, x in expected.items():
            np.testing.assert_array_equal(found[key].array, x, err_msg=f"{program}: {key}")


# --- mistakes ---

VOCAB, EMBED, LAYERS, KV, GROUP, SIZE, MLP = 11, 6, 3, 2, 5, 4, 7  # all differ, and so do their products
CONFIG = llama.Config(
    Vocab=axn.Axis("vocab", VOCAB),
    Embed=axn.Axis("embed", EMBED),
    Layers=axn.Axis("layers", LAYERS),
    KVHeads=axn.Axis("kv_heads", KV),
    Group=axn.Axis("group", GROUP),
    HeadSize=axn.Axis("head_size", SIZE),
    Mlp=axn.Axis("mlp", MLP),
)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 9)


def engine_arrays() -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays of an engine that knows no names."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, EMBED),
        "model.norm.weight": (EMBED,),
        "lm_head.weight": (VOCAB, EMBED),
    }
    for i in range(LAYERS):
        shapes |= {
            f"model.layers.{i}.input_layernorm.weight": (EMBED,),
            f"model.layers.{i}.self_attn.qkv_proj.weight": (KV * (GROUP + 2) * SIZE, EMBED),
            f"model.layers.{i}.self_attn.o_proj.weight": (EMBED, KV * GROUP * SIZE),
            f"model.layers.{i}.post_attention_layernorm.weight": (EMBED,),
            f"model.layers.{i}.mlp.gate_up_proj.weight": (2 * MLP, EMBED),
            f"model.layers.{i}.mlp.down_proj.weight": (EMBED, MLP),
        }
    return {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}


@jax.jit
@jax.numpy_rank_promotion("allow")
def engine(w: dict[str, jax.Array]) -> jax.Array:
    """Return the logits of the engine."""

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + CONFIG.norm_eps) * scale

    def rotated(x: jax.Array) -> jax.Array:
        angles = jnp.arange(len(TOKENS))[:, None] * 10000.0 ** -(jnp.arange(0, SIZE, 2) / SIZE)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        first, second = jnp.split(x, 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x = w["model.embed_tokens.weight"][TOKENS]
    for i in range(LAYERS):
        own = {key.removeprefix(f"model.layers.{i}."): value for key, value in w.items()}
        qkv = norm(x, own["input_layernorm.weight"]) @ own["self_attn.qkv_proj.weight"].T
        heads = qkv.reshape(len(TOKENS), -1, SIZE)
        q, k, v = jnp.split(heads, [KV * GROUP, KV * GROUP + KV], 1)
        q, k, v = rotated(q), jnp.repeat(rotated(k), GROUP, 1), jnp.repeat(v, GROUP, 1)
        scores = jnp.einsum("qhs,khs->hqk", q, k) * SIZE**-0.5
        scores = jnp.where(jnp.tri(len(TOKENS), dtype=bool), scores, -jnp.inf)
        attended = jnp.einsum("hqk,khs->qhs", jax.nn.softmax(scores), v).reshape(len(TOKENS), -1)
        x = x + attended @ own["self_attn.o_proj.weight"].T
        gate, up = jnp.split(norm(x, own["post_attention_layernorm.weight"]) @ own["mlp.gate_up_proj.weight"].T, 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ own["mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


@jax.jit
def ours(model: llama.Llama) -> jax.Array:
    return model(axn.named(TOKENS, ("pos",))).array


def replaced(old: str, new: str) -> Callable[[dict[str, str]], dict[str, str]]:
    """Return a mistake: other text in the one row that has a text."""

    def mistaken(table: dict[str, str]) -> dict[str, str]:
        (at,) = (key for key, row in table.items() if old in row and "bias" not in key)  # of which the model has none
        return table | {at: table[at].replace(old, new)}

    return mistaken


def swapped(a: str, b: str) -> Callable[[dict[str, str]], dict[str, str]]:
    """Return a mistake: two texts that are swapped in all rows."""

    def mistaken(table: dict[str, str]) -> dict[str, str]:
        other = {a: b, b: a}
        return {key: re.sub(f"{re.escape(a)}|{re.escape(b)}", lambda m: other[m[0]], row) for key, row in table.items()}

    return mistaken


def key(old: str, new: str | None) -> Callable[[dict[str, str]], dict[str, str]]:
    """Return a mistake: other text in the one key that has a text, or no such row."""

    def mistaken(table: dict[str, str]) -> dict[str, str]:
        assert sum(old in k for k in table) == 1
        return {
            k if old not in k else k.replace(old, new or ""): row for k, row in table.items() if new or old not in k
        }

    return mistaken


_ATTENTION = "blocks.stacked.attention"
# Each mistake, and for those that are found before an array is moved, what the message says.
MISTAKES: dict[str, tuple[Callable[[dict[str, str]], dict[str, str]], tuple[str, ...]]] = {
    "a path that does not exist": (
        replaced("mlp.down_proj", "mlp.down_prj"),
        ("mlp.down_proj.weight is float32[", "mlp.down_prj.weight'?"),
    ),
    "no row": (key("o_proj.weight", None), (f"{_ATTENTION}.o_proj.weight is float32[", "no row has it")),
    "another key": (
        key("qkv_proj.weight", "qvk_proj.weight"),
        ("qvk_proj.weight' is missing", "(_ head_size)=56, embed=6"),
    ),
    "the gate twice": (replaced("mlp.up_proj", "mlp.gate_proj"), ("mlp.up_proj.weight is float32[", "no row has it")),
    "the table is transposed": (
        replaced("table.weight -> vocab embed", "table.weight -> embed vocab"),
        ("'model.embed_tokens.weight': axis 'embed' has size 11, but by the table 6",),
    ),
    "the head is transposed": (
        replaced("head.weight -> vocab embed", "head.weight -> embed vocab"),
        ("'lm_head.weight': axis 'vocab' has size 6, but by the table 11",),
    ),
    "outputs are transposed": (
        replaced("embed (kv_heads group head_size)", "(kv_heads group head_size) embed"),
        ("o_proj.weight': axis '(kv_heads group head_size)' has size 6, but by the table 40",),
    ),
    "the perceptron is transposed": (
        replaced("embed mlp", "mlp embed"),
        ("down_proj.weight': axis 'mlp' has size 6, but by the table 7",),
    ),
    "queries are transposed": (
        replaced("(_ head_size) embed", "embed (_ head_size)"),
        ("qkv_proj.weight': axis '(_ head_size)' has size 6, but by the table 56",),
    ),
    "the gate is transposed": (
        replaced("(_ mlp) embed", "embed (_ mlp)"),
        ("gate_up_proj.weight': axis 'embed' has size 14, but by the table 6",),
    ),
    "an axis that does not exist": (
        replaced("(_ mlp) embed", "(_ mlp) emebd"),
        ("gate_up_proj.weight'", "without 'emebd'. Did you mean 'embed'?"),
    ),
    "heads are not merged": (
        replaced("embed (kv_heads group head_size)", "embed kv_heads group head_size"),
        ("has shape (6, 40)", "[embed=6, kv_heads=2, group=5, head_size=4]"),
    ),
    "too much is merged": (replaced("(_ mlp) embed", "(_ mlp embed)"), ("has shape (14, 6)", "[(_ mlp embed)=84]")),
    "nothing is joined": (replaced("(_ head_size)", "(kv_heads head_size)"), ("qkv_proj.weight'", "has no `_`")),
    "an axis is forgotten": (
        replaced("(kv_heads group),", "(kv_heads),"),
        ("axis 'group' of", "of size 5, has no place"),
    ),
    "an axis is added": (
        replaced("k_proj.weight (kv_heads)", "k_proj.weight (kv_heads group)"),
        ("k_proj.weight is float32[", "without 'group'"),
    ),
    "too many heads": (
        replaced("embed (kv_heads group", "embed (kv_heads=4 group"),
        ("axis '(kv_heads group head_size)' has size 40, but by the table 80",),
    ),
    "layers are not separate": (key("down_proj", "{nothing}"), ("without 'nothing'",)),
    "8 bits without scales": (
        replaced("embed mlp", "embed mlp as int8"),
        ("down_proj.weight'", "a cast to int8 would cut off fractions"),
    ),
    "the head is the table": (
        lambda table: table | {"lm_head.weight": "= model.embed_tokens.weight"},
        ("head.weight is float32[", "no row has it"),
    ),
    # What names and shapes do not show.
    "queries by group": (replaced("(kv_heads group),", "(group kv_heads),"), ()),
    "features before heads": (replaced("(_ head_size)", "(head_size _)"), ()),
    "outputs by group": (replaced("(kv_heads group head_size)", "(group kv_heads head_size)"), ()),
    "outputs by feature": (replaced("(kv_heads group head_size)", "(kv_heads head_size group)"), ()),
    "rotations of neighbours": (replaced("(_ head_size)", "(_ half two)"), ()),
    "values before keys": (swapped("k_proj", "v_proj"), ()),
    "up before gate": (swapped("gate_proj", "up_proj"), ()),
    "gate and up by turns": (replaced("(_ mlp)", "(mlp _)"), ()),
    "the norms": (swapped("attention_norm", "mlp_norm"), ()),
    "the head and the table": (swapped("head.weight", "table.weight"), ()),
}


def test_a_table_without_mistakes() -> None:
    like = jax.eval_shape(lambda key: llama.Llama.init(CONFIG, key=key), jax.random.key(0))
    layout = layouts.layout(like, "serving")
    layout.check(like, engine_arrays())
    assert layout.probe(like, ours, engine, key=jax.random.key(1)) < 1e-5


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str) -> None:
    like = jax.eval_shape(lambda key: llama.Llama.init(CONFIG, key=key), jax.random.key(0))
    mistaken, said = MISTAKES[mistake]
    table = layouts.table_of(like, "serving")
    assert len(MISTAKES) == 30 and mistaken(table) != table

    def call() -> None:
        layout = WeightLayout(mistaken(table), split={"head_size": "two=2 half"})
        layout.check(like, engine_arrays())
        if not said:
            layout.probe(like, ours, engine, key=jax.random.key(1))

    with pytest.raises(ValueError) as e:
        call()
    assert ("WeightLayout.probe" in str(e.value)) == (not said), str(e.value)
    for text in said or ("with the same random weights, results differ by",):
        assert text in str(e.value), str(e.value)


def test_entries_that_must_be_the_same() -> None:
    layout = WeightLayout({"emb": "table -> vocab embed", "head": "= emb"})
    like, one = {"table": axn.zeros({"vocab": 4, "embed": 3})}, jnp.ones((4, 3))
    assert float(layout.unpack({"emb": one, "head": np.ones((4, 3))}, like)["table"].sum()) == 12
    with pytest.raises(ValueError, match="'head' differs from 'emb', but in the layout they are the same"):
        layout.unpack({"emb": one, "head": 2 * one}, like)


def test_split_axes_in_parentheses_of_one_array() -> None:
    layout = WeightLayout({"{l}.qk": "q (g half two), k (half two) -> h _ e"}, split={"s": "two=2 half"})
    tree = {
        "q": axn.random.normal(jax.random.key(0), {"l": 2, "h": 2, "g": 3, "s": 4, "e": 5}),
        "k": axn.random.normal(jax.random.key(1), {"l": 2, "h": 2, "s": 4, "e": 5}),
    }
    packed = layout.pack(tree)
    assert packed["0.qk"].array.shape == (2, 16, 5)
    back = layout.unpack({key: x.array for key, x in packed.items()}, tree)
    for name, x in tree.items():
        np.testing.assert_array_equal(back[name].rearrange(x.names).array, x.array)


def test_a_probe_without_values_shows_nothing() -> None:
    layout, like = WeightLayout({"w": "weight -> out in"}), {"weight": axn.ones({"in": 3, "out": 2})}
    with pytest.raises(ValueError, match="all results are zero"):
        layout.probe(like, lambda t: t["weight"] * 0, lambda entries: entries["w"] * 0, key=jax.random.key(0))
