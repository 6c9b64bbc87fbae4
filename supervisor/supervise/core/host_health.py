"""Judgement of a host's measurements: its fitness to start a job.

Only what is certain to fail, or certainly broken, is `BAD` and prevents a start. What was asked and
has no clear answer is `UNDECIDED`: the job is started, and people are notified. What there is
nothing to ask about is `SKIPPED`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .model.failure import Failure, FailureClass, classify
from .model.payload import Payload

KIND = "host-health"  # of the notice
GOOD, BAD, UNDECIDED, SKIPPED = "good", "bad", "undecided", "skipped"
MEMORY, DISK, DEVICES, MATMUL = "memory", "disk", "devices", "matmul"
PEAK_SHARE = 0.5  # of the most that the job had; a leak may have made it large; project default
HARDWARE = "gpu-hardware"  # the class of an error that the device itself is to blame for
GB = 1e9


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question: `verdict` is one of the four above, `text` has the numbers."""

    check: str
    verdict: str
    text: str


def refusal(findings: Iterable[Finding]) -> str:
    """Return why the host is not fit, in one line; "" where it may be."""
    return _of(findings, BAD)


def doubts(findings: Iterable[Finding]) -> str:
    """Return what could not be decided, in one line; "" for nothing."""
    return _of(findings, UNDECIDED)


def summary(findings: Sequence[Finding]) -> tuple[str, Payload]:
    """Return the message of a notice about the host, and its data."""
    unfit, unclear = refusal(findings), doubts(findings)
    if unfit:
        message = f"this host is not fit to start the job on: {unfit}"
    elif unclear:
        message = f"the health of this host could not be checked in full: {unclear}"
    else:
        message = "this host is fit to start the job on" if findings else "not looked at"
    checks = {each.check: {"verdict": each.verdict, "text": each.text} for each in findings}
    return message, Payload({"unfit": unfit, "doubts": unclear, "checks": checks})


def _of(findings: Iterable[Finding], verdict: str) -> str:
    return "; ".join(f"{each.check}: {each.text}" for each in findings if each.verdict == verdict)


def judge_memory(available: float | None, peak: float | None, wanted: float | None) -> Finding:
    """Judge the memory of the host, in bytes.

    Args:
        available: what can be had without swapping, in this container; None: nobody can say.
        peak: the most that the job's processes had, None: not measured.
        wanted: what the policy asks for, None: half of the peak.
    """
    if available is None:
        return Finding(MEMORY, UNDECIDED, "the system does not say how much is available")
    text = f"{available / GB:.1f} GB available"
    if wanted is not None:
        needed, why = wanted, f"job.health.memory_gb is {wanted / GB:g}"
    elif peak is not None:
        needed, why = PEAK_SHARE * peak, f"the job took up to {peak / GB:.1f} GB"
    else:
        return Finding(MEMORY, SKIPPED, f"{text}; how much the job takes was not measured")
    return Finding(MEMORY, BAD if available < needed else GOOD, f"{text}, and {why}")


def judge_disk(
    folder: str, free: float | None, total: float, checkpoint: float, wanted: float | None
) -> Finding:
    """Judge the disk that checkpoints are written to, in bytes.

    Args:
        free, total: of its file system; some of them know neither, and report 0 for both.
        checkpoint: size of the one that the job goes on from: as large will the next one be.
        wanted: what the policy asks for, None: room for that.
    """
    if free is None or not total:
        return Finding(DISK, UNDECIDED, f"the file system of {folder} does not say what is free")
    needed, why = checkpoint, f", and a checkpoint has {checkpoint / GB:.1f} GB"
    if wanted is not None:
        needed, why = wanted, f", and job.health.disk_gb is {wanted / GB:g}"
    text = f"{free / GB:.1f} GB free in {folder}{why if needed else ''}"
    return Finding(DISK, BAD if free < needed else GOOD, text)


def judge_devices(
    devices: Sequence[Mapping[str, Any]] | None, before: int | None, *, some: bool, trouble: str
) -> Finding:
    """Judge what the driver says of its devices.

    Args:
        devices: what `supervise.runtime.host` printed; None: it did not.
        before: how many there were when the run began, None: unknown.
        some: the job is given some of them only, so a broken one may be another.
        trouble: why there is no report.
    """
    if devices is None:
        return Finding(DEVICES, UNDECIDED, trouble)
    if not devices and not before:
        return Finding(DEVICES, SKIPPED, "no NVIDIA device")
    broken = [f"{_name(each)}: {each['lost']}" for each in devices if each.get("lost")]
    broken += [
        f"{_name(each)}: more rows of its memory are faulty than it can remap"
        for each in devices
        if each.get("remap_failed")
    ]
    if before is not None and len(devices) < before:
        broken.append(f"{len(devices)} devices, of {before} when the run began")
    if broken:
        return Finding(DEVICES, UNDECIDED if some else BAD, ", ".join(broken))
    doubtful = [
        f"{_name(each)}: rows of its memory are remapped at the next reset"
        for each in devices
        if each.get("remap_pending")
    ]
    doubtful += [
        f"{_name(each)}: {each['ecc_errors']} uncorrected memory errors since its driver was loaded"
        for each in devices
        if each.get("ecc_errors")
    ]
    if doubtful:
        return Finding(DEVICES, UNDECIDED, ", ".join(doubtful))
    return Finding(DEVICES, GOOD, f"{len(devices)} without a fault")


def judge_matmul(
    devices: Sequence[Mapping[str, Any]], classes: Iterable[FailureClass], seconds: float
) -> Finding:
    """Judge what `supervise_offline.devices` found when it multiplied matrices on each device.

    Where each product of each device is wrong, the arithmetic is perhaps another than we expect,
    and no fault.
    """
    broken: list[str] = []
    doubtful: list[str] = []
    products = 0
    none_right = all(each["products"] == each["wrong"] for each in devices)
    for each in devices:
        products += each["products"]
        name = _name(each)
        if each["wrong"]:
            text = f"{name}: {each['wrong']} of {each['products']} products are wrong"
            (doubtful if none_right else broken).append(text)
        elif each["no_memory"]:
            broken.append(f"{name}: no memory for matrices of 0.2 GB, {_in_use(each)} are in use")
        elif each["error"]:
            failure = classify(Failure(message=each["error"]), classes)
            (broken if failure.cls == HARDWARE else doubtful).append(f"{name}: {each['error']}")
        elif each["in_use"]:
            text = f"{name}: not asked, as {_in_use(each)} are in use by other processes"
            doubtful.append(text)
    if broken or doubtful:
        return Finding(MATMUL, BAD if broken else UNDECIDED, ", ".join(broken or doubtful))
    where = f"{len(devices)} devices" if len(devices) > 1 else _name(devices[0])
    return Finding(MATMUL, GOOD, f"{products} products on {where} are right, in {seconds:g} s")


def _in_use(device: Mapping[str, Any]) -> str:
    used, total = device["total"] - device["free"], device["total"]
    return f"{used / GB:.1f} of {total / GB:.1f} GB"


def _name(device: Mapping[str, Any]) -> str:
    """Return "cuda:3 (NVIDIA H100)"."""
    return f"{device['device']} ({device['name']})" if device.get("name") else device["device"]
