"""Commands below directories that may not be entered, also by a root that may not do everything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

NOBODY = 65534
LIMITED = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, and setpriv to limit it"
)
def test_a_program_behind_a_closed_directory_cannot_be_started(tmp_path):
    """126 as in a shell, one sentence, and nothing is left behind."""
    closed, shm = tmp_path / "closed", tmp_path / "shm"
    for folder in (closed, shm):
        folder.mkdir(mode=0o700)
    shutil.copy("/bin/true", closed / "program")
    os.chown(closed, NOBODY, NOBODY)
    command = str(closed / "program")

    done = subprocess.run(
        [*LIMITED, sys.executable, "-m", "supervise", "--run-dir", "run", "--", command],
        cwd=tmp_path,
        env={**os.environ, "SUPERVISE_SHM": str(shm)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 126, done.stderr
    assert f"cannot start {command}: a directory above it may not be entered" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed", "shm"]
    assert not list(shm.iterdir())
