"""What a measurement ran on: card and versions in words, and the card's ceilings, measured in the
same run.
"""

import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from engine.bench.timing import Timer

_COPY_BYTES, _SMALL_COPY_BYTES = 1 << 30, 1 << 16
_SIDE, _SMALL_SIDE = 8192, 32


@dataclass(frozen=True, slots=True)
class Machine:
    """`copy` in bytes read and written a second, `matmul` in bfloat16 FLOP a second."""

    device: str
    versions: str
    copy: float
    matmul: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def ceilings(self) -> str:
        return (
            f"copy {self.copy / 1e12:.2f} TB/s (read + write), bf16 product of {_SIDE}^3 "
            f"{self.matmul / 1e12:.0f} TFLOP/s"
        )


def measure_machine(device: torch.device, timer: Timer, *, matmul: bool = True) -> Machine:
    """Without `matmul` that ceiling is 0."""
    on_card = device.type == "cuda"
    num_bytes = _COPY_BYTES if on_card else _SMALL_COPY_BYTES
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2e6 * num_bytes / timer(lambda: target.copy_(source)).warm_us
    product = 0.0
    if matmul:
        side = _SIDE if on_card else _SMALL_SIDE
        a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
        product = 2e6 * side**3 / timer(lambda: torch.mm(a, b)).warm_us
    return Machine(_device_name(device), _versions(), copy, product)


def cuda_fault() -> str:
    """Why nothing can be measured here, in one line; empty if it can."""
    if torch.cuda.is_available():
        return ""
    build = torch.version.cuda
    if build is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
    return f"no CUDA device is visible to torch {torch.__version__}; run it where there is one"


def is_broken(device: torch.device) -> bool:
    """Whether a kernel's fault has made the device useless for this process."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}), Triton interpreted: times mean nothing"


def _versions() -> str:
    found = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    try:
        found.append(f"triton {version('triton')}")
    except PackageNotFoundError:
        found.append("no triton")
    return ", ".join([*found, sys.platform])
