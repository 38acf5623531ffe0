"""The language of `rearrange` and `einsum`: valid expressions, and the positions of errors."""

from __future__ import annotations

import pytest

from axonym.core import parsing
from axonym.core.parsing import Dots, Group, Name, parse, parse_terms


def _shown(text: str, term: parsing.Term) -> list[str]:
    """Return the elements of a term as written in the text."""
    return [text[e.start : e.stop] for e in term.elements]


def test_ordered_term():
    expression = parse("op", "a ... (b_1 c)->(n: a c)", comma="elements")
    assert expression.lhs == (
        parsing.Term(
            0, 13, (Name(0, 1, "a"), Dots(2, 5), Group(6, 13, None, (Name(7, 10, "b_1"), Name(11, 12, "c")))), True
        ),
    )
    (rhs,) = expression.rhs
    assert rhs.elements == (Group(15, 23, Name(16, 17, "n"), (Name(19, 20, "a"), Name(21, 22, "c"))),)


@pytest.mark.parametrize("comma", ["terms", "elements"])
def test_unordered_term(comma):
    text = "{a (n: c d), ...} -> "
    expression = parse("op", text, comma=comma)
    (term,) = expression.lhs
    assert not term.ordered
    assert _shown(text, term) == ["a", "(n: c d)", "..."]
    assert text[term.start : term.stop] == "{a (n: c d), ...}"
    assert [v.name for v in term.variables] == ["a", "c", "d"]
    assert [g.start for g in term.groups] == [3]
    assert term.dots == Dots(13, 16)


def test_commas_separate_terms_or_elements():
    text = "a b, c -> a"
    assert [_shown(text, t) for t in parse("op", text, comma="terms").lhs] == [["a", "b"], ["c"]]
    assert [_shown(text, t) for t in parse("op", text, comma="elements").lhs] == [["a", "b", "c"]]


def test_a_blank_term_has_no_elements():
    assert [len(t.elements) for t in parse("op", "-> a", comma="terms").lhs] == [0]
    assert [len(t.elements) for t in parse("op", "a, , b -> ", comma="terms").lhs] == [1, 0, 1]
    assert [len(t.elements) for t in parse("op", "a ->", comma="terms").rhs] == [0]


def test_names_may_be_of_any_script_and_are_interned():
    first, second = (parse("op", "größe -> größe", comma="elements").lhs[0].variables[0].name for _ in range(2))
    assert first == "größe"
    assert first is second


def test_terms_without_an_arrow():
    assert [_shown("a b, {c ...}", t) for t in parse_terms("op", "a b, {c ...}", comma="terms")] == [
        ["a", "b"],
        ["c", "..."],
    ]
    with pytest.raises(ValueError, match="`->` is not allowed here"):
        parse_terms("op", "a -> b", comma="terms")


@pytest.mark.parametrize("comma", ["terms", "elements"])
@pytest.mark.parametrize(
    ("text", "carets", "message"),
    [
        ("a b", "   ^", "expected `->`"),
        ("", "^", "expected `->`"),
        ("a -> b -> c", "       ^^", "this is the second"),
        ("a (b c -> c", "  ^", "this parenthesis is not closed"),
        ("a b) -> c", "   ^", "this '.' closes nothing"),
        ("{a b -> c", "^", "this brace is not closed"),
        ("a} -> c", " ^", "this '}' closes nothing"),
        ("{a} b -> c", "    ^", "expected nothing after the closing brace"),
        ("a {b} -> c", "  ^", "braces around the whole term"),
        ("a -> {a}", "     ^^^", "the output has an order"),
        ("a * b -> c", "  ^", r"unexpected '\*'.*letters, digits and underscores"),
        ("a 1b -> c", "  ^", "unexpected '1'.*does not start with a digit"),
        ("a .. -> c", "  ^", "unexpected '.'.*three dots"),
        ("a => b", "  ^", "unexpected '='.*written `->`"),
        ("a ... b ... -> c", "        ^^^", "a second `...`"),
        ("a -> ... b ...", "           ^^^", "a second `...`"),
        ("a () -> a", "  ^^", "this group is empty"),
        ("a (n:) -> a", "  ^^^^", "this group is empty"),
        ("a b a -> b", "    ^", "'a' occurs a second time here"),
        ("a (b a) -> b", "     ^", "'a' occurs a second time here"),
        ("{a a} -> b", "   ^", "'a' occurs a second time here"),
        ("a b -> b b", "         ^", "'b' occurs a second time here"),
        ("(n: a) (n: b) -> a", "        ^", "'n' occurs a second time here"),
        ("((a b) c) -> a", " ^^^^^", "groups do not nest"),
        ("(a ...) -> a", "   ^^^", "cannot be part of one"),
        ("a: b -> c", " ^", "':' is not allowed here"),
        ("(a b: c) -> c", "    ^", "':' is not allowed here"),
        ("(a,, b) -> c", "   ^", "expected an axis before this comma"),
        ("{a, b,} -> c", "     ^", "expected an axis after this comma"),
    ],
)
def test_errors_point_at_the_place(text, carets, message, comma):
    with pytest.raises(ValueError, match=f"^op: .*{message}") as error:
        parse("op", text, comma=comma)
    _, shown, pointer = str(error.value).split("\n")
    assert shown == f"    {text}"
    assert pointer == f"    {carets}"


def test_misplaced_commas_between_elements():
    for text, carets in [("a, -> b", " ^"), (", a -> b", "^"), ("a,, b -> b", "  ^"), ("{a}, b -> b", "   ^")]:
        with pytest.raises(ValueError) as error:
            parse("op", text, comma="elements")
        assert str(error.value).endswith(f"\n    {carets}")


def test_the_caret_stands_right_in_several_lines():
    with pytest.raises(ValueError) as error:
        parse("op", "a\n\tb -> a ?", comma="elements")
    assert str(error.value).split("\n")[1:] == ["    a  b -> a ?", "              ^"]


def test_later_stages_point_at_parts():
    expression = parse("op", "a (b c) -> a", comma="elements")
    with pytest.raises(ValueError, match=r"^op: not today") as error:
        expression.fail(expression.lhs[0].groups[0], "not today")
    assert str(error.value).endswith("\n      ^^^^^")
