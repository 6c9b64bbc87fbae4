"""The `when` language: parsed exactly, evaluated by Kleene's tables."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervise.catalog import ExpressionError, parse_expression
from supervise.core.model import BREACH, OK, UNKNOWN

CODES = (OK, UNKNOWN, BREACH)
NAMES = ("a", "b", "c.d")
INDEX = {name: i for i, name in enumerate(NAMES)}

# A tree that Python itself can evaluate, as text and as a function of the codes.
LEAF = st.sampled_from([(name, lambda codes, i=i: codes[i]) for name, i in INDEX.items()])


def _joined(parts: list) -> object:
    word, pick = ("and", min) if len(parts) % 2 else ("or", max)
    text = f"({f' {word} '.join(text for text, _ in parts)})"
    return text, lambda codes: pick(value(codes) for _, value in parts)


TREES = st.recursive(
    LEAF,
    lambda tree: st.one_of(
        st.lists(tree, min_size=2, max_size=4).map(_joined),
        tree.map(lambda part: (f"not {part[0]}", lambda codes: 2 - part[1](codes))),
    ),
    max_leaves=8,
)


@given(TREES)
def test_it_agrees_with_kleenes_tables(tree):
    """and is the lower, or the higher, not turns around, for all readings of all inputs."""
    text, expected = tree
    when = parse_expression(text, limit=len(text)).compile(INDEX)

    for codes in itertools.product(CODES, repeat=len(NAMES)):
        assert when(codes) == expected(codes)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("a or b and c.d", "a or (b and c.d)"),
        ("not a and b", "(not a) and b"),
        ("not not a", "a"),
        ("a and b and c.d", "(a and b) and c.d"),
        ("  a\tor\nb ", "a or b"),
        ("((a))", "a"),
    ],
)
def test_not_binds_closer_than_and_and_closer_than_or(text, same):
    one, other = parse_expression(text).compile(INDEX), parse_expression(same).compile(INDEX)

    for codes in itertools.product(CODES, repeat=len(NAMES)):
        assert one(codes) == other(codes)


@pytest.mark.parametrize(
    ("text", "at", "said"),
    [
        ("", 0, "a detector name is missing here"),
        ("a and", 5, "a detector name is missing here"),
        ("a or or b", 5, "a detector name is missing before 'or'"),
        ("a b", 2, "'b' is not expected here"),
        ("a and (b", 6, "this parenthesis is never closed"),
        ("()", 1, "a detector name is missing before ')'"),
        ("a < 3", 2, "'<' has no meaning here"),
        ("3", 0, "'3' has no meaning here"),
        ("(" * 40 + "a" + ")" * 40, 33, "nested deeper than 32 levels"),
        ("not " * 40 + "a", 132, "nested deeper than 32 levels"),
        ("a or " * 200 + "a", 500, "longer than 500 characters"),
    ],
)
def test_what_is_no_expression_is_refused_at_its_column(text, at, said):
    """No arithmetic, no comparison, nothing that Python would quietly accept."""
    with pytest.raises(ExpressionError) as raised:
        parse_expression(text)

    assert said in str(raised.value)
    assert raised.value.at == at


def test_names_can_be_replaced_where_they_stand():
    """A pack's short names become long ones, and the rest of the text stays as it was."""
    expression = parse_expression("a  and not (b or ab)").with_names({"a": "p.a", "ab": "p.ab"})

    assert expression.text == "p.a  and not (b or p.ab)"
    assert expression.names == ("p.a", "b", "p.ab")


@given(st.text(max_size=80))
@settings(max_examples=40)
def test_any_text_gives_a_function_or_an_error(text):
    try:
        expression = parse_expression(text)
    except ExpressionError as error:
        assert 0 <= error.at <= len(text)
    else:
        when = expression.compile(dict.fromkeys(expression.names, 0))
        assert when((OK,)) in CODES
