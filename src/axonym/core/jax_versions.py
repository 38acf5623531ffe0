"""Handle differences between the supported versions of JAX, and infer internals that it does not expose."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun
from jax.sharding import AxisType, PartitionSpec

INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # pyright: ignore[reportAttributeAccessIssue]
"""The `inline` argument of `jax.jit` for functions that must not show up in a program that is being traced.

From jax 0.12 on, `inline=True` inlines only when the program is lowered.
"""


def varying_axes(x: Any) -> frozenset[str]:
    """Return the mesh axes over which a value, or one of its type, is device-varying inside `shard_map`.
    JAX does not track this with `check_vma=False`. The attribute had another name before jax 0.10.2.
    """
    kind: Any = x if isinstance(x, ShapedArray) else jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def axes_made_manual(equation: Any) -> frozenset[str]:
    """Return the mesh axes that an equation makes manual: those of a `shard_map`, and none of another one.

    The parameter had another name before jax 0.10.2.
    """
    params = equation.params
    return frozenset(params.get("newly_manual_axes", params.get("manual_axes", ())))


def is_about_devices(error: ValueError) -> bool:
    """Return whether `jax.jit` refused a call because arguments and mesh have different devices, by its message."""
    return "incompatible devices" in str(error)


def is_about_older_mesh(error: ValueError) -> bool:
    """Return whether JAX refused to compile a program on Explicit axes under an older `with mesh:`, by its message."""
    return "Length of device assignment" in str(error)


def called_by_grad() -> bool:
    """Return whether the caller was called by the check in `jax.grad` that a result is a scalar."""
    return sys._getframe(2).f_code.co_name == "typeof" and sys._getframe(3).f_code.co_name == "_check_scalar"


def set_apart(x: jax.Array) -> jax.Array:
    """Return the array behind a barrier: XLA does not simplify it together with the operations before or after it.

    Before jax 0.12, XLA has three bugs with sharded arrays. It pads an array only once for several pads of the same
    widths, even if they pad with different values. If one position of a constant (also a constant cotangent) is
    updated, the other shards are updated too. And pieces that an all-to-all exchanges may get layouts of their
    own, which XLA then rejects.
    """
    return x if jax.__version_info__ >= (0, 12) else jax.lax.optimization_barrier(x)


def stackable(x: Any) -> Any:
    """Return the result of a step of a loop in a form that JAX can stack on Explicit mesh axes.

    Before jax 0.12, it cannot stack constants in a partly unrolled loop, as these do not have the type of a mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if jax.__version_info__ >= (0, 12) or AxisType.Explicit not in mesh.axis_types:
        return x
    return jax.sharding.reshard(x, PartitionSpec()) if jax.typeof(x).sharding.mesh.empty else x


def is_staged(x: Tracer) -> bool:
    """Return whether operations on a tracer become part of a program, rather than run at once.

    They run at once on the tracers with which `jax.grad`, `jax.jvp` and `jax.vmap` follow arrays outside of jit. Such a
    tracer refers to the array that it follows. In JAX versions without this reference, every tracer counts as staged.
    """
    followed = followed_by(x)
    return followed is None or isinstance(followed, Tracer)


def followed_by(x: Tracer) -> Any:
    """Return the array that a tracer follows, or the tracer of a program; None in JAX versions that do not tell.

    Under `jax.vmap`, it still has the axis that is mapped over.
    """
    referent: Any = getattr(x, "get_referent", None)
    return None if referent is None else referent()


def active_platform() -> str:
    """Return the platform of the active mesh's devices; without a mesh, JAX's default platform."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend()
    if hasattr(device, "platform"):
        return device.platform
    # Before jax 0.10.2, a device of a mesh has no platform.
    return "tpu" if device.device_kind.startswith("TPU") else jax.default_backend()


def active_device_kind() -> str:
    """Return the kind of the active mesh's devices, such as `NVIDIA H100 80GB HBM3`, or of JAX's default one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def scan_operands(params: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Split the operands of a `scan` equation into constants, the first carry, and the arrays that are scanned over."""
    if "num_carry" in params:
        constants, carry = params["num_consts"], params["num_consts"] + params["num_carry"]
        return list(operands[:constants]), list(operands[constants:carry]), list(operands[carry:])
    # From jax 0.12 on, the equation holds a tree of its operands.
    constants, carry, scanned = params["ft_in"].update(operands).unpack()
    return list(constants), list(carry), list(scanned)


def is_on_host(aval: Any) -> bool:
    """Return whether an array of a traced program is in the memory of the host."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def programs_in(equation: Any) -> Iterator[Any]:
    """Yield the programs in the parameters of an equation: bodies of loops, branches and functions that it calls."""
    for value in jax.tree.leaves(list(equation.params.values())):
        if hasattr(program := getattr(value, "jaxpr", value), "eqns"):
            yield program


def program_of(params: Any, operands: Sequence[Any]) -> Jaxpr | None:
    """Return the program of an operation that `jax.experimental.hijax` defines; None for any other equation."""
    operation = params.get("_prim")
    if not hasattr(operation, "expand"):  # as before jax 0.12
        return None
    structure = jax.tree.structure(operation.in_avals)
    abstract = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
    return jax.make_jaxpr(lambda *xs: jax.tree.leaves(operation.expand(*structure.unflatten(xs))))(*abstract).jaxpr


def without_unused(program: Jaxpr) -> Jaxpr:
    """Return a program without the operations that no result needs; the same one in JAX versions that cannot tell."""
    try:
        from jax.interpreters.partial_eval import dce_jaxpr
    except ImportError:
        return program
    return dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)[0]


@functools.lru_cache(maxsize=16)
def _identity(count: int) -> Jaxpr:
    return jax.make_jaxpr(lambda *xs: xs)(*[jax.ShapeDtypeStruct((), "int32")] * count).jaxpr


def evaluated(eqn: Any, params: Any, operands: Sequence[Any]) -> list[Any]:
    """Run an equation with other parameters and operands, in its scope and at its line of Python."""
    program: Any = _identity(len(operands))
    eqns = [eqn.replace(invars=program.invars, params=params)]
    return jaxpr_as_fun(ClosedJaxpr(program.replace(outvars=eqn.outvars, eqns=eqns), ()))(*operands)


def traced_operation(name: str, types: Callable[..., list[Any]], mapped: Callable[..., Any]) -> Primitive:
    """Return an operation that only shows in a traced program, from the types of its results, and its `vmap`."""
    from jax.interpreters import batching

    made: Any = Primitive(name)
    made.multiple_results = True
    made.def_abstract_eval(types)
    batching.primitive_batchers[made] = mapped
    return made


def marking_operation(name: str, mapped: Callable[[Any, int], Any]) -> Callable[[jax.Array, Any], jax.Array]:
    """Return an operation without effect that shows in a traced program with a parameter `names`, also in derivatives.

    Under `jax.vmap` it gets `mapped(names, at)`, where `at` is the dimension that is mapped over. In a JAX version
    without these ways to define operations, it shows nowhere.
    """
    try:
        from jax.interpreters import ad, batching, mlir

        mark: Any = Primitive(name)
        mark.def_impl(lambda x, *, names: x)
        mark.def_abstract_eval(lambda x, *, names: x)
        mlir.register_lowering(mark, lambda ctx, x, *, names: [x])
        ad.deflinear2(mark, lambda cotangent, x, *, names: [mark.bind(cotangent, names=names)])
        batching.primitive_batchers[mark] = lambda xs, at, *, names: (mark.bind(*xs, names=mapped(names, at[0])), at[0])
    except (ImportError, AttributeError):
        return lambda x, names: x
    return lambda x, names: mark.bind(x, names=names)


@contextlib.contextmanager
def x64_while_partitioning() -> Iterator[None]:
    """Let JAX trace custom partitioning rules with 64-bit types while it compiles.

    Before jax 0.12, it traces them in a thread of XLA, which `jax.enable_x64` does not reach.
    """
    if jax.__version_info__ >= (0, 12):
        yield
        return
    with ThreadPoolExecutor(1) as other:
        before = other.submit(jax.config.read, "jax_enable_x64").result()
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
