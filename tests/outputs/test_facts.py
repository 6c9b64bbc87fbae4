"""Facts about the surroundings of a run."""

import hashlib
import subprocess

import pytest

from supervise.runtime import git_facts, output_files, tail_of_output


@pytest.fixture
def repository(tmp_path):
    """A repository with one commit of one file."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout

    git("init")
    (tmp_path / "train.py").write_text("one\n")
    git("add", ".")
    git("commit", "-m", "first")
    return tmp_path, git


def test_a_change_is_named_and_hashed_but_not_copied(repository):
    """Two runs with the same change have the same hash; the change itself may hold secrets."""
    path, git = repository
    (path / "train.py").write_text("two\n")
    (path / "new.py").write_text("")

    found = git_facts(path)

    assert found.dirty == [" M train.py", "?? new.py"]
    assert found.diff_sha256 == hashlib.sha256(git("diff", "HEAD").encode()).hexdigest()


def test_outside_a_repository_the_reason_is_kept(tmp_path):
    assert "not a git repository" in git_facts(tmp_path).missing


def test_output_that_goes_to_a_file_is_found(tmp_path):
    log = tmp_path / "train.log"
    with log.open("w") as out:
        popen = subprocess.Popen(["sleep", "60"], stdout=out, stderr=out)
    piped = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    try:
        found = output_files(popen.pid)
        log.write_text("still here\n")
        log.unlink()

        assert list(found) == [str(log)]
        assert tail_of_output(found[str(log)]) == "still here\n"
        assert output_files(piped.pid) == {}
    finally:
        for process in (popen, piped):
            process.kill()
            process.communicate()


def test_a_tail_begins_at_a_line(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(1000)))

    assert tail_of_output(log, limit=30) == "line 997\nline 998\nline 999\n"
    assert tail_of_output(log, limit=10**6).startswith("line 0\n")
