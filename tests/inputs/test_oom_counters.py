"""Which counters of the kernel are read, and what of them is ours."""

import pytest

from supervise.runtime import OomCounters, group_file


@pytest.mark.parametrize(
    ("membership", "place"),
    [
        ("0::/slurm/job_1\n", "slurm/job_1/memory.events"),
        ("0::/../../elsewhere\n", "memory.events"),  # a container sees only its own root
        ("3:cpu:/a\n5:memory,x:/b\n0::/\n", "memory/b/memory.oom_control"),
        ("nonsense\n", None),
    ],
)
def test_the_file_of_our_cgroup(tmp_path, membership, place):
    (tmp_path / "cgroup").write_text(membership)
    root = tmp_path / "fs"
    if place is not None:
        (root / place).parent.mkdir(parents=True)
        (root / place).write_text("oom_kill 1\n")

    found = group_file(tmp_path / "cgroup", root)
    assert found == (None if place is None else root / place)


def test_only_what_grew_since_the_launch_counts(tmp_path):
    group, kernel = tmp_path / "memory.events", tmp_path / "vmstat"
    group.write_text("low 0\noom_kill 7\n")
    kernel.write_text("pgfault 1\noom_kill 9\n")
    counters = OomCounters(group, kernel)
    assert counters.killed() == ""  # nothing was launched
    counters.start()
    assert counters.killed() == ""
    kernel.write_text("oom_kill 10\n")
    assert counters.killed().endswith("ended 1 process of this machine")
    group.write_text("oom_kill 9\n")
    assert counters.killed().endswith("ended 2 processes of this cgroup")
    group.write_text("oom_kill x\n")
    kernel.unlink()
    assert counters.killed() == ""
