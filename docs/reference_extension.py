"""What the API reference needs beyond the source text: it is loaded by mkdocs.yml, and is no part of the library.

Many functions are made by factories from the rows of a table, such as `exp = _unary("exp", ...)`. Read without being
run, they are values of no known type. Here they are imported, and take the signature and the docstring that they have
when the program runs, as do the `__init__` that Equinox makes for a module and the docstrings that decorators complete.
And the examples of docstrings, which have no heading, become blocks of code.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import re
import textwrap
from typing import Any

import griffe

# An example begins with a prompt and ends at the next empty line; one that follows at once belongs to it.
_EXAMPLE = re.compile(r"^>>> .*\n(?:.+\n)*(?:\n>>> .*\n(?:.+\n)*)*", flags=re.MULTILINE)

_PRIVATE = re.compile(r"(?<![\w.])_[A-Za-z]\w*")


class Reference(griffe.Extension):
    """Takes from the running program what its text does not say, and shows examples as code."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Called once, when the whole package has been read."""
        if pkg.path == "axonym":
            _complete(pkg, loader)
            _hide_modules(pkg)
            _show_no_private_name(pkg)


def _complete(parent: griffe.Module | griffe.Class, loader: griffe.GriffeLoader) -> None:
    for name, member in list(parent.members.items()):
        if member.is_alias:
            continue
        if isinstance(parent, griffe.Module):
            _as_run(name, member, parent, loader)
            member = parent.members[name]
        if member.docstring is not None:
            member.docstring.value = readable(member.docstring.value)
        if isinstance(member, (griffe.Module, griffe.Class)):
            _complete(member, loader)


def _hide_modules(package: griffe.Module) -> None:
    """Puts a function in place of a module that has its name, where the program does: `axonym.nn.dropout` is one."""
    for name, module in list(package.members.items()):
        if module.is_alias or not isinstance(module, griffe.Module):
            continue
        _hide_modules(module)
        if name in module.members and inspect.isfunction(getattr(importlib.import_module(package.path), name, None)):
            member = module.members[name]
            function = copy.copy(member.final_target if isinstance(member, griffe.Alias) else member)
            function.parent = package
            function.members = module.members  # so that what is in the module can still be found
            package.members[name] = function


def _show_no_private_name(parent: griffe.Module | griffe.Class) -> None:
    """Takes markers such as `_REQUIRED` from signatures: what has one as its default must be given."""
    for member in parent.members.values():
        if member.is_alias:
            continue
        if isinstance(member, griffe.Function):
            for parameter in member.parameters:
                if isinstance(parameter.default, (str, griffe.Expr)) and _PRIVATE.match(str(parameter.default)):
                    parameter.default = None
                if parameter.annotation is not None and _PRIVATE.search(text := str(parameter.annotation)):
                    public = " | ".join(part for part in text.split(" | ") if not _PRIVATE.search(part))
                    parameter.annotation = _annotation(public, parent)
        elif isinstance(member, (griffe.Module, griffe.Class)):
            _show_no_private_name(member)


def _as_run(name: str, member: griffe.Object, module: griffe.Module, loader: griffe.GriffeLoader) -> None:
    """Takes from the running program what its text does not say."""
    value = getattr(importlib.import_module(module.path), name, None)
    if inspect.isfunction(value) and isinstance(member, (griffe.Attribute, griffe.Function)):
        if isinstance(member, griffe.Attribute):
            types = _types_of_family(str(member.value).partition("(")[0], module)
            member = _function(value, module, types)
            module.set_member(name, member)
        member.docstring = griffe.Docstring(
            inspect.cleandoc(value.__doc__ or ""),
            parent=member,
            parser=loader.docstring_parser,
            parser_options=loader.docstring_options,
        )
    elif isinstance(value, type) and isinstance(member, griffe.Class) and "__init__" not in member.members:
        makers = [vars(value).get(maker) for maker in ("__init__", "__new__")]
        found = [maker for maker in makers if inspect.isfunction(maker)]
        if found and list(inspect.signature(found[0]).parameters) != ["self", "args", "kwargs"]:
            member.set_member("__init__", _function(found[0], member))


def _types_of_family(factory: str, module: griffe.Module) -> dict[str, Any]:
    """The types of the parameters of what a factory makes: those of its protocol's first overload, for named arrays."""
    made = module.members.get(factory)
    if not isinstance(made, griffe.Function) or made.returns is None or str(made.returns) not in module.members:
        return {}
    protocol = module.members[str(made.returns)]
    if isinstance(protocol, griffe.Alias):
        if not protocol.target_path.startswith("axonym."):  # such as `Any`, which is not loaded
            return {}
        protocol = protocol.final_target
    if not isinstance(protocol, griffe.Class):
        return {}
    call = [*protocol.overloads.get("__call__", []), protocol.members.get("__call__")][0]
    if not isinstance(call, griffe.Function):
        return {}
    return {p.name: "NamedArray" if str(p.annotation) == "A" else str(p.annotation) for p in call.parameters}


def _function(value: Any, parent: griffe.Module | griffe.Class, types: dict[str, Any] | None = None) -> griffe.Function:
    """A function of a module, or what makes the objects of a class."""
    signature = inspect.signature(value)
    if types:
        parameters = [p.replace(annotation=types.get(p.name, p.annotation)) for p in signature.parameters.values()]
        signature = signature.replace(parameters=parameters, return_annotation="NamedArray")
    parameters = (
        griffe.Parameter(
            parameter.name,
            kind=griffe.ParameterKind[parameter.kind.name.lower()],
            annotation=_annotation(parameter.annotation, parent),
            default=None if parameter.default is parameter.empty else _default(parameter.default),
        )
        for parameter in signature.parameters.values()
        if not parameter.name.startswith("_")
    )
    return griffe.Function(
        "__init__" if isinstance(parent, griffe.Class) else value.__name__,
        parameters=griffe.Parameters(*parameters),
        returns=_annotation(signature.return_annotation, parent),
        parent=parent,
    )


def _default(value: Any) -> str:
    """A default value, without the addresses that `repr` gives for functions and the like."""
    shown = getattr(value, "__name__", None) or repr(value)
    return "..." if shown.startswith("<") else shown


def _annotation(annotation: Any, parent: griffe.Module | griffe.Class) -> Any:
    """Annotations are strings at run time; as expressions, the names in them become links."""
    if annotation is inspect.Parameter.empty:
        return None
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    try:
        return griffe.safe_get_annotation(ast.parse(text, mode="eval").body, parent)
    except SyntaxError:
        return text


def readable(text: str) -> str:
    """A docstring as the parser wants it: each example a block of code, arguments indented."""
    start, rest = text.partition("\n")[::2]
    if start == "Arguments:" and not rest.startswith(" "):  # a first line tells nothing about the indentation
        text = f"{start}\n{textwrap.indent(rest, '    ')}"
    return _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}```\n", text + "\n").rstrip("\n")
