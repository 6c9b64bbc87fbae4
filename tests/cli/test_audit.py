import json

import pytest

from supervise.store import verify_audit as check

READERS = ["audit verify", "audit show", "replay", "export --csv", "status", "why", "record"]


@pytest.mark.parametrize("command", [*READERS, "why-not --rule r --step 1", "release", "reload"])
def test_a_directory_that_is_no_run_is_refused_with_a_way_out(
    supervise, recorded, tmp_path, command
):
    recorded()
    for place in (tmp_path, tmp_path / "nowhere"):
        code, out, err = supervise(*command.split(), place)

        assert (code, out) == (64, "")
        assert f"supervise: {place} " in err
        assert "try: " in err or "did you mean " in err
        assert place != tmp_path or f"did you mean {tmp_path / 'run'}?" in err


def test_records_are_shown_as_stored_and_a_changed_byte_is_exit_1(supervise, recorded):
    run = recorded()
    code, out, err = supervise("audit", "show", "--json", run.path)
    stored = [line[65:] for line in run.audit_path.read_text().splitlines()]
    assert (code, err, out.splitlines()) == (0, "", stored)

    data = bytearray(run.audit_path.read_bytes())
    at = data.index(b"\n") + 200
    data[at] ^= 1
    run.audit_path.write_bytes(data)

    code, out, _ = supervise("audit", "verify", run.path)
    assert (code, out.startswith("tampered: audit record 1 (byte ")) == (1, True)
    code, out, _ = supervise("audit", "verify", "--json", run.path)
    found = json.loads(out)
    assert (code, found["status"], found["bad_seq"], found["records"]) == (1, "tampered", 1, 1)
    code, out, err = supervise("audit", "show", run.path)
    assert (code, len(out.splitlines()), "record 1 " in err) == (1, 1, True)


def test_what_was_cut_off_is_exit_2_or_found_by_a_witness(supervise, recorded):
    """A power cut is no crime; what is whole can be shown. A chain cannot show that its end is
    missing, the head from a message can."""
    run = recorded()
    whole, report = run.audit_path.read_bytes(), check(run.audit_path)
    run.audit_path.write_bytes(whole[:-7])
    code, out, _ = supervise("audit", "verify", run.path)
    assert (code, out.startswith("truncated: record ")) == (2, True)
    assert supervise("audit", "show", run.path)[0] == 0

    run.audit_path.write_bytes(whole[: whole.rstrip(b"\n").rindex(b"\n") + 1])
    assert supervise("audit", "verify", run.path)[0] == 0
    witness = ("--witness", report.records, report.head)
    assert supervise("audit", "verify", run.path, *witness)[0] == 1
    run.audit_path.write_bytes(whole)
    assert supervise("audit", "verify", run.path, *witness)[0] == 0


def test_a_copy_of_a_log_can_be_checked_alone(supervise, recorded, tmp_path):
    run = recorded()
    (tmp_path / "copy.log").write_bytes(run.audit_path.read_bytes())
    assert supervise("audit", "verify", tmp_path / "copy.log")[0] == 0

    described = run.read_json("run.json")
    run.write_json("run.json", {**described, "run": "another"})
    code, out, _ = supervise("audit", "verify", run.path)
    assert (code, "belongs to the run" in out) == (1, True)
