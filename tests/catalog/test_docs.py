"""The READMEs say what the code does."""

from __future__ import annotations

import pytest

from supervise.catalog.export import docs
from supervise.catalog.inventory import shipped


@pytest.mark.parametrize("file", docs.READMES)
def test_the_tables_of_a_readme_are_current(file: str) -> None:
    """`python -m supervise.catalog.export.docs` was run after the last change."""
    assert docs.path_of(file).read_text("utf-8") == docs.current(file)


def test_check_names_what_is_out_of_date_and_writes_nothing() -> None:
    """Exit status 0 when everything is current, as here."""
    assert docs.main(["--check"]) == 0


def test_every_part_of_the_language_is_in_a_table() -> None:
    """Nothing that can be written is missing from the reference."""
    text = "".join(docs.path_of(file).read_text("utf-8") for file in docs.READMES)

    for name in docs.PARTS:
        assert f"<!-- generated: {name} -->" in text
    for kind in ("policies", "policies/packs", "runbooks"):
        for name in shipped.names(kind):
            assert f"`{name}`" in text


def test_the_example_of_the_policy_reference_loads(load) -> None:
    """What a newcomer copies first works; the same for the runbook, inside a policy."""
    text = docs.path_of("policies/README.md").read_text("utf-8")
    example = text.partition("```yaml\n")[2].partition("```")[0]
    runbook = docs.path_of("runbooks/README.md").read_text("utf-8")
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


def test_a_table_escapes_what_would_break_it() -> None:
    """A pipe inside a cell."""
    assert docs.table(("a",), [("x | y",)]) == "| a |\n| --- |\n| x \\| y |\n"
