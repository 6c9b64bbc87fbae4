"""`supervise policy migrate`."""

from __future__ import annotations

OLD = "version: supervise/v1\nextends: nano\noverride: {loss_spike.notice: {gt: 9}} # mine\n"


def test_a_policy_is_shown_then_written_with_what_is_left_to_do(supervise, tmp_path):
    """65: the rule has no such key, and never had; the hint of an unknown name is the same."""
    path = tmp_path / "old.yaml"
    path.write_text(OLD.replace("{gt: 9}", "{sev: SEV2}"), "utf-8")
    code, out, _ = supervise("policy", "check", path)
    assert (code, "did you mean 'loss_spike.minor'?" in out) == (65, True)

    code, out, err = supervise("policy", "migrate", path)
    assert (code, err) == (1, "")
    assert "-override: {loss_spike.notice: {sev: SEV2}} # mine\n+override: {loss_spike.minor" in out
    assert "loss_spike.notice" in path.read_text("utf-8")

    assert supervise("policy", "migrate", path, "--write")[0] == 0
    assert path.read_text("utf-8").endswith("override: {loss_spike.minor: {sev: SEV2}} # mine\n")
    assert supervise("policy", "migrate", path) == (0, "nothing to rename\n", "")

    path.write_text(OLD, "utf-8")
    code, _, err = supervise("policy", "migrate", path)
    assert (code, "old.yaml (migrated):3:" in err) == (65, True)
