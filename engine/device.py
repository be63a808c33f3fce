"""The device that tensors live on and what it can tell of its memory. Knows nothing of who uses it.

A dry device gives the `meta` torch device in place of the real one: every component then builds
with its true shapes and no bytes, which is how `command=plan` prints the ledger of a real start.
"""

import math
import os
from pathlib import Path

import numpy as np
import torch

from engine.config import DeviceConfig, DeviceKind
from engine.errors import ConfigError

_NUM_MULTIPROCESSORS = 132
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


class Device:
    """`torch_device` for tensors, capacity and use in bytes."""

    def __init__(self, cfg: DeviceConfig) -> None:
        """Raise ConfigError if the wanted device does not exist on this machine."""
        self.kind = cfg.kind
        self.dry = cfg.dry
        self._memory_bytes = cfg.memory_bytes
        if cfg.num_threads is not None:
            torch.set_num_threads(cfg.num_threads)
        needs_card = cfg.kind is DeviceKind.cuda and not cfg.dry
        num_cards = torch.cuda.device_count() if needs_card else 0
        if needs_card and cfg.index >= num_cards:
            raise ConfigError(
                f"device.kind: cuda:{cfg.index} was asked for, this machine has {num_cards} CUDA "
                "devices; use device=cpu"
            )
        self._real = (
            torch.device("cpu") if cfg.kind is DeviceKind.cpu else torch.device("cuda", cfg.index)
        )
        self.torch_device = torch.device("meta") if cfg.dry else self._real
        # What earlier jobs of this process left (library workspaces) is not this container's.
        self._allocated_at_reset = 0
        self._allocated_before = 0 if self.host_visible or self.dry else self._allocated()

    @property
    def host_visible(self) -> bool:
        """Whether tensors of this device are ordinary host memory."""
        return self._real.type == "cpu"

    @property
    def num_multiprocessors(self) -> int:
        """Of the card; those of an H200 where no card can be asked."""
        if self.dry or self.host_visible:
            return _NUM_MULTIPROCESSORS
        return int(torch.cuda.get_device_properties(self._real).multi_processor_count)

    def check_triton(self, key: str) -> None:
        """Raise ConfigError if Triton kernels, chosen by the config's `key`, cannot run here: on
        the CPU only Triton's interpreter runs them, for tests.
        """
        if self.host_visible and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError(
                f"{key}: got triton, which needs a CUDA device; use kernels=reference or "
                "device=cuda"
            )

    def total_bytes(self) -> int:
        """Capacity: `device.memory_bytes` if set, else what the machine (or its cgroup) has."""
        if self._memory_bytes is not None:
            return self._memory_bytes
        if self.host_visible:
            return min(_meminfo_bytes("MemTotal"), _cgroup_limit_bytes())
        if self.dry:
            raise ConfigError("device.memory_bytes: a plan for a CUDA device needs it, it is null")
        return torch.cuda.get_device_properties(self._real).total_memory

    def available_bytes(self) -> int:
        """Bytes that can be allocated now; on a dry device or with `memory_bytes` set, the
        capacity.
        """
        if self._memory_bytes is not None or self.dry:
            return self.total_bytes()
        if self.host_visible:
            return min(_meminfo_bytes("MemAvailable"), _cgroup_limit_bytes())
        free, _ = torch.cuda.mem_get_info(self._real)
        return free

    def allocated_bytes(self) -> int | None:
        """Bytes that torch's allocator holds for live tensors; None where there is no allocator to
        ask.
        """
        if self.host_visible or self.dry:
            return None
        return self._allocated() - self._allocated_before

    def forget_peak(self) -> None:
        """Count the most bytes of live tensors anew."""
        if not self.host_visible:
            torch.cuda.reset_peak_memory_stats(self._real)
            self._allocated_at_reset = self._allocated()

    def peak_bytes(self) -> int:
        """Most bytes of live tensors since `forget_peak`, beyond those that were alive then."""
        return torch.cuda.max_memory_allocated(self._real) - self._allocated_at_reset

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._real)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor. In host memory it is committed page by page as it is first written."""
        if self.dry or not self.host_visible or 0 in shape:
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)
        raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype).view(shape)


def _meminfo_bytes(key: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_limit_bytes() -> int:
    for path in _CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return 1 << 62
