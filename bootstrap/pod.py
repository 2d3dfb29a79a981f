"""What this pod has: GPUs by nvidia-smi, CPUs and memory by control group, shared memory, room on the volume.

A pod without a usable nvidia-smi is a pod without GPU, never an error here: a restarted pod may come back with none,
and must stay reachable. Why there is none stands in ``Pod.notes``.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bootstrap.drivers import torch_cuda
from bootstrap.gpus import find_gpu

MIB = 1 << 20
FIELDS = ("index", "name", "memory.total", "memory.free", "driver_version", "compute_cap")
MORE_FIELDS = ("uuid", "mig.mode.current")  # asked for last, so that a shorter answer still reads well
NVIDIA_SMI_SECONDS = 60.0  # a cold driver with 8 GPUs needs up to 30 s; a card that fell off the bus hangs for ever
# What NCCL puts into /dev/shm for a GPU that others reach through host memory: about four channels of a 9.6 MB segment.
NCCL_SHM = 40 * MIB
UNLIMITED = 1 << 60  # control groups of version 1 say "no limit" with a number near 2^63


@dataclass(frozen=True)
class Gpu:
    index: int  # nvidia-smi's, in the order of the PCI bus
    name: str
    memory: int  # bytes in all
    free: int | None = None  # bytes, where the driver says
    driver: str = ""
    capability: tuple[int, int] | None = None
    uuid: str = ""


@dataclass(frozen=True)
class Pod:
    gpus: tuple[Gpu, ...]
    cpus: int
    memory: int  # bytes of RAM that this container may use
    shm: int  # bytes free in /dev/shm
    disk_free: int  # bytes free on the volume; a network volume shows its whole cluster here, not the quota
    notes: tuple[str, ...] = ()
    cuda: str = ""  # version that the torch of this image is built with; "" without


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


# ---------------------------------------------------------------- GPUs


def read_gpus(
    nvidia_smi: str, environment: Mapping[str, str], time_limit: float
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """The GPUs that CUDA may use, and notes on those missing."""
    try:
        code, output = _ask(nvidia_smi, (*FIELDS, *MORE_FIELDS), time_limit)
        if code and "is not a valid field" in output:  # a driver of before 2022 knows no compute_cap
            code, output = _ask(nvidia_smi, FIELDS[:-1], time_limit)
    except OSError:
        return (), (f"{nvidia_smi} is not there, which the platform brings along with the driver",)
    except subprocess.TimeoutExpired:
        return (), (
            f"{nvidia_smi} did not answer within {time_limit:g} s, so the pod counts as one without GPU; a card or "
            "the driver of this host hangs: restart the pod, or deploy it anew on another host",
        )
    gpus, notes = parse_gpus(output)
    if code and (gpus or not notes):
        notes = (*notes, f"nvidia-smi ended with code {code}: {_first_line(output)}")
    if not gpus and not notes:
        notes = ("nvidia-smi lists no GPU",)
    seen, more = visible(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    return seen, notes + more


def _ask(nvidia_smi: str, fields: tuple[str, ...], time_limit: float) -> tuple[int, str]:
    """Exit code and output of a query. A process that cannot even be killed (stuck in the driver) is left behind."""
    command = [nvidia_smi, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=time_limit)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=2)
        raise
    return process.returncode, output.decode(errors="replace")


def parse_gpus(output: str) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """GPUs in nvidia-smi's answer, one comma-separated line each, and notes on lines that are no usable GPU."""
    gpus: list[Gpu] = []
    notes: list[str] = []
    for line in output.splitlines():
        values = [value.strip() for value in line.split(",")]
        if not any(values):
            continue
        if not values[0].isdigit() or len(values) < 3:
            notes.append(f"nvidia-smi: {line.strip()[:200]}")  # "No devices were found", a card that fell off the bus
            continue
        values += [""] * (len(FIELDS) + len(MORE_FIELDS) - len(values))
        index, name, total, free, driver, capability, uuid, mig = values[: len(FIELDS) + len(MORE_FIELDS)]
        known = find_gpu(name)
        memory = _mebibytes(total) or (known.bytes if known and _not_told(total) else None)
        if memory is None:
            notes.append(f"GPU {index} ({name}) is left out: nvidia-smi says {total or 'nothing'} of its memory")
        elif mig == "Enabled":
            notes.append(
                f"GPU {index} ({name}) is left out: it is cut into MIG slices, and a slice does not show its size or "
                "speed here; rent a whole GPU"
            )
        else:
            version = re.fullmatch(r"(\d+)\.(\d+)", capability)
            from_table = known.capability if known else None
            gpus.append(
                Gpu(
                    index=int(index),
                    name=name,
                    memory=memory,
                    free=_mebibytes(free),
                    driver=driver if driver[:1].isdigit() else "",
                    capability=(int(version[1]), int(version[2])) if version else from_table,
                    uuid=uuid,
                )
            )
    return tuple(gpus), tuple(notes)


def _mebibytes(text: str) -> int | None:
    number = re.fullmatch(r"(\d+)( MiB)?", text)
    return int(number[1]) * MIB if number and int(number[1]) > 0 else None


def _not_told(text: str) -> bool:
    """[N/A] means that this driver does not tell; ERR!, [Unknown Error] and [GPU is lost] mean that the card is ill."""
    return text.strip("[]").lower() in ("n/a", "not supported", "")


def visible(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """What CUDA_VISIBLE_DEVICES leaves, read as CUDA reads it: the first entry that is no GPU ends the list."""
    if setting is None:
        return gpus, ()
    chosen: list[Gpu] = []
    for entry in setting.split(","):
        word = entry.strip()
        found = [
            gpu for gpu in gpus if str(gpu.index) == word or (word.startswith("GPU-") and gpu.uuid[: len(word)] == word)
        ]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    if len(chosen) == len(gpus):
        return tuple(chosen), ()
    return tuple(chosen), (f"CUDA_VISIBLE_DEVICES={setting} leaves {len(chosen)} of {len(gpus)} GPUs",)


def _first_line(text: str) -> str:
    return next((line.strip()[:200] for line in text.splitlines() if line.strip()), "no output")


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
