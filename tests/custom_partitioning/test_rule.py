"""Rules: derived from names, or given as strings, against rules written by hand."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

import axonym as axn
from axonym.custom_partitioning import PartitioningRule, partitioned
from axonym.custom_partitioning.rule import derived_shardings, for_shardy, local_shape, spec_of_term

Batch, Vocab, K = axn.make_axes(batch=4, vocab=6, k=2)


def term(text: str):
    return tuple((name,) for name in text.split())


def check(rule: PartitioningRule, operands, results, sizes, *, reduced="", replicated="", permuted=""):
    assert rule.operands == tuple(map(term, operands))
    assert rule.results == tuple(map(term, results))
    assert dict(rule.sizes) == sizes
    assert rule.reduced == set(reduced.split())
    assert rule.replicated == set(replicated.split())
    assert rule.permuted == set(permuted.split())


def test_axes_in_and_out_pass_through():
    rule = partitioned(lambda x: x + 1).explain(axn.ones((Batch, Vocab)))
    check(rule, ["batch vocab"], ["batch vocab"], {"batch": 4, "vocab": 6})


def test_axes_only_in_operands_are_whole_unless_reduced():
    fn = lambda x: axn.sum(x, "vocab")
    x = axn.ones((Batch, Vocab))
    sizes = {"batch": 4, "vocab": 6}
    check(partitioned(fn).explain(x), ["batch vocab"], ["batch"], sizes, replicated="vocab")
    check(partitioned(reduced="vocab")(fn).explain(x), ["batch vocab"], ["batch"], sizes, reduced="vocab")


def test_axes_only_in_results_are_whole():
    rule = partitioned(lambda x: axn.broadcast_axis(x, K)).explain(axn.ones(Batch))
    check(rule, ["batch"], ["k batch"], {"batch": 4, "k": 2}, replicated="k")


def test_scalars_and_what_has_no_name():
    rule = partitioned(lambda x, t, table: (x * t, table)).explain(axn.ones(Batch), 2.0, jnp.ones((3, 2)))
    sizes = {"batch": 4, "operand2_0": 3, "operand2_1": 2, "result1_0": 3, "result1_1": 2}
    replicated = "operand2_0 operand2_1 result1_0 result1_1"
    check(rule, ["batch", "", "operand2_0 operand2_1"], ["batch", "result1_0 result1_1"], sizes, replicated=replicated)


def test_trees_count_leaf_by_leaf():
    rule = partitioned(lambda p, x: {"y": axn.dot(x, p["w"], axis="vocab") + p["b"]}).explain(
        {"w": axn.ones((Vocab, K)), "b": axn.ones(K)}, axn.ones((Batch, Vocab))
    )
    sizes = {"k": 2, "vocab": 6, "batch": 4}
    check(rule, ["k", "vocab k", "batch vocab"], ["batch k"], sizes, replicated="vocab")


def test_options():
    fn = lambda x: axn.flip(x, "vocab")
    x = axn.ones((Batch, Vocab))
    sizes = {"batch": 4, "vocab": 6}
    rule = partitioned(replicated="vocab")(fn).explain(x)
    check(rule, ["batch vocab"], ["batch vocab"], sizes, replicated="vocab")
    rule = partitioned(permuted="vocab")(fn).explain(x)
    check(rule, ["batch vocab"], ["batch vocab"], sizes, permuted="vocab")


def test_a_resized_axis_is_another_one():
    rule = partitioned(lambda x: x["vocab", 1:]).explain(axn.ones((Batch, Vocab)))
    check(rule, ["batch vocab"], ["batch vocab'"], {"batch": 4, "vocab": 6, "vocab'": 5}, replicated="vocab vocab'")


@pytest.mark.parametrize("text", ["batch vocab, -> batch", "vocab batch, -> batch", "... vocab, -> ..."])
def test_string_for_named_arrays(text):
    rule = partitioned(text, reduced="vocab")(lambda x, t: axn.sum(x, "vocab") * t).explain(
        axn.ones((Batch, Vocab)), 1.0
    )
    check(rule, ["batch vocab", ""], ["batch"], {"batch": 4, "vocab": 6}, reduced="vocab")


def test_string_for_raw_arrays():
    fn = lambda x, t: jnp.max(x, -1, keepdims=True) * t
    rule = partitioned("b v, -> b k", reduced="v")(fn).explain(jnp.ones((4, 6)), 1.0)
    check(rule, ["b v", ""], ["b k"], {"b": 4, "v": 6, "k": 1}, reduced="v", replicated="k")


def test_ellipsis_of_raw_arrays():
    rule = partitioned("... v -> ...", reduced="v")(lambda x: x.sum(-1)).explain(jnp.ones((2, 3, 4)))
    check(rule, ["...0 ...1 v"], ["...0 ...1"], {"...0": 2, "...1": 3, "v": 4}, reduced="v")


def test_compound_axes():
    split_heads = partitioned("(h d) b -> h b", reduced="d", d=2)(lambda x: x.reshape(3, 2, 5).sum(1))
    rule = split_heads.explain(jnp.ones((6, 5)))
    assert rule.operands == ((("h", "d"), ("b",)),)
    assert dict(rule.sizes) == {"h": 3, "d": 2, "b": 5}
    assert str(rule) == "(h d) b -> h b\npassed through: h=3, b=5\nreduced: d=2"
    named = partitioned("(vocab: h d) batch -> h batch", reduced="d", h=3)(
        lambda x: axn.sum(axn.unflatten_axis(x, "vocab", axn.make_axes(h=3, d=2)), "d")
    )
    rule = named.explain(axn.ones((Vocab, Batch)))
    assert rule.operands == ((("h", "d"), ("batch",)),)
    assert dict(rule.groups) == {"vocab": ("h", "d")}


def test_printed():
    fn = partitioned(reduced="vocab")(lambda x, t: (axn.sum(x, "vocab") * t, axn.ones(K)))
    assert str(fn.explain(axn.ones((Batch, Vocab)), 1.0)) == (
        "batch vocab, -> batch, k\npassed through: batch=4\nreduced: vocab=6\nreplicated: k=2"
    )
    assert str(partitioned(lambda: 1.0).explain()) == "->"


def test_for_shardy():
    rule = PartitioningRule((term("a b"), ()), (term("a c"),), {"a": 2, "b": 3, "c": 4}, replicated={"c"})
    shardy = for_shardy(rule)
    assert shardy.operand_mappings == (("f0", "f1"), ())
    assert shardy.result_mappings == (("f0", "f2"),)
    assert shardy.reduction_factors == ("f1",)
    assert shardy.need_replication_factors == ("f2",)


def test_for_shardy_of_compound_axes():
    rule = PartitioningRule(((("a", "b"),),), ((("a",),),), {"a": 2, "b": 3})
    assert for_shardy(rule).operand_mappings == ((("f0", "f1"),),)
    assert for_shardy(rule).factor_sizes == {"f1": 3}


# --- how an operation is split ---

MESH = {"data": 4, "model": 2}


@pytest.mark.parametrize(
    ("spec", "shardings"),
    [
        (("data", None), {"a": ("data",)}),
        ((None, "model"), {"b": ("model",)}),
        (("data", "model"), {"a": ("data",), "b": ("model",)}),
        ((("data", "model"), None), {"a": ("data", "model")}),
        ((None, "data"), {}),
    ],
)
def test_splits(spec, shardings):
    rule = PartitioningRule((term("a b"),), (term("a"),), {"a": 8, "b": 6})
    assert derived_shardings(rule, MESH, [(rule.operands[0], spec)]) == shardings


def test_what_must_be_whole_is_not_split():
    rule = PartitioningRule((term("a b"),), (term("a"),), {"a": 8, "b": 6}, replicated={"b"})
    assert derived_shardings(rule, MESH, [(rule.operands[0], ("data", "model"))]) == {"a": ("data",)}


def test_a_mesh_axis_splits_one_factor_and_the_first_array_has_the_say():
    rule = PartitioningRule((term("a b"), term("b c")), (term("a c"),), {"a": 8, "b": 8, "c": 8})
    found = [(rule.operands[0], ("data", None)), (rule.operands[1], ("model", "data"))]
    shardings = derived_shardings(rule, MESH, found)
    assert shardings == {"a": ("data",), "b": ("model",)}
    assert [spec_of_term(t, shardings) for t in (*rule.operands, *rule.results)] == [
        P("data", "model"),
        P("model", None),
        P("data", None),
    ]


def test_a_minor_factor_is_split_when_the_major_one_is_used_up():
    both = (("a", "b"),)
    rule = PartitioningRule((both,), (both,), {"a": 4, "b": 6})
    assert derived_shardings(rule, MESH, [(both, (("data", "model"),))]) == {"a": ("data",), "b": ("model",)}
    assert derived_shardings(rule, {"data": 2, "model": 2}, [(both, (("data", "model"),))]) == {"a": ("data", "model")}
    assert derived_shardings(rule, {"data": 2, "model": 3}, [(both, (("data", "model"),))]) == {"a": ("data",)}


def test_a_minor_factor_is_not_split_elsewhere_if_that_leaves_holes():
    rule = PartitioningRule((term("b"), (("a", "b"),)), (term("b"),), {"a": 4, "b": 6})
    assert derived_shardings(rule, MESH, [(rule.operands[0], ("model",))]) == {}


# --- properties ---

names = st.lists(st.sampled_from("abcdef"), unique=True, max_size=4)
SIZES = dict(zip("abcdef", (2, 4, 8, 3, 6, 5), strict=True))


def zeros(axes):
    return axn.zeros(tuple(axn.Axis(n, SIZES[n]) for n in axes))


@settings(max_examples=25)
@given(
    operands=st.lists(names, min_size=1, max_size=3), results=st.lists(names, min_size=1, max_size=2), data=st.data()
)
def test_derived_rules_are_those_written_by_hand(operands, results, data):
    into, out = set(itertools.chain(*operands)), set(itertools.chain(*results))
    reduced = data.draw(st.sets(st.sampled_from(sorted(into - out)))) if into - out else set()
    fn = lambda *xs: tuple(zeros(r) for r in results)
    derived = partitioned(reduced=sorted(reduced))(fn).explain(*map(zeros, operands))
    by_hand = PartitioningRule(
        tuple(tuple((n,) for n in o) for o in operands),
        tuple(tuple((n,) for n in r) for r in results),
        {n: SIZES[n] for n in into | out},
        replicated=(into ^ out) - reduced,
    )
    assert derived.operands == by_hand.operands and derived.results == by_hand.results
    assert (derived.replicated, derived.reduced, dict(derived.sizes)) == (by_hand.replicated, reduced, by_hand.sizes)
    text = f"{', '.join(map(' '.join, operands))} -> {', '.join(map(' '.join, results))}"
    given_as_string = partitioned(text, reduced=sorted(reduced))(fn).explain(*map(zeros, operands))
    assert str(given_as_string) == str(derived)
    raw = partitioned(text, reduced=sorted(reduced))(lambda *xs: tuple(zeros(r).array for r in results))
    assert str(raw.explain(*(zeros(o).array for o in operands))) == str(derived)


entries = st.sampled_from([None, "data", "model", ("data", "model"), ("model", "data")])


@settings(max_examples=50)
@given(shape=names.filter(bool), data=st.data())
def test_splits_can_be_carried_out(shape, data):
    """Every device has as much, no mesh axis is used twice, and what must be replicated is."""
    drawn = data.draw(st.lists(entries, min_size=len(shape), max_size=len(shape)))
    replicated = data.draw(st.sets(st.sampled_from(shape)))
    own = tuple((n,) for n in shape)
    rule = PartitioningRule((own,), (own,), {n: SIZES[n] for n in shape}, replicated=replicated)
    shardings = derived_shardings(rule, MESH, [(own, drawn)])
    used = list(itertools.chain.from_iterable(shardings.values()))
    assert len(used) == len(set(used))
    assert not replicated & shardings.keys()
    local = local_shape(rule, own, shardings, MESH)
    for name, size in zip(shape, local, strict=True):
        assert size * int(np.prod([MESH[a] for a in shardings.get(name, ())])) == SIZES[name]


# --- messages ---


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("b v > b", {}, r"The arrow is written `->`"),
        ("{b v} -> b", {}, r"without braces"),
        ("b v -> b v v", {}, r"'v' occurs a second time here"),
        ("b v -> b", {"vv": 2}, r"'vv' is not among the axes of the rule, 'b', 'v'\. Did you mean 'v'\?"),
    ],
)
def test_strings_are_checked_at_once(text, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        partitioned(text, **options)(lambda x: x)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("batch -> batch", {}, r"operand 0 \(batch=4, vocab=6\) has 'vocab' as well"),
        ("batch vocab, batch -> batch", {}, r"2 operands here, but the call has 1"),
        ("batch vocab -> batch, k", {}, r"2 results here, but the function returns 1"),
        ("batch vocb -> batch", {}, r"no axis 'vocb'\. Did you mean 'vocab'\?(.|\n)*      \^\^\^\^"),
        ("batch (h d) -> batch", {}, r"this group needs the name of its axis"),
        ("batch (vocab: h d) -> batch", {}, r"the sizes \(h=\?, d=\?\) do not follow from 6"),
        ("batch (vocab: h d) -> batch", {"h": 4}, r"the sizes \(h=4, d=\?\) do not make up 6"),
        ("batch vocab -> batch", {"reduced": "vocb"}, r"`reduced` has 'vocb'.*Did you mean 'vocab'\?"),
        ("batch vocab -> batch", {"reduced": "batch"}, r"`reduced` has 'batch', which the results have too"),
    ],
)
def test_strings_that_do_not_fit(text, options, message):
    with pytest.raises(ValueError, match=message):
        partitioned(text, **options)(lambda x: axn.sum(x, "vocab")).explain(axn.ones((Batch, Vocab)))


def test_raw_arrays_of_another_rank():
    with pytest.raises(ValueError, match=r"1 dimension here, but operand 0 is of shape \(2, 3\)"):
        partitioned("b -> b")(lambda x: x).explain(jnp.ones((2, 3)))


def test_sizes_that_conflict():
    with pytest.raises(ValueError, match="axis 'batch' has conflicting sizes"):
        partitioned(lambda x, y: x).explain(axn.ones(Batch), axn.ones({"batch": 3}))


def test_an_axis_is_listed_once():
    with pytest.raises(ValueError, match="'a' is listed more than once"):
        partitioned(reduced="a", replicated="a")(lambda x: x)


def test_sizes_need_a_string():
    with pytest.raises(TypeError, match="sizes are for the factors of a string"):
        partitioned(lambda x: x, h=2)
