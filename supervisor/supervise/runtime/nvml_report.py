"""Prints what the NVIDIA driver says of each device, as a JSON list. Run as a program of its own.

A driver that hangs then hangs a process that can be left behind.

Source: NVML, nvmlDeviceGetRemappedRows and nvmlDeviceGetTotalEccErrors; what they mean: NVIDIA's
"GPU Memory Error Management".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def driver_report(nvml: Any) -> list[dict[str, Any]]:
    """Return one row per device: `device`, `name`, `ecc_errors`, `remap_failed`, `remap_pending`;
    of one that does not answer `device` and `lost`. What it does not support is left out.

    Args:
        nvml: the `pynvml` module, or whatever has its functions.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, no device: nothing is missing
        return []
    return [_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def _device(nvml: Any, index: int) -> dict[str, Any]:
    row: dict[str, Any] = {"device": f"device {index}"}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        row["name"] = _text(nvml.nvmlDeviceGetName(handle))
        nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:  # its memory is the host's
        pass
    except nvml.NVMLError as error:
        return {**row, "lost": f"it does not answer: {error}"}

    def remapped() -> tuple[bool, bool]:
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        return bool(pending), bool(failed)

    def ecc_errors() -> int:
        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))

    row["ecc_errors"] = _ask(nvml, ecc_errors, 0)
    row["remap_pending"], row["remap_failed"] = _ask(nvml, remapped, (False, False))

    return row


def _ask(nvml: Any, question: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return question()
    except nvml.NVMLError:  # consumer cards count no ECC errors and remap no rows
        return otherwise


def _text(name: str | bytes) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name


if __name__ == "__main__":
    import pynvml

    print(json.dumps(driver_report(pynvml)))
