"""The report begins with a verdict, which shows planted bugs of performance at first glance."""

from __future__ import annotations

import dataclasses
import functools
import html
import re
from typing import Any

import equinox as eqx
import jax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.insight import Bounds, Memory, Report
from tests.insight import cases
from tests.insight.performance_bugs import BUGS, FSDP, MESH, Bug
from tests.insight.test_explain import FSDP_AND_TENSOR, batch, step, weights

ON_ALL_VERSIONS = {"a cumulative sum", "a positional product", "the state of the optimizer is replicated"}


def glance(report: Report) -> str:
    """Return what the report says before its tables."""
    return re.sub(r"\n  (?=\S)", " ", str(report).split("\n\nover ")[0])


@pytest.mark.parametrize(
    "name",
    [
        name if bug.by == "names" or name in ON_ALL_VERSIONS else pytest.param(name, marks=pytest.mark.oldest)
        for name, bug in BUGS.items()
    ],
)
def test_a_planted_bug_is_said_at_first_glance(name: str) -> None:
    said = glance(BUGS[name].report())
    for expected in BUGS[name].said:
        assert re.search(expected, said), f"{expected!r} is not in:\n{said}"


def test_a_clean_step_is_fine() -> None:
    verdict = Bug(FSDP, ()).report().verdict
    assert verdict.suspicious == () and len(verdict.costliest) == 3
    fine = ("no product is repeated outside of code per device", "each mesh axis is used")
    assert {*fine, "no large argument is held in copies"} <= {*verdict.fine}


def test_all_forms_say_the_same_words() -> None:
    report = BUGS["the heads of another model"].report()
    text, page = str(report), html.unescape(re.sub("<[^>]*>", "", report.to_html()))
    words = [report.verdict.binds, report.verdict.explanation]
    words += [str(finding) for finding in report.verdict.suspicious]
    words += [*report.verdict.costliest, ", ".join(report.verdict.fine)]
    assert len(words) >= 7 and text.splitlines()[2].startswith("- fix: The mapping shards kv_heads over model")
    for word in words:
        assert word in re.sub(r"\n  (?=\S)", " ", text), word
    for word in (report.verdict.binds, report.verdict.explanation, *report.verdict.fine):
        assert word in page, word


@pytest.mark.parametrize(
    "mapping", [{"batch": "data"}, {"mlp": "model"}, FSDP_AND_TENSOR, ({"embed": "model"}, {"batch": "data"})]
)
def test_all_ways_find_the_same_repeated_work(mapping: Any) -> None:
    found = {}
    for by in ("partitioner", "names"):
        try:
            report = axn.insight.explain(step, weights(), batch(), mapping=mapping, mesh=axn.make_mesh(MESH), by=by)
        except ValueError as e:
            assert by == "names" and "devices that do not share its mesh axes" in str(e)
            continue
        work = {(w.operation, w.phase, w.source, w.flops, w.copies, w.axes) for w in report.repeated}
        found[by] = work, tuple((x.path, x.bytes, x.copies, x.replicated_over) for x in report.placed)
    assert len(set(map(repr, map(sorted_parts, found.values())))) == 1, found


def sorted_parts(found: Any) -> Any:
    work, placed = found
    return sorted(map(str, work)), placed


@pytest.mark.parametrize("explicit", [False, True])
def test_repeated_work_in_a_loop_is_found(explicit: bool) -> None:
    def layers(w: axn.NamedArray, x: axn.NamedArray) -> axn.NamedArray:
        layer = lambda x, w: axn.tanh(axn.dot(x, w, axis="embed").rename({"out": "embed"}))
        return axn.fold(layer, "layers")(x, w)

    args = axn.ones({"layers": 3, "embed": 8, "out": 8}), axn.ones({"batch": 8, "embed": 8})
    mesh = axn.make_mesh(MESH, explicit=explicit)
    (work,) = axn.insight.explain(layers, *args, mapping={"batch": "data"}, mesh=mesh, by="partitioner").repeated
    assert (work.flops, work.copies, work.axes) == (2 * 3 * 8 // MESH["data"] * 8 * 8, MESH["model"], ("model",))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("classifier", "height"), marks=pytest.mark.oldest),  # convolutions repeat a little at their edges
        ("mixture", "experts"),
        pytest.param(("llama", "mixed"), marks=pytest.mark.oldest),
    ],
)
def test_no_work_is_said_to_be_repeated_where_none_is(case: tuple[str, str]) -> None:
    of = {"mixture": cases.mixture, "classifier": cases.classifier}
    mesh, compiled, args = of[case[0]](case[1]) if case[0] in of else cases.language_model(*case)
    with jax.set_mesh(mesh):
        report = axn.insight.explain(compiled, *args, by="partitioner")
    assert "no product is repeated outside of code per device" in report.verdict.fine


def test_a_product_that_xla_merges_with_a_transpose_counts_at_its_own_line(auto_mesh: Mesh) -> None:
    """XLA gives it the line of the transpose, here the one of another product."""

    def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        a, b = jax.numpy.tanh(x @ w), jax.numpy.tanh(y @ w) @ w.T
        scores = jax.numpy.tanh(a @ w.T) @ b.T
        return -jax.numpy.mean(jax.numpy.diagonal(jax.nn.log_softmax(scores)))

    def array(sizes: tuple[int, ...], *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(sizes, "float32", sharding=NamedSharding(auto_mesh, P(*spec)))

    rows = array((512, 512), ("data", "model"))
    assert axn.insight.explain(jax.grad(loss), array((512, 2048)), rows, rows, by="partitioner").repeated == ()


def test_transfers_have_the_path_of_their_parameter() -> None:
    report = axn.insight.explain(
        step, weights(), batch(), mapping=FSDP_AND_TENSOR, mesh=axn.make_mesh(MESH), by="names"
    )
    paths = {(c.kind, c.phase, c.parameters) for c in report.collectives}
    gathered = {("all-gather", "forward", (f"w/{name}",)) for name in ("up", "down")}
    scattered = {("reduce-scatter", "backward", (f"w/{name}",)) for name in ("up", "down")}
    assert paths == gathered | scattered | {("all-reduce", "forward", ())}


def test_arrays_without_names_have_the_path_of_their_parameter() -> None:
    mesh, compiled, args = cases.plain_jax()
    report = axn.insight.explain(compiled, *args, mesh=mesh, by="partitioner")
    found = {c.parameters for c in report.collectives if c.phase == "backward" and c.axes == ("data",)}
    assert found == {("weights/up",), ("weights/down",)}


def test_a_lifted_module_has_the_paths_of_its_parameters() -> None:
    """Also in a step of `eqx.filter_jit`, with abstract arguments."""

    class Model(eqx.Module):
        mlp: eqx.nn.MLP

    @eqx.filter_jit
    def gradients(model: Any, x: axn.NamedArray) -> Any:
        return eqx.filter_grad(lambda model: axn.mean(axn.lift(model.mlp, "embed -> out")(x) ** 2).scalar())(model)

    model = eqx.filter_eval_shape(lambda: Model(eqx.nn.MLP(32, 16, 64, 1, key=jax.random.key(0))))
    x = jax.eval_shape(lambda: axn.ones({"batch": 16, "embed": 32}))
    report = axn.insight.explain(
        gradients, model, x, mapping={"batch": "data"}, mesh=axn.make_mesh({"data": 8}), by="partitioner"
    )
    found = {c.parameters for c in report.collectives}
    assert {("model/mlp/layers/0/weight",), ("model/mlp/layers/1/weight",)} <= found
    assert not any("held array" in f"{c.array} {c.reason}" for c in report.collectives)
    assert all(c.reason is not None for c in report.collectives if c.parameters)


def test_small_rows_are_one() -> None:
    report = BUGS["parameters are not stored sharded"].report()
    total, small = report.total_sent() or 0, [c for c in report.collectives if "f32[]" in c.array]
    assert small and sum(c.total_sent or 0 for c in small) < 0.01 * total
    assert "smaller ones" in str(report) and not re.search(r"x 6 B .*f32\[\]", str(report))
    assert "2 x " in str(report)  # the layers


def test_a_report_without_a_chip() -> None:
    report = axn.insight.explain(
        step, weights(), batch(), mapping={"batch": "data"}, mesh=axn.make_mesh(MESH), by="names"
    )
    assert report.verdict.binds == "No chip was given, so times are not known; 50% of the compute is repeated."
    assert report.verdict.explanation.startswith("Most bytes go over data: each device sends ")


def test_what_depends_on_values_is_not_said_to_be_nothing() -> None:
    """Transfers in a loop of unknown length have no sum, and no chip would tell the time."""

    def sorted_until(x: axn.NamedArray) -> axn.NamedArray:
        return axn.while_loop(lambda x: axn.any(x > 1).scalar(), lambda x: axn.sort(x, "batch") / 2, x)

    x = jax.eval_shape(lambda: axn.ones({"batch": 8}))
    mesh = axn.make_mesh({"data": 8})
    report = axn.insight.explain(sorted_until, x, mapping={"batch": "data"}, mesh=mesh, by="partitioner", chip="v5e")
    assert report.verdict.binds.startswith("Times are not known, because they depend on values")
    assert "how much depends on values" in report.verdict.explanation and "0 B" not in str(report).split("\n\n")[0]


@pytest.mark.parametrize("by", ["names"])
def test_an_activation_is_no_argument(by: Any) -> None:
    """A hidden array has the axes of the batch, but the gradient that is sent is not the batch's."""

    def loss(w: Any, x: axn.NamedArray) -> jax.Array:
        for layer in w:
            x = axn.dot(axn.tanh(axn.dot(x, layer["up"], axis="embed")), layer["down"], axis="mlp")
        return axn.mean(x).scalar()

    up, down = {"embed": 8, "mlp": 16}, {"mlp": 16, "embed": 8}
    w, x = jax.eval_shape(
        lambda: ([{"up": axn.ones(up), "down": axn.ones(down)}] * 2, axn.ones({"batch": 8, "embed": 8}))
    )
    mesh = axn.make_mesh({"data": 4, "model": 2})
    mapping = {"batch": "data", "mlp": "model"}
    train = lambda w, x: jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w, x))
    report = axn.insight.explain(train, w, x, mapping=mapping, mesh=mesh, by=by)
    carried = {path for c in report.collectives for path in c.parameters}
    assert "x" not in carried and len(carried) == 4


def test_fine_is_said_only_of_what_was_checked() -> None:
    """Without names, it is not known which mesh axes shard `x`; where it is, idle mesh axes are one finding."""
    mesh = axn.make_mesh({"a": 2, "b": 2, "c": 2})
    w, x = jax.eval_shape(lambda: (jax.numpy.ones((8, 8)), jax.numpy.ones((16, 8))))
    step = jax.jit(lambda w, x: x @ w, in_shardings=(None, NamedSharding(mesh, P("a"))))
    verdict = axn.insight.explain(step, w, x, mesh=mesh, by="partitioner").verdict
    assert not {"each name of the mapping is an axis of an array", "each mesh axis is used"} & {*verdict.fine}
    assert not [f for f in verdict.suspicious if "mesh ax" in f.cause]
    named = jax.eval_shape(lambda: axn.ones({"batch": 16, "embed": 8}))
    verdict = axn.insight.explain(axn.sum, named, mapping={"batch": "a"}, mesh=mesh, by="partitioner").verdict
    (finding,) = [f for f in verdict.suspicious if "mesh ax" in f.cause]
    assert finding.cause.startswith("Nothing uses the mesh axes b and c: 4 devices along them hold the same.")


def test_a_finding_has_what_follows_from_it() -> None:
    """Replicated parameters and the sums of their gradients are one finding."""
    (copies,) = BUGS["parameters are not stored sharded"].report().verdict.suspicious
    assert any("gradients are all-reduced over data, 30% of the bytes sent" in so for so in copies.consequences)


@pytest.mark.oldest
def test_a_gather_has_the_work_that_is_repeated_after_it() -> None:
    gathered, *others = BUGS["replicated scores"].report().verdict.suspicious
    assert gathered.cause.startswith("batch is gathered") and "of the compute is repeated" in gathered.consequences[0]
    assert not any("repeated" in str(finding) for finding in others)


def test_transfers_of_one_kind_are_one() -> None:
    summed, *_ = BUGS["mlp is forgotten"].report().verdict.costliest
    assert summed.startswith(
        "60%: all-reduce over data of f32 gradients of parameters (w/layers/*/down, w/layers/*/up, "
    )
    assert summed.endswith("sums over batch, which is sharded over data")


@pytest.mark.parametrize("donate", [False, True])
def test_a_missing_donation_is_told_from_missing_checkpointing(donate: bool) -> None:
    """The forward pass of many layers keeps more than all parameters take; a wide model is mostly parameters."""
    found = {}
    for what, rows, width in (("deep", 512, 16), ("wide", 8, 512)):

        def train(w: Any, x: axn.NamedArray) -> Any:
            def loss(w: Any) -> jax.Array:
                y = x
                for _ in range(6):
                    y = axn.tanh(axn.dot(axn.tanh(axn.dot(y, w["up"], axis="embed")), w["down"], axis="mlp"))
                return axn.mean(y).scalar()

            return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))

        sizes = {"up": {"embed": 16, "mlp": width}, "down": {"mlp": width, "embed": 16}}
        w, x = jax.eval_shape(
            lambda sizes=sizes, rows=rows: (
                {n: axn.ones(own) for n, own in sizes.items()}, axn.ones({"batch": rows, "embed": 16})
            )
        )  # fmt: skip
        step = axn.named_jit(train, {"batch": "data"}, donate_args=(donate, False))
        report = axn.insight.explain(step, w, x, mesh=axn.make_mesh({"data": 8}), by="partitioner")
        found[what] = " ".join(map(str, report.verdict.suspicious))
    assert ("gradient checkpointing" in found["deep"], "gradient checkpointing" in found["wide"]) == (True, False)
    assert ("donate_args for w" in found["wide"]) is not donate and "donate_args" not in found["deep"]


def test_modules_of_flax_have_the_paths_of_their_parameters() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(jax.nn.gelu(self.up(x)))

    @nnx.jit
    def gradients(net: Net, x: jax.Array) -> Any:
        return nnx.grad(lambda net: (net(x) ** 2).mean())(net)

    mesh = axn.make_mesh({"data": 8})
    x = jax.device_put(jax.numpy.ones((16, 32)), NamedSharding(mesh, P("data")))
    report = axn.insight.explain(gradients, Net(nnx.Rngs(0)), x, mesh=mesh, by="partitioner")
    carried = {path for c in report.collectives for path in c.parameters if c.kind == "all-reduce"}
    assert {re.sub("/value$", "", path) for path in carried} >= {"net/up/kernel", "net/down/kernel"}, carried
    assert report.timeline is not None and all(h.operation for h in report.timeline.at_peak)


def of_report(report: Report, **changed: Any) -> str:
    return "\n".join(map(str, dataclasses.replace(report, **changed).verdict.suspicious))


@functools.cache
def replicated() -> Report:
    return BUGS["parameters are not stored sharded"].report()


def test_results_are_the_arguments_of_the_next_step() -> None:
    """Unless the step says itself what it donates; the page shows the same memory."""
    bounds = Bounds("small", 1.0, 1.0, {}, capacity=60)
    state = {"bounds": bounds, "memory": Memory(arguments=50, results=45, aliased=0, temporaries=5)}
    fits = dataclasses.replace(replicated(), **state)
    assert not fits.verdict.binds.startswith("This does not fit") and "The step needs" not in of_report(fits)
    assert (
        "55 B of 60 B" in fits.to_html()
        and "100 B if no result takes the place of an argument, 45 B more" in fits.to_html()
    )
    too_large = dataclasses.replace(fits, undonated=("w",))
    assert too_large.verdict.binds == "This does not fit: 100 B of 60 B." and "fix: The step needs" in of_report(
        too_large
    )
    assert axn.insight.Comparison({"a": fits})._headline()[0].startswith("a takes the least")
    assert axn.insight.Comparison({"a": too_large})._headline()[0] == "None of the mappings fits."


@pytest.mark.parametrize("by", ["names", "partitioner"])
def test_repeated_work_in_a_branch_counts_as_the_flops_do(by: str) -> None:
    def step(w: Any, x: axn.NamedArray, skip: jax.Array) -> axn.NamedArray:
        attend = lambda x: axn.rename(axn.dot(x, w, axis="embed"), {"out": "embed"})
        return jax.lax.cond(skip, lambda x: x, attend, x)

    w, x, skip = jax.eval_shape(
        lambda: (axn.ones({"embed": 64, "out": 64}), axn.ones({"batch": 64, "embed": 64}), jax.numpy.zeros((), bool))
    )
    report = axn.insight.explain(step, w, x, skip, mapping={}, mesh=axn.make_mesh({"data": 8}), by=by)
    (work,) = report.repeated
    assert (work.copies, work.flops) == (8, report.flops) and "88% of the compute is repeated" in str(report)


def test_replicated_parameters_are_usual() -> None:
    """As data parallelism has them, unless others are sharded, or copies take much of a chip."""
    report = replicated()
    gradients = tuple(c for c in report.collectives if c.parameters)
    assert report.verdict.suspicious and report.bounds is not None
    said = of_report(report, collectives=gradients)
    assert "note: " in said and "look: " not in said and "with axonym.fsdp, which sends half as much again." in said
    small = dataclasses.replace(report.bounds, capacity=2**16)
    assert "look: " in of_report(report, collectives=gradients, bounds=small)


@pytest.mark.parametrize("other", [None, "model"])
def test_a_mapping_may_be_for_several_models(other: str | None) -> None:
    """A name that no array has is no misspelling of an axis that is mapped beside it."""
    report = dataclasses.replace(replicated(), parameter_mapping={}, repeated=())
    said = of_report(report, mapping={**report.mapping, "heads": other, "kv_heads": "model"})
    assert ("fix: The mapping shards kv_heads" in said, "Did you mean 'heads'?" in said) == (other is None,) * 2


def test_what_an_optimizer_keeps_may_be_sharded_alone() -> None:
    """Its parameter is replicated then, and updates are gathered."""
    parameter = next(x for x in replicated().placed if x.path == "w/layers/0/up")
    assert parameter.axes == ("embed", "mlp")
    state, whole = (
        dataclasses.replace(parameter, path="state/layers/0/up", over=(("data",), ())),
        dataclasses.replace(parameter, over=((), ())),
    )
    both = {"placed": (whole, state), "updated": (whole.path, state.path)}
    assert "came sharded" not in of_report(replicated(), **both)
    assert "state/layers/*/up came sharded" in of_report(replicated(), **{**both, "placed": (state,)})


def test_results_of_the_same_sizes_are_not_said_to_be_updates() -> None:
    x = jax.eval_shape(lambda: axn.ones({"batch": 8}))
    mesh = axn.make_mesh({"data": 8})
    report = axn.insight.explain(axn.named_jit(lambda x: x * 2, {"batch": "data"}), x, mesh=mesh, by="partitioner")
    (found,) = report.verdict.suspicious
    assert (found.severity, found.cause) == (
        "note", "Results are held beside arguments of the same sizes, which are not donated: x."
    )  # fmt: skip
    assert found.consequences[0].startswith("If the results are their updates, ")


def test_a_report_whose_times_depend_on_values() -> None:
    """It has no bound, but all its forms."""
    turn = lambda x: axn.rename(axn.dot(x, axn.ones({"embed": 8, "out": 8}), axis="embed"), {"out": "embed"})
    step = lambda x: axn.while_loop(lambda x: axn.any(x > 1).scalar(), turn, x)
    x = jax.eval_shape(lambda: axn.ones({"batch": 8, "embed": 8}))
    report = axn.insight.explain(step, x, mapping={}, mesh=axn.make_mesh({"data": 8}), by="partitioner", chip="v5e")
    assert report.flops is None and report.bounds is not None and report.bounds.named() == []
    assert (report.bounds.bottleneck, report.bounds.longest) == ("not known", 0.0)
    assert '"bottleneck": "not known"' in report.to_json()
    comparison = axn.insight.Comparison({"a": report, "b": report})
    assert "at least" not in str(comparison) and comparison.to_html() and report.to_html()


def test_a_mesh_that_is_not_known_is_not_one_device() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    one = jax.ShapeDtypeStruct((8,), "float32")
    step = jax.jit(lambda x: x * 2, in_shardings=NamedSharding(mesh, P("data")))
    report = axn.insight.explain(step, one, by="partitioner")
    assert report.devices == 8 and "8 devices, whose mesh is not known" in str(report)
    assert "8 devices · mesh axes are not known" in report.to_html() and "one device" not in report.to_html()


def test_products_in_a_larger_dtype_are_said() -> None:
    """One array of float32 makes all that comes after it so, in a model that computes in bfloat16."""
    w = jax.eval_shape(lambda: {"up": axn.ones({"embed": 32, "mlp": 64}), "down": axn.ones({"mlp": 64, "embed": 32})})
    x = jax.eval_shape(lambda: axn.ones({"batch": 16, "embed": 32}, "bfloat16"))

    def step(scale: Any) -> Any:
        def loss(w: Any, x: axn.NamedArray) -> Any:
            w = jax.tree.map(lambda a: a.astype("bfloat16"), w)
            x = axn.dot(axn.tanh(axn.dot(x * scale, w["up"], axis="embed")), w["down"], axis="mlp")
            return axn.mean(x.astype("float32")).scalar()

        return jax.grad(loss)

    mesh = axn.make_mesh({"data": 8})
    for scale, wide in ((axn.ones({"embed": 32}), True), (0.5, False)):
        report = axn.insight.explain(step(scale), w, x, mapping={"batch": "data"}, mesh=mesh, by="partitioner")
        said = [str(found) for found in report.verdict.suspicious if "larger dtype" in found.cause]
        assert bool(said) == wide
        if wide:
            assert re.match(r"look: bfloat16 becomes float32 at test_verdict.py:\d+: 100% of the flops", said[0])

    def asked_for(w: Any, x: axn.NamedArray) -> Any:
        up = w["up"].astype("bfloat16").astype("float32")
        return axn.mean(axn.dot(x.astype("float32"), up, axis="embed")).scalar()

    assert not axn.insight.explain(asked_for, w, x, mapping={"batch": "data"}, mesh=mesh, by="partitioner").avoidable


def test_exchanges_between_two_placements_are_asked_for() -> None:
    """As on the way to experts and back."""
    mesh = axn.make_mesh({"data": 8})
    x = jax.eval_shape(lambda: axn.ones({"batch": 64, "experts": 64, "embed": 64}))

    def there_and_back(x: axn.NamedArray) -> axn.NamedArray:
        return axn.shard(axn.tanh(axn.shard(x, {"experts": "data"})), {"batch": "data"})

    report = axn.insight.explain(there_and_back, x, mapping={"batch": "data"}, mesh=mesh, by="partitioner")
    assert report.count("all-to-all") == 2 and not [s for s in report.verdict.suspicious if "moved" in s.cause]


def test_an_axis_may_be_sharded_over_more_mesh_axes() -> None:
    """Where devices along a mesh axis repeat work, the batch may be sharded over that one too."""
    w, x = jax.eval_shape(lambda: (axn.ones({"embed": 32, "mlp": 64}), axn.ones({"batch": 16, "embed": 32})))
    step = lambda w, x: axn.dot(x, w, axis="embed")
    report = axn.insight.explain(
        step, w, x, mapping={"batch": "data"}, mesh=axn.make_mesh({"data": 2, "model": 4}), by="partitioner"
    )
    (found,) = (s for s in report.verdict.suspicious if s.severity == "fix")
    assert found.advice == "shard mlp over model, or batch over data and model."


def test_parameters_placed_by_a_rule_came_so() -> None:
    mesh = axn.make_mesh({"data": 8})
    w, x = jax.eval_shape(lambda: (axn.ones({"embed": 64, "mlp": 64}), axn.ones({"batch": 16, "embed": 64})))
    rule = axn.sharding.FSDPShardingRule("data", 8, min_fsdp_size=0)
    step = lambda w, x: jax.grad(lambda w: axn.mean(axn.dot(x, w, axis="embed")).scalar())(w)
    report = axn.insight.explain(axn.fsdp(step, rule, {"batch": "data"}), w, x, mesh=mesh, by="partitioner")
    assert report.placed_by_rule and not [s for s in report.verdict.suspicious if "came sharded" in s.cause]
