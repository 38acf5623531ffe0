"""Policies that say which arrays a scan keeps for its backward pass, and which it computes again.

The backward pass of a step needs its carry, its inputs and its intermediate results, the *internals*. A step that is
computed again from its carry needs no internals, and a scan that is computed again as a whole needs no carries. With
nested scans, the steps are cut into groups, and only the carries between groups are kept: with about sqrt(N) groups of
N steps, memory grows with sqrt(N), for one more forward pass.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.ad_checkpoint
import numpy as np

from ..core import errors
from ..core.operation_rules import equations
from ..core.tree_spec import FlatTree, flatten_arrays

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ScanCheckpointPolicy:
    """The values that a scan saves for its backward pass; all others are computed again there.

    Arguments:
        save_carries: keep the carry of every step: True, or "offload" to the host. With False none is kept, and the
            backward pass runs the whole scan again before it goes through the steps.
        save_inputs: "offload" moves the inputs of every step to the host. They are the operands of the scan and stay
            where they are otherwise, whether True or False.
        save_block_internals: keep the intermediate results of the steps: True for all, or a list of names, which steps
            give with `tree_checkpoint_name`. A scan warns of names that nothing in its body has.
        offload_block_internals: names of intermediate results that are kept on the host instead.
        prevent_cse: keep the compiler from undoing the policy, where the steps are not in a loop. A scan that is
            unrolled completely does so by itself.
        disable: no checkpointing: everything is kept.
        simple: the plain `jax.checkpoint` of each step, which keeps only the arguments of the step.
        nested: cut the steps into this many groups and keep only the carries between groups; True chooses the number
            that keeps least. A prime number of steps cannot be cut and is treated as if not nested.

    >>> policy = axn.ScanCheckpointPolicy(save_carries="offload", save_block_internals=["attention"])
    >>> policy.save_block_internals
    ('attention',)
    """

    save_carries: bool | Literal["offload"] = True
    save_inputs: bool | Literal["offload"] = False
    save_block_internals: bool | Sequence[str] = False
    offload_block_internals: Sequence[str] = ()
    prevent_cse: bool = False
    disable: bool = False
    simple: bool = False
    nested: bool | int = False

    def __post_init__(self) -> None:
        # Tuples, so that a policy can be part of the cache key of a compiled scan.
        for field in ("save_block_internals", "offload_block_internals"):
            given = getattr(self, field)
            if isinstance(given, str):
                raise TypeError(f"ScanCheckpointPolicy: {field} takes a list of names, as in {field}=[{given!r}].")
            if not isinstance(given, bool):
                object.__setattr__(self, field, tuple(given))
        problem = _policy_contradiction(self)
        if problem:
            raise ValueError(f"ScanCheckpointPolicy: {problem}")

    @staticmethod
    def from_bool_or_str(remat_policy: bool | str) -> ScanCheckpointPolicy:
        """Return the policy that a short word stands for.

        Arguments:
            remat_policy: one of

                - False: keep everything.
                - True, "recompute" or "full": keep the carries and compute the steps again.
                - "offload": the same, with carries and inputs on the host.
                - "nested": nested scans.
                - "save_all": keep everything.

        >>> axn.ScanCheckpointPolicy.from_bool_or_str("nested").nested
        True
        """
        if isinstance(remat_policy, (bool, str)) and remat_policy in _WORDS:
            return _WORDS[remat_policy]
        raise ValueError(f"ScanCheckpointPolicy: expected one of {errors.quoted(_WORDS)}, got {remat_policy!r}.")

    def checkpoint(self, carry_name: str, input_name: str, fn: Callable[..., T]) -> Callable[..., T]:
        """Return a step that keeps for its backward pass what the policy says.

        It does not handle options that concern all steps together: nested scans, and not keeping the carries.

        Arguments:
            carry_name: the name of the carry for JAX's policy, used if it is moved to the host.
            input_name: the same for the inputs.
            fn: the step; its first argument is the carry, the others are the inputs.

        >>> step = axn.ScanCheckpointPolicy().checkpoint("carry", "input", lambda carry, x: jnp.sin(carry) * x)
        >>> jax.grad(step)(0.0, 2.0)
        Array(2., dtype=float32, weak_type=True)
        """
        moves_carry, moves_inputs = self.save_carries == "offload", self.save_inputs == "offload"
        moves = self.offload_block_internals or moves_carry or moves_inputs
        if self.disable or (self.save_block_internals is True and not moves):
            return fn  # everything is kept
        moved = [n for n, moves in ((carry_name, moves_carry), (input_name, moves_inputs)) if moves]
        policy = self._kept(moved)

        def step(*args: Any, **kwargs: Any) -> T:
            # `jax.checkpoint` takes trees of arrays only, and a step can have other arguments and results.
            arrays, spec = flatten_arrays((args, kwargs))

            def of_arrays(arrays: list[Any]) -> FlatTree:
                (carry, *inputs), options = spec.unflatten(arrays)
                if moves_carry:
                    carry = tree_checkpoint_name(carry, carry_name)
                if moves_inputs:
                    inputs, options = tree_checkpoint_name((inputs, options), input_name)
                return FlatTree(*flatten_arrays(fn(carry, *inputs, **options)))

            return jax.checkpoint(of_arrays, policy=policy, prevent_cse=self.prevent_cse)(arrays).tree()

        return step

    @property
    def _saved(self) -> Sequence[str]:
        """Return the names of internals that stay on the device."""
        return () if isinstance(self.save_block_internals, bool) else self.save_block_internals

    def _kept(self, moved: Sequence[str]) -> Callable[..., Any] | None:
        """Return the policy of `jax.checkpoint` that keeps the internals, and moves these names to the host."""
        policies = jax.checkpoint_policies
        moved = (*moved, *self.offload_block_internals)
        if not moved:
            return policies.save_only_these_names(*self._saved) if self._saved else None
        by_name = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self._saved),
            names_which_can_be_offloaded=list(moved),
            offload_src="device",
            offload_dst="pinned_host",
        )
        if self.save_block_internals is not True:
            return by_name

        # JAX has no policy that saves everything and offloads some of it.
        def all_but_moved(*args: Any, **kwargs: Any) -> Any:
            decision = by_name(*args, **kwargs)
            return decision if isinstance(decision, jax.ad_checkpoint.Offloadable) else True

        return all_but_moved

    def _groups(self, length: int) -> int | None:
        """Return the number of groups of steps of nested scans; None without them."""
        if self.disable or self.nested is False:
            return None
        divisors = [d for d in range(2, length) if length % d == 0]
        if self.nested is True:
            # Memory holds the carry of each group, and of each step in the group that is computed again.
            return min(divisors, key=lambda d: d + length // d, default=None)
        if length % self.nested:
            raise ValueError(
                f"ScanCheckpointPolicy: {length} steps cannot be cut into nested={self.nested} groups of one size. "
                f"Use a divisor ({', '.join(map(str, divisors)) or 'there is none'}), or True."
            )
        return self.nested


def _policy_contradiction(policy: ScanCheckpointPolicy) -> str | None:
    for field in ("save_carries", "save_inputs"):
        if getattr(policy, field) not in (True, False, "offload"):
            return f"{field} is True, False or 'offload', not {getattr(policy, field)!r}."
    internals = policy.save_block_internals
    if policy.simple:
        saves = policy.save_carries is not True or policy.save_inputs or internals or policy.offload_block_internals
        return "simple=True keeps only the arguments of a step; leave the other fields out." if saves else None
    if policy.disable:
        return None
    if policy.nested is not True and policy.nested is not False and policy.nested < 2:
        return f"nested={policy.nested} is not a number of groups: use at least 2, True to have it chosen, or False."
    if internals is True and policy.save_carries is False:
        return "save_block_internals=True keeps everything, the carries too, so save_carries=False contradicts it."
    if twice := set(policy.offload_block_internals).intersection(policy._saved):
        return f"{errors.quoted(sorted(twice))} cannot be both saved on the device and offloaded to the host."
    return None


_WORDS: dict[bool | str, ScanCheckpointPolicy] = {
    True: ScanCheckpointPolicy(simple=True),
    False: ScanCheckpointPolicy(save_inputs=True, save_block_internals=True, disable=True),
    "offload": ScanCheckpointPolicy(save_carries="offload", save_inputs="offload"),
    "recompute": ScanCheckpointPolicy(),
    "full": ScanCheckpointPolicy(),
    "save_all": ScanCheckpointPolicy(save_inputs=True, save_block_internals=True),
    "nested": ScanCheckpointPolicy(nested=True),
}

ScanCheckpointSpec: TypeAlias = (
    bool | Literal["offload", "recompute", "full", "save_all", "nested"] | ScanCheckpointPolicy
)
"""A policy, or a word for one."""


def policy_of(spec: ScanCheckpointSpec) -> ScanCheckpointPolicy:
    """Return the policy of a spec."""
    return spec if isinstance(spec, ScanCheckpointPolicy) else ScanCheckpointPolicy.from_bool_or_str(spec)


def tree_checkpoint_name(tree: T, name: str) -> T:
    """Name every array of a tree, for checkpoint policies that choose by name what to keep.

    >>> axn.tree_checkpoint_name(axn.ones({"x": 2}), "attention")
    NamedArray(float32[x=2], [1. 1.])
    """
    if (given := _GIVEN.get()) is not None:
        given.add(name)

    def name_leaf(leaf: Any) -> Any:
        return jax.ad_checkpoint.checkpoint_name(leaf, name) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf

    return jax.tree.map(name_leaf, tree)


def checkpointed_scan(
    policy: ScanCheckpointPolicy,
    label: str,
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: list[jax.Array],
    *,
    length: int,
    reverse: bool,
    unroll: int,
) -> tuple[Any, Any]:
    """Run `jax.lax.scan` with a checkpoint policy.

    Arguments:
        label: the beginning of the names of carries and inputs that move to the host.
        step: the body, from raw arrays to raw arrays.
        xs: the arrays to scan, along their first axis.
    """
    symbolic = jax.export.is_symbolic_dim(length)  # JAX finds it by itself, and does not accept it as an argument
    if not symbolic and unroll >= length:
        # Without a loop between them, the compiler would merge the two computations of a step.
        policy = dataclasses.replace(policy, prevent_cse=True)
    names = f"{label}__carry", f"{label}__input"
    groups = policy._groups(length)

    def run(carry: Any, xs: list[jax.Array]) -> tuple[Any, Any]:
        if groups is None:
            given = None if symbolic else length
            return jax.lax.scan(policy.checkpoint(*names, step), carry, xs, given, reverse, unroll)
        per_group = length // groups
        prevent_cse = policy.prevent_cse or unroll >= per_group
        loop = functools.partial(jax.lax.scan, length=per_group, reverse=reverse, unroll=unroll)
        outer = _checkpointed_group(policy, prevent_cse, names, step, loop)
        cut = [x.reshape(groups, per_group, *x.shape[1:]) for x in xs]
        # `unroll` counts steps, and each step of the outer loop is a whole group.
        carry, ys = jax.lax.scan(outer, carry, cut, groups, reverse, max(1, unroll // per_group))
        return carry, jax.tree.map(lambda y: y.reshape(length, *y.shape[2:]), ys)

    if policy.save_carries is False and not policy.disable:
        # The inner checkpoints keep carries; this one drops them, and the backward pass runs the scan again first.
        run = jax.checkpoint(run, policy=policy._kept(()))
    with _record_names() as given:
        result = run(carry, xs)
    wanted = () if policy.disable else (*policy._saved, *policy.offload_block_internals)
    if not given.issuperset(wanted):  # JAX ignores names that the body gives to no array
        program = jax.make_jaxpr(lambda *xs: jax.lax.scan(step, *xs, length=length))(carry, xs).jaxpr
        found = given | {eqn.params["name"] for eqn in equations(program) if eqn.primitive.name == "name"}
        unknown = [n for n in wanted if n not in found]
        left = sorted(found.difference(wanted))
        hints = "".join(dict.fromkeys(errors.suggestion(n, left) for n in unknown))
        # A policy can serve several bodies, each with some of its names. So an unused name is fine if another one is
        # used, unless it is similar to a name that the policy lacks.
        if unknown and (hints or len(unknown) == len(wanted)):
            listed, named = errors.quoted(unknown), errors.quoted(sorted(found))
            errors.warn(
                f"{label}: the checkpoint policy has {listed}, but the body gives no array such a name. "
                + (f"It names {named}.{hints}" if found else "`axonym.tree_checkpoint_name` gives names to arrays.")
            )
    return result


def checkpointed_steps(
    policy: ScanCheckpointPolicy,
    label: str,
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    inputs: Sequence[Any],
) -> tuple[Any, list[Any]]:
    """Run the steps one after the other, without a loop, for inputs that are not slices of one tree.

    Arguments:
        step: the body, from a carry and the input of one step to the next carry and an output, all of them any trees.
        inputs: the input of each step.
    """
    policy = dataclasses.replace(policy, prevent_cse=True)
    names = f"{label}__carry", f"{label}__input"
    groups = policy._groups(len(inputs))

    def in_turn(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, inputs: Sequence[Any]) -> tuple[Any, list]:
        outputs = []
        for x in inputs:
            carry, output = step(carry, x)
            outputs.append(output)
        return carry, outputs

    def run(carry: Any, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        if groups is None:
            return in_turn(policy.checkpoint(*names, step), carry, inputs)
        per_group = len(inputs) // groups
        group = _checkpointed_group(policy, True, names, step, in_turn)
        cut = [inputs[i : i + per_group] for i in range(0, len(inputs), per_group)]
        carry, outputs = in_turn(group, carry, cut)
        return carry, [output for some in outputs for output in some]

    if policy.save_carries is False and not policy.disable:
        run = dataclasses.replace(policy, save_carries=True, save_inputs=False).checkpoint(*names, run)
    return run(carry, inputs)


def _checkpointed_group(
    policy: ScanCheckpointPolicy, prevent_cse: bool, names: tuple[str, str], step: Any, loop: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a loop over a group of steps, from a carry and the inputs of the group, with both checkpointed."""
    # The groups keep the values that live until the backward pass, so these move to the host.
    of_groups = ScanCheckpointPolicy(policy.save_carries, policy.save_inputs, prevent_cse=policy.prevent_cse)
    of_steps = dataclasses.replace(policy, save_carries=True, save_inputs=False, prevent_cse=prevent_cse)
    return of_groups.checkpoint(*names, functools.partial(loop, of_steps.checkpoint(*names, step)))


# --- the names given to arrays ---

_GIVEN: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("names given to arrays", default=None)


@contextlib.contextmanager
def _record_names() -> Iterator[set[str]]:
    """Collect the names given to arrays in a with-block, unless its trace is cached."""
    given, outer = set[str](), _GIVEN.get()
    token = _GIVEN.set(given)
    try:
        yield given
    finally:
        _GIVEN.reset(token)
        if outer is not None:
            outer |= given
