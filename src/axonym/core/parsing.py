"""Parse the expressions of `rearrange`, `einsum` and annotations.

An *expression* is `lhs -> rhs`. Each side is a list of *terms*, and a term is a list of *elements*:

| element          | written         |                                                     |
|------------------|-----------------|-----------------------------------------------------|
| name             | `batch`         | letters, digits and underscores, no digit in front  |
| name with size   | `batch=8`       | only in annotations; elsewhere sizes are keywords   |
| ellipsis         | `...`           | the axes that are not named; at most one in a term  |
| group            | `(row col)`     | the factors of one axis                             |
| named group      | `(pos: row col)`| the same, and the name of that axis                 |

A term is ordered, `a b ...`, or unordered, `{a b ...}`. Elements are separated by spaces. A comma separates terms in
`einsum`, where each operand has one, and elements in `rearrange`, where each side has one term. Inside braces and
parentheses it always separates elements.

Parsing does not involve arrays: it turns text into the small objects below, each with its position in the text. `fail`
raises an error that points at this position; the later stages use it too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple, NoReturn, TypeAlias

from . import errors

CommaSeparates: TypeAlias = Literal["terms", "elements"]

# Named tuples rather than dataclasses: defining these takes less of the time of the import.


class Place(NamedTuple):
    """A place in the text, from `start` up to `stop`, that errors point at."""

    start: int
    stop: int


class Name(NamedTuple):
    """An identifier, with its size in languages that have sizes."""

    start: int
    stop: int
    name: str
    size: int | None = None


class Dots(NamedTuple):
    """An ellipsis."""

    start: int
    stop: int


class Group(NamedTuple):
    """Factors in parentheses; `name` is the name before the colon."""

    start: int
    stop: int
    name: Name | None
    members: tuple[Name, ...]


Element: TypeAlias = Name | Dots | Group
Node: TypeAlias = "Place | Element | Term | _Token"


class Term(NamedTuple):
    """The axes of one array, in order or (in braces) in any order."""

    start: int
    stop: int
    elements: tuple[Element, ...]
    ordered: bool

    @property
    def dots(self) -> Dots | None:
        """Return the ellipsis, if there is one."""
        return next((e for e in self.elements if isinstance(e, Dots)), None)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Return the elements in parentheses."""
        return tuple(e for e in self.elements if isinstance(e, Group))

    @property
    def variables(self) -> tuple[Name, ...]:
        """Return every name in order, including the names inside groups but not the names of groups."""
        nested = ((e,) if isinstance(e, Name) else e.members if isinstance(e, Group) else () for e in self.elements)
        return tuple(name for names in nested for name in names)


class Expression(NamedTuple):
    """`lhs -> rhs`. A side has at least one term: a blank one is a single term without elements.

    Terms on the left can be in braces, terms on the right are ordered.
    """

    what: str
    text: str
    lhs: tuple[Term, ...]
    rhs: tuple[Term, ...]

    def fail(self, node: Node, message: str) -> NoReturn:
        """Raise a ValueError that points at a part of the expression."""
        fail(self.what, self.text, node, message)


def split_words(expression: Expression, ranks: Sequence[int]) -> str:
    """Return a sentence with the expression, its words split into letters, if there is one letter for each axis."""
    words = [[e.name for e in term.elements if isinstance(e, Name)] for term in expression.lhs]
    whole = all(len(found) == len(term.elements) == 1 for found, term in zip(words, expression.lhs, strict=True))
    if not whole or [len(found[0]) for found in words] != list(ranks):
        return ""
    text = re.sub(r"\w+", lambda word: " ".join(word[0]), expression.text)
    text = re.sub(r"\s*,\s*", ", ", re.sub(r"\s*->\s*", " -> ", text)).strip()
    return f" Words are separated by spaces: write `{text}`."


def fail(what: str, text: str, node: Node, message: str) -> NoReturn:
    """Raise a ValueError that points at a part of the text."""
    flat = re.sub(r"\s", " ", text)  # a line break would move the caret away from its place
    raise ValueError(errors.caret(flat, node.start, node.stop, f"{what}: {message}"))


def parse(what: str, text: str, *, comma: CommaSeparates) -> Expression:
    """Parse `lhs -> rhs`; `comma` says which things a comma outside of braces and parentheses separates."""
    tokens = _tokenize(what, text)
    arrows = [i for i, token in enumerate(tokens) if token.kind == "->"]
    if not arrows:
        fail(what, text, tokens[-1], "expected `->` between the axes of the input and the axes of the output.")
    if len(arrows) > 1:
        fail(what, text, tokens[arrows[1]], "expected one `->`, this is the second.")
    arrow = arrows[0]
    end = _Token(tokens[arrow].start, tokens[arrow].start, "->", "the end")
    lhs = _Parser(what, text, [*tokens[:arrow], end], comma).side()
    rhs = _Parser(what, text, tokens[arrow + 1 :], comma).side()
    for term in rhs:
        if not term.ordered:
            fail(what, text, term, "the output has an order, so its axes are written without braces.")
    return Expression(what, text, lhs, rhs)


def parse_terms(what: str, text: str, *, comma: CommaSeparates, sizes: bool = False) -> tuple[Term, ...]:
    """Parse a single side, for languages without an arrow; with `sizes`, names can have sizes."""
    tokens = _tokenize(what, text)
    for token in tokens:
        if token.kind == "->":
            fail(what, text, token, "`->` is not allowed here.")
    return _Parser(what, text, tokens, comma, sizes).side()


# --- from characters to tokens ---


class _Token(NamedTuple):
    start: int
    stop: int
    kind: str
    """'name', 'end', or the sign itself."""
    text: str
    size: int | None = None


_TOKEN = re.compile(r"\s+|(?P<name>[^\W\d]\w*)(?:=(?P<size>\d+))?|(?P<sign>->|\.\.\.|[(){}:,])")


def _tokenize(what: str, text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            sign = text[position]
            if sign == ".":
                hint = "An ellipsis is three dots, `...`."
            elif sign in "->=→":
                hint = "The arrow is written `->`."
            elif sign.isdigit():
                hint = "A name does not start with a digit; sizes are given by keyword."
            else:
                hint = "Names are made of letters, digits and underscores."
            fail(what, text, Place(position, position + 1), f"unexpected {sign!r}. {hint}")
        if found["name"]:
            size = None if found["size"] is None else int(found["size"])
            tokens.append(_Token(found.start(), found.end(), "name", sys.intern(found["name"]), size))
        elif found["sign"]:
            tokens.append(_Token(found.start(), found.end(), found["sign"], found["sign"]))
        position = found.end()
    tokens.append(_Token(len(text), len(text), "end", "the end"))
    return tokens


# --- from tokens to terms ---


class _Parser:
    """Reads one side of an expression, left to right."""

    def __init__(self, what: str, text: str, tokens: list[_Token], comma: CommaSeparates, sizes: bool = False):
        self.what, self.text, self.tokens, self.comma, self.sizes = what, text, tokens, comma, sizes
        self.position = 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.position]

    @property
    def at_end(self) -> bool:
        return self.position == len(self.tokens) - 1

    def fail(self, node: Node, message: str) -> NoReturn:
        fail(self.what, self.text, node, message)

    def take(self) -> _Token:
        token = self.token
        self.position += 1
        return token

    def side(self) -> tuple[Term, ...]:
        terms = [self.term()]
        while self.token.kind == ",":  # only where commas separate terms; otherwise `elements` has consumed it
            self.take()
            terms.append(self.term())
        return tuple(terms)

    def term(self) -> Term:
        opening = self.token
        if opening.kind == "{":
            self.take()
            elements = self.elements(closing="}")
            if self.at_end:
                self.fail(opening, "this brace is not closed.")
            stop = self.take().stop
            next_term = self.token.kind == "," and self.comma == "terms"
            if not self.at_end and not next_term:
                self.fail(self.token, "expected nothing after the closing brace: braces must enclose the whole term.")
            term = Term(opening.start, stop, elements, False)
        else:
            elements = self.elements(closing=None)
            start = elements[0].start if elements else opening.start
            stop = elements[-1].stop if elements else opening.start
            term = Term(start, stop, elements, True)
        self.check(term)
        return term

    def elements(self, closing: str | None) -> tuple[Element, ...]:
        """Return the elements up to the closing sign or the end of the term, which is left for the caller."""
        found: list[Element] = []
        comma: _Token | None = None
        while not self.at_end and self.token.kind != closing:
            token = self.token
            if token.kind == ",":
                if closing is None and self.comma == "terms":
                    break
                if comma is not None or not found:
                    self.fail(token, "expected an axis before this comma.")
                comma = self.take()
                continue
            comma = None
            found.append(self.element())
        if comma is not None:
            self.fail(comma, "expected an axis after this comma.")
        return tuple(found)

    def element(self) -> Element:
        token = self.take()
        match token.kind:
            case "name":
                return self.name(token)
            case "...":
                return Dots(token.start, token.stop)
            case "(":
                return self.group(token)
            case ")" | "}":
                self.fail(token, f"this {token.kind!r} closes nothing.")
            case "{":
                self.fail(token, "expected braces around the whole term.")
            case _:
                self.fail(token, f"{token.kind!r} is not allowed here; a group with a name is written `(name: a b)`.")

    def name(self, token: _Token) -> Name:
        if token.size is not None and not self.sizes:
            self.fail(token, "axes have no sizes here; sizes are given by keyword.")
        return Name(token.start, token.stop, token.text, token.size)

    def group(self, opening: _Token) -> Group:
        name = None
        if self.token.kind == "name" and self.tokens[self.position + 1].kind == ":":
            name = self.name(self.take())
            self.take()
        elements = self.elements(closing=")")
        if self.at_end:
            self.fail(opening, "this parenthesis is not closed.")
        whole = Group(opening.start, self.take().stop, name, tuple(e for e in elements if isinstance(e, Name)))
        for element in elements:
            if isinstance(element, Dots):
                self.fail(element, "an ellipsis stands for whole axes and cannot be part of one: name the axes here.")
            if isinstance(element, Group):
                self.fail(element, "groups do not nest.")
        if not elements:
            self.fail(whole, "this group is empty.")
        return whole

    def check(self, term: Term) -> None:
        """Check that no name occurs twice in a term, and no more than one ellipsis."""
        dots = [e for e in term.elements if isinstance(e, Dots)]
        if len(dots) > 1:
            self.fail(dots[1], "a second `...`; one takes all the axes that are not named.")
        for names in (term.variables, [g.name for g in term.groups if g.name is not None]):
            for i, name in enumerate(names):
                if any(name.name == before.name for before in names[:i]):
                    self.fail(name, f"{name.name!r} occurs a second time here.")
