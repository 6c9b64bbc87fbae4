"""Whatever a file holds, it loads or it is refused with `file:line:col`; never a traceback."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervise.catalog import load as loading
from supervise.catalog import load_policy, shipped
from supervise.catalog.problems import PolicyErrors, Problems, Source

pytestmark = pytest.mark.slow

WHERE = re.compile(r".+:[1-9][0-9]*:[1-9][0-9]*")
PARSERS = [yaml.SafeLoader, *([yaml.CSafeLoader] if yaml.__with_libyaml__ else [])]

# Files that are changed, and the policy that makes the changed file be read.
HANG = "version: supervise/v1\nmode: enforce\nuse: [hang]\n"
SOFT = (
    "version: supervise/v1\nmode: enforce\ndetectors: {a: {kind: nonfinite}}\n"
    "rules: [{id: r, when: a, sev: SEV0, run: soften}]\n"
    "budgets: {all: {max: 1}, lr_scale: {max: 1}, rollback: {max: 1}}\nsavepoints: {every: 9}\n"
)
SEEDS = {
    "p.yaml": (shipped.folder("policies") / "nano.yaml").read_text("utf-8"),
    "whole.yaml": load_policy("nano").resolved,
    "packs/hang.yaml": (shipped.folder("policies/packs") / "hang.yaml").read_text("utf-8"),
    "runbooks/soften.yaml": (shipped.folder("runbooks") / "soften.yaml").read_text("utf-8"),
}
PIECES = (
    "", " ", "  ", "\t", "\n", ":", ": ", "- ", "{", "}", "[", "]", ",", "#", "'", '"', "|", ">",
    "&a ", "*a", "!!int ", "<<: ", "? ", "---\n", "...\n", "%YAML 1.1\n", "null", "~", "on", "1e-3",
    "-1", ".nan", ".inf", "1e999", "9" * 400, "30s", "é", "\x00", "\ufeff", "\u2028", "\\",
    "and", "or", "not", "(", ")", "hold", "verify", "approve", "supervise/v2", "x" * 600, "[" * 60,
)  # fmt: skip


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


def judged(path: Path) -> bool:
    """Load; return whether it was refused, and insist on how."""
    try:
        load_policy(path)
    except PolicyErrors as error:
        assert error.problems
        for problem in error.problems:
            assert WHERE.fullmatch(problem.where)
            assert "\n" not in str(problem)
        assert WHERE.match(str(error))
        error.render()
        return True
    return False


@pytest.mark.parametrize("name", SEEDS)
def test_a_damaged_file_is_refused_or_still_right(name: str, tmp_path: Path) -> None:
    """Two hundred random damages to each sort of shipped file."""
    chance = random.Random(name)
    for folder in ("packs", "runbooks"):
        (tmp_path / folder).mkdir()
    main = tmp_path / (name if "/" not in name else "p.yaml")
    main.write_text(HANG if name.startswith("packs") else SOFT, "utf-8")
    refused = 0
    for _ in range(200):
        (tmp_path / name).write_bytes(mutated(SEEDS[name], chance).encode("utf-8", "surrogatepass"))
        refused += judged(main)

    assert refused > 50  # else the damages are too gentle to prove anything


@given(st.text(max_size=200) | st.binary(max_size=200))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_at_all_is_refused_with_a_place(tmp_path: Path, content: str | bytes) -> None:
    """Text of all of Unicode, and bytes that are none."""
    raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    (tmp_path / "p.yaml").write_bytes(raw)

    assert judged(tmp_path / "p.yaml")


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
def test_both_parsers_refuse_the_same(text: str) -> None:
    """libyaml or not, the same file is right or wrong."""
    verdicts = []
    for parser in PARSERS:
        problems = Problems()
        loading.parse(Source("x.yaml", f"top: {text}\n"), problems, parser)
        verdicts.append(problems.count > 0)

    assert len(set(verdicts)) == 1


@pytest.mark.parametrize("key", ["mode", "rules", "detectors", "budgets", "runbooks", "inhibit"])
@given(value=YAML_TEXT)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_under_a_known_key_is_handled(tmp_path: Path, key: str, value: str) -> None:
    """Every section meets every shape of value."""
    (tmp_path / "p.yaml").write_text(f"version: supervise/v1\n{key}: {value}\n", "utf-8")

    judged(tmp_path / "p.yaml")
