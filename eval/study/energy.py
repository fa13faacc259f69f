"""Energy of the GPU, where NVML is there and tells it."""


class Meter:
    """Reads the first GPU's energy counter."""

    def __init__(self, device: str):
        self.handle = None
        if device != 'cuda':
            return
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except pynvml.NVMLError:
            return
        self.nvml, self.handle = pynvml, handle

    def read(self) -> dict[str, float]:
        """`joules` since the driver was loaded; nothing where they are not told."""
        if self.handle is None:
            return {}
        return {'joules': self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3}
