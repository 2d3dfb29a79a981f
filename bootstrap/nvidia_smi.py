"""What nvidia-smi says of the GPUs, with everything it is known to say when a card, a driver or a host is ill.

A missing or failing nvidia-smi is no error here: its notes say why there is no GPU. Every call has a time limit, and
what cannot even be killed (a process stuck in the driver) is left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bootstrap.gpus import find_gpu

MIB = 1 << 20
FIELDS = ("index", "name", "memory.total", "memory.free", "driver_version", "compute_cap")
MORE_FIELDS = ("uuid", "mig.mode.current")  # asked for last, so that a shorter answer still reads well
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
HEALTH_FIELDS = (
    *("temperature.gpu", "clocks.sm", "clocks.max.sm", "power.draw", "power.limit"),
    *("ecc.errors.uncorrected.volatile.total", "retired_pages.pending"),
)
LOAD_FIELDS = ("index", "utilization.gpu", "memory.used", "clocks.sm", "power.draw", "temperature.gpu")
CLOCK_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # renamed with driver 535
NVIDIA_SMI_SECONDS = 60.0  # a cold driver with 8 GPUs needs up to 30 s; a card that fell off the bus hangs for ever

# Why clocks are below their most, bit by bit: nvmlClocksEventReasons in NVIDIA's NVML reference. Idle and the software
# power cap (a card at its full power) are left out: they are how healthy cards live.
_SLOWED = {
    0x8: "hardware slowdown (heat or power)",
    0x20: "software thermal slowdown: it is too hot",
    0x40: "hardware thermal slowdown: it is far too hot",
    0x80: "power brake: the host cannot feed it",
}
_POWER_CAP = 0x4


@dataclass(frozen=True)
class Gpu:
    index: int  # nvidia-smi's, in the order of the PCI bus
    name: str
    memory: int  # bytes in all
    free: int | None = None  # bytes, where the driver says
    driver: str = ""
    capability: tuple[int, int] | None = None
    uuid: str = ""
    processes: tuple[str, ...] = ()  # that hold memory of it, with how much, as far as the container may know


@dataclass(frozen=True)
class Health:
    """One card at one moment; None where the driver does not tell."""

    temperature: float | None = None  # degrees C
    clock: float | None = None  # MHz
    most_clock: float | None = None
    power: float | None = None  # W
    power_limit: float | None = None
    ecc_errors: int | None = None  # uncorrected, since the driver was loaded
    page_retirement_pending: bool = False
    slowed: tuple[str, ...] = ()  # why the clock is held down, where it should not be
    power_capped: bool = False


@dataclass(frozen=True)
class Load:
    """What one card does now; None where the driver does not tell."""

    utilisation: float | None  # percent of the last second in which any kernel ran
    memory_gib: float | None
    clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None


# ---------------------------------------------------------------- which GPUs there are


def read_gpus(
    nvidia_smi: str, environment: Mapping[str, str], time_limit: float
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """The GPUs that CUDA may use, and notes on those missing."""
    try:
        code, output = _query(nvidia_smi, "gpu", (*FIELDS, *MORE_FIELDS), time_limit)
        if code and "is not a valid field" in output:  # a driver of before 2022 knows no compute_cap
            code, output = _query(nvidia_smi, "gpu", FIELDS[:-1], time_limit)
    except OSError as error:
        reason = "is not there, which the platform brings along with the driver"
        if not isinstance(error, FileNotFoundError):
            reason = f"does not start: {error.strerror}"
        return (), (f"{nvidia_smi} {reason}",)
    except subprocess.TimeoutExpired:
        return (), (
            f"{nvidia_smi} did not answer within {time_limit:g} s, so the pod counts as one without GPU; a card or "
            "the driver of this host hangs: restart the pod, or deploy it anew on another host",
        )
    gpus, notes = parse_gpus(output)
    if code and (gpus or not notes):
        told = "" if gpus else f": {_first_line(output)}"
        notes = (*notes, f"nvidia-smi ended with code {code}{told}")
    if not gpus and not notes:
        notes = ("nvidia-smi lists no GPU",)
    seen, more = visible(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    return _with_processes(nvidia_smi, seen, time_limit), notes + more


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
                    uuid=uuid if uuid.startswith("GPU-") else "",
                )
            )
    return tuple(gpus), tuple(notes)


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


# ---------------------------------------------------------------- who else is there


def _with_processes(nvidia_smi: str, gpus: tuple[Gpu, ...], time_limit: float) -> tuple[Gpu, ...]:
    """The GPUs with the processes that hold memory of them. A driver that does not tell changes nothing."""
    if not any(gpu.uuid for gpu in gpus):
        return gpus
    try:
        code, output = _query(nvidia_smi, "compute-apps", PROCESS_FIELDS, time_limit)
    except (OSError, subprocess.TimeoutExpired):
        return gpus
    holders = {} if code else parse_processes(output)
    return tuple(replace(gpu, processes=holders.get(gpu.uuid, ())) for gpu in gpus)


def parse_processes(output: str) -> dict[str, tuple[str, ...]]:
    """By GPU, who holds memory of it. In a container the driver often knows neither name nor size."""
    found: dict[str, list[str]] = {}
    for line in output.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) < 4 or not values[0].startswith("GPU-"):
            continue
        # A process's name may itself hold a comma.
        uuid, pid, name, size = values[0], values[1], ", ".join(values[2:-1]), _mebibytes(values[-1])
        told = "a process of another container" if name.startswith("[") or not name else os.path.basename(name)
        told += f" (process {pid})" if pid.isdigit() and int(pid) > 0 else ""
        found.setdefault(uuid, []).append(told + (f" with {size / (1 << 30):.1f} GiB" if size else ""))
    return {uuid: tuple(holders) for uuid, holders in found.items()}


# ---------------------------------------------------------------- how a card feels


def read_health(index: int, nvidia_smi: str = "nvidia-smi", time_limit: float = 10.0) -> Health:
    """One card now: for clocks and heat to mean something, while it works. Nothing known where nothing is told."""
    for clocks in CLOCK_FIELDS:
        try:
            code, output = _query(nvidia_smi, "gpu", (*HEALTH_FIELDS, clocks), time_limit, ("-i", str(index)))
        except (OSError, subprocess.TimeoutExpired):
            return Health()
        if not code:
            return parse_health(output)
    return Health()


def parse_health(output: str) -> Health:
    values = [value.strip() for value in _first_line(output).split(",")]
    values += [""] * (len(HEALTH_FIELDS) + 1 - len(values))
    temperature, clock, most_clock, power, power_limit, ecc, retiring, reasons = values[: len(HEALTH_FIELDS) + 1]
    bits = int(reasons, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) else 0
    errors = _number(ecc)
    return Health(
        temperature=_number(temperature),
        clock=_number(clock),
        most_clock=_number(most_clock),
        power=_number(power),
        power_limit=_number(power_limit),
        ecc_errors=None if errors is None else int(errors),
        page_retirement_pending=retiring == "Yes",
        slowed=tuple(told for bit, told in _SLOWED.items() if bits & bit),
        power_capped=bool(bits & _POWER_CAP),
    )


def read_loads(nvidia_smi: str = "nvidia-smi", time_limit: float = 10.0) -> dict[int, Load]:
    """Every card, by its index; none where nvidia-smi does not answer."""
    try:
        code, output = _query(nvidia_smi, "gpu", LOAD_FIELDS, time_limit)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {} if code else parse_loads(output)


def parse_loads(output: str) -> dict[int, Load]:
    found = {}
    for line in output.splitlines():
        index, *values = (value.strip() for value in line.split(","))
        if index.isdigit() and len(values) == len(LOAD_FIELDS) - 1:
            utilisation, memory, clock, power, temperature = map(_number, values)
            gib = None if memory is None else round(memory * MIB / (1 << 30), 2)
            found[int(index)] = Load(utilisation, gib, clock, power, temperature)
    return found


# ---------------------------------------------------------------- asking


def _query(
    nvidia_smi: str, what: str, fields: Sequence[str], time_limit: float, more: Sequence[str] = ()
) -> tuple[int, str]:
    """Exit code and output of a query."""
    command = [nvidia_smi, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits", *more]
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


def _mebibytes(text: str) -> int | None:
    number = re.fullmatch(r"(\d+)( MiB)?", text)
    return int(number[1]) * MIB if number and int(number[1]) > 0 else None


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def _not_told(text: str) -> bool:
    """[N/A] means that this driver does not tell; ERR!, [Unknown Error] and [GPU is lost] mean that the card is ill."""
    return text.strip("[]").lower() in ("n/a", "not supported", "")


def _first_line(text: str) -> str:
    return next((line.strip()[:200] for line in text.splitlines() if line.strip()), "no output")
