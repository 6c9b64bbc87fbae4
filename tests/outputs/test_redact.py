"""Secrets stay out of what others read."""

from __future__ import annotations

from supervise.outputs.redact import REDACTED, Redactor


def test_values_are_replaced_by_the_name_of_their_variable():
    """Names stay, so that a reader sees that there was one."""
    redactor = Redactor()

    clean = redactor.environment(
        {
            "WANDB_API_KEY": "abcdefgh12345",
            "hf_token": "hf_123456789",
            "SLACK_URL": "https://hooks.example/T0/B0/xyz",
            "DB_PASSWORD": "pw",
            "OMP_NUM_THREADS": "1",
            "PWD": "/home/me",
            "EMPTY_TOKEN": "",
        }
    )

    assert clean["OMP_NUM_THREADS"] == "1"
    assert clean["PWD"] == "/home/me"
    assert clean["EMPTY_TOKEN"] == ""
    assert redactor.names == ["DB_PASSWORD", "SLACK_URL", "WANDB_API_KEY", "hf_token"]
    assert {clean[name] for name in redactor.names} == {REDACTED}


def test_a_login_in_a_url_is_a_secret_under_any_name():
    """Proxies carry passwords."""
    redactor = Redactor()

    clean = redactor.environment({"http_proxy": "http://me:hunter2hunter2@proxy:8080/"})

    assert clean == {"http_proxy": f"http://{REDACTED}@proxy:8080/"}
    assert redactor.names == ["http_proxy"]


def test_options_of_a_command_line_are_read_like_variables():
    """Both spellings, and short words are not touched elsewhere."""
    clean = Redactor().command(
        ["python", "train.py", "--api-key", "s3cr3ts3cr3t", "--token=abc", "--lr", "1e-3", "--key"]
    )

    assert clean == (
        [
            "python",
            "train.py",
            "--api-key",
            REDACTED,
            f"--token={REDACTED}",
            "--lr",
            "1e-3",
            "--key",
        ]
    )


def test_a_secret_seen_once_is_removed_everywhere():
    """A token of the environment that a script prints into its log."""
    redactor = Redactor()
    redactor.environment({"API_KEY": "topsecretvalue", "SHORT_KEY": "a"})

    text = redactor.text("using topsecretvalue at https://u:p@host/a\nand a cat")

    assert text == f"using {REDACTED} at https://{REDACTED}@host/a\nand a cat"
