"""The endpoint for Prometheus: one real socket, real parsers, and clients that mean no good."""

import json
import math
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from supervise.catalog import all_metrics
from supervise.core import initial_state
from supervise.core import step as step_engine
from supervise.core.model import (
    ActionFailed,
    ActionOrder,
    ActionPlanned,
    ActionRef,
    Announced,
    Frame,
    Gap,
    IncidentOpened,
    LateFrame,
    Launched,
    Notice,
)
from supervise.report import RunMetrics
from tests.support.recorded_run import shipped_policy

DOCS = Path(__file__).parents[2] / "docs" / "metrics"
UNITS = {name: spec.unit for name, spec in all_metrics().items() if "." not in name}
NAMES = (*UNITS, "my_score", "learning_rate.1")


def run_a_little(served):
    """Let two ranks make steps, with a rollback, an action that failed and a non-finite loss."""
    policy = shipped_policy("nano")
    state = initial_state(policy)
    events = [
        Launched(1, 5, 0),
        *(Announced(2, rank, 2, 5 + rank, NAMES) for rank in (0, 1)),
        *(
            Frame(10**9 * (step + 1), rank, attempt, step, values(rank, step))
            for attempt, first in ((0, 0), (1, 4))
            for step in range(first, 8)
            for rank in (0, 1)
        ),
        Gap(10**10, 0, 3, 7),
        LateFrame(10**10, "savepoint", 1, 3, {"spectral_radius": 1.5}),
        Notice(10**10, "safeguard", "", 0, 3, {"order": "skip_nonfinite"}),
    ]
    for event in events:
        state, decisions = step_engine(policy, state, event)
        served.observe(event, NAMES if isinstance(event, Frame) else (), decisions)
    name = "inc-1/1/0-pause"
    order = ActionOrder(
        id=name, verb="pause", runbook="r", args={}, destructive=False, touches_job=True
    )
    about = {"reason": "", "incident": "inc-9", "severity": "SEV1"}
    opened = IncidentOpened(**about, headline="", runbook="", breach_step=3, band=None)
    attempt = ActionPlanned(**about, action=order, budget={})
    served.observe(events[0], (), [opened, attempt, ActionFailed(**about, action=ActionRef(name))])
    served.delivered("slack", ok=False)
    served.publish(policy, state, 10**10, None)


def values(rank, step):
    found = dict.fromkeys(NAMES, 0.0) | {"tokens_per_update": 10.0, "gpu_util": 50.0 + rank}
    found |= {"step_time": 0.25, "train_loss_raw": math.nan if step == 7 else 2.0 + rank}
    found |= {"nan_inf_events": float(step == 7), "gpu_temperature": 40.0}
    return tuple(found.values())


@pytest.fixture
def serve():
    """A function that starts an endpoint; returns it and what it prints."""
    started = []

    def start(port=0, **options):
        printed = []
        info = {"run": "r-1", "version": "0"}
        served = RunMetrics(port, "127.0.0.1", info, UNITS, **options)
        run_a_little(served)
        served.start(printed.append)
        started.append(served)
        return served, printed

    yield start
    for served in started:
        served.close()


def scrape(served, accept="text/plain"):
    url = f"http://127.0.0.1:{served.port}/metrics"
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def samples(families):
    return {
        (s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples
    }


def test_every_number_is_served_under_a_stable_name_in_base_units(serve):
    """As Prometheus and as OpenMetrics; series are bounded: no step, no rank, no unknown id."""
    served, printed = serve()
    assert printed == [f"supervise: metrics at http://127.0.0.1:{served.port}/metrics"]

    found = samples(parser.text_string_to_metric_families(scrape(served)))

    expected = {
        ("supervise_step_total",): 12.0,
        ("supervise_steps_lost_total",): 4.0,
        ("supervise_tokens_total",): 240.0,
        ("supervise_nonfinite_total",): 2.0,
        ("supervise_frames_lost_total",): 7.0,
        ("supervise_training_step",): 7.0,
        ("supervise_step_age_seconds",): 2.0,
        ("supervise_ranks",): 2.0,
        ("supervise_step_time_seconds",): 0.25,
        ("supervise_gpu_util_ratio",): 0.5,
        ("supervise_spectral_radius",): 1.5,
        ("supervise_gpu_temperature_celsius",): 40.0,
        ("supervise_actions_total", ("action", "pause"), ("result", "failed")): 1.0,
        ("supervise_safeguards_total", ("safeguard", "skip_nonfinite")): 1.0,
        ("supervise_notify_failures_total", ("channel", "slack")): 1.0,
        ("supervise_incidents_total", ("severity", "SEV1")): 1.0,
    }
    assert expected.items() <= found.items()
    assert math.isnan(found["supervise_train_loss_raw",])
    assert {key[0] for key in found if "learning_rate_1" in key[0] or "my_score" in key[0]} == set()
    assert not {label for key in found for label, _ in key[1:]} & {"step", "rank"}
    text = scrape(served, "application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    strict = samples(openmetrics_parser.text_string_to_metric_families(text))
    assert expected.items() <= strict.items()
    (info,) = (key for key in strict if key[0] == "supervise_info")
    assert dict(info[1:]) == {"run": "r-1", "version": "0", "policy": "nano", "mode": "enforce"}

    per_rank = samples(parser.text_string_to_metric_families(scrape(serve(per_rank=True)[0])))
    assert [per_rank["supervise_gpu_util_ratio", ("rank", n)] for n in "01"] == [0.5, 0.51]


def test_dashboard_and_alerts_name_only_what_is_served(serve):
    found = {
        s.name for f in parser.text_string_to_metric_families(scrape(serve()[0])) for s in f.samples
    }
    board = json.loads((DOCS / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [each["query"] for each in board["templating"]["list"] if "metrics" not in each]
    groups = yaml.safe_load((DOCS / "alerts.yaml").read_text())["groups"]
    expressions += [rule["expr"] for group in groups for rule in group["rules"]]
    without_labels = (re.sub(r"\{[^}]*\}", "", text) for text in expressions)
    named = {name for text in without_labels for name in re.findall(r"supervise_\w+", text)}

    assert len(named) > 25
    assert named - found == set()


def is_ended(client):
    """Return whether a connection ends though its client goes on to send a byte now and then."""
    for _ in range(40):
        try:
            client.sendall(b"P")
            return client.recv(1) == b""
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


@pytest.mark.slow
def test_a_client_that_is_slow_or_one_of_many_holds_nothing_up(serve):
    """Its connection is ended; the loop publishes meanwhile, and the next scrape is answered."""
    served, _ = serve()
    slow = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(8 + 4)]
    for each in slow:
        each.settimeout(0.5)
        each.sendall(b"GET /metrics HT")
    since_s = time.monotonic()
    run_a_little(served)
    assert time.monotonic() - since_s < 5.0  # nothing of this waits for a client

    assert all(map(is_ended, slow))
    for each in slow:
        each.close()
    assert "supervise_step_total 24.0" in scrape(served)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{served.port}/other", timeout=10)


def test_a_port_that_is_taken_is_a_warning(serve):
    first, _ = serve()
    _, printed = serve(first.port)
    assert printed[0].startswith(f"supervise: warning: no metrics on 127.0.0.1:{first.port}: ")

    threads = [t.name for t in threading.enumerate() if t.name == "metrics"]
    assert len(threads) == 1
