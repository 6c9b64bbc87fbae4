"""Whatever a file holds, it loads or it is refused with `file:line:col`; never a traceback."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervise.catalog import Problems, Source, parse_yaml, shipped_folder
from supervise.cli import invoke

pytestmark = pytest.mark.slow

PARSERS = [yaml.SafeLoader, *([yaml.CSafeLoader] if yaml.__with_libyaml__ else [])]

TEST_FILE = """\
version: supervise/v1
policy: nano
tests:
  - name: one
    series: {train_loss_raw: "2.4x80 nanx3"}
    noise: {train_loss_raw: 0.01}
    after_rollback: [{train_loss_raw: "2.4x9"}]
    inject: [{at: 3, nan: [train_loss_raw], for: 2}]
    expect:
      - {between: [1, 2], rule: nonfinite.sustained, is: quiet}
      - {end: true, budget: {rollback: 0}}
      - {never: [stop]}
"""
WHOLE = {
    "p.yaml": (shipped_folder("policies") / "nano.yaml").read_text("utf-8"),
    "packs/spike.yaml": (shipped_folder("policies/packs") / "loss_spike.yaml").read_text("utf-8"),
    "tests/p.yaml": TEST_FILE,
    "runbooks/soften.yaml": (shipped_folder("runbooks") / "soften.yaml").read_text("utf-8"),
}
WORDS = ("*a", "null", "on", "1e-3", ".nan", ".inf", "1e999", "30s", "and", "or", "not", "hold")
PIECES = (
    *("", " ", "  ", "\t", "\n", ": ", "- ", "? ", "&a ", "<<: ", "!!int ", "---\n", "...\n"),
    *":{}[],#'\"|>~\\()",
    *WORDS,
    *("%YAML 1.1\n", "é", "\x00", "\ufeff", "\u2028", "9" * 400, "x" * 600, "[" * 60),
)


def mutated(text: str, chance: random.Random) -> str:
    """Return the text with a few pieces dropped, doubled, moved or put in."""
    for _ in range(chance.randint(1, 3)):
        at, to = sorted(chance.randrange(len(text) + 1) for _ in "ab")
        to = min(to, at + chance.choice((0, 1, 5, 30)))
        how = chance.randrange(4)
        piece = (
            chance.choice(PIECES) if how < 2 else text[at:to] * 2 if how == 2 else text[to : to + 9]
        )
        text = text[:at] + piece + text[to:]
    return text


def check(path: Path, content: str | bytes, capsys: pytest.CaptureFixture[str]) -> bool:
    """Check a file with the command; return whether it was refused, and insist on how."""
    raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    path.write_bytes(raw)
    code = invoke(["policy", "check", "--json", str(path)])
    out, err = capsys.readouterr()
    document = json.loads(out)

    assert (err, code) == ("", 65 if document["errors"] else 0)
    for problem in document["errors"] + document["warnings"]:
        assert problem["line"] >= 1 and problem["col"] >= 1
        assert problem["message"] and "\n" not in problem["message"]
    return bool(document["errors"])


@given(st.text(max_size=200) | st.binary(max_size=200))
@settings(max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_at_all_is_refused_with_a_place(tmp_path, capsys, content):
    """Text of all of Unicode, and bytes that are none."""
    assert check(tmp_path / "p.yaml", content, capsys)


YAML_TEXT = st.recursive(
    st.sampled_from(
        ["a", "1", "1e-3", "'x'", '"\\x00"', "*a", "&a b", "!!str c", "30s", "null", ""]
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
        st.lists(st.tuples(st.sampled_from(["a", "b", "<<", "? c", "''"]), inner), max_size=3).map(
            lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"
        ),
    ),
    max_leaves=12,
)


@given(YAML_TEXT)
@settings(max_examples=200)
def test_both_parsers_refuse_the_same(text):
    verdicts = []
    for parser in PARSERS:
        problems = Problems()
        parse_yaml(Source("x.yaml", f"top: {text}\n"), problems, parser)
        verdicts.append(problems.count > 0)

    assert len(set(verdicts)) == 1


NANO = WHOLE["p.yaml"]
ODD: dict[str, str | bytes] = {
    "binary": bytes(range(256)) * 8,
    "zeros": b"\x00" * 4096,
    "half a surrogate": b"policy: \xed\xa0\x80\n",
    "a billion laughs": "a: &a [x,x]\n"
    + "".join(f"{b}: &{b} [*{a},*{a}]\n" for a, b in itertools.pairwise("abcdefghij")),
    "tabs everywhere": NANO.replace("  ", "\t"),
    "deep mappings": "\n".join(" " * i + "a:" for i in range(400)),
    "an open depth": "{a: " * 3000,
    "many keys": "".join(f"k{i}: 1\n" for i in range(500)),
    "emoji": "version: supervise/v1\npolicy: \U0001f525\n\U0001f525: 1\nuse: [\u202egnah]\n",
    "line separators": "version: supervise/v1\u2028mode: enforce\u2029\x85rules: 1\n",
    "Windows lines": NANO.replace("\n", "\r\n").replace("enforce", "enfroce"),
    "a long number": "version: supervise/v1\nwarmup: " + "9" * 5000 + "\n",
    "a long when": "rules: [{id: a, sev: SEV0, when: " + "(" * 400 + "a" + ")" * 400 + "}]\n",
    "a long series": TEST_FILE.replace("2.4x80", "2.4x999999 1+x"),
    "a series of spaces": TEST_FILE.replace("2.4x80 nanx3", " " * 5000 + "!"),
}


@pytest.mark.parametrize("name", ODD)
def test_check_refuses_every_odd_file(name, tmp_path, capsys):
    assert check(tmp_path / "p.yaml", ODD[name], capsys)


@pytest.mark.parametrize("name", WHOLE)
def test_check_stands_every_cut_and_every_damage(name, tmp_path, capsys):
    chance, text, path = random.Random(name), WHOLE[name], tmp_path / name
    path.parent.mkdir(exist_ok=True)
    cuts = [text[: len(text) * i // 7] for i in range(7)]
    changed = [mutated(text, chance) for _ in range(8)]

    assert sum(check(path, content, capsys) for content in (*cuts, *changed)) > 5


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"k{i}: 1\n" for i in range(6_000)),
        f"override: {{{', '.join(f'k{i}: 1' for i in range(6_000))}}}\n",
    ],
    ids=["sections", "overrides"],
)
def test_thousands_of_mistakes_are_told_in_part(text, tmp_path, capsys):
    """Likeness is looked for two hundred times, not thousands of times; the last one says so."""
    path = tmp_path / "p.yaml"
    path.write_text(f"version: supervise/v1\n{text}")

    assert invoke(["policy", "check", "--json", str(path)]) == 65
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert len(errors) == 201
    assert any("the rest of the file was not read" in each["message"] for each in errors)
