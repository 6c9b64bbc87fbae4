"""The READMEs say what the code does."""

from __future__ import annotations

from pathlib import Path

import cogapp
import pytest

from supervise.catalog import docs, shipped

ROOT = Path(__file__).parents[2]
READMES = ("policies/README.md", "runbooks/README.md", "probes/README.md")


@pytest.mark.parametrize("name", READMES)
def test_the_tables_of_a_readme_are_current(name: str) -> None:
    cog = cogapp.Cog()
    cog.options.prologue = "from supervise.catalog import docs"
    text = (ROOT / name).read_text("utf-8")

    assert cog.process_string(text, name) == text


def test_every_part_of_the_language_is_in_a_table() -> None:
    """Nothing that can be written is missing from the reference."""
    text = "".join((ROOT / name).read_text("utf-8") for name in READMES)

    for name in docs.PARTS:
        assert f'docs.part("{name}")' in text
    for kind in ("policies", "policies/packs", "runbooks"):
        for name in shipped.names(kind):
            assert f"`{name}`" in text


def test_the_example_of_the_policy_reference_loads(load) -> None:
    """What a newcomer copies first works; the same for the runbook, inside a policy."""
    text = (ROOT / "policies/README.md").read_text("utf-8")
    example = text.partition("```yaml\n")[2].partition("```")[0]
    runbook = (ROOT / "runbooks/README.md").read_text("utf-8")
    steps = runbook.partition("```yaml\n")[2].partition("```")[0]

    policy = load(
        example,
        {"runbooks/my-rollback.yaml": steps},
    )
    user = load(
        example.replace("sev: SEV2, for: 100", "sev: SEV1, run: my-rollback"),
        {"runbooks/my-rollback.yaml": steps},
    )

    assert policy.mode == "shadow"
    assert user.runbooks["my-rollback"].verbs[-1] == "verify"
