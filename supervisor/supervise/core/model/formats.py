"""Actions and readings in words, as people read them in a story or in an answer. Pure text.

`printable` is for text that others wrote, such as a job: it goes to no terminal or page without.

Works on what `Watch.numbers` returned and on the same after JSON ("NaN" and "+Inf" as text); knows
the keys that detectors share (see interfaces.py) and shows the plain ones of any other kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from .checkpoint_registry import WEIGHTS_ONLY
from .interfaces import Numbers, Reading, ReadingValue
from .payload import (
    EndArgs,
    Json,
    Payload,
    QuarantineArgs,
    RateArgs,
    RelaunchArgs,
    Rewarm,
    RollbackArgs,
)


def format_plan(steps: Iterable[tuple[str, Payload]]) -> str:
    """Return `(verb, arguments)` of each step as one line."""
    return ", ".join(describe_action(verb, args) for verb, args in steps)


def describe_action(verb: str, args: Payload) -> str:
    """Return one action in words; one that has none by its name and its arguments."""
    form = FORMS.get(verb)
    if form is not None:
        return form(args)
    arguments = ", ".join(f"{key} {value}" for key, value in args.items() if value is not None)
    return f"{verb} ({arguments})"[:160] if arguments else verb


def _rollback(args: Payload) -> str:
    order = args.parse(RollbackArgs)
    return f"restore the weights from before step {order.before_step}{_ramp(order.rewarm)}"


def _relaunch(args: Payload) -> str:
    order = args.parse(RelaunchArgs)
    text = f"start the job again from the checkpoint of step {order.step}"
    if order.resumable == WEIGHTS_ONLY:
        text += ", which holds weights only: the optimizer starts from nothing"
    return text + _ramp(order.rewarm)


def _hold_rate(args: Payload) -> str:
    order = args.parse(RateArgs)
    if order.lift:
        return "hold the learning rate no more"
    if order.limit is not None:
        harm = f", as {order.harmful:.3g} did the harm"
        return f"hold the learning rate at {order.limit:.3g} at most{harm}"
    return f"hold the learning rate at its level from before step {order.before_step}"


def _pause(args: Payload) -> str:
    lease_s = args.parse(EndArgs).lease_s
    return "pause" if lease_s is None else f"pause (at most {lease_s:g} s)"


def _ramp(rewarm: Rewarm | None) -> str:
    if rewarm is None or not rewarm.steps:
        return ""
    start = f"{100.0 * rewarm.start:.3g} %"
    return f", raise the learning rate from {start} to 100 % over {rewarm.steps} steps"


FORMS: Mapping[str, Callable[[Payload], str]] = {
    "pause": _pause,
    "resume": lambda args: "resume",
    "rollback": _rollback,
    "relaunch": _relaunch,
    "stop": lambda args: "stop the job",
    "lr_scale": lambda args: f"multiply the learning rate by {args.get('value')}",
    "hold_rate": _hold_rate,
    "check_weights": lambda args: "compare the loss of the probe batch with that before",
    "skip_step": lambda args: f"skip the next {args.get('count')} updates",
    "quarantine": lambda args: f"leave out shards {', '.join(args.read(QuarantineArgs).shards)}",
}

# What is compared with `threshold`, the first of these that the numbers hold, and its form.
MEASURES = {
    "sum": "accumulated drift {}",
    "ratio": "{} times its baseline",
    "residual": "residual {}",
    "distance": "{} widths off",
    "bound": "at least {} per 1000 steps",
    "z": "z {}",
    "difference": "difference {}",
}
# Told in a form of their own, or of no use to a reader.
TOLD = frozenset(
    (
        *("code", "metric", "step", "steps", "value", "threshold", "clear", "samples", "median"),
        *("scale", "reference", "transform", "breaching", "needed", "of", "oldest", "raw"),
        *("values", "fast"),
        *(
            "nonfinite",
            "match",
            "last_breach",
            "signal",
            "unit",
            "within",
            "gt",
            "gte",
            "lt",
            "lte",
        ),
        *("rel_gt", "last_block", "where"),
        *MEASURES,
    )
)


# Metrics in words; others by their ids, without the underscores.
METRICS = {
    "train_loss": "loss",
    "train_loss_raw": "loss",
    "train_loss_ema": "smoothed loss",
    "grad_global_norm": "gradient norm",
    "learning_rate": "learning rate",
    "running_stats_broken": "layers whose running statistics are not finite",
    "batch_top1_share": "share of the commonest token",
    "losses_without_targets": "losses that are a mean over no target",
    "batch_samples_differ": "samples of the batch that differ (0 is none)",
    "batch_token_entropy": "entropy of the batch",
    "batch_token_drift": "distance (KL) of the batch's tokens from those before",
    "batch_unique_ratio": "share of different tokens",
    "batch_new_share": "share of batches that are new",
    "batch_token_shift": "distance (KL) of the tokens from the first ones, over their own",
    "batch_ids_outside": "share of token ids outside the vocabulary",
    "batch_pad_fraction": "share of padding",
    "batch_seq_len_p50": "median length of the sequences",
    "batch_source_shift": "change of a source's share in the data",
    "tokens_per_update": "target tokens per update",
    "dataloader_stall_frac": "share of time waiting for data",
    "host_mem_growth": "growth of the host's memory in use",
    "host_mem_used": "host memory in use",
    "param_digest_mismatch": "parameter digests that differ between ranks",
    "rank_probe_dispersion": "spread of the ranks on one batch",
    "opt_state_finite": "optimizer moments finite (1 is yes)",
    "rerun_mismatch": "steps that did not repeat",
    "straggler_ratio": "step time of the slowest rank over the median",
    "loss_dispersion": "spread of the loss over ranks",
    "batch_dispersion": "spread of the token entropy over ranks",
    "gpu_util": "GPU utilization",
    "ckpt_verified": "checkpoint verified (1 is yes)",
}
UNITS = {
    "step_time": " s",
    "dataloader_stall_frac": " %",
    "batch_new_share": " %",
    "batch_ids_outside": " %",
    "batch_pad_fraction": " %",
    "batch_seq_len_p50": " tokens",
    "batch_source_shift": " %",
    "host_mem_used": " %",
    "gpu_util": " %",
    "host_mem_growth": " GB/h",
}

SCALES = {"host_mem_growth": 1e-9}  # from the unit of a metric to the one that people read

# Metrics whose values are codes: what each means, from 0 on.
CODES: Mapping[str, Sequence[str]] = {
    "checkpoint_ok": ("a checkpoint cannot be loaded", "a checkpoint was verified"),
    "update_skipped": ("the update was applied", "an update was skipped"),
    "skip_reason": (
        "the update was applied",
        "an update was skipped: the gradient scaler overflowed",
        "an update was skipped: NaN or Inf in its loss or gradient",
        "an update was skipped by a command",
        "an update was skipped: its gradient was far larger than usual",
    ),
}
# Kinds of audit records, for people.
RECORDS = {
    "notify_intent": "message",
    "notify_result": "delivery",
    "notify_text": "message as sent",
    "approval_requested": "request",
    "in_doubt": "in doubt",
    "near_miss": "near miss",
}


# Which metric names the rank that another one is about, and what `straggler_part` counts.
RANK_OF = {
    "straggler_ratio": "straggler_rank",
    **dict.fromkeys(("loss_dispersion", "batch_dispersion"), "loss_outlier_rank"),
    "param_digest_mismatch": "param_digest_rank",
    "skip_mismatch": "skip_mismatch_rank",
    **dict.fromkeys(("train_loss_raw", "grad_global_norm", "update_norm"), "nonfinite_rank"),
}
SLOW_AT = ("its input", "its forward or optimizer", "code outside forward and backward")


def printable(text: str, keep: str = "") -> str:
    """Return `text` with blanks for what controls a terminal or turns the direction of a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else " " for c in text)


def readable_metric(name: str) -> str:
    """Return a metric in words."""
    return METRICS.get(name) or name.replace("_", " ")


def quantity(name: str, value: float) -> str:
    """Return a value of a metric with three digits that count, and its unit."""
    unit, scale = unit_of(name)
    return f"{value * scale:.3g}{unit}"


def unit_of(name: str) -> tuple[str, float]:
    """Return the unit in which people read a metric, and the factor to it."""
    return UNITS.get(name, ""), SCALES.get(name, 1.0)


def coded_value_text(name: str, value: object) -> str:
    """Return what the value of a metric of codes means, "" for any other metric or value."""
    if name == "batch_fingerprint":  # neither it nor what it is compared with tells a person more
        return "each batch has the checksum of the one before"
    meanings, code = CODES.get(name, ()), finite_number(value)
    return meanings[int(code)] if code is not None and code in range(len(meanings)) else ""


def rank_text(name: str, value_of: Callable[[str], float | None]) -> str:
    """Return which rank a metric of several is about, "" where it is of none or not known."""
    rank = value_of(RANK_OF.get(name, ""))
    if rank is None:
        return ""
    part = value_of("straggler_part") if name == "straggler_ratio" else None
    has_part = part is not None and part in range(len(SLOW_AT))
    return f"rank {rank:.0f}" + (f" in {SLOW_AT[int(part or 0)]}" if has_part else "")


def format_number(value: object) -> str:
    """Return a number with four digits that count; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "absent" if value is None else str(value)
    return f"{value:.4g}".replace("nan", "NaN") if isinstance(value, float) else str(value)


def finite_number(value: object) -> float | None:
    """Return a finite number as float, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def reading_text(reading: Reading, name: str) -> str:
    """Return a text of a reading, "" where it has none."""
    entry = reading.get(name)
    return entry if isinstance(entry, str) else ""


def reading_integer(reading: Reading, name: str, default: int) -> int:
    """Return a whole number of a reading, `default` where it has none."""
    entry = reading.get(name)
    return entry if isinstance(entry, int) else default


def reading_names(reading: Reading, name: str) -> Sequence[int | str]:
    """Return a list of a reading, () where it has none."""
    entry = reading.get(name)
    return entry if isinstance(entry, list | tuple) else ()


def reading_table(reading: Reading, name: str) -> Numbers:
    """Return the numbers below a name of a reading, by their own names."""
    entry = reading.get(name)
    return entry if isinstance(entry, Mapping) else {}


def measured_number(numbers: Reading) -> tuple[str, float | str | None]:
    """Return `(key, number)` of what the detector compares with its threshold."""
    if "rel_gt" in numbers and "gt" not in numbers:  # of two evaluations: a share of the first
        key = "share"
    else:
        key = next((key for key in MEASURES if key in numbers), "value")
    entry = numbers.get(key)
    return key, entry if isinstance(entry, int | float | str) else None


def judged_value(measure: str, numbers: Reading) -> ReadingValue:
    """Return the newest sample, or what is compared with the limit where they lie apart.

    A ratio is of an average of late samples, so the newest one may be on the limit's other side.
    """
    value = numbers.get("last_block", numbers.get("value"))
    if measure == "ratio" and isinstance(value, int | float):
        average, limit = finite_number(numbers.get("fast")), limit_value(measure, numbers)
        if average is not None and limit is not None and (average - limit) * (value - limit) < 0:
            return average
    return value


def format_limit(measure: ReadingValue, numbers: Reading) -> str:
    """Return "limit 0.8", or "limit 0.8, clear 0.9" where a breach only lasts at that measure."""
    line = f"limit {format_number(numbers.get('threshold'))}"
    current, threshold, clear = map(
        finite_number, (measure, numbers.get("threshold"), numbers.get("clear"))
    )
    if current is None or threshold is None or clear is None or threshold == clear:
        return line
    lasts = (current - threshold) * (current - clear) <= 0
    return f"{line}, clear {format_number(clear)}" if lasts else line


def limit_value(measure: str, numbers: Reading) -> float | None:
    """Return the limit in force as a value of the metric, None where the measure has none."""
    value, limit, clear = map(
        finite_number, (numbers.get(measure), numbers.get("threshold"), numbers.get("clear"))
    )
    if value is None or limit is None:
        return None
    is_low = measure == "z" and -value >= (limit if clear is None else clear)  # below its median
    far = -value if is_low else value
    if clear is not None and (far - limit) * (far - clear) < 0:  # it lasts, by this one
        limit = clear
    limit = -limit if is_low else limit
    level = next((v for k in ("median", "reference") if (v := finite_number(numbers.get(k)))), None)
    scale = finite_number(numbers.get("scale"))
    if measure == "value":
        return limit
    if measure == "ratio" and level is not None:
        return limit * level
    if measure != "z" or level is None or scale is None or numbers.get("transform") == "abs":
        return None
    is_log = numbers.get("transform") == "log"
    return (
        level * math.exp(max(-700.0, min(limit * scale, 700.0)))
        if is_log
        else level + limit * scale
    )


def format_baseline(numbers: Reading) -> str:
    """Return "baseline 2.31 +- 0.02 over steps 120..247 (128 samples)"; "" when there is none."""
    level = next((numbers[k] for k in ("median", "reference", "level") if k in numbers), None)
    if finite_number(level) is None:
        return ""
    line = f"baseline {format_number(level)}"
    spread = finite_number(numbers.get("scale", numbers.get("spread")))
    if spread is not None:
        if numbers.get("transform") == "log":
            line += f" */ {format_number(math.exp(min(spread, 700.0)))}"
        else:
            line += f" +- {format_number(spread)}"
    steps = reading_names(numbers, "steps")
    if len(steps) == 2:
        line += f" over steps {steps[0]}..{steps[1]}"
    if "samples" in numbers and "median" in numbers:  # else it counts all that was ever seen
        line += f" ({numbers['samples']} samples)"
    return line


UNMEASURED = "not measured"


def format_reading(numbers: Reading) -> str:
    """Return the numbers of one reading as one line, without its name and code."""
    if "nonfinite" in numbers:
        values = reading_table(numbers, "values")
        if not values and numbers.get("code") == "UNKNOWN":
            return UNMEASURED
        return ", ".join(
            [f"{name} {format_number(entry)}" for name, entry in values.items()] + _votes(numbers)
        )
    if "signal" in numbers:
        return format_silence(numbers)
    if "last_breach" in numbers:
        return _coupled(numbers)
    key, measure = measured_number(numbers)
    level = numbers.get("last_block", numbers.get("value"))  # the value of a trend is its slope
    if meaning := coded_value_text(reading_text(numbers, "metric"), level):
        return ", ".join([meaning, *_votes(numbers)])
    metric = reading_text(numbers, "metric")
    if level is None and numbers.get("code") == "UNKNOWN":
        return f"{metric} {UNMEASURED}".strip()
    if level is None and not metric:
        return "it holds, and has no number"
    parts = [f"{metric or 'value'} {format_number(level)}"]
    if key == "bound" and finite_number(measure) is None:
        parts.append("no slope yet")
    elif key != "value" and measure is not None:
        parts.append(MEASURES.get(key, "share {}").format(format_number(measure)))
    if "threshold" in numbers:
        parts[-1] += f" ({format_limit(measure, numbers)})"
    parts += _votes(numbers)
    extras = [
        f"{k} {format_number(v)}" for k, v in numbers.items() if k not in TOLD and _is_plain(v)
    ]
    return "; ".join([", ".join([*parts, *extras[:4]]), *filter(None, [format_baseline(numbers)])])


def format_silence(numbers: Reading, *, limited: bool = True) -> str:
    """Return "no step for 120 s (limit 100 s, usual 0.1 s)", or without the bracket."""
    unit, value, limit_value = (
        numbers.get("unit", "s"),
        numbers.get("value"),
        numbers.get("threshold"),
    )
    signal = reading_text(numbers, "signal")
    is_of_steps = signal in ("step", "heartbeat")  # of any sign there is none, so no step
    line = f"no {'step' if is_of_steps else readable_metric(signal)} for {_rounded(value)} {unit}"
    if not limited:
        return line
    usual, limits = finite_number(numbers.get("p99_s")), f"limit {_rounded(limit_value)} {unit}"
    limits += f", usual {usual:.3g} s" if usual and is_of_steps else ""
    return f"{line} ({limits})"


def _rounded(value: ReadingValue) -> str:
    return (
        f"{value:.0f}"
        if isinstance(value, float) and math.isfinite(value)
        else format_number(value)
    )


def _votes(numbers: Reading) -> list[str]:
    window = reading_integer(numbers, "of", 1)
    return [f"{numbers.get('breaching', 0)} of the newest {window} breach"] if window > 1 else []


def _coupled(numbers: Reading) -> str:
    match = reading_table(numbers, "match")
    steps = match.get("steps") or reading_table(numbers, "last_breach")
    breaches = steps.items() if isinstance(steps, Mapping) else ()
    line = ", ".join(f"{name} at step {step}" for name, step in breaches)
    within = f"within {format_number(numbers.get('within'))} steps"
    if match:
        return f"last match {within}: {line}"
    return f"{within}; breaches so far: {line or 'none'}"


def _is_plain(value: ReadingValue) -> bool:
    return value is not None and not isinstance(value, (Mapping, list, tuple))


LIST_TEXT = 120  # characters of the items of a list that are named, two at least


def inline(values: Mapping[str, Json], joint: str = "=", *, counted: bool = False) -> str:
    """Return named values in one line; what is empty is left out.

    Of a long list the first items are named, or it is `counted`.
    """
    present = {key: value for key, value in values.items() if value not in (None, "", [], ())}
    plain = {name: _plain(name, value, counted) for name, value in present.items()}
    return ", ".join(f"{name}{joint}{text}" for name, text in plain.items())


def _plain(name: str, value: Any, counted: bool) -> str:
    if isinstance(value, Mapping):
        return f"({inline(value, counted=counted)})"
    if isinstance(value, list | tuple):
        if name == "was" and all(map(_is_pair, value)):  # steps, each with the loss of then
            pairs = ([_plain("", number, counted) for number in pair] for pair in value[-3:])
            return " ".join(f"{loss} (step {step})" for step, loss in pairs)
        if counted and len(value) > 2:
            return f"{len(value)} of them"
        texts = [_plain("", item, counted) for item in value]
        sizes = accumulate(len(text) + 1 for text in texts)
        fitting = max(2, sum(size <= LIST_TEXT for size in sizes))
        more = [f"and {len(texts) - fitting} more"] if len(texts) > fitting else []
        return " ".join(texts[:fitting] + more)
    if name == "sha256":
        return str(value)[:12]
    return f"{value:.4g}".replace("nan", "NaN") if isinstance(value, float) else str(value)


def _is_pair(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) == 2
    return is_list and all(isinstance(number, int | float) for number in value)


def format_bytes(count: int) -> str:
    """Return a size in MB or kB."""
    return f"{max(1, round(count / 1e6))} MB" if count >= 1e5 else f"{round(count / 1e3)} kB"


def format_seconds(seconds: float) -> str:
    """Return a time in seconds or minutes."""
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"


def format_timeout(seconds: float) -> str:
    """Return a time that somebody chose: `24 h`, `10 min`, `90 s`, in the largest whole unit."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size and not seconds % size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def short_digest(digest: str) -> str:
    """Return the beginning of a digest, enough to tell one request from another."""
    return digest.removeprefix("sha256:")[:12]


def format_age(seconds: float) -> str:
    """Return a time in the largest unit that has at least two of it."""
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def count_messages(count: int) -> str:
    """Return "1 message was", or "2 messages were"."""
    return f"{count} message was" if count == 1 else f"{count} messages were"
