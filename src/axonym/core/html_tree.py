"""Write arrays as a tree, as the model is, with the bytes of each part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from .errors import describe_bytes
from .html import Html, bar, code, element, joined

_OPEN = 2
"""The depth to which parts are shown open."""
_MOST = 600
"""The largest number of arrays that are written."""
_LARGE = 12
"""The largest number of children of a part that is shown open."""


class ArrayInTree(Protocol):
    """An array in a tree: where it lies, and the bytes on each device."""

    @property
    def path(self) -> str: ...
    @property
    def axes(self) -> tuple[str | None, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def over(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def bytes(self) -> int: ...
    @property
    def copies(self) -> int: ...


A = TypeVar("A", bound=ArrayInTree)


@dataclasses.dataclass
class _Node(Generic[A]):
    """A part of a tree: an array, or parts by their names."""

    path: str
    children: dict[str, _Node[A]] = dataclasses.field(default_factory=dict)
    array: A | None = None

    def arrays(self) -> Iterator[A]:
        if self.array is not None:
            yield self.array
        for child in self.children.values():
            yield from child.arrays()

    def kind(self) -> tuple[object, ...]:
        """Return a value that is equal for parts that are sharded alike."""
        start = len(self.path)
        return tuple((x.path[start:], x.axes, x.sizes, x.over, x.copies) for x in self.arrays())


def array_tree(placed: Sequence[A], described: Callable[[A], Html], more: str) -> Html:
    """Write arrays as a tree. A part that is sharded as another says so.

    Arguments:
        placed: the arrays.
        described: writes the end of an array's line.
        more: where the arrays are that are not written, if there are too many.
    """
    root = _Node[A]("")
    for x in placed:
        node = root
        for name in x.path.split("/"):
            path = f"{node.path}/{name}" if node.path else name
            node = node.children.setdefault(name, _Node(path))
        node.array = x
    whole = max((sum(x.bytes for x in node.arrays()) for node in root.children.values()), default=0)
    writer = _Writer(described, max(1, whole))
    items = [*writer.items(root, 0)]
    if writer.left:
        items.append(element("li", f"and {writer.left} more: {more}", class_="small"))
    return element("ul", *items, class_="tree")


class _Writer(Generic[A]):
    def __init__(self, described: Callable[[A], Html], whole: int):
        self._described, self._whole = described, whole
        self._known: dict[object, str] = {}
        self._written, self.left = 0, 0

    def items(self, node: _Node[A], depth: int) -> Iterator[Html]:
        """Yield the children of a part; layers that are alike are one."""
        waiting = list(node.children.items())
        while waiting:
            (name, child), *waiting = waiting
            alike = [name]
            while name.isdigit() and waiting and waiting[0][0].isdigit() and waiting[0][1].kind() == child.kind():
                alike.append(waiting.pop(0)[0])
            if self._written < _MOST:
                yield self._item(name, child, depth, len(alike), alike[-1])
            else:
                self.left += len(alike) * len(child.kind())

    def _item(self, name: str, node: _Node[A], depth: int, count: int, last: str) -> Html:
        title = name if count == 1 else f"{name} to {last}"
        while node.array is None and len(node.children) == 1:
            ((below, node),) = node.children.items()
            title = f"{title}/{below}"
        size = count * sum(x.bytes for x in node.arrays())
        head = [
            element("span", code(title), class_="name"),
            element("span", describe_bytes(size), class_="num"),
            bar(size / self._whole),
        ]  # with spaces between, for notebooks that drop every style
        kind = node.kind()
        same = self._known.setdefault(kind, node.path) if len(kind) > 1 else node.path
        if same != node.path:
            said = element("span", "sharded as ", code(same), class_="soft")
            return element("li", element("div", joined([*head, said], " "), class_="leaf"))
        self._written += node.array is not None
        if node.array is not None and not node.children:
            return element("li", element("div", joined([*head, self._described(node.array)], " "), class_="leaf"))
        is_open = depth < _OPEN and len(node.children) <= _LARGE
        own = self._described(node.array) if node.array is not None else None
        summary = element("summary", element("span", joined([*head, own], " "), class_="node"))
        below = element("ul", *self.items(node, depth + 1), style=f"--depth:{depth + 1}")
        return element("li", element("details", summary, below, open=is_open))
