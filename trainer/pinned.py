"""Host memory that the GPU copies to and from at full speed.

Torch's pinned allocator rounds every block up to a power of two (22 GiB of states would take 32). One slab, registered
with the driver, wastes nothing.
"""

from __future__ import annotations

import math

import torch

ALIGNMENT = 512  # bytes; what copy engines like


def pinned_slab(size: int) -> torch.Tensor:
    """``size`` zero bytes of pinned memory. Raises MemoryError, with the size, where the host has not as much."""
    slab = torch.zeros(size, dtype=torch.uint8)
    result = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0)
    if int(result) != 0:
        need = f"{size / 2**30:.1f} GiB for what lies on the host"
        raise MemoryError(f"the host cannot pin {need} (CUDA error {int(result)})")
    return slab


def unpin(slab: torch.Tensor) -> None:
    """Before its memory goes back to the system, which would hand it out pinned."""
    torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())


def aligned_bytes(tensor: torch.Tensor) -> int:
    """What a tensor takes in a slab where all begin at multiples of ALIGNMENT."""
    size = math.prod(tensor.shape) * tensor.dtype.itemsize
    return math.ceil(size / ALIGNMENT) * ALIGNMENT
