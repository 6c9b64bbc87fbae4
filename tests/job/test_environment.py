"""The way in for the probe, and what keeps it out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import supervise_probe
from supervise.runtime import child_environment, directory_tier

PYTHON = sys.executable


OURS = str(Path(supervise_probe.__file__).parent / "inject")


def test_only_two_variables_change(tmp_path):
    """The job's own PYTHONPATH stays behind ours, which is listed once; the inner one wins."""
    environ = {"PATH": "/bin", "PYTHONPATH": "/a:/b", "LANG": "C"}

    child = child_environment(environ, tmp_path / "probe.json")

    ours = {"PYTHONPATH": f"{OURS}:/a:/b", "SUPERVISE_PROBE": str(tmp_path / "probe.json")}
    assert child == environ | ours
    assert environ == {"PATH": "/bin", "PYTHONPATH": "/a:/b", "LANG": "C"}
    inner = child_environment(child, tmp_path / "inner.json")
    assert inner == child | {"SUPERVISE_PROBE": str(tmp_path / "inner.json")}


@pytest.mark.parametrize("before", [{}, {"PYTHONPATH": ""}])
def test_without_a_pythonpath_none_is_made_up(before, tmp_path):
    """An empty entry would put the working directory on the path."""
    assert child_environment(before, tmp_path)["PYTHONPATH"] == OURS


def test_the_kill_switch_changes_nothing(tmp_path):
    off = {"SUPERVISE_DISABLE": "1"}
    assert child_environment(off, tmp_path) == off
    assert "SUPERVISE_PROBE" in child_environment({"SUPERVISE_DISABLE": "0"}, tmp_path)
    assert directory_tier(["python", "x.py"], off) == ("T0", "SUPERVISE_DISABLE is set")


ORDINARY = """
python train.py
python3.11 -u -m pkg.train -I
python -c pass -E
python -Wignore -X dev train.py -S
python -W ignore -Xdev -OO -B -s -P train.py
python -uc pass
python - -I
python --check-hash-based-pycs always train.py
/opt/venv/bin/python train.py
env A=1 python train.py
timeout 5 nice -n 3 python train.py
bash run.sh
srun train.sh
uv run train.py
make train
"""


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        *((command, None) for command in ORDINARY.split("\n")[1:-1]),
        ("python -I train.py", "python -I ignores PYTHONPATH"),
        ("python3 -uE train.py", "python -E ignores PYTHONPATH"),
        ("python -Im pkg.train", "python -I ignores PYTHONPATH"),
        ("python -X dev -S train.py", "python -S does not import sitecustomize"),
        ("env A=1 python -Ic pass", "python -I ignores PYTHONPATH"),
        ("numactl -N 0 python3 -E train.py", "python -E ignores PYTHONPATH"),
        ("sleep 5", "sleep is not Python"),
    ],
)
def test_a_command_gets_the_probe_unless_something_keeps_it_out(command, reason):
    """The tier goes down to T0, with the sentence that `doctor` and the run manifest show."""
    assert directory_tier(command.split()) == ("T0" if reason else "T1", reason)


@pytest.mark.parametrize("flags", ["-I", "-E", "-S", "-u", "-P", "-s", "-Im"])
def test_the_forecast_is_what_python_does(flags, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('in')")
    argv = [PYTHON, flags, *(["platform"] if flags.endswith("m") else ["-c", "pass"])]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}

    out = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True).stdout

    assert (directory_tier(argv)[0] == "T1") == out.startswith("in")


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("#!/usr/bin/env python3\n", None),
        ("#!/usr/bin/env -S python3 -I\n", "python -I ignores PYTHONPATH"),
        ("#!/opt/venv/bin/python -Es\n", "python -E ignores PYTHONPATH"),
        (
            "#!/bin/sh\n'''exec' \"/a very long/python3\" -E \"$0\" \"$@\"\n' '''\n",
            "python -E ignores PYTHONPATH",
        ),
        ("#!/bin/sh\necho hello\n", None),
        ("\x7fELF and so on", "tool is not Python"),
    ],
)
def test_a_script_is_judged_by_its_first_line(head, expected, tmp_path):
    tool = tmp_path / "tool"
    tool.write_text(head)
    tool.chmod(0o755)

    assert directory_tier([str(tool), "--flag"])[1] == expected
    assert directory_tier(["tool"], {"PATH": str(tmp_path)})[1] == expected
