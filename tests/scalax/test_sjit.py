"""`sjit` and the helper: placements of arguments, results and annotated values, and recompilation."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import axonym as axn
from axonym.scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    TreePathShardingRule,
    get_global_annotation_shardings,
    get_global_mesh,
    get_global_mesh_helper,
    sharding_annotations,
    sjit,
    with_sharding_annotation,
    with_sharding_constraint,
)

ANY_FSDP = FSDPShardingRule("data", min_fsdp_size=0)


@pytest.fixture(params=["auto", "explicit"])
def helper(request) -> MeshShardingHelper:
    return MeshShardingHelper([4, -1], ["data", "model"], explicit=request.param == "explicit")


def lies(x: Any, spec: P) -> bool:
    x = x.array if isinstance(x, axn.NamedArray) else x
    return x.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, spec), x.ndim)


def counted(fn: Any) -> tuple[Any, list[None]]:
    """Return the function, and a list with an entry for each time that it was traced."""
    traces: list[None] = []

    def wrapper(*args: Any) -> Any:
        traces.append(None)
        return fn(*args)

    return wrapper, traces


# --- arguments and results ---


def test_a_placement_for_each_argument(helper):
    x = jnp.ones((8, 8))
    a, b, c = helper.sjit(lambda a, b, c: (a, b, c), (P("data"), None, {"w": ANY_FSDP}))(x, x, {"w": x})
    assert lies(a, P("data")) and lies(b, P()) and lies(c["w"], P("data"))


def test_one_placement_for_all_arguments(helper):
    a, b = helper.sjit(lambda a, b: (a, b), in_shardings=P("model"))(jnp.ones(8), b=np.ones((8, 2)))
    assert lies(a, P("model")) and lies(b, P("model"))


def test_results(helper):
    f = helper.sjit(lambda x: (x * 2, {"y": x + 1, "z": x}), out_shardings=(P("data"), {"y": P("model"), "z": None}))
    a, rest = f(jnp.arange(8.0))
    assert lies(a, P("data")) and lies(rest["y"], P("model"))
    np.testing.assert_array_equal(a, 2 * np.arange(8))


def test_arguments_arrive_in_one_placement_and_are_used_in_another(helper):
    seen = []

    def f(w, x):
        if helper.mesh.axis_types[0] == AxisType.Explicit:
            seen.append(jax.typeof(w).sharding.spec)
        return x @ w

    compiled = helper.sjit(f, (ANY_FSDP, P("data")), P("data"), args_sharding_constraint=(P(), None))
    w, x = jnp.ones((8, 4)), jnp.ones((16, 8))
    assert lies(compiled(w, x), P("data"))
    assert seen in ([], [P(None, None)])
    # The program takes shards of the weight, and gathers it.
    program = compiled.lower(w, x).compile()
    assert program.input_shardings[0][0].is_equivalent_to(NamedSharding(helper.mesh, P("data")), 2)
    assert "all-gather" in program.as_text()


@pytest.mark.parametrize("static", [1, (1,), -2], ids=str)
def test_static_arguments(static, helper):
    def f(x, mode, y):
        return (x if mode == "x" else y), x, y

    compiled = helper.sjit(f, (P("data"), P("model")), static_argnums=static)
    chosen, x, y = compiled(jnp.ones(8), "x", jnp.zeros(8))
    assert np.all(chosen == 1) and lies(x, P("data")) and lies(y, P("model"))
    assert np.all(compiled(jnp.ones(8), "y", jnp.zeros(8))[0] == 0)
    one_for_each = helper.sjit(f, (P("data"), None, P("model")), static_argnums=static)
    assert lies(one_for_each(jnp.ones(8), "x", jnp.zeros(8))[2], P("model"))


def test_a_static_argument_by_keyword(helper):
    x, y = helper.sjit(lambda x, y, mode: (x, y), P("data"), static_argnums=2)(jnp.ones(8), jnp.ones(8), mode="a")
    assert lies(x, P("data")) and lies(y, P("data"))


def test_arguments_of_jit(helper):
    f = helper.sjit(lambda x: x + 1, P("data"), P("data"), donate_argnums=0)
    x = jax.device_put(jnp.ones(8), NamedSharding(helper.mesh, P("data")))
    f(x)
    assert x.is_deleted()


def test_errors(helper):
    def f(params, x):
        return x

    x = jnp.ones((6, 4))
    with pytest.raises(ValueError, match=r"sjit \(in_shardings\): 1 placement, and none for x"):
        helper.sjit(f, (P(),))(x, x)
    with pytest.raises(TypeError, match=r"sjit \(in_shardings\): expected a placement, or a tuple"):
        helper.sjit(f, 3)(x, x)
    with pytest.raises(ValueError, match=r"'parms' is not an argument .* which has params, x. Did you mean 'params'"):
        helper.sjit(f, {"parms": P()})(x, x)
    with pytest.raises(ValueError, match="3 placements for the 2 parameters params, x"):
        helper.sjit(f, (P(), P(), P()))(x, x)
    with pytest.raises(TypeError, match=r"sjit \(in_shardings\): 'data', for 'params', is not a placement"):
        helper.sjit(f, ("data", None))(x, x)
    with pytest.raises(ValueError, match=r"\(in_shardings\) on mesh .*: params/w \(6, 4\): .* size 6 .* over data=4"):
        helper.sjit(f, (P("data"), None))({"w": x}, x)
    with pytest.raises(ValueError, match=r"\(constraint\) .*: x \(6, 4\): .* size 6"):
        helper.sjit(f, args_sharding_constraint=(None, P("data")))({"w": x}, x)
    with pytest.raises(ValueError, match=r"sjit \(results\) .*: a \(6, 4\): .* size 6"):
        helper.sjit(lambda x: {"a": x}, out_shardings=P("data"))(x)
    with pytest.raises(ValueError, match=r"params/w .*: no pattern of TreePathShardingRule"):
        helper.sjit(f, (TreePathShardingRule(("v", P())), None))({"w": x}, x)


def test_without_a_mesh_nothing_is_placed():
    assert not isinstance(sjit(lambda x: x * 2, P("data"), P("data"))(jnp.ones(3)).sharding, NamedSharding)


def test_the_mesh_in_force(mesh):
    with axn.set_mesh(mesh):
        assert lies(sjit(lambda x: x * 2, P("data"), P("data"))(jnp.ones(8)), P("data"))


def test_named_arrays(helper):
    x = axn.ones({"batch": 8, "embed": 8})
    f = helper.sjit(lambda x, w: axn.dot(x, w, axis="embed"), ({"batch": "data"}, P(None, "model")))
    assert lies(f(x, axn.ones({"embed": 8, "mlp": 4})), P("data", "model"))


# --- when rules are worked out ---


def test_other_shapes_and_structures_get_specs_of_their_own(helper):
    f, traces = counted(lambda tree: tree)
    f = helper.sjit(f, (ANY_FSDP,), ANY_FSDP)
    tall, wide = jnp.ones((1024, 2)), jnp.ones((2, 1024))
    assert lies(f(tall), P("data")) and lies(f(wide), P(None, "data"))
    assert lies(f({"w": wide})["w"], P(None, "data"))
    assert len(traces) == 3
    assert lies(f(tall), P("data"))
    assert len(traces) == 3


# --- annotations ---


def hidden(x: Any) -> Any:
    return with_sharding_annotation(x * 2, "hidden")


def test_an_annotation_without_a_placement_changes_nothing(helper):
    np.testing.assert_array_equal(hidden(jnp.ones(4)), 2 * np.ones(4))
    np.testing.assert_array_equal(helper.sjit(hidden)(jnp.ones(8)), 2 * np.ones(8))


@pytest.mark.parametrize("placement", [P("model"), TreePathShardingRule(("", P("model")))], ids=["spec", "rule"])
def test_annotations_are_placed(placement, helper):
    assert lies(helper.sjit(hidden, annotation_shardings={"hidden": placement})(jnp.ones(8)), P("model"))
    with axn.set_mesh(helper.mesh):
        named = axn.named_jit(hidden, annotation_shardings={"hidden": placement})
        assert lies(named(axn.ones({"batch": 8})), P("model"))
        with sharding_annotations({"hidden": placement}):
            assert lies(hidden(jnp.ones(8)), P("model"))
            assert lies(jax.jit(hidden)(jnp.ones(8)), P("model"))


def test_annotations_of_named_arrays_and_trees(helper):
    f = helper.sjit(
        lambda x: with_sharding_annotation(pytree={"a": x * 2, "b": x.array * 3}, sharding_name="both"),
        annotation_shardings={"both": {"a": {"batch": "data"}, "b": P(None, "model")}},
    )
    found = f(axn.ones({"batch": 8, "embed": 4}))
    assert lies(found["a"], P("data")) and lies(found["b"], P(None, "model"))


def test_the_innermost_decides(helper):
    inner = helper.sjit(hidden, annotation_shardings={"hidden": P("model")})
    silent = helper.sjit(hidden)

    def outer(x):
        return inner(x), silent(x), hidden(x), with_sharding_annotation(x + 1, "other")

    placed = helper.sjit(outer, annotation_shardings={"hidden": P("data"), "other": P(("data", "model"))})(jnp.ones(8))
    expected = [P("model"), P("data"), P("data"), P(("data", "model"))]
    assert all(lies(x, spec) for x, spec in zip(placed, expected, strict=True))
    with axn.set_mesh(helper.mesh), sharding_annotations({"hidden": P("data"), "other": P("data")}):
        with sharding_annotations({"hidden": P("model")}, merge=True):
            assert lies(hidden(jnp.ones(8)), P("model"))
            assert lies(with_sharding_annotation(jnp.ones(8), "other"), P("data"))
        with sharding_annotations({"hidden": P("model")}):
            assert not isinstance(with_sharding_annotation(np.ones(8), "other"), jax.Array)


@pytest.mark.parametrize("compile_it", [jax.jit, axn.named_jit, sjit], ids=["jit", "named_jit", "sjit"])
def test_another_placement_compiles_again_and_the_old_one_is_found_again(compile_it, mesh):
    f, traces = counted(hidden)
    compiled = compile_it(f)
    with axn.set_mesh(mesh):
        for spec, expected in ((P("data"), 1), (P("model"), 2), (P("data"), 2), (P("model"), 2)):
            with sharding_annotations({"hidden": spec}):
                assert lies(compiled(jnp.ones(8)), spec)
            assert len(traces) == expected
        compiled(jnp.ones(8))
        assert len(traces) == 3


def test_a_rule_is_the_same_as_itself(mesh):
    f, traces = counted(hidden)
    f = jax.jit(f)
    with axn.set_mesh(mesh):
        for _ in range(3):
            with sharding_annotations({"hidden": {"batch": "data"} | ANY_FSDP, "more": ANY_FSDP}):
                f(jnp.ones(8))
        assert len(traces) == 1
        rule = {"batch": "data"} | ANY_FSDP
        for _ in range(3):
            with sharding_annotations({"hidden": {"a": rule, "b": {"batch": "data"}}}):
                with pytest.raises(
                    ValueError, match="with_sharding_annotation 'hidden': the placement is not a prefix"
                ):
                    f(jnp.ones(8))


def test_a_misspelled_annotation(mesh):
    with axn.set_mesh(mesh), sharding_annotations({"hiddn": P("data")}):
        with pytest.warns(UserWarning, match="no annotation 'hidden' is active. Did you mean 'hiddn'"):
            hidden(jnp.ones(8))


def test_mapping_and_annotations_do_not_disturb_each_other(mesh):
    with axn.set_mesh(mesh), sharding_annotations({"hidden": P("model")}), axn.axis_mapping({"batch": "data"}):
        assert lies(axn.shard(axn.ones({"batch": 8})), P("data"))
        assert lies(hidden(jnp.ones(8)), P("model"))
        assert lies(axn.named_jit(hidden, {"x": None})(jnp.ones(8)), P("model"))


def test_constraints_inside(helper):
    def f(tree):
        return with_sharding_constraint(jax.tree.map(lambda x: x * 2, tree), {"a": ANY_FSDP, "b": P("model")})

    found = helper.sjit(f)({"a": jnp.ones((2, 8)), "b": jnp.ones(8)})
    assert lies(found["a"], P(None, "data")) and lies(found["b"], P("model"))


# --- inside other functions ---


def test_inside_traced_functions(helper):
    inner = helper.sjit(lambda x: jnp.sum(x**2), (P("data"),))
    with axn.set_mesh(helper.mesh):
        gradient = jax.jit(jax.grad(lambda x: inner(x)))(jnp.ones(8))
        np.testing.assert_array_equal(gradient, 2 * np.ones(8))
        np.testing.assert_array_equal(jax.grad(inner)(jnp.ones(8)), 2 * np.ones(8))


def test_inside_traced_functions_without_a_mesh(helper):
    """What is traced around it learns of the mesh, where JAX lets it."""
    inner = helper.sjit(lambda tree: {"y": tree["x"] * 2}, (P("data"),), {"y": P("model")})
    tree = {"x": jnp.arange(8.0)}
    found = jax.eval_shape(inner, tree)["y"]
    assert found.shape == (8,) and found.dtype == jnp.float32
    if helper.mesh.axis_types[0] == AxisType.Explicit:
        with pytest.raises(ValueError, match="set_mesh"):
            jax.jit(lambda x: inner(x))(tree)
        return
    assert lies(jax.jit(lambda x: inner(x))(tree)["y"], P("model"))
    gradient = jax.grad(lambda tree: inner(tree)["y"].sum())(tree)["x"]
    np.testing.assert_array_equal(gradient, np.full(8, 2.0))


def test_methods():
    class Model:
        @sjit
        def double(self, x):
            """Twice."""
            return x * 2

        @sjit(out_shardings=P("data"))
        def split(self, x):
            return x

    jax.tree_util.register_static(Model)
    assert Model().double(jnp.ones(2))[0] == 2
    assert Model.double.__doc__ == "Twice." and Model.double.__name__ == "double"
    assert Model().double.lower(jnp.ones(2)).compile() is not None
    with jax.set_mesh(axn.make_mesh({"data": 8})):
        assert Model().split(jnp.ones(8)).sharding.spec == P("data")


def test_arrays_on_one_device_are_moved(helper):
    x = jax.device_put(jnp.arange(8), jax.devices()[1])
    with helper:
        found = helper.sjit(in_shardings=P("data"))(lambda x: x)(x)
        with pytest.raises(ValueError, match=r"sjit: argument 0 \(8,\) lies on 1 device"):
            helper.sjit(lambda x: x)(x)
    assert found.sharding.spec == P("data")


# --- the helper ---


def test_meshes():
    helper = MeshShardingHelper((2, -1), ("data", "model"), mesh_axis_splitting=True)
    assert dict(helper.mesh.shape) == {"data": 2, "model": 4}
    assert helper.mesh.axis_types == (AxisType.Auto,) * 2
    assert repr(helper) == "MeshShardingHelper(data=2, model=4)"
    assert MeshShardingHelper([2], ["data"]).mesh.size == 2
    for dims, names, message in (
        ([-1, -1], ["a", "b"], "only one size can be left open, got a, b"),
        ([3, -1], ["a", "b"], "8 devices cannot be divided by 3"),
        ([4, 4], ["a", "b"], "needs 16 devices; there are 8"),
        ([4, 2], ["a"], r"2 sizes \(4, 2\) for 1 mesh axes \('a',\)"),
    ):
        with pytest.raises(ValueError, match=message):
            MeshShardingHelper(dims, names)


def test_the_helper_in_force(helper):
    other = MeshShardingHelper([8], ["data"])
    assert get_global_mesh_helper() is None and get_global_mesh() is None
    with helper as entered:
        assert entered is helper is get_global_mesh_helper()
        assert get_global_mesh() is helper.mesh and axn.current_mesh() == helper.mesh.abstract_mesh
        with other, other:
            assert MeshShardingHelper.get_global_mesh() is other.mesh
            assert lies(axn.shard(jnp.ones(8), P("data")), P("data"))
            with concurrent.futures.ThreadPoolExecutor() as pool:
                assert pool.submit(get_global_mesh).result() is None
        assert get_global_mesh_helper() is helper
    assert get_global_mesh_helper() is None and axn.current_mesh() is None


def test_shardings_of_a_tree(helper):
    tree = {"w": jax.ShapeDtypeStruct((8, 2), jnp.float32), "named": axn.ones({"batch": 8}), "step": 3}
    found = helper.match_sharding_rule({"w": P("data"), "named": {"batch": "model"}, "step": None}, tree)
    assert found["w"] == NamedSharding(helper.mesh, P("data", None)) and found["step"] is None
    assert found["named"].array == NamedSharding(helper.mesh, P("model"))
    made = jax.jit(lambda: jnp.ones((8, 2)), out_shardings=found["w"])()
    assert lies(made, P("data"))


def test_placing_and_fetching(helper):
    tree = {"w": np.ones((8, 2)), "named": axn.named(np.ones(8), "batch"), "step": 3, "none": None}
    place, fetch = helper.make_shard_and_gather_fns(tree, {"batch": "data"} | ANY_FSDP)
    placed = jax.tree.map(lambda f, x: f(x), place, tree)
    assert lies(placed["w"], P("data")) and lies(placed["named"], P("data")) and placed["step"] == 3
    fetched = jax.tree.map(lambda f, x: f(x), fetch, placed)
    assert isinstance(fetched["w"], np.ndarray) and isinstance(fetched["named"].array, np.ndarray)
    np.testing.assert_array_equal(fetched["w"], tree["w"])


def test_local_data(helper):
    batch = {"x": np.arange(16.0).reshape(8, 2), "named": axn.ones({"step": 2, "batch": 8})}
    with pytest.raises(ValueError, match=r"x \(8, 2\) has no axis 'batch' along which"):
        helper.local_data_to_global_array(batch, "batch")
    loaded = helper.local_data_to_global_array(batch, mesh_axis_subset="model")
    assert lies(loaded["x"], P("model")) and lies(loaded["named"], P("model"))
    np.testing.assert_array_equal(loaded["x"], batch["x"])
    by_name = helper.local_data_to_global_array(batch["named"], axn.Axis("batch", 8))
    assert lies(by_name, P(None, ("data", "model"))) and by_name.axes == batch["named"].axes
    assert lies(helper.local_data_to_global_array(np.ones((3, 8)), -1, ("data",)), P(None, "data"))
    # The partition spec is written as scalax does, since code compares it.
    for subset, axis, expected in (
        ("data", 0, P("data")),
        (("data", "model"), 0, P(("data", "model"))),
        ("model", 1, P(None, "model")),
    ):
        assert helper.local_data_to_global_array(np.ones((8, 8, 2)), axis, subset).sharding.spec == expected
    with pytest.raises(ValueError) as raised:
        helper.local_data_to_global_array({"a": [np.ones((6, 2))], "step": 3})
    assert "2 problems" in str(raised.value) and "step () has no axis 0" in str(raised.value)
    assert "a/0 (6, 2): 6 along axis 0 cannot be sharded over data=4 x model=2" in str(raised.value)
    with pytest.raises(ValueError, match=r"mesh \(data=4, model=2\) has no axis 'dat'. Did you mean 'data'"):
        helper.local_data_to_global_array(batch, 0, ["dat"])


def test_placements_belong_to_parameters(mesh):
    """Also where a parameter has its default, or is passed by keyword."""

    def f(n, x, y=None):
        return x * n, y

    with axn.set_mesh(mesh):
        compiled = sjit(f, in_shardings=(P("data"), P("model")), static_argnums=0)
        x = jnp.ones(8)
        for args, kwargs in [((3, x), {}), ((3, x, x), {}), ((3, x), {"y": x}), ((3,), {"x": x, "y": x})]:
            first, second = compiled(*args, **kwargs)
            assert lies(first, P("data"))
            assert second is None or lies(second, P("model"))


def test_the_types_of_the_mesh_around(helper):
    other = MeshShardingHelper([4, 2], ["data", "model"], explicit=helper.mesh.axis_types[0].name == "Auto")
    inner = other.sjit(lambda x: x * 2)
    with (
        helper,
        pytest.raises(ValueError, match=r"called in a traced function under mesh .* axes, but it is meant for"),
    ):
        jax.jit(lambda x: inner(x))(jnp.ones(8))


# --- other uses in code written for scalax ---


def test_the_global_helper_inside(helper):
    seen = []

    def f(x):
        seen.append((get_global_mesh_helper(), get_global_mesh(), get_global_annotation_shardings()))
        return x

    helper.sjit(f, annotation_shardings={"hidden": P("data")})(jnp.ones(2))
    assert seen == [(helper, helper.mesh, {"hidden": P("data")})]
    assert MeshShardingHelper.get_global_mesh_helper() is None and get_global_annotation_shardings() is None


def test_the_context(helper):
    assert (helper.axis_dims, helper.axis_names) == ((4, -1), ("data", "model"))
    with helper.get_context(annotation_shardings={"hidden": P("model")}) as entered:
        assert entered is helper is get_global_mesh_helper()
        assert MeshShardingHelper.get_global_annotation_shardings() == {"hidden": P("model")}
        assert lies(MeshShardingHelper.with_sharding_annotation(jnp.ones(8), "hidden"), P("model"))
        assert lies(MeshShardingHelper.with_sharding_constraint(jnp.ones(8), P("data")), P("data"))
    x = jnp.ones(8)
    assert with_sharding_constraint(x, P("data")) is x  # without a mesh it does nothing, silently


@pytest.mark.parametrize("of", [tuple, list])
def test_lists_of_placements(helper, of):
    f = helper.sjit(lambda a, b: of([a, b]), in_shardings=[P("data"), None], out_shardings=[P("data"), P("model")])
    a, b = f(jnp.ones(8), jnp.ones(8))
    assert lies(a, P("data")) and lies(b, P("model"))


def test_applying_functions_to_a_tree(helper):
    tree = {"w": np.arange(8.0), "b": {"x": np.ones((2, 8))}}
    place, fetch = helper.make_shard_and_gather_fns(tree, sharding_rule=ANY_FSDP)
    placed = helper.apply_shard_and_gather_fns(place, tree)
    assert lies(placed["w"], P("data")) and lies(placed["b"]["x"], P(None, "data"))
    np.testing.assert_array_equal(MeshShardingHelper.apply_shard_and_gather_fns(fetch, placed)["w"], tree["w"])
