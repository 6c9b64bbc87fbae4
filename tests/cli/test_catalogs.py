"""Runbooks, drills and shell completion, as the command line lists them."""

from __future__ import annotations

import json

import pytest

from supervise.catalog import action_classes, parse_drill


def test_a_runbook_is_explained_step_by_step(supervise):
    code, out, err = supervise("runbook", "rollback-and-rewarm")

    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert text.startswith("runbook rollback-and-rewarm (policy nano) ")
    assert "runs for nonfinite.poisoned, " in text
    assert "step 3 pause (lease 900s): Pause training at the next step boundary" in text
    assert "if refused relaunch-and-rewarm" in text
    assert "budgets rollback 2 per 5000 steps, all 6 per 20000 steps" in text
    facts = json.loads(supervise("runbook", "rollback-and-rewarm", "--json")[1])
    assert [step["verb"] for step in facts["steps"]][:3] == ["check_weights", "hold_rate", "pause"]
    assert (facts["acts"], facts["ladder_level"]) == (True, 2)
    assert all(step["does"] and step["verb"] in action_classes() for step in facts["steps"])


def test_runbooks_are_listed_those_that_act_first(supervise):
    found = json.loads(supervise("runbook", "--json")[1])

    acts = [one["acts"] for one in found]
    assert acts == sorted(acts, reverse=True) and 0 < sum(acts) < len(acts)
    listed = supervise("runbook")[1].splitlines()
    assert len(listed) == len(found) + 1 and listed[0].split()[0] == "runbook"


def test_drills_are_listed_and_their_example_can_be_given(supervise):
    names = [row["drill"] for row in json.loads(supervise("drill", "list", "--json")[1])]
    for name in names:
        shown = supervise("drill", "show", name)[1].splitlines()[-1]
        assert parse_drill(shown.split(" --drill ")[1].split(" -- ")[0]).fault == name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script(supervise, shell):
    code, out, _ = supervise("completion", shell)
    assert code == 0
    assert "_SUPERVISE_COMPLETE" in out and "supervise" in out


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("supervise ru", {"run", "runs", "runbook"}),
        ("supervise --pol", {"--policy"}),
        ("supervise status 2026", {"20260105-101112-7f3a9c"}),
        ("supervise run --mode sh", {"shadow"}),
    ],
)
def test_commands_options_and_runs_are_completed(
    supervise, tmp_path, monkeypatch, capsys, line, completed
):
    run = tmp_path / "runs" / "20260105-101112-7f3a9c"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("_SUPERVISE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    with pytest.raises(SystemExit):
        supervise()
    assert completed <= {row.partition(",")[2] for row in capsys.readouterr().out.splitlines()}
