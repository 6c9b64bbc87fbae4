"""The numbers of a run for Prometheus: an endpoint that only reads what the loop has published.

The loop counts, and publishes an immutable snapshot once a second. A thread of its own serves it,
see `metrics_endpoint.py`.

Names are stable. `supervise_<metric id>` is a metric of the job's leading rank, in base units with
the unit as a suffix; only ids of the catalog, never a member of a family, so that the number of
series is bounded. All else is a number of the supervision. Non-finite values stay as they are.

Sources: the OpenMetrics specification 1.0; Prometheus, "Metric and label naming".
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..core import frames, rule_scope
from ..core.model.decisions import (
    CODE_NAMES,
    ActionFailed,
    ActionFinished,
    ActionInDoubt,
    ActionPlanned,
    Decision,
    IncidentOpened,
    IncidentRaised,
    RuleJoined,
    RunbookWithdrawn,
)
from ..core.model.events import Event, Frame, Gap, LateFrame, Notice
from ..core.model.payload import NOTHING, Outcome, Safeguard
from ..core.model.policy import Policy
from ..core.model.state_machine import STATES
from ..core.run_state import State
from ..system import Thread

if TYPE_CHECKING:
    from .metrics_endpoint import Endpoint

POLL_S = 0.25  # between two looks for connections that are open for too long
RULE_STATES = (*CODE_NAMES, "firing", "flapping", "inactive", "blind")
Ended = ActionFinished | ActionFailed | ActionInDoubt | RunbookWithdrawn
OUTCOMES = {"commit": "done", "abort": "failed", "in_doubt": "in_doubt"}
# Unit of a metric -> suffix of its name, and the factor to the base unit.
SUFFIXES: Mapping[str, tuple[str, float]] = {
    "s": ("seconds", 1.0),
    "%": ("ratio", 0.01),
    "bytes": ("bytes", 1.0),
    "bytes/h": ("bytes_per_hour", 1.0),
    "tokens/s": ("tokens_per_second", 1.0),
    "C": ("celsius", 1.0),
    "W": ("watts", 1.0),
    "1/day": ("per_day", 1.0),
    "1/h": ("per_hour", 1.0),
}
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "supervise_step": ("Steps of the leading rank that were seen.", ()),
    "supervise_tokens": ("Sum of tokens_per_update of all ranks, each batch once.", ()),
    "supervise_nonfinite": ("Sum of nan_inf_events of the leading rank.", ()),
    "supervise_updates_skipped": ("Updates that were skipped.", ()),
    "supervise_steps_lost": ("Steps that rollbacks and relaunches undid.", ()),
    "supervise_frames_lost": ("Frames that were overwritten before they were read.", ()),
    "supervise_incidents": ("Incidents that were opened.", ("severity",)),
    "supervise_actions": ("Actions and their outcomes.", ("action", "result")),
    "supervise_safeguards": ("Safeguards of the probe that fired.", ("safeguard",)),
    "supervise_notify": ("Messages delivered or given up.", ("channel",)),
    "supervise_notify_failures": ("Messages that were given up.", ("channel",)),
}


def prometheus_name(metric: str, unit: str) -> tuple[str, float]:
    """Return the exported name of a metric, and the factor to its base unit."""
    suffix, factor = SUFFIXES.get(unit, ("", 1.0))
    ends = not suffix or metric.endswith(f"_{suffix}")
    return f"supervise_{metric}" + ("" if ends else f"_{suffix}"), factor


class RunMetrics:
    """Counts what happens in a run, and serves it.

    Args:
        info: labels of `supervise_info`.
        units: metric id -> unit, of those that are exported.
        per_rank: export the job's metrics of each rank, with the label `rank`.
    """

    def __init__(
        self,
        port: int,
        host: str,
        info: Mapping[str, str],
        units: Mapping[str, str],
        *,
        per_rank: bool = False,
    ) -> None:
        self.port = port
        self.host = host
        self._info = dict(info)
        self._names = {metric: prometheus_name(metric, unit) for metric, unit in units.items()}
        self._per_rank = per_rank
        self._values: dict[int, dict[str, float]] = {}
        self._newest: dict[int, tuple[int, int]] = {}  # rank -> attempt and step
        self._verbs: dict[str, str] = {}
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._tokens = 0.0
        self._troubles: set[str] = set()
        self._frame_ns = 0
        self._snapshot: Sequence[Any] = ()
        self._server: Endpoint | None = None
        self._thread: threading.Thread | None = None

    # ── for the loop ──────────────────────────────────────────────────────────────────────────────

    def observe(self, event: Event, names: Sequence[str], decisions: Sequence[Decision]) -> None:
        """Count an event and what was decided about it; `names` are those of a frame's values."""
        if isinstance(event, Frame):
            self._frame(event, names)
        elif isinstance(event, LateFrame):
            values = self._values.setdefault(min(self._newest, default=0), {})
            values |= {name: x for name, x in event.values.items() if name in self._names}
        elif isinstance(event, Gap):
            self._counts["supervise_frames_lost", ()] += event.count
        elif isinstance(event, Notice) and event.kind == "safeguard":
            order = event.data.read(Safeguard).order[:40]
            self._counts["supervise_safeguards", (order,)] += 1
        for decision in decisions:
            self._decision(decision)

    def delivered(self, channel: str, *, ok: bool) -> None:
        """Count a message that was delivered or given up."""
        self._counts["supervise_notify", (channel,)] += 1
        self._counts["supervise_notify_failures", (channel,)] += not ok

    def publish(self, policy: Policy, state: State, now_ns: int, trouble: str | None) -> None:
        """Let scrapes see the run as it is now."""
        self._snapshot = list(self._families(policy, state, now_ns, trouble))

    def _frame(self, event: Frame, names: Sequence[str]) -> None:
        rank = event.rank
        values = self._values.setdefault(rank, {})
        for name, value in zip(names, event.values, strict=False):
            if value is not None and name in self._names:
                values[name] = value
        metrics = dict(zip(names, event.values, strict=False))
        self._tokens += frames.tokens_of_rank(metrics)
        self._counts["supervise_tokens", ()] = int(self._tokens)
        previous = self._newest.get(rank)
        self._newest[rank] = event.attempt, event.step
        if rank != min(self._newest):
            return
        self._frame_ns = event.at_ns
        self._counts["supervise_step", ()] += 1
        self._counts["supervise_nonfinite", ()] += int(metrics.get("nan_inf_events") or 0)
        self._counts["supervise_updates_skipped", ()] += bool(metrics.get("update_skipped"))
        if previous is not None and previous[0] < event.attempt:
            self._counts["supervise_steps_lost", ()] += max(0, previous[1] - event.step + 1)

    def _decision(self, decision: Decision) -> None:
        if self._is_new_trouble(decision):
            self._counts["supervise_incidents", (str(decision.severity),)] += 1
        elif isinstance(decision, ActionPlanned):
            self._verbs[decision.action.id] = decision.action.verb
        elif isinstance(decision, Ended) and decision.action is not None:
            verb = self._verbs.pop(decision.action.id, "unknown")
            self._counts["supervise_actions", (verb, OUTCOMES[decision.kind])] += 1
            result = None if isinstance(decision, ActionInDoubt) else decision.result
            outcome = (result or NOTHING).read(Outcome)
            if outcome.from_step is not None and outcome.step is not None:
                lost = outcome.from_step - outcome.step
                self._counts["supervise_steps_lost", ()] += max(0, lost)

    def _is_new_trouble(self, decision: Decision) -> bool:
        """Return whether an incident begins; an operator's order is none until a rule joins it."""
        name = str(decision.incident)
        if not isinstance(decision, IncidentOpened | RuleJoined | IncidentRaised):
            return False
        ordered = isinstance(decision, IncidentOpened) and decision.requested_by
        if name in self._troubles or ordered:
            return False
        self._troubles.add(name)
        return True

    def _families(
        self, policy: Policy, state: State, now_ns: int, trouble: str | None
    ) -> Iterator[Any]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            InfoMetricFamily,
            StateSetMetricFamily,
        )

        def gauge(name: str, text: str, value: float) -> Any:
            return GaugeMetricFamily(f"supervise_{name}", text, value=value)

        labels = {**self._info, "policy": policy.name, "mode": policy.mode}
        yield InfoMetricFamily("supervise", "The run.", value=labels)
        yield gauge("published_timestamp_seconds", "When this was published.", time.time())
        age_s = (now_ns - self._frame_ns) / 1e9 if self._frame_ns else float("nan")
        yield gauge("step_age_seconds", "Time since the newest step of the leading rank.", age_s)
        yield gauge(
            "training_step", "Number of the newest step; a rollback takes it back.", state.step
        )
        yield gauge("attempt", "Number of launches and rollbacks so far.", state.attempt)
        yield gauge("ranks", "Ranks of the job.", state.job.world_size)
        yield gauge("recording", "1 while decisions can be recorded.", float(trouble is None))
        yield StateSetMetricFamily(
            "supervise_state", "State of the run.", {name: name == state.machine for name in STATES}
        )
        incident = state.incident
        opened = GaugeMetricFamily(
            "supervise_incident_open", "An open incident.", labels=["severity"]
        )
        for severity in ("SEV0", "SEV1", "SEV2"):
            is_open = incident is not None and incident.severity == severity
            opened.add_metric([severity], float(is_open))
        yield opened
        rules = rule_scope.rule_states(policy, state)
        firing = GaugeMetricFamily(
            "supervise_policy_firing", "1 while a rule fires.", labels=["rule", "severity"]
        )
        for rule in policy.rules:
            firing.add_metric([rule.id, rule.severity], float(rules[rule.id] == "firing"))
        yield firing
        counts = Counter(rules.values())
        in_state = GaugeMetricFamily("supervise_rules", "Rules in each state.", labels=["state"])
        for name in RULE_STATES:
            in_state.add_metric([name], counts[name])
        yield in_state
        for name, (text, label_names) in COUNTERS.items():
            family = CounterMetricFamily(name, text, labels=label_names)
            if not label_names:
                family.add_metric([], self._counts[name, ()])
            for (counter, values), count in sorted(self._counts.items()):
                if counter == name and label_names:
                    family.add_metric(values, count)
            yield family
        yield from self._of_job(GaugeMetricFamily)

    def _of_job(self, family: Callable[..., Any]) -> Iterator[Any]:
        """Yield the newest value of each metric of the job."""
        ranks = sorted(self._values) if self._per_rank else sorted(self._values)[:1]
        for metric in dict.fromkeys(name for rank in ranks for name in self._values[rank]):
            name, factor = self._names[metric]
            gauge = family(
                name, f"Metric {metric} of the job.", labels=["rank"] if self._per_rank else []
            )
            for rank in ranks:
                if metric in self._values[rank]:
                    value = self._values[rank][metric] * factor
                    gauge.add_metric([str(rank)] if self._per_rank else [], value)
            yield gauge

    # ── for the endpoint ──────────────────────────────────────────────────────────────────────────

    def start(self, print_line: Callable[[str], None]) -> None:
        """Serve on a thread of its own. A port that is taken is a warning: the run goes on."""
        try:
            from .metrics_endpoint import Endpoint  # most runs serve nothing

            server = self._server = Endpoint(self.host, self.port, self)
            thread = Thread(
                target=server.serve_forever, args=(POLL_S,), name="metrics", daemon=True
            )
            thread.start()
        except (OSError, OverflowError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            address = f"{self.host}:{self.port}"
            print_line(f"supervise: warning: no metrics on {address}: {reason}; the run goes on")
            self.close()
            return
        self._thread = thread
        self.port = int(server.server_address[1])
        print_line(f"supervise: metrics at http://{self.host}:{self.port}/metrics")

    def close(self) -> None:
        """Stop serving; open connections end with their thread."""
        server, self._server = self._server, None
        if server is None:
            return
        if self._thread is not None:
            server.shutdown()  # waits for the thread, which would never end if it had not begun
            self._thread.join()
        with suppress(OSError):
            server.server_close()

    def collect(self) -> Iterator[Any]:
        """Yield the families of the newest snapshot. Any thread."""
        yield from self._snapshot
