from importlib import import_module
from pathlib import Path

import pytest

from supervise import notifiers
from supervise.errors import InputError, UsageError

MAIL = {"email": {"host": "h", "sender": "a@b.c", "to": ("d@e.f",)}}
MAIL["email"] |= {"user": "u", "password_env": "MAIL_PASSWORD"}
HOOK = {"webhook": {"url_env": "HOOK_URL", "secret_env": "HOOK_SECRET"}}


def test_every_file_is_a_kind():
    """The file name is the key in a policy, the fields of its settings are the keys below it."""
    names = [path.stem for path in Path(notifiers.__path__[0]).glob("[!_]*.py")]
    modules = {name: vars(import_module(f"supervise.notifiers.{name}")) for name in names}

    assert dict(notifiers.KINDS) == {
        name: value
        for name, parts in modules.items()
        for value in parts.values()
        if isinstance(value, type)
        and issubclass(value, notifiers.Settings)
        and value.__module__.endswith(f".{name}")
    }


@pytest.mark.parametrize(
    ("notify", "env", "warning"),
    [
        ({"slack": {"url_env": "SLACK_URL"}}, {}, "variable SLACK_URL is not set"),
        ({"slack": {"url_env": "U"}}, {"U": "hooks/topsecret"}, "U does not hold a URL"),
        ({"slack": {"url_env": "U"}}, {"U": "http://x/topsecret"}, "use https, or set"),
        (HOOK, {"HOOK_URL": "https://x/topsecret"}, "HOOK_SECRET is not set"),
        (HOOK, {"HOOK_URL": "https://x/", "HOOK_SECRET": "topsecret"}, "HOOK_SECRET must hold"),
        (MAIL, {}, "MAIL_PASSWORD is not set"),
    ],
)
def test_what_cannot_work_is_one_warning_without_the_value(notify, env, warning):
    """A missing variable costs a channel, never the run; and nothing is sent unsigned."""
    senders, warnings = notifiers.build_senders(notify, env)

    assert senders == []
    assert len(warnings) == 1
    assert warning in warnings[0]
    assert "topsecret" not in warnings[0]


@pytest.mark.parametrize(
    ("url", "keys"), [("http://localhost:1/x", {}), ("http://alerts/x", {"allow_http": True})]
)
def test_http_works_on_this_machine_and_where_the_policy_allows_it(url, keys):
    keys |= {"url_env": "U", "min_sev": "SEV1"}
    (slack,), warnings = notifiers.build_senders({"slack": keys}, {"U": url})

    assert (slack.name, slack.min_sev, warnings) == ("slack", "SEV1", [])


def test_a_wrong_key_is_refused_with_what_there_is():
    for notify, text in (
        ({"slakc": {}}, "unknown notifier"),
        ({"slack": {"url": "x"}}, "no key 'url'"),
    ):
        with pytest.raises(InputError, match=text) as caught:
            notifiers.build_senders(notify, {})
        assert caught.value.exit_code == 65
        assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["slak:SLACK_URL"], "no channel 'slak' (channels by --notify: heartbeat, slack, webhook)"),
        (["slack:NOT_SET"], "NOT_SET is not set (export NOT_SET=https://... and start again)"),
        (["slack:https://hooks/secret"], "export SLACK_URL=https://...; then --notify slack:SLACK"),
        (["slack:URL", "slack:URL"], "slack is given twice"),
        (["slack:NOISE"], "NOISE does not hold a URL"),
    ],
)
def test_a_channel_of_the_command_line_is_refused_before_the_job_starts(options, said):
    """What the person types next is in the hint; a URL in the wrong place is not shown."""
    with pytest.raises(UsageError) as raised:
        notifiers.channels_from_options(options, {"URL": "https://a.example/x", "NOISE": "secret"})
    text = f"{raised.value} ({raised.value.hint})"

    assert said in text and "secret" not in text
    found = notifiers.channels_from_options(["webhook:URL"], {"URL": "https://a.example/x"})
    assert found == {"webhook": {"url_env": "URL"}}


def test_the_page_is_no_channel_and_a_link_to_a_run_or_its_incident():
    keys = {"page": {"url": "https://gpu-07.example/x"}}
    assert notifiers.build_senders(keys, {}) == ([], []) and notifiers.build_routes(keys) == {}
    link = notifiers.page_link(keys["page"], "run 1", "inc-2")
    assert link == "https://gpu-07.example/x/run/run%201/incident/inc-2/"
    assert notifiers.page_link(keys["page"], "r", None) == "https://gpu-07.example/x/run/r/"


@pytest.mark.parametrize(
    ("url", "paths"),
    [("/uuid", ["/uuid/start", "/uuid", "/uuid/fail"]), ("/p?k=1", ["/p/start?k=1", "/p?k=1"])],
)
def test_a_heartbeat_is_no_channel_and_pings_beside_its_url(hook, url, paths):
    keys = {"heartbeat": {"url_env": "HC", "every": 60.0}}
    env = {"HC": hook.url.partition("/services")[0] + url}
    sender, warnings = notifiers.heartbeat_sender(keys, env)
    for kind in ("start", "ping", "fail")[: len(paths)]:
        sender.send(kind, "run-1: step 7")

    assert (warnings, notifiers.build_senders(keys, env)) == ([], ([], []))
    assert [path for path, _, _ in hook.requests] == paths
    assert hook.requests[0][2] == b"run-1: step 7"
    assert notifiers.heartbeat_sender(keys, {})[1] == [
        "no heartbeat is sent: the environment variable HC is not set"
    ]


@pytest.mark.parametrize(
    ("quiet", "flaw"),
    [
        ("22:00-07:00 Europe/Berlin", ""),
        ("22:00-07:00", ""),
        ("22-7", "must be hours such as 22:00-07:00 Europe/Berlin, not '22-7'"),
        ("22:00-07:00 Mars/Olympus", "has no known time zone: 'Mars/Olympus'"),
        ("22:00-22:00", "must end at another time than it begins, not '22:00-22:00'"),
    ],
)
def test_quiet_hours_are_checked(quiet, flaw):
    """PagerDuty has its own: a digest could resolve no alert there."""
    kinds = notifiers.KINDS

    assert kinds["console"](quiet=quiet).find_errors() == ([("quiet", flaw)] if flaw else [])
    assert kinds["pagerduty"](key_env="K", quiet=quiet).find_errors()[0][0] == "quiet"
