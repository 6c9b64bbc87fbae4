"""Words on the command line: they reach the supervisor, and what becomes of them is printed."""

from __future__ import annotations

import json
import threading

import pytest

from supervise.cli import OPERATOR_COMMANDS
from supervise.runtime import ControlInbox, post_command
from tests.support.waiting import wait_until


def test_a_word_survives_a_supervisor_that_dies_with_it(tmp_path):
    post_command(tmp_path, "approve", "anna", {"key": "1-1"}, at_ns=1)
    post_command(tmp_path, "pause", "bo", {"key": "2-2"}, at_ns=2)
    assert [told.operator for told in ControlInbox(tmp_path, lambda: 7).poll()] == ["anna", "bo"]

    heir = ControlInbox(tmp_path, lambda: 8, {"1-1"})

    assert [told.operator for told in heir.poll()] == ["bo"]
    assert heir.poll() == []
    assert not list((tmp_path / "control").iterdir())


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (("lr", "RUN", "0.5", "--rewarm", "9"), 0, "lr_scale sent to the job"),
        (("pause", "RUN"), 0, "inc-1/1/0-pause done"),
        (("resume", "RUN"), 1, "the job is not paused"),
        (("savepoint", "RUN"), 1, "failed: no room for it"),
        (("save", "RUN"), 0, "inc-1/1/0-checkpoint done"),
        (("rollback", "RUN", "--before", "9"), 0, "inc-1/1/1-rollback done"),
        (("skip", "RUN", "--steps", "2"), 0, "inc-1/1/0-skip_step done"),
        (("approve", "RUN", "ask-1", "--sha", "0"), 1, "no request 'ask-1' is waiting"),
        (("deny", "RUN", "ask-1"), 1, "no request 'ask-1' is waiting"),
        (("ack", "RUN", "--incident", "inc-1"), 1, "no incident is open"),
        (("silence", "RUN", "nix"), 1, "there is no rule 'nix'"),
        (("plan", "add", "RUN", "--to", "900", "--what", "new mix"), 0, "to 900 are planned"),
        (("release", "RUN"), 1, "nothing to release"),
        (("release", "RUN", "--shard", "a.tar"), 0, "unquarantine"),
        (("quarantine", "RUN", "a.tar"), 1, "the job does not report which shards"),
        (("stop", "RUN", "--requeue"), 0, "inc-1/1/0-stop done"),
    ],
)
def test_every_word_is_answered(supervise, supervised, line, code, said):
    line = [str(supervised.path) if part == "RUN" else part for part in line]
    found, out, err = supervise(*line, "--by", "anna")

    assert (found, out) == (code, ""), err
    assert said in err
    assert "anna: " in err


def test_an_answer_is_one_document_for_a_program(supervise, supervised):
    for word, args, outcome, code in (
        ("pause", (), "done", 0),
        ("savepoint", (), "failed", 1),
        ("silence", ("nix",), "refused", 1),
        ("release", ("--shard", "b.tar"), "refused", 1),
    ):
        ended, out, err = supervise(word, "--json", supervised.path, *args)
        answer = json.loads(out)

        assert (ended, err) == (code, "")
        assert (answer["command"], answer["outcome"], answer["exit_code"]) == (word, outcome, code)
        assert answer["text"] or all(r["seq"] and r["text"] for r in answer["records"])


def test_there_is_a_test_of_every_word():
    (mark,) = test_every_word_is_answered.pytestmark
    assert {line[0] for line, _, _ in mark.args[1]} == set(OPERATOR_COMMANDS)


def test_the_only_living_run_need_not_be_named(supervise, supervised, monkeypatch, tmp_path):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "r1").symlink_to(supervised.path)

    assert supervise("pause")[0] == 0
    for words, said in (
        (("pause", "nowhere"), "nowhere"),
        (("pause", "runs/r1", "x"), "too many arguments"),
        (("approve",), "too few arguments"),
    ):
        code, _, err = supervise(*words)
        assert (code, said in err) == (64, True), err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        *(
            (("lr", "RUN", value), f"VALUE: {value!r} is not a number above 0 and at most 1.\n")
            for value in ("nan", "half", "2", "0")
        ),
        (("lr", "RUN", "--rewram", "1", "0.5"), "no such option '--rewram'"),
        (("skip", "RUN", "--steps", "4"), "'--steps': 4 is not in the range 1<=x<=3"),
        (("policy", "test", "--min", "nan", "RUN"), "'nan' is not a number at least 0 and at most"),
        (("release", "RUN", "--shard", "b.tar"), "b.tar is not in quarantine, which holds a.tar\n"),
    ],
)
def test_what_cannot_be_done_is_said_before_anybody_is_asked(supervise, supervised, line, said):
    """A word that JSON cannot carry would never be answered."""
    refused = 1 if line[0] == "release" else 64
    line = [str(supervised.path) if part == "RUN" else part for part in line]
    code, _, err = supervise(*line)

    assert (code, said in err) == (refused, True), err
    assert not (supervised.path / "control").exists()


def test_a_mistyped_run_is_no_name(supervise, supervised, monkeypatch, tmp_path):
    """It lies where runs are. What lies elsewhere, as a shard does, is a name."""
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").symlink_to(supervised.path)
    typo, absolute = "runs/frist", tmp_path / "runs" / "frist"
    for line in (("quarantine", typo, "s.tar"), ("approve", absolute), ("lr", typo)):
        code, _, err = supervise(*line)
        assert (code, "did you mean" in err, "runs/first?" in err) == (64, True, True), err
    assert not (supervised.path / "control").exists()
    (tmp_path / "data").mkdir()
    code, _, err = supervise("quarantine", "data/017.tar")
    assert (code, "does not report which shards" in err) == (1, True)


def test_a_reload_is_answered_with_its_record_or_refused_with_the_cause(
    supervise, supervised, small, tmp_path, monkeypatch
):
    """The file is read from where the person stands."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("policy: [\n")
    code, _, err = supervise("reload", supervised.path, "--policy", "bad.yaml")
    assert code == 65
    assert "bad.yaml:" in err and "the old one stays in force" in err

    small.write_text(small.read_text().replace("gt: 5.0", "gt: 4.0"))
    code, out, err = supervise("reload", supervised.path, "--by", "anna")
    assert (code, out) == (0, "")
    assert "anna reloaded the policy: detectors ~high" in err
    assert len(list(supervised.path.glob("policies/*.yaml"))) == 1
    small.write_text(small.read_text().replace("gt: 4.0", "gt: 3.0"))
    assert (
        "detectors ~high" in json.loads(supervise("reload", supervised.path, "--json")[1])["text"]
    )


@pytest.mark.parametrize(("command", "code"), [("pause", 75), ("reload", 64)])
def test_no_supervisor_answers(supervise, keep_run, make_frames, alive, command, code):
    """One that is dead: at once, with 64; one that dies meanwhile: the command stays."""
    run = keep_run(make_frames(0, 2.0), ended=False)
    dead, _, err = supervise(command, run.path)
    assert (dead, "has no supervisor" in err) == (64, True)
    assert not (run.path / "control").exists()

    audit, posted = alive(run), run.path / "control"
    thread = threading.Thread(
        target=lambda: (wait_until(lambda: posted.is_dir() and [*posted.iterdir()]), audit.close())
    )
    thread.start()
    unanswered, _, err = supervise(command, run.path)
    thread.join()
    assert unanswered == code
    assert "no answer within" in err or "has not answered within" in err
    (word,) = posted.glob("*.json")
    assert json.loads(word.read_text())["command"] == command
