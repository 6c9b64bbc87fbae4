"""Judgement of a host's measurements: its fitness to start a job.

Only what is certain to fail, or certainly broken, is `BAD` and prevents a start. What was asked and
has no clear answer is `UNDECIDED`: the job is started, and people are notified. What there is
nothing to ask about is `SKIPPED`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from . import reasons
from .model.failure import Failure, FailureClass, classify_failure
from .model.payload import Payload
from .notices import Cause
from .reasons import Causes, CheckGap, DeviceFault, MemoryRows, Reported

HEALTH_NOTICE = "host-health"  # of the notice
GOOD, BAD, UNDECIDED, SKIPPED = "good", "bad", "undecided", "skipped"
MEMORY, DISK, DEVICES, MATMUL = "memory", "disk", "devices", "matmul"
PEAK_SHARE = 0.5  # of the most that the job had; a leak may have made it large; project default
HARDWARE = "gpu-hardware"  # the class of an error that the device itself is to blame for
GB = 1e9


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question, with its numbers; `verdict` is one of the four above."""

    check: str
    verdict: str
    answer: Cause

    @property
    def text(self) -> str:
        return str(self.answer)


def explain_unfit(findings: Iterable[Finding]) -> str:
    """Return why the host is not fit, in one line; "" where it may be."""
    return _join_findings(findings, BAD)


def explain_undecided(findings: Iterable[Finding]) -> str:
    """Return what could not be decided, in one line; "" for nothing."""
    return _join_findings(findings, UNDECIDED)


def health_summary(findings: Sequence[Finding]) -> tuple[str, Payload]:
    """Return the message of a notice about the host, and its data."""
    unfit, unclear = explain_unfit(findings), explain_undecided(findings)
    message: Cause = reasons.HostState.FIT if findings else reasons.HostState.UNEXAMINED
    if unfit:
        message = reasons.HostUnfit(trouble=unfit)
    elif unclear:
        message = reasons.HostUnclear(trouble=unclear)
    checks = {
        finding.check: {"verdict": finding.verdict, "text": finding.text} for finding in findings
    }
    return str(message), Payload({"unfit": unfit, "doubts": unclear, "checks": checks})


def _join_findings(findings: Iterable[Finding], verdict: str) -> str:
    return "; ".join(
        str(reasons.CheckAnswer(check=finding.check, answer=finding.answer))
        for finding in findings
        if finding.verdict == verdict
    )


def judge_memory(available: float | None, peak: float | None, required: float | None) -> Finding:
    """Judge the memory of the host, in bytes.

    Args:
        available: what can be had without swapping, in this container; None: nobody can say.
        peak: the most that the job's processes had, None: not measured.
        required: what the policy asks for, None: half of the peak.
    """
    if available is None:
        return Finding(MEMORY, UNDECIDED, CheckGap.MEMORY_UNKNOWN)
    free_gb = available / GB
    if required is not None:
        by_policy = reasons.MemoryFree(free_gb=free_gb, need_gb=required / GB)
        return Finding(MEMORY, BAD if available < required else GOOD, by_policy)
    if peak is None:
        return Finding(MEMORY, SKIPPED, reasons.MemoryNeedUnknown(free_gb=free_gb))
    by_peak = reasons.MemoryFree(free_gb=free_gb, peak_gb=peak / GB)
    return Finding(MEMORY, BAD if available < PEAK_SHARE * peak else GOOD, by_peak)


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
        return Finding(DISK, UNDECIDED, reasons.DiskUnknown(folder=folder))
    needed = checkpoint if required is None else required
    answer = reasons.DiskFree(
        free_gb=free / GB,
        folder=folder,
        need_gb=required / GB if required else None,
        size_gb=checkpoint / GB if checkpoint and required is None else None,
    )
    return Finding(DISK, BAD if free < needed else GOOD, answer)


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
    devices: Sequence[Device] | None, previous_count: int | None, *, some: bool, trouble: Cause
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
        return Finding(DEVICES, SKIPPED, CheckGap.NO_NVIDIA)
    broken: list[Cause] = [
        DeviceFault(device=_name(device), fault=Reported(report=device.lost))
        for device in devices
        if device.lost
    ]
    broken += [
        DeviceFault(device=_name(device), fault=MemoryRows.LOST)
        for device in devices
        if device.remap_failed
    ]
    if previous_count is not None and len(devices) < previous_count:
        broken.append(reasons.DevicesMissing(count=len(devices), total=previous_count))
    if broken:
        return Finding(DEVICES, UNDECIDED if some else BAD, Causes(causes=tuple(broken)))
    doubtful: list[Cause] = [
        DeviceFault(device=_name(device), fault=MemoryRows.TO_REMAP)
        for device in devices
        if device.remap_pending
    ]
    doubtful += [
        reasons.MemoryErrors(device=_name(device), count=device.ecc_errors)
        for device in devices
        if device.ecc_errors
    ]
    if doubtful:
        return Finding(DEVICES, UNDECIDED, Causes(causes=tuple(doubtful)))
    return Finding(DEVICES, GOOD, reasons.DevicesGood(count=len(devices)))


def judge_matmul(
    devices: Sequence[Device], classes: Iterable[FailureClass], seconds: float
) -> Finding:
    """Judge what `supervise_offline.devices` found when it multiplied matrices on each device.

    Where each product of each device is wrong, the arithmetic is perhaps another than we expect,
    and no fault.
    """
    broken: list[Cause] = []
    doubtful: list[Cause] = []
    products = 0
    none_right = all(each.products == each.wrong for each in devices)
    for device in devices:
        products += device.products
        name = _name(device)
        if device.wrong:
            wrong = reasons.ProductsWrong(device=name, count=device.wrong, total=device.products)
            (doubtful if none_right else broken).append(wrong)
        elif device.no_memory:
            broken.append(reasons.DeviceFull(device=name, **_memory_gb(device)))
        elif device.error:
            failure = classify_failure(Failure(message=device.error), classes)
            error = DeviceFault(device=name, fault=Reported(report=device.error))
            (broken if failure.cls == HARDWARE else doubtful).append(error)
        elif device.in_use:
            doubtful.append(reasons.DeviceBusy(device=name, **_memory_gb(device)))
    if broken or doubtful:
        answer = Causes(causes=tuple(broken or doubtful))
        return Finding(MATMUL, BAD if broken else UNDECIDED, answer)
    subject = f"{len(devices)} devices" if len(devices) > 1 else _name(devices[0])
    right = reasons.ProductsRight(total=products, device=subject, seconds=seconds)
    return Finding(MATMUL, GOOD, right)


def _memory_gb(device: Device) -> dict[str, float]:
    used = device.total - device.free
    return {"used_gb": used / GB, "total_gb": device.total / GB}


def _name(device: Device) -> str:
    """Return "cuda:3 (NVIDIA H100)"."""
    return f"{device.device} ({device.name})" if device.name else device.device
