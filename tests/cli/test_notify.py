"""`supervise notify test` against a real receiver."""

import json


def test_each_channel_gets_one_test_message(supervise, receiver, monkeypatch, tmp_path):
    url, received = receiver(200)
    monkeypatch.setenv("HOOK_URL", f"{url}/secret")
    monkeypatch.setenv("DEAD_URL", "http://127.0.0.1:1/secret")
    policy = tmp_path / "mine.yaml"
    policy.write_text(
        "version: supervise/v1\npolicy: mine\nuse: [nonfinite]\nmode: observe\n"
        "notify: {webhook: {url_env: HOOK_URL, min_sev: SEV0}, slack: {url_env: DEAD_URL},"
        " pagerduty: {key_env: NO_KEY}, heartbeat: {url_env: DEAD_URL}}\n"
    )
    code, out, err = supervise("notify", "test", "--policy", policy)

    assert code == 1 and "INFO test message from" in err
    assert out.splitlines()[0] == "console: ok: printed"
    assert "slack: FAILED: no connection (ConnectError)" in out and "secret" not in out + err
    assert "pagerduty: FAILED: pagerduty notifications are off" in out
    assert [body["data"]["title"][:17] for _, body in received] == ["test message from"]

    code, out, _ = supervise("notify", "test", "-p", policy, "webhook", "--json")
    assert (code, [one["channel"] for one in json.loads(out)]) == (0, ["webhook"])


def test_a_channel_that_the_policy_does_not_have(supervise):
    code, _, err = supervise("notify", "test", "slack")

    assert code == 64 and "policy nano has no channel 'slack'" in err and "it has: console" in err
