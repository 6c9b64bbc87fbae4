"""A complete stand-in for the binding of the NVIDIA driver."""

# ruff: noqa: N801, N802, N815, N818 - the driver's own names

from types import SimpleNamespace


class Driver:
    """Devices of which the second is the worse one, and a third, if there is one, is lost.

    Attributes:
        users: pids that compute on each device.
        xids: critical errors that nobody has heard of.
        lost: devices that do not answer.
        shared: they have the host's memory, and tell nothing of it.
    """

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    NVML_TEMPERATURE_GPU = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, users=None, count=2, *, shared=False):
        self.users, self.count, self.xids = users or {}, count, 0
        self.lost, self.shared = {2}, shared

    def nvmlInit(self):
        if not self.count:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, i):
        if i in self.lost:
            raise self.NVMLError("GPU is lost")
        return i

    def nvmlDeviceGetName(self, i):
        return b"NVIDIA H100"

    def nvmlDeviceGetUUID(self, i):
        return f"GPU-{i}"

    def nvmlSystemGetDriverVersion(self):
        return "570.1"

    def nvmlDeviceGetComputeRunningProcesses(self, i):
        return [SimpleNamespace(pid=pid) for pid in self.users.get(i, [])]

    def nvmlDeviceGetMemoryInfo(self, i):
        if self.shared:
            raise self.NVMLError_NotSupported("Not Supported")
        return SimpleNamespace(used=(i + 1) * 20, total=100)

    def nvmlDeviceGetUtilizationRates(self, i):
        return SimpleNamespace(gpu=(90, 30)[i])

    def nvmlDeviceGetTemperature(self, i, kind):
        return 60 + i

    def nvmlDeviceGetPowerUsage(self, i):
        return 350_000

    def nvmlDeviceGetRemappedRows(self, i):
        if i == 0:
            raise self.NVMLError("Not Supported")
        return 0, 3, True, False

    def nvmlDeviceGetTotalEccErrors(self, i, kind, since):
        if self.users:
            raise self.NVMLError("Not Supported")
        return 4 * i

    def nvmlEventSetCreate(self):
        return "set"

    def nvmlDeviceRegisterEvents(self, device, kinds, events):
        pass

    def nvmlEventSetWait_v2(self, events, timeout_ms):
        if self.xids == 0:
            raise self.NVMLError("Timeout")
        self.xids -= 1
