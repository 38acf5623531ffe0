"""Steps are compiled for TPUs that this machine does not have. The compiler for TPUs is optional."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import axonym as axn
from axonym import nn
from axonym.insight import compare, explain, explaining
from axonym.insight.chips import islands_of
from axonym.nn.attention import Causal, dot_product_attention
from axonym.sharding import slices_along
from benchmarks.llama import CONFIG
from examples import diloco
from examples.models.llama import Llama
from tests.insight import cases

MESH = {"data": 4, "model": 2}
TOPOLOGY = "v5e:2x4"


# The topology, the mesh, the axes of a collective, its kind, and what the compiler makes of it. A change of this table
# is news of the compiler, and of `fsdp` on TPUs, not a defect; `chips.made_on_torus` follows it.
MADE: list[tuple[str, dict[str, int], Any, str, str | None]] = [
    ("v5e:4x4", {"data": 16}, "data", "reduce-scatter", "all-reduce"),
    ("v6e:4x4", {"data": 16}, "data", "reduce-scatter", "all-reduce"),
    ("v5p:2x2x2", {"data": 8}, "data", "reduce-scatter", "all-reduce"),
    ("v5p:2x2x4", {"data": 16}, "data", "reduce-scatter", "all-reduce"),
    ("v5e:4x4", {"x": 4, "y": 4}, ("x", "y"), "reduce-scatter", "all-reduce"),
    ("v5e:2x2", {"data": 4}, "data", "reduce-scatter", None),
    ("v5p:2x2x1", {"data": 4}, "data", "reduce-scatter", None),
    ("v5e:2x4", {"data": 8}, "data", "reduce-scatter", None),
    ("v5e:4x8", {"data": 32}, "data", "reduce-scatter", None),
    ("v5e:4x4", {"x": 4, "y": 4}, "x", "reduce-scatter", None),
    ("v5e:4x4", {"data": 16}, "data", "all-gather", None),
    ("v5p:2x4x4", {"data": 32}, "data", "all-gather", None),
    ("v5p:4x4x4", {"data": 64}, "data", "all-gather", "all-reduce"),
    ("v5p:4x4x8", {"data": 128}, "data", "all-gather", "all-reduce"),
    ("v5e:4x4x2slices", {"replica": 2, "data": 16}, "data", "reduce-scatter", None),
]


@pytest.mark.parametrize(("topology", "sizes", "over", "kind", "made"), MADE)
def test_estimates_are_of_what_the_compiler_makes(
    topology: str, sizes: dict[str, int], over: Any, kind: str, made: str | None
) -> None:
    islands, axes = islands_of(topology, "v5p"), (over,) if isinstance(over, str) else over
    own, of_sum = (islands.rate(sizes, k, axes) for k in (kind, "all-reduce"))
    assert ((own.per_byte, own.launch) == (of_sum.per_byte, of_sum.launch)) == (made is not None)
    assert own.busy["links"] == of_sum.busy["links"] / 2, "a compiler may do better than this one"


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ImportError, match=r"install axonym\[tpu-plan\]"):
        explain(lambda x: x, axn.ones({"batch": 4}), mesh=axn.make_mesh(MESH), topology=TOPOLOGY)


def test_what_is_wrong_is_said_first() -> None:
    with pytest.raises(ValueError, match=r"a mesh is needed for the topology 'v5e:2x4'"):
        explain(lambda x: x, 1.0, topology=TOPOLOGY)
    with pytest.raises(ValueError, match=r"by='partitioner' is not for a topology"):
        explain(lambda x: x, 1.0, mesh=axn.make_mesh(MESH), topology=TOPOLOGY, by="partitioner")


class TestWithTheCompiler:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("libtpu", reason="needs the extra: pip install -e '.[tpu-plan]'")

    @pytest.mark.parametrize("strategy", ["fsdp", "tensor", "mixed"])
    def test_a_step_exchanges_and_computes_what_it_does_on_a_cpu(self, strategy: str, mesh: jax.sharding.Mesh) -> None:
        """Loops are counted, and asynchronous collectives once. Weights may be gathered in bfloat16."""
        _, step, args = cases.language_model("llama", strategy, mesh.axis_types[0])
        here = explain(step, *args, mesh=mesh, by="partitioner")
        there = explain(step, *args, mesh=mesh, topology=TOPOLOGY)
        assert there.platform == "tpu" and there.flops == here.flops and there.memory is not None
        assert all(c.times is not None for c in there.collectives)
        for axis in mesh.axis_names:
            sent, expected = there.total_sent(axis), here.total_sent(axis)
            assert sent is not None and expected is not None
            assert expected / 2 <= sent <= expected, axis

    @pytest.mark.parametrize("name", ["context", "pipeline+fsdp", "expert"])
    def test_mappings_of_the_training_script(self, name: str) -> None:
        """Rings, pipelines and exchanges of experts, too. Flops are not compared: experts have kernels on TPUs."""
        compute, storage = cases.example("training.strategies").BUILT_IN[name]
        second = {"context": "model", "pipeline+fsdp": "stage", "expert": "expert"}[name]
        config = dataclasses.replace(CONFIG, Experts=axn.Axis("experts", 4) if name == "expert" else None)
        model = jax.eval_shape(lambda: Llama.init(config, key=jax.random.key(0)))
        tokens = jax.eval_shape(lambda: axn.zeros({"batch": 16, "pos": 32}, "int32"))
        schedule = axn.schedules.OneFOneB(4, axis="batch") if "layers" in compute else None

        def step(model: Llama, tokens: axn.NamedArray) -> Any:
            return jax.value_and_grad(lambda model: model.loss(tokens, schedule))(model)

        mesh = axn.make_mesh({"data": 4, second: 2})
        report = explain(step, model, tokens, mapping=(storage, compute), mesh=mesh, topology=TOPOLOGY)
        assert all(c.times is not None for c in report.collectives)
        permute = "collective-permute"
        kind = {"context": permute, "pipeline+fsdp": permute, "expert": "ragged-all-to-all"}[name]
        found = [c for c in report.collectives if c.kind == kind]
        assert any(second in (c.axes or ()) for c in found)
        if name == "expert":
            assert {c.reason for c in found} == {"sends rows to experts, which is sharded over expert, or results back"}
            assert not any("experts" in c.gathered for c in report.collectives)

    @pytest.mark.parametrize(
        ("topology", "sizes", "between", "along"),
        [
            ("v5e:4x4x2slices", {"replica": 2, "data": 16}, None, {"replica": 2}),
            ("v5e:4x4x2slices", {"data": 4, "model": 8}, "model", {"model": 2}),
            ("v5p:2x2x4x4slices", {"data": 8, "model": 8}, {"data": 2, "model": 2}, {"data": 2, "model": 2}),
            ("v6e:4x4x4slices", {"data": 8, "model": 8}, ("model", "data"), {"model": 4}),
            # `jax.make_mesh` refuses these on one slice.
            ("v6e:4x4", {"data": 8, "model": 2}, None, {}),
            ("v5p:4x4x4", {"data": 8, "model": 8}, "data", {}),
            ("v5p:2x2x4", {"data": 2, "model": 2, "x": 4}, None, {}),
        ],
    )
    def test_meshes(self, topology: str, sizes: dict[str, int], between: Any, along: dict[str, int]) -> None:
        abstract = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
        on_topology = explaining._on_topology(abstract, topology, between)
        devices = sorted(on_topology.devices.flat, key=lambda device: device.id)
        mesh = axn.make_mesh(sizes, devices=devices, between=between)
        assert dict(mesh.shape) == sizes and slices_along(mesh) == slices_along(on_topology) == along
        assert len({device.id for device in mesh.devices.flat}) == mesh.size
        with pytest.raises((NotImplementedError, ValueError, AssertionError)):  # for slices, the last one
            jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices)

    @pytest.mark.parametrize(
        ("sizes", "stored"),
        [
            ({"replica": 2, "data": 16}, "data"),
            ({"replica": 2, "data": 16}, ("replica", "data")),
            ({"data": 32}, "data"),
        ],
    )
    def test_slices_exchange_what_names_say(self, sizes: dict[str, int], stored: Any) -> None:
        w, x = jax.eval_shape(lambda: (axn.ones({"embed": 512, "mlp": 1024}), axn.ones({"batch": 256, "embed": 512})))
        step = jax.grad(lambda w, x: (axn.dot(x, w, axis="embed") ** 2).mean().scalar())
        mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
        where: dict[str, Any] = {"mapping": ({"embed": stored}, {"batch": tuple(sizes)}), "mesh": mesh}
        between = {next(iter(sizes)): 2}
        names = explain(step, w, x, by="names", between=between, **where)
        compiled = explain(step, w, x, topology="v5e:4x4x2slices", between=between, **where)
        assert compiled.between == between and compiled.total_sent("slices") == names.total_sent("slices") == 2**17
        assert {c.slices for c in compiled.collectives} == {1, 2}
        assert all(c.axes == (next(iter(between)),) for c in compiled.chosen("slices"))

    def test_replicas_on_two_slices_send_what_names_say(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The slow network has nothing of an inner step, and the parameters of a device of an outer one."""
        for axis in axn.make_axes(embed=512, mlp=1024, batch=256):
            monkeypatch.setattr(diloco, axis.name.title(), axis)
        mesh = jax.sharding.AbstractMesh((2, 16), ("slice", "data"))
        x = jax.eval_shape(lambda: diloco.texts(jax.random.key(1), 2))

        def start() -> Any:
            anchor = diloco.make_model(jax.random.key(0))
            models = diloco.replicate(anchor, 2)
            return anchor, diloco.NESTEROV.init(anchor), models, axn.vmap(diloco.ADAM.init, "replica")(models)

        anchor, momentum, models, states = jax.eval_shape(start)
        where: dict[str, Any] = {"mesh": mesh, "between": "slice"}
        on: dict[str, Any] = where | {"topology": "v5e:4x4x2slices"}
        both: Any = diloco.STORAGE, diloco.COMPUTE
        inner = explain(axn.vmap(diloco.step, "replica"), models, states, x, mapping=both, **on)
        assert inner.total_sent("slices") == 0 and inner.total_sent("data")
        given = anchor, momentum, models
        compiled = explain(diloco.agree, *given, mapping=both, **on).total_sent("slices")
        in_8_bits = explain(functools.partial(diloco.agree, int8=True), *given, mapping=both, **on).total_sent("slices")
        stored = sum(x.size * 4 // (16 if "embed" in x.names else 1) for x in axn.tree.leaves(anchor))
        names = explain(diloco.agree, *given, mapping=diloco.STORAGE, by="names", **where).total_sent("slices")
        assert names == stored
        for sent, expected in ((compiled, stored), (in_8_bits, stored / 4)):  # TPUs pad the smallest arrays
            assert sent is not None and expected <= sent <= 1.01 * expected

    def test_arguments_that_are_placed(self) -> None:
        mesh = axn.make_mesh(MESH)
        x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P("data")))
        report = compare(lambda x: jnp.sum(x, 0), [x], {"none": None}, mesh=mesh, topology=TOPOLOGY).reports["none"]
        assert [c.kind for c in report.collectives] == ["all-reduce"] and report.mesh == MESH
        elsewhere = axn.make_mesh({"data": 8})
        with pytest.raises(ValueError, match=r"an argument is on the mesh \{'data': 4, 'model': 2\}"):
            explain(lambda x: x, x, mesh=elsewhere, topology=TOPOLOGY)

    def test_kernels_and_what_brings_its_own_partitioning(
        self, explicit_mesh: jax.sharding.Mesh, auto_mesh: Any
    ) -> None:
        """Kernels of the platform that is compiled for are chosen, and run device by device."""
        Batch, Pos, Heads, Size, Experts, Vocab = axn.make_axes(
            batch=8, pos=128, heads=2, head_size=128, experts=4, vocab=512
        )
        compute = {"batch": "data", "heads": "model", "vocab": "model"}
        x = jax.eval_shape(lambda: axn.zeros((Batch, Pos, Heads, Size), "bfloat16"))
        logits, sizes = jax.eval_shape(lambda: (axn.zeros((Batch, Vocab)), axn.zeros(Experts, "int32")))
        rows = jax.eval_shape(lambda: axn.zeros((Vocab.alias("rows"), Size)))
        layer = jax.eval_shape(
            lambda: nn.MoELinear.init(Experts, Size, Size.alias("out"), key=jax.random.key(0), use_gmm=True)
        )

        def attend(x: axn.NamedArray) -> Any:
            def total(x: axn.NamedArray) -> Any:
                keys, mask = x.rename({"pos": "key_pos"}), Causal("pos")
                y = dot_product_attention(x, keys, keys, "key_pos", "head_size", mask, implementation="fused")
                return y.astype("float32").sum().scalar()

            return jax.grad(total)(x)

        for mesh in (auto_mesh, explicit_mesh):
            settings: Any = {"mesh": mesh, "topology": TOPOLOGY}
            report = explain(attend, x, mapping=compute, **settings)
            assert report.total_sent() == 0 and "tpu_custom_call" in report.notes[0]
            multiply = lambda layer, x, sizes: layer(x, sizes)
            report = explain(multiply, layer, rows, sizes, mapping={"experts": None}, **settings)
            assert report.total_sent() == 0 and "tpu_custom_call" in report.notes[0]
        largest = lambda x: axn.top_k(x, "vocab", 4)
        sent = explain(largest, logits, mapping=compute, mesh=explicit_mesh, topology=TOPOLOGY).total_sent("model")
        assert sent is not None and 0 < sent < 512, "candidates, not logits"
        with pytest.raises(ValueError, match=r"only on a mesh whose axes are Explicit"):
            explain(largest, logits, mapping=compute, mesh=auto_mesh, topology=TOPOLOGY)

    def test_what_does_not_fit_is_the_compilers_error(self) -> None:
        mesh = axn.make_mesh(MESH)
        x = jax.ShapeDtypeStruct((2**18, 2**16), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("data")))
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            explain(lambda x: x @ x.T, x, mesh=mesh, topology=TOPOLOGY)

    @pytest.mark.parametrize(
        ("topology", "message"),
        [
            ("v5e:2x2", "'v5e:2x2' has 4 devices and the mesh {'data': 4, 'model': 2} has 8"),
            ("v0", "cannot be asked for the topology 'v0'"),
        ],
    )
    def test_topologies_that_do_not_fit(self, topology: str, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            explain(lambda x: x, 1.0, mesh=axn.make_mesh(MESH), topology=topology)

    @pytest.mark.parametrize(("topology", "sizes", "over", "kind", "made"), MADE)
    def test_what_the_compiler_makes_of_a_collective(
        self, topology: str, sizes: dict[str, int], over: Any, kind: str, made: str | None
    ) -> None:
        mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
        P = jax.sharding.PartitionSpec

        def exchange(x: jax.Array) -> jax.Array:
            if kind == "all-gather":
                return jax.lax.all_gather(x[0], over, axis=0, tiled=True)[None]
            return jax.lax.psum_scatter(x[0], over, scatter_dimension=0, tiled=True)[None]

        x = jax.ShapeDtypeStruct((mesh.size, 4096 if kind != "all-gather" else 256, 14336), "bfloat16")
        every = P(tuple(sizes))

        def step(x: jax.Array) -> jax.Array:
            return jax.shard_map(exchange, in_specs=every, out_specs=every, check_vma=False)(x)

        report = explain(jax.jit(step), x, mesh=mesh, topology=topology)
        found = max(report.collectives, key=lambda c: c.sent or 0)
        assert (found.kind, found.made, found.beside) == (kind, made, 0)
        count = found.devices
        assert (
            found.sent
            == (2 if made else 1) * found.size * (count if kind != "all-gather" else 1) * (count - 1) // count
        )
        assert made is None or f"the compiler for TPUs makes of it an {made}" in (found.reason or "")

    def test_what_is_exposed(self) -> None:
        """Each byte that is sent is in the schedule, once; options of the compiler change what is beside it."""
        Layers, Embed, Mlp = axn.make_axes(layers=2, embed=4096, mlp=14336)
        w, x = jax.eval_shape(
            lambda: ([axn.zeros((Layers, Embed, Mlp), "bfloat16"), axn.zeros((Layers, Mlp, Embed), "bfloat16")],
                     axn.zeros({"batch": 2**15, "embed": 4096}, "bfloat16"))
        )  # fmt: skip

        def loss(w: Any, x: axn.NamedArray) -> Any:
            layer = lambda x, w: x + axn.dot(nn.relu(axn.dot(x, w[0], axis="embed")), w[1], axis="mlp")
            return (axn.fold(jax.checkpoint(layer), Layers)(x, w).astype("float32") ** 2).mean().scalar()

        mesh = jax.sharding.AbstractMesh((16,), ("data",))
        where: dict[str, Any] = {"mapping": ({"embed": "data"}, {"batch": "data"}), "mesh": mesh, "topology": "v5e:4x4"}
        report = explain(jax.grad(loss), w, x, **where)
        options = {
            "xla_enable_async_all_reduce": "ENABLED",
            "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
        }
        tuned = explain(jax.grad(loss), w, x, compiler_options=options, **where)
        alone, beside = (
            [sum(c.total_sent or 0 for c in r.collectives if bool(c.beside) is which) for r in (report, tuned)]
            for which in (False, True)
        )
        assert [*map(sum, zip(alone, beside, strict=True))] == [report.total_sent(), tuned.total_sent()]
        assert alone[1] < alone[0] / 2 and report.total_sent() == tuned.total_sent()
        gradients = [c for c in report.collectives if c.phase == "backward" and c.parameters]
        assert {(c.kind, c.made, c.beside) for c in gradients} == {("reduce-scatter", "all-reduce", 0)}
        assert "MiB of gradients (backward), not overlapped: about" in str(report) and report.verdict.fine
        assert "not overlapped, about" in report.to_html()
        assert report.computing is not None and all(c.waits is not None for c in report.collectives)
