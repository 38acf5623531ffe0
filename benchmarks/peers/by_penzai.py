"""The transformer with Penzai: a model is a tree of layers, and a trainer holds the state of the loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.toolshed import basic_training, sharding_util

from .case import EPS, OPTIMIZER, Program, Sizes, make_inputs, make_tokens


def layer_norm(name: str, sizes: Sizes, key: jax.Array) -> pz.nn.Layer:
    return pz.nn.LayerNorm.from_config(f"{name}/norm", key, {"embed": sizes.embed}, epsilon=EPS)


def attention(name: str, sizes: Sizes, key: jax.Array) -> pz.nn.Attention:
    embed, heads = {"embed": sizes.embed}, {"heads": sizes.heads, "head_size": sizes.head_size}

    def linear(part: str, axes_in: dict[str, int], axes_out: dict[str, int]) -> pz.nn.Linear:
        return pz.nn.Linear.from_config(f"{name}/{part}", key, axes_in, axes_out)

    queries = {"pos": "q", "heads": "h", "head_size": "s"}
    keys = {"pos": "k", "heads": "h", "head_size": "s"}
    weights = {"heads": "h", "pos": "q", "key_pos": "k"}
    return pz.nn.Attention(
        input_to_query=pz.nn.Sequential(
            [linear("q", embed, heads), pz.nn.ConstantRescale(by=jnp.array(sizes.head_size**-0.5))]
        ),
        input_to_key=linear("k", embed, heads),
        input_to_value=linear("v", embed, heads),
        query_key_to_attn=pz.nn.Sequential(
            [
                pz.nn.NamedEinsum((queries, keys), weights),
                pz.nn.ApplyCausalAttentionMask(jnp.array(-1e30), seq_axis="pos", kv_seq_axis="key_pos"),
                pz.nn.Softmax("key_pos"),
            ]
        ),
        attn_value_to_output=pz.nn.Sequential(
            [pz.nn.NamedEinsum((weights, keys), queries), linear("o", heads, embed)],
        ),
    )


def block(name: str, sizes: Sizes, key: jax.Array) -> pz.nn.Sequential:
    embed, mlp = {"embed": sizes.embed}, {"mlp": sizes.mlp}
    attend = [layer_norm(f"{name}/attention", sizes, key), attention(f"{name}/attention", sizes, key)]
    perceptron = [
        layer_norm(f"{name}/mlp", sizes, key),
        pz.nn.Linear.from_config(f"{name}/up", key, embed, mlp),
        pz.nn.Elementwise(jax.nn.gelu),
        pz.nn.Linear.from_config(f"{name}/down", key, mlp, embed),
    ]
    return pz.nn.Sequential([pz.nn.Residual(pz.nn.Sequential(attend)), pz.nn.Residual(pz.nn.Sequential(perceptron))])


def transformer(sizes: Sizes, key: jax.Array) -> pz.nn.Sequential:
    embed = {"embed": sizes.embed}
    table = pz.nn.EmbeddingTable.from_config("table", key, sizes.vocab, embed, vocabulary_axis="vocab")
    return pz.nn.Sequential(
        [
            pz.nn.EmbeddingLookup(table),
            *(block(f"block{i}", sizes, key) for i in range(sizes.layers)),
            layer_norm("last", sizes, key),
            pz.nn.Linear.from_config("head", key, embed, {"vocab": sizes.vocab}),
        ]
    )


def loss(*, model: Any, state: Any, rng: Any, tokens: pz.nx.NamedArray, targets: pz.nx.NamedArray) -> Any:
    logits = model(tokens, token_positions=pz.nx.arange("pos", tokens.named_shape["pos"]))
    log_probabilities = pz.nx.nmap(jax.nn.log_softmax)(logits.untag("vocab"))
    picked = pz.nx.nmap(lambda row, i: row[i])(log_probabilities, targets)
    value = -picked.untag("batch", "pos").mean().unwrap()
    return value, state, value


def trainer(model: Any) -> basic_training.StatefulTrainer:
    return basic_training.StatefulTrainer.build(
        root_rng=jax.random.key(0), model=model, optimizer_def=OPTIMIZER, loss_fn=loss
    )


def init_sharded(mesh: jax.sharding.Mesh, sizes: Sizes, key: jax.Array) -> Any:
    return sharding_util.sharded_init(transformer, sizes, key, mesh=mesh, axis_name_to_mesh_name={"embed": "data"})


def place_batch(mesh: jax.sharding.Mesh, *arrays: Any) -> Any:
    return sharding_util.name_to_name_device_put(arrays, mesh, {"batch": "data"})


# --- for the comparison ---


def make_block(sizes: Sizes, weights: Any) -> Program:
    model = transformer(sizes, jax.random.key(0))
    _fill(model, weights)
    block = pz.freeze_variables(model.sublayers[1])
    x = pz.nx.wrap(jnp.asarray(make_inputs(sizes))).tag("batch", "pos", "embed")
    fn = jax.jit(lambda block, x: block(x, token_positions=pz.nx.arange("pos", sizes.pos)))
    order = ("batch", "pos", "embed")
    return Program(lambda: fn(block, x), lambda: fn.lower(block, x), lambda y: y.unwrap(*order))


def make_step(sizes: Sizes, weights: Any) -> Program:
    model = transformer(sizes, jax.random.key(0))
    _fill(model, weights)
    return _training(model, _batch(sizes))


def make_sharded_step(sizes: Sizes, weights: Any, mesh: jax.sharding.Mesh) -> Program:
    model = init_sharded(mesh, sizes, jax.random.key(0))
    _fill(model, weights)
    return _training(model, place_batch(mesh, *_batch(sizes)))


def _batch(sizes: Sizes) -> Any:
    return tuple(pz.nx.wrap(jnp.asarray(x)).tag("batch", "pos") for x in make_tokens(sizes))


def _training(model: Any, batch: Any) -> Program:
    made = trainer(model)
    jitted, given = made.step_fn, {}

    def step_fn(**arguments: Any) -> Any:
        given.update(arguments)
        return jitted(**arguments)

    made = dataclasses.replace(made, step_fn=step_fn)
    tokens, targets = batch
    return Program(lambda: made.step(tokens=tokens, targets=targets), lambda: jitted.lower(**given))


def _fill(model: Any, weights: Any) -> None:
    def put(name: str, w: jax.Array) -> None:
        parameter = parameters[name]
        old = parameter.value
        order = tuple(old.named_axes)
        assert tuple(old.named_axes.values()) == w.shape, (name, old.named_axes, w.shape)
        array = jax.device_put(w, jax.tree.leaves(old)[0].sharding)
        parameter.value = pz.nx.wrap(array).tag(*order)

    parameters = {p.label: p for p in pz.unbind_params(model)[1]}
    put("table.embeddings", weights["table"]), put("head.weights", weights["head"])
    norms = {"last/norm": weights["norm"]}
    for i, w in enumerate(weights["blocks"]):
        norms |= {f"block{i}/attention/norm": w["norm1"], f"block{i}/mlp/norm": w["norm2"]}
        for name in ("attention/q", "attention/k", "attention/v", "attention/o", "up", "down"):
            put(f"block{i}/{name}.weights", w[name.removeprefix("attention/")])
    for name, w in norms.items():
        put(f"{name}/scale.weights", w["scale"]), put(f"{name}/shift.bias", w["bias"])
