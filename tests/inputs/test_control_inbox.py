"""Files in which operators leave their words."""

import pytest

from supervise.runtime import ControlInbox, post_command


@pytest.mark.parametrize(
    "text",
    [
        '{"command": "lr", "operator": "anna", "args": {"value": '
        + "[" * 100_000
        + "]" * 100_000
        + "}}",
        '{"command": "lr", "operator": "anna", "args": {"value": [[1]]}}',
        '{"command": "lr", "operator": "anna", "args": {"value": {"a": 1}}}',
        '{"command": "lr", "operator": "anna", "args": {"value": NaN}}',
        '{"command": "lr", "operator": "anna", "args": [1]}',
        '{"command": "lr", "args": {}}',
        "[]",
        "",
    ],
)
def test_what_is_no_word_is_dropped_and_those_after_it_are_heard(tmp_path, text):
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "0.json").write_text(text)
    args = {"key": "k", "shards": ["a", "b"], "value": 0.5, "requeue": True}
    post_command(tmp_path, "stop", "anna", args, at_ns=7)
    heard = ControlInbox(tmp_path, lambda: 9)

    (told,) = heard.poll()
    assert (told.at_ns, told.operator, told.command, told.args) == (9, "anna", "stop", args)
    assert heard.poll() == []
    assert not list((tmp_path / "control").iterdir())
