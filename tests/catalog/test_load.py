"""Reading YAML: positions are kept, surprises are refused, nothing ends in a traceback."""

import pytest
import yaml

from supervise.catalog import PolicyErrors, Problems, Source, load_policy, parse_yaml

from .conftest import plain

PARSERS = [yaml.SafeLoader, *([yaml.CSafeLoader] if yaml.__with_libyaml__ else [])]


@pytest.fixture(params=PARSERS, ids=lambda parser: parser.__name__)
def parser(request):
    """Both of PyYAML's, since libyaml is not everywhere."""
    return request.param


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("012", 12),
        ("0x10", 16),
        ("1_000", "1_000"),
        ("10:30", "10:30"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("", None),
        (".inf", float("inf")),
        ("'1'", "1"),
        ("9" * 30, 1e30),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(parser, text, value):
    """`1e-3` is a number, `on` and `10:30` are text, nothing is a date."""
    scalar = plain(f"key: {text}\n", parser=parser)["key"]

    assert (scalar, type(scalar)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "line", "col", "said"),
    [
        ("", 1, 1, "the file is empty"),
        ("a:\n  é: [1, {b: c, b: d}]\n", 2, 17, "duplicate key 'b'"),  # characters, not bytes
        ("- a\n", 1, 1, "a mapping of keys to values, not a list"),
        ("a: 1\nb: 2\na: 3\n", 3, 1, "duplicate key 'a'; first in line 1"),
        ("a: &x 1\n", 1, 4, "the anchor &x is not allowed"),
        ("a: *x\n", 1, 4, "the alias *x is not allowed"),
        ("a: {<<: {b: 1}}\n", 1, 5, "merge keys (<<) are not allowed"),
        ("a: !python/object:os.system x\n", 1, 4, "the tag !python/object:os.system is not"),
        ("a: 1\n---\nb: 2\n", 2, 1, "a second document starts here"),
        ("%YAML 1.1\n---\na: 1\n", 1, 1, "directives (%YAML, %TAG) are not allowed"),
        ("? [a, b]\n: 1\n", 1, 3, "a key must be plain text"),
        ("a:\n\tb: 1\n", 2, 1, "tabs are not allowed here (indent with spaces)"),
        ("a: `x`\n", 1, 4, "put quotes around text that begins with `"),
        ("a: b: c\n", 1, 5, "put quotes around text that holds ': '"),
        ("a: {b: 1\n", 1, 9, "not YAML"),
        ('a: "\\0"\n', 1, 4, "cannot contain the control character '\\x00'"),
        ("a: " + "[" * 30 + "]" * 30, 1, 27, "nested deeper than 24 levels"),
    ],
)
def test_a_surprise_is_refused_where_it_stands(parser, text, line, col, said):
    with pytest.raises(PolicyErrors) as raised:
        plain(text, parser=parser)
    problem = raised.value.problems[0]

    assert said in f"{problem.message} ({problem.hint})"
    assert problem.line == line
    if "not YAML" not in said:  # there the two parsers point at neighbouring characters
        assert problem.col == col


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"a: caf\xe9\n", "1:7: this is not UTF-8 text"),
        ("a: 1\n".encode("utf-16"), "1:1: this is not UTF-8 text"),
        (b"a: " + b"x" * 300_000, "1:1: the file is larger than 256 kB"),
    ],
)
def test_a_file_of_another_encoding_or_too_large_is_refused(tmp_path, raw, said):
    path = tmp_path / "p.yaml"
    path.write_bytes(raw)

    with pytest.raises(PolicyErrors, match=said):
        load_policy(path)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xef\xbb\xbfversion: supervise/v1\n")

    assert load_policy(path).name == "p"


def test_mistakes_come_sorted_with_their_lines():
    problems = Problems()
    parse_yaml(Source("x.yaml", "b: 1\na: 1\nb: 2\na: 2\n"), problems)
    with pytest.raises(PolicyErrors) as raised:
        problems.raise_if_any()

    error = raised.value
    assert str(error) == ("x.yaml:3:1: duplicate key 'b'; first in line 1 (and 1 more)")
    assert error.render().splitlines()[-3:] == [
        "x.yaml:4:1: duplicate key 'a'; first in line 2",
        "    a: 2",
        "    ^",
    ]
