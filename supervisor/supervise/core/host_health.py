"""Judgement of a host's measurements: its fitness to start a job.

Only what is certain to fail, or certainly broken, is `BAD` and prevents a start. What was asked and
has no clear answer is `UNDECIDED`: the job is started, and people are notified. What there is
nothing to ask about is `SKIPPED`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from .model.failure import Failure, FailureClass, classify_failure
from .model.payload import Payload

HEALTH_NOTICE = "host-health"  # of the notice
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


def explain_unfit(findings: Iterable[Finding]) -> str:
    """Return why the host is not fit, in one line; "" where it may be."""
    return _join_findings(findings, BAD)


def explain_undecided(findings: Iterable[Finding]) -> str:
    """Return what could not be decided, in one line; "" for nothing."""
    return _join_findings(findings, UNDECIDED)


def health_summary(findings: Sequence[Finding]) -> tuple[str, Payload]:
    """Return the message of a notice about the host, and its data."""
    unfit, unclear = explain_unfit(findings), explain_undecided(findings)
    if unfit:
        message = f"this host is not fit to start the job on: {unfit}"
    elif unclear:
        message = f"the health of this host could not be checked in full: {unclear}"
    else:
        message = "this host is fit to start the job on" if findings else "not looked at"
    checks = {
        finding.check: {"verdict": finding.verdict, "text": finding.text} for finding in findings
    }
    return message, Payload({"unfit": unfit, "doubts": unclear, "checks": checks})


def _join_findings(findings: Iterable[Finding], verdict: str) -> str:
    return "; ".join(
        f"{finding.check}: {finding.text}" for finding in findings if finding.verdict == verdict
    )


def judge_memory(available: float | None, peak: float | None, required: float | None) -> Finding:
    """Judge the memory of the host, in bytes.

    Args:
        available: what can be had without swapping, in this container; None: nobody can say.
        peak: the most that the job's processes had, None: not measured.
        required: what the policy asks for, None: half of the peak.
    """
    if available is None:
        return Finding(MEMORY, UNDECIDED, "the system does not say how much is available")
    text = f"{available / GB:.1f} GB available"
    if required is not None:
        needed, reason = required, f"job.health.memory_gb is {required / GB:g}"
    elif peak is not None:
        needed, reason = PEAK_SHARE * peak, f"the job took up to {peak / GB:.1f} GB"
    else:
        return Finding(MEMORY, SKIPPED, f"{text}; how much the job takes was not measured")
    return Finding(MEMORY, BAD if available < needed else GOOD, f"{text}, and {reason}")


def judge_disk(
    folder: str, free: float | None, total: float, checkpoint: float, required: float | None
) -> Finding:
    """Judge the disk that checkpoints are written to, in bytes.

    Args:
        free, total: of its file system; some of them know neither, and report 0 for both.
        checkpoint: size of the one that the job goes on from: as large will the next one be.
        required: what the policy asks for, None: room for that.
    """
    if free is None or not total:
        return Finding(DISK, UNDECIDED, f"the file system of {folder} does not say what is free")
    needed, reason = checkpoint, f", and a checkpoint has {checkpoint / GB:.1f} GB"
    if required is not None:
        needed, reason = required, f", and job.health.disk_gb is {required / GB:g}"
    text = f"{free / GB:.1f} GB free in {folder}{reason if needed else ''}"
    return Finding(DISK, BAD if free < needed else GOOD, text)


class Device(Struct, frozen=True):
    """A device as its driver reports it, and as matrix products on it went.

    Attributes:
        lost: why the driver cannot use it. remap_failed, remap_pending: of rows of its memory.
        wrong: of `products`. no_memory: there was none for the matrices. in_use: not asked, as
            others use it. total, free: bytes.
    """

    device: str
    name: str = ""
    lost: str | None = None
    remap_failed: bool | None = None
    remap_pending: bool | None = None
    ecc_errors: int | None = None
    products: int = 0
    wrong: int = 0
    no_memory: bool = False
    error: str | None = None
    in_use: bool = False
    total: float = 0.0
    free: float = 0.0


def judge_devices(
    devices: Sequence[Device] | None, previous_count: int | None, *, some: bool, trouble: str
) -> Finding:
    """Judge what the driver says of its devices.

    Args:
        devices: what `supervise.runtime.host` printed; None: it did not.
        previous_count: how many there were when the run began, None: unknown.
        some: the job is given some of them only, so a broken one may be another.
        trouble: why there is no report.
    """
    if devices is None:
        return Finding(DEVICES, UNDECIDED, trouble)
    if not devices and not previous_count:
        return Finding(DEVICES, SKIPPED, "no NVIDIA device")
    broken = [f"{_name(device)}: {device.lost}" for device in devices if device.lost]
    broken += [
        f"{_name(device)}: more rows of its memory are faulty than it can remap"
        for device in devices
        if device.remap_failed
    ]
    if previous_count is not None and len(devices) < previous_count:
        broken.append(f"{len(devices)} devices, of {previous_count} when the run began")
    if broken:
        return Finding(DEVICES, UNDECIDED if some else BAD, ", ".join(broken))
    doubtful = [
        f"{_name(device)}: rows of its memory are remapped at the next reset"
        for device in devices
        if device.remap_pending
    ]
    doubtful += [
        f"{_name(device)}: {device.ecc_errors} uncorrected memory errors "
        "since its driver was loaded"
        for device in devices
        if device.ecc_errors
    ]
    if doubtful:
        return Finding(DEVICES, UNDECIDED, ", ".join(doubtful))
    return Finding(DEVICES, GOOD, f"{len(devices)} without a fault")


def judge_matmul(
    devices: Sequence[Device], classes: Iterable[FailureClass], seconds: float
) -> Finding:
    """Judge what `supervise_offline.devices` found when it multiplied matrices on each device.

    Where each product of each device is wrong, the arithmetic is perhaps another than we expect,
    and no fault.
    """
    broken: list[str] = []
    doubtful: list[str] = []
    products = 0
    none_right = all(each.products == each.wrong for each in devices)
    for device in devices:
        products += device.products
        name = _name(device)
        if device.wrong:
            text = f"{name}: {device.wrong} of {device.products} products are wrong"
            (doubtful if none_right else broken).append(text)
        elif device.no_memory:
            broken.append(f"{name}: no memory for matrices of 0.2 GB, {_in_use(device)} are in use")
        elif device.error:
            failure = classify_failure(Failure(message=device.error), classes)
            (broken if failure.cls == HARDWARE else doubtful).append(f"{name}: {device.error}")
        elif device.in_use:
            text = f"{name}: not asked, as {_in_use(device)} are in use by other processes"
            doubtful.append(text)
    if broken or doubtful:
        return Finding(MATMUL, BAD if broken else UNDECIDED, ", ".join(broken or doubtful))
    subject = f"{len(devices)} devices" if len(devices) > 1 else _name(devices[0])
    return Finding(MATMUL, GOOD, f"{products} products on {subject} are right, in {seconds:g} s")


def _in_use(device: Device) -> str:
    used, total = device.total - device.free, device.total
    return f"{used / GB:.1f} of {total / GB:.1f} GB"


def _name(device: Device) -> str:
    """Return "cuda:3 (NVIDIA H100)"."""
    return f"{device.device} ({device.name})" if device.name else device.device
