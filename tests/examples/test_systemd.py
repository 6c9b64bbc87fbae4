"""The shipped unit: systemd accepts it, and its command is one that `supervise run` understands."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "examples" / "systemd" / "supervise@.service"


def run(argv: list[str], **where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, **where, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path):
    commands = tmp_path / "one" / ".venv" / "bin"
    commands.mkdir(parents=True)
    (commands / "supervise").symlink_to(sys.executable)
    unit = tmp_path / UNIT.name.replace("@", "@one")
    unit.write_text(UNIT.read_text().replace("/srv/training", str(tmp_path)))
    done = run(["systemd-analyze", "verify", "--man=no", str(unit)])

    assert (done.returncode, UNIT.name.partition("@")[0] in done.stderr) == (0, False), done.stderr


@pytest.mark.slow
def test_the_command_of_the_unit_is_one_of_ours(tmp_path):
    """Its options parse: what is refused is the policy, which is not there."""
    (line,) = (line for line in UNIT.read_text().splitlines() if line.startswith("ExecStart="))
    _, *words = line.split()
    done = run([sys.executable, "-m", "supervise", *words], cwd=tmp_path)

    assert done.returncode == 65 and "policy.yaml" in done.stderr, done.stderr
