"""Host memory that the GPU copies to and from at full speed.

Torch's pinned allocator rounds every block up to a power of two (22 GiB of states would take 32). One slab, registered
with the driver, wastes nothing.
"""

from __future__ import annotations

import math

import torch

ALIGNMENT = 512  # bytes; what copy engines like


def move_to_host(states: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """Zeros of the shapes and dtypes of ``states`` (meta tensors serve), as views of one pinned slab of host memory.

    Raises MemoryError, with the size, where the host has not as much to pin.
    """
    sizes = [_aligned(tensor) for group in states.values() for tensor in group.values()]
    slab = torch.zeros(sum(sizes), dtype=torch.uint8)
    result = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0)
    if int(result) != 0:
        raise MemoryError(
            f"the host cannot pin {slab.numel() / 2**30:.1f} GiB for optimizer states (CUDA error {int(result)})"
        )
    views: dict[str, dict[str, torch.Tensor]] = {}
    offset = 0
    for name, group in states.items():
        views[name] = {}
        for key, tensor in group.items():
            size = math.prod(tensor.shape) * tensor.dtype.itemsize
            views[name][key] = slab[offset : offset + size].view(tensor.dtype).view(tensor.shape)
            offset += _aligned(tensor)
    return views


def _aligned(tensor: torch.Tensor) -> int:
    size = math.prod(tensor.shape) * tensor.dtype.itemsize
    return math.ceil(size / ALIGNMENT) * ALIGNMENT
