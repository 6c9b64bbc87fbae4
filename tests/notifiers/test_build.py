import pytest

from supervise import notifiers
from supervise.errors import InputError

HOOK = {"webhook": {"url_env": "HOOK_URL", "secret_env": "HOOK_SECRET"}}


def test_every_file_is_a_kind():
    """The file name is the key in a policy, the fields of its settings are the keys below it."""
    assert list(notifiers.kinds()) == ["console", "slack", "webhook"]


def test_senders_know_their_severity():
    env = {"SLACK_URL": "https://hooks.slack.com/services/x", "HOOK_URL": "https://a.b/c"}

    (slack,), warnings = notifiers.build(
        {"slack": {"url_env": "SLACK_URL", "min_sev": "SEV1"}}, env
    )

    assert (slack.name, slack.min_sev, warnings) == ("slack", "SEV1", [])


@pytest.mark.parametrize(
    ("notify", "env", "warning"),
    [
        ({"slack": {"url_env": "SLACK_URL"}}, {}, "variable SLACK_URL is not set"),
        ({"slack": {"url_env": "U"}}, {"U": "hooks/topsecret"}, "U does not hold a URL"),
        ({"slack": {"url_env": "U"}}, {"U": "https://[topsecret"}, "U does not hold a URL"),
        ({"slack": {"url_env": "U"}}, {"U": "http://x/topsecret"}, "use https, or set"),
        (HOOK, {"HOOK_URL": "https://x/topsecret"}, "HOOK_SECRET is not set"),
        (HOOK, {"HOOK_URL": "https://x/", "HOOK_SECRET": "topsecret"}, "HOOK_SECRET must hold"),
    ],
)
def test_what_cannot_work_is_one_warning_without_the_value(notify, env, warning):
    """A missing variable costs a channel, never the run; and nothing is sent unsigned."""
    senders, warnings = notifiers.build(notify, env)

    assert senders == []
    assert len(warnings) == 1
    assert warning in warnings[0]
    assert "topsecret" not in warnings[0]


def test_http_works_where_it_was_asked_for():
    """On this machine always, elsewhere when the policy says so."""
    for url, more in (("http://localhost:1/x", {}), ("http://alerts/x", {"allow_http": True})):
        senders, warnings = notifiers.build({"slack": {"url_env": "U", **more}}, {"U": url})
        assert (len(senders), warnings) == (1, [])


def test_a_wrong_key_is_refused_with_what_there_is():
    for notify, text in (
        ({"slakc": {}}, "unknown notifier"),
        ({"slack": {"url": "x"}}, "no key 'url'"),
    ):
        with pytest.raises(InputError, match=text) as caught:
            notifiers.build(notify, {})
        assert caught.value.exit_code == 65
        assert caught.value.hint is not None
