"""Secrets stay out of what others read."""

from __future__ import annotations

import pytest

from supervise.core.model import REDACTED, Finished, Frame, Notice, Redactor, channel_variables


def test_values_are_replaced_by_the_name_of_their_variable():
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
            "http_proxy": "http://me:hunter2hunter2@proxy:8080/",
        }
    )

    assert clean["OMP_NUM_THREADS"] == "1"
    assert clean["PWD"] == "/home/me"
    assert clean["EMPTY_TOKEN"] == ""
    assert clean.pop("http_proxy") == f"http://{REDACTED}@proxy:8080/"
    secret = [name for name, value in sorted(clean.items()) if value == REDACTED]
    assert secret == ["DB_PASSWORD", "SLACK_URL", "WANDB_API_KEY", "hf_token"]
    assert redactor.names == [*secret, "http_proxy"]


S = "s3cr3t-V4lue"


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--token", S],
        ["train", f"--token={S}"],
        ["train", "--db-password", S],
        ["train", f"--pw={S}"],
        ["train", "--db_pw", S],
        ["train", f"--wandb_api_key={S}"],
        ["train", f"+logger.api_key={S}"],
        ["env", f"WANDB_API_KEY={S}", "python", "train.py"],
        ["sh", "-c", f"export HF_TOKEN={S}; python train.py --secret {S}"],
        ["bash", "-lc", f"HF_TOKEN='{S}' python train.py"],
        ["curl", "-H", f"Authorization: Bearer {S}"],
        ["curl", "-H", f"X-Api-Key: {S}"],
        ["train", f"https://me:{S}@host/data"],
        ["train", f"https://{S}@host/data"],
        ["train", f"https://host/data?part=1&sig={S}"],
        ["train", f"s3://host/data?X-Amz-Signature={S}&X-Amz-Expires=5"],
    ],
    ids=lambda words: " ".join(words[1:]).replace(S, "S"),
)
def test_every_form_of_a_secret_in_a_command_is_found(words):
    """In the command, in one line of it, in the text of an exception; and what it was, anywhere."""
    redactor = Redactor(argv=words)

    shown = redactor.command(words)
    assert S not in " ".join(shown) and len(shown) == len(words)
    assert S not in redactor.text(f"the job said {S} to us")
    for text in (" ".join(words), f"Command '{words}' failed"):
        assert S not in Redactor().text(text)


@pytest.mark.parametrize(
    "text",
    [
        f"remote: https://x-access-token:{S}@github.com/a/b.git",
        f"OSError: GET https://h/p?a=1&token={S} failed",
        f"{{'api_key': '{S}', 'lr': 0.1}}",
        f"requests.post(headers={{'Authorization': 'Basic {S}'}})",
        f"login(password='{S}')",
        f"password: {S}",
        f"Bearer {S}",
        "hf_abcdefghijklmnopqrstuvwxyz01 is not allowed",
        "see https://hooks.slack.com/services/T000/B000/s3cr3t-V4lue",
        f"HTTPError: 404 for url: https://api.telegram.org/bot123456789:AAHdqTcvCH1{S}/sendMessage",
        f"Max retries exceeded with url: /v1/up?t=aB3dE5fG7hI9jK1lM3{S} (Caused by ...)",
        f"<urlopen error https://h.example/hook/aB3dE5fG7hI9jK1lM3{S}>",
        f"https://h.example/cb?next=https%3A%2F%2Fx%3Ftoken%3D{S}",
    ],
)
def test_a_secret_that_nobody_named_is_known_by_its_form(text):
    clean = Redactor().text(text)

    assert S not in clean and "hf_abc" not in clean and REDACTED in clean
    assert Redactor().text(clean) == clean


@pytest.mark.parametrize(
    "words",
    [
        "--max-tokens=100000",
        "--tokenizer=gpt2-large",
        "--eos_token=</s>",
        "--key-dim=64",
        "--num_key_value_heads=8",
        "--lr=1e-3",
        "--pass-through",
        "--author=me",
        "data/monkey.bin",
        "tokens=5000000",
        "--forward-passes=3",
        "train_loss_raw 7.31 exceeds 5.0 (z=8.2, threshold=6.0) at step 120",
        "supervise: the job ended with exit code=7; next: supervise why runs/20260105-1 inc-1",
        "KeyError: 'model'; the batch has keys: input_ids, labels",
        "404 for url: https://huggingface.co/meta-llama/Meta-Llama-3-8B-Instruct/resolve/main/x.bin",
        "https://h.co/resolve/86b5e0934494bd15c9632b12f734a8a67f723594/Qwen2VLForConditional7B.pt",
        "s3://bucket/runs/20260105-101112-7f3a9c/ckpt-000100.pt is missing",
        "job.relaunch.args --init_from=resume; see http://localhost:5000/run/1",
    ],
)
def test_words_of_language_models_and_plain_sentences_are_no_secrets(words):
    """They have tokens, keys and values in plenty, and people need these numbers."""
    redactor = Redactor({"OMP_NUM_THREADS": "1", "HOME": "/home/me"})

    assert redactor.command(["train", words]) == ["train", words]
    assert redactor.text(f"ran with {words} to step 100000") == f"ran with {words} to step 100000"


def test_what_a_policy_names_is_secret_whatever_it_is_called():
    """Each of several secrets in one variable too, and the beginning of one that was cut off."""
    names = channel_variables(
        {"slack": {"url_env": "WHERE"}, "webhook": {"secret_env": "HOW"}, "console": {}}
    )
    redactor = Redactor({"WHERE": "https://h/T/B", "HOW": "whsec_one whsec_two"}, (), names)

    assert redactor.text("to https://h/T/B with whsec_two") == f"to {REDACTED} with {REDACTED}"
    assert redactor.text("signed whsec_o…") == f"signed {REDACTED}…"
    assert redactor.fresh().text("whsec_one") == REDACTED
    assert redactor.environment({"WHERE": "https://h/T/B"}) == {"WHERE": REDACTED}


def test_it_is_fast_whatever_it_reads():
    """No text makes it look at the same place again and again, which would take for ever."""
    redactor = Redactor({"API_KEY": S})
    for piece in ("a", "a=", "--a ", "https://", "api-", "'", '"x": ', "token: ", "x;", "a.b-"):
        assert S not in redactor.text(f"{piece * (100_000 // len(piece))} {S}")


def test_events_lose_what_a_job_or_an_exception_says():
    redactor = Redactor({"HF_TOKEN": S})
    noticed = Notice(1, "note", f"{S} is off", 0, 5, {"why": [S], S: 1.5}, 7, 8)
    finished = Finished(1, "inc-1/1/0-lr_scale", False, {"traceback": f"x\n{S}\n"}, f"no {S}")
    frame = Frame(1, 0, 0, 5, (1.0, None))

    assert redactor.event(noticed) == Notice(
        1, "note", f"{REDACTED} is off", 0, 5, {"why": [REDACTED], REDACTED: 1.5}, 7, 8
    )
    assert redactor.event(finished) == Finished(
        1, "inc-1/1/0-lr_scale", False, {"traceback": f"x\n{REDACTED}\n"}, f"no {REDACTED}"
    )
    assert redactor.event(frame) is frame


def test_marks_that_reorder_what_is_read_are_taken_out():
    """U+202E and its like show a text as another than it is; the letters stay."""
    assert (
        Redactor().text("a \u202e\u2066evil\u2069 name, \u05d0\u05d1")
        == "a evil name, \u05d0\u05d1"
    )
