"""What this pod has: GPUs by nvidia-smi, CPUs and memory by control group, shared memory, room on the volume.

A pod without a usable nvidia-smi is a pod without GPU, never an error here: a restarted pod may come back with none,
and must stay reachable. Why there is none stands in ``Pod.notes``.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bootstrap.drivers import torch_cuda
from bootstrap.nvidia_smi import NVIDIA_SMI_SECONDS, read_gpus
from bootstrap.nvidia_smi import Gpu as Gpu

# What NCCL puts into /dev/shm for a GPU that others reach through host memory: about four channels of a 9.6 MB segment.
NCCL_SHM = 40 << 20
UNLIMITED = 1 << 60  # control groups of version 1 say "no limit" with a number near 2^63


@dataclass(frozen=True)
class Pod:
    gpus: tuple[Gpu, ...]
    cpus: int
    memory: int  # bytes of RAM that this container may use
    shm: int  # bytes free in /dev/shm
    disk_free: int  # bytes free on the volume; a network volume shows its whole cluster here, not the quota
    notes: tuple[str, ...] = ()
    cuda: str = ""  # version that the torch of this image is built with; "" without
    p2p: bool = True  # whether GPUs may talk past the host's memory; False where that was seen to hang or to lie


def read_pod(
    volume: Path,
    nvidia_smi: str = "nvidia-smi",
    *,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    time_limit: float = NVIDIA_SMI_SECONDS,
) -> Pod:
    """Facts of this pod. ``root`` is where proc, sys and dev lie. Never raises for what a pod can be like."""
    gpus, notes = read_gpus(nvidia_smi, environment, time_limit)
    return Pod(
        gpus=gpus,
        cpus=read_cpus(root, environment),
        memory=read_memory(root, environment),
        shm=free_bytes(root / "dev/shm"),
        disk_free=free_bytes(volume),
        notes=notes,
        cuda=torch_cuda(),
    )


def share_of(pod: Pod, gpus: int, total: int) -> Pod:
    """What a job may count on that has ``gpus`` of a pod's ``total`` while others run, or may start, on the rest."""
    cpus = max(1, pod.cpus * gpus // total)
    return replace(pod, cpus=cpus, memory=pod.memory * gpus // total, disk_free=pod.disk_free * gpus // total)


def lacks_shm(processes: int, shm: int) -> bool:
    """Whether NCCL, which dies of a full /dev/shm, must be told to do without it."""
    return processes > 1 and shm < processes * NCCL_SHM


# ---------------------------------------------------------------- CPUs, memory, disks


def read_cpus(root: Path, environment: Mapping[str, str]) -> int:
    """CPUs this process may use: its affinity, and the quota of its control group or, without one, the platform's
    word. At least 1."""
    limits = [float(len(os.sched_getaffinity(0)))]
    quotas = [_quota(text) for text in _group_files(root, "", "cpu.max")]  # version 2: "400000 100000", "max 100000"
    for folder in _group_folders(root, "cpu", "cpu.cfs_quota_us"):  # version 1: a file each
        quotas.append(_quota(_read(folder / "cpu.cfs_quota_us") + " " + _read(folder / "cpu.cfs_period_us")))
    known = [quota for quota in quotas if quota is not None]
    limits += known or _positive(environment.get("RUNPOD_CPU_COUNT"))
    return max(1, math.floor(min(limits)))


def read_memory(root: Path, environment: Mapping[str, str]) -> int:
    """Bytes of RAM this container may use: the least of the host's and its control groups' limits."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    host = int(match[1]) * 1024 if match else 0
    texts = _group_files(root, "", "memory.max") + _group_files(root, "memory", "memory.limit_in_bytes")
    limits = [int(text) for text in texts if text.strip().isdigit() and int(text) < UNLIMITED]
    if not limits:
        limits = [int(gigabytes * 1e9) for gigabytes in _positive(environment.get("RUNPOD_MEM_GB"))]
    return min([limit for limit in (host, *limits) if limit > 0], default=0)


def read_free_memory(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int:
    """Bytes of RAM this container may still take: what the host has available, and what the control group's limit
    leaves beside what is in use, cached files not counted. 0 where it cannot be told."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    if match is None:
        return 0
    used = _group_files(root, "", "memory.current") + _group_files(root, "memory", "memory.usage_in_bytes")
    stats = _group_files(root, "", "memory.stat") + _group_files(root, "memory", "memory.stat")
    cached = [int(n) for text in stats for n in re.findall(r"^(?:total_)?inactive_file (\d+)$", text, re.MULTILINE)]
    in_use = max((int(text) for text in used if text.strip().isdigit()), default=0) - max(cached, default=0)
    return max(0, min(int(match[1]) * 1024, read_memory(root, environment) - max(0, in_use)))


def read_oom_kills(root: Path = Path("/")) -> int:
    """How many processes of this container the kernel has killed for want of memory so far."""
    texts = _group_files(root, "", "memory.events") + _group_files(root, "memory", "memory.oom_control")
    counts = [int(count) for text in texts for count in re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE)]
    return max(counts, default=0)


def _group_folders(root: Path, controller: str, file: str) -> list[Path]:
    """Folders of this process's control group and its parents that hold ``file``; ``controller`` "" is version 2.

    Inside a container the group's own path often is not there: its limits then lie at the mount point."""
    base = root / "sys/fs/cgroup" / controller
    folders = {base}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controller in controllers.split(","):
            own = base / path.strip().lstrip("/")
            folders |= {folder for folder in (own, *own.parents) if folder.is_relative_to(base)}
    return [folder for folder in sorted(folders) if (folder / file).is_file()]


def _group_files(root: Path, controller: str, file: str) -> list[str]:
    return [_read(folder / file) for folder in _group_folders(root, controller, file)]


def _quota(text: str) -> float | None:
    """CPUs that a quota is, written as microseconds in every period of so many; None for no limit ("max", -1)."""
    parts = text.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or int(parts[1]) == 0:
        return None
    return int(parts[0]) / int(parts[1])


def _positive(text: str | None) -> list[float]:
    try:
        number = float(text or "")
    except ValueError:
        return []
    return [number] if number > 0 and math.isfinite(number) else []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def free_bytes(path: Path) -> int:
    """Free bytes of the file system that holds ``path``, or will hold it; 0 where that cannot be told."""
    for folder in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            room = os.statvfs(folder)
            return room.f_bavail * room.f_frsize
    return 0
