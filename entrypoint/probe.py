"""``fluxpod probe``, and what each run does of it before it fetches anything: is this pod what it was rented as?

The GPUs are measured by children (``trainer/probe.py``), one for each card, at the same time; each part has a hard time
limit, and what hangs is cut off and told instead of measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bootstrap.gpus import PCIE, find_gpu
from bootstrap.host_speeds import download_rate, hashing_rate
from bootstrap.nvidia_smi import Gpu, Health, read_health
from bootstrap.outcome import DONE, POD_WRONG, STOPPED, PodError
from bootstrap.pod import Pod, free_bytes, lacks_shm, read_pod
from bootstrap.probe import (
    CARD_PARTS,
    P2P_GAIN,
    UNITS,
    CardFacts,
    Measure,
    Probe,
    hardware,
    known_probe,
    no_kernels,
    normal_of,
    render,
    too_slow,
    verdict,
)
from bootstrap.volume import Volume
from bootstrap.volume_probe import VolumeFacts, probe_volume
from bootstrap.ways import usable_gpus
from entrypoint.launch import SHARED_MEMORY, Stop, free_port
from jobs.schema import Job
from jobs.secret import is_secret

START_SECONDS = 90.0  # for a child to import torch: 5 s, or a minute from the cold disk of a new pod
CARDS_SECONDS = 35.0  # for all parts of the cards, which are measured at the same time
LINKS_SECONDS = 25.0  # for the ways between them, with P2P and again without; NCCL on 8 GPUs needs 10 of it to start
WITNESS_SECONDS = 45.0  # for torch to list the GPUs where nvidia-smi does not
NORMAL_VOLUME = 200e6  # bytes/s; network volumes are sold with 200 to 400 MB/s
MANY = 1 << 30  # GPUs
AT_WORK = 1.0  # seconds after which a card that multiplies matrices has its clocks and heat

Say = Callable[[str], None]


# ---------------------------------------------------------------- the command, and the step of a run


def show_probe(volume: Volume) -> int:
    """Measures this pod anew and prints the table; 65 where it cannot train, or runs below half of normal speed."""
    stop = Stop()
    stop.on_signals()
    pod, facts = read_pod(volume.root), probe_volume(volume.root)
    pod = second_witness(pod, os.environ, stop)
    for note in (*pod.notes, *facts.notes):
        print(f"! {note}", flush=True)
    probe = probe_pod(pod, facts, os.environ, lambda line: print(line, flush=True), stop, download=True)
    print(render(probe), flush=True)
    if stop.requested:
        return STOPPED
    least = Job.model_fields["least_speed"].default
    return POD_WRONG if probe.faults or too_slow(probe, least) else DONE


def examine(job: Job, pod: Pod, facts: VolumeFacts, volume: Volume, say: Say, stop: Stop, download: bool) -> Pod:
    """The pod as it proved to be, and ``runs/<name>/pod.json``; measured once for these GPUs and their boot.

    Raises PodError where no GPU works, or the pod is slower than the job allows.
    """
    pod = second_witness(pod, os.environ, stop)
    if pod.gpus:
        usable_gpus(pod)  # a driver too old for this torch has a better word than torch's own
    probe = known_probe(volume.runs, pod.gpus, job.least_speed)
    if probe:
        say("; ".join((f"probe: measured before, on this pod since its boot. {verdict(probe)}", *probe.notes)))
    else:
        probe = probe_pod(pod, facts, os.environ, say, stop, download=download)
        say(render(probe))
    probe.write(volume.run(job.name).pod)
    ill = dict(probe.faults)
    if ill and len(ill) == len(pod.gpus):
        raise PodError(f"No GPU of this pod can train: {'; '.join((*ill.values(), *pod.notes))}.")
    if why := too_slow(probe, job.least_speed):
        raise PodError(why)
    if probe.apart and min(job.gpus or MANY, job.plan.processes or MANY, job.images_per_step) > 1:
        raise PodError(f"{probe.notes[-1]}.")
    notes = (*pod.notes, *(f"left out: {why}" for why in ill.values()))
    return replace(pod, gpus=tuple(gpu for gpu in pod.gpus if gpu.index not in ill), notes=notes, p2p=probe.p2p)


def second_witness(pod: Pod, environment: Mapping[str, str], stop: Stop, root: Path = Path("/")) -> Pod:
    """Where nvidia-smi lists no GPU but there are device nodes, torch is asked."""
    if pod.gpus or not any((root / "dev").glob("nvidia[0-9]*")):
        return pod
    child = Child([sys.executable, "-m", "trainer.probe", "cards"], child_environment(environment))
    told = child.next(time.monotonic() + WITNESS_SECONDS, stop)
    child.end()
    seen = told["value"] if told else []
    shown = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")  # torch counts anew what this leaves
    indices = [int(word) for word in shown] if all(word.strip().isdigit() for word in shown) else range(len(seen))
    gpus = tuple(
        Gpu(index, each["name"], each["memory"], capability=tuple(each["capability"]), uuid=each["uuid"])
        for index, each in zip(indices, seen, strict=False)
        if "MIG" not in each["name"]  # nvidia-smi's note says what to do
    )
    if not gpus:
        return pod
    return replace(pod, gpus=gpus, notes=(*pod.notes, f"torch sees {len(gpus)} GPUs all the same: they are used"))


# ---------------------------------------------------------------- everything


def probe_pod(
    pod: Pod, facts: VolumeFacts, environment: Mapping[str, str], say: Say, stop: Stop, *, download: bool
) -> Probe:
    """Measures the pod, under a minute unless its disk is so slow that torch does not start."""
    begun = time.monotonic()
    measures = [*_volume(facts), *_host(pod, environment, say, download)]
    if not pod.gpus:
        note = "No GPU here: only the volume, the CPUs and the network were measured"
        return Probe(hardware(()), time.monotonic() - begun, tuple(measures), notes=(note,))
    cards = probe_cards(pod.gpus, environment, say, stop)
    sound = [card for card in cards if not card.fault]
    between, ways = probe_links([card.gpu for card in sound], environment, say, stop)
    return Probe(
        hardware=hardware(pod.gpus),
        seconds=time.monotonic() - begun,
        measures=(*(each for card in cards for each in card.measures), *between, *measures),
        cards=tuple(card.facts for card in cards if card.facts),
        health=tuple((card.gpu.index, card.health) for card in cards if card.health),
        faults=tuple((card.gpu.index, card.fault) for card in cards if card.fault),
        p2p=ways.p2p,
        apart=ways.apart,
        notes=(ways.note,) if ways.note else (),
    )


def _volume(facts: VolumeFacts) -> list[Measure]:
    speeds = {"write": facts.write_speed, "read": facts.read_speed}
    return [
        Measure(name, "volume", speed / 1e6 if speed else None, "MB/s", NORMAL_VOLUME / 1e6)
        for name, speed in speeds.items()
    ]


def _host(pod: Pod, environment: Mapping[str, str], say: Say, download: bool) -> list[Measure]:
    say("probe: CPUs" + (" and download" if download else ""))
    measures = [Measure("sha256", f"{pod.cpus} CPUs", hashing_rate(pod.cpus) / 1e9, "GB/s")]
    if not download:
        return measures
    if environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return [*measures, Measure("download", "network", None, "MB/s", note="not measured: HF_HUB_OFFLINE is set")]
    try:
        rate = download_rate(environment) / 1e6
    except OSError as error:
        return [*measures, Measure("download", "network", None, "MB/s", note=f"not measured: {error}")]
    minutes = 33e9 / rate / 1e6 / 60
    return [*measures, Measure("download", "network", rate, "MB/s", note=f"FLUX.1-dev in {minutes:.0f} min")]


# ---------------------------------------------------------------- cards


@dataclass
class Card:
    """What became of one GPU's parts."""

    gpu: Gpu
    measures: list[Measure] = field(default_factory=list)
    facts: CardFacts | None = None
    health: Health | None = None
    fault: str = ""


def probe_cards(gpus: Sequence[Gpu], environment: Mapping[str, str], say: Say, stop: Stop) -> list[Card]:
    """All cards at the same time, as training uses them: shared power and heat show."""
    deadline = time.monotonic() + START_SECONDS + CARDS_SECONDS
    say(f"probe: {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}, {', '.join(CARD_PARTS)}")
    with ThreadPoolExecutor(len(gpus)) as pool:
        jobs = [pool.submit(_probe_card, gpu, environment, stop, deadline, gpu is gpus[0]) for gpu in gpus]
        return [job.result() for job in jobs]


def _probe_card(gpu: Gpu, environment: Mapping[str, str], stop: Stop, deadline: float, speaks: bool) -> Card:
    card = Card(gpu)
    settings = child_environment(environment) | {"CUDA_VISIBLE_DEVICES": str(gpu.index)}

    def begun(part: str) -> None:
        if speaks:
            print(f"probe: {part}", flush=True)
        if part == "matrix product":
            time.sleep(AT_WORK)
            card.health = read_health(gpu.index)

    command = [sys.executable, "-m", "trainer.probe", "card"]
    found = run_parts(command, CARD_PARTS, settings, stop, deadline, begun)
    model = find_gpu(gpu.name)
    for part, told in found.items():
        if part == "device":
            card.facts, card.fault = _facts(gpu, told)
        elif part == "8-bit step":
            if "error" in told and not card.fault:
                card.fault = f"GPU {gpu.index}: bitsandbytes, which the optimizers run on, fails: {told['error']}"
        else:
            unit = UNITS.get(part, "GB/s")
            where, normal = f"GPU {gpu.index}", normal_of(part, model)
            card.measures.append(Measure(part, where, told.get("value"), unit, normal, told.get("error", "")))
    return card


def _facts(gpu: Gpu, told: dict[str, Any]) -> tuple[CardFacts | None, str]:
    if "error" in told:
        held = f" (memory of it is held by {', '.join(gpu.processes)})" if gpu.processes else ""
        return None, f"GPU {gpu.index} ({gpu.name}) does not work with torch: {told['error']}{held}"
    value = told["value"]
    facts = CardFacts(
        index=gpu.index,
        name=value["name"],
        memory=value["memory"],
        capability=tuple(value["capability"]),
        torch=value["torch"],
        cuda=value["cuda"],
        kernels=tuple(value["kernels"]),
    )
    fault = no_kernels(facts) or (f"GPU {gpu.index} ({gpu.name}): {value['fault']}" if "fault" in value else "")
    return facts, fault


# ---------------------------------------------------------------- between cards


@dataclass(frozen=True)
class Ways:
    """How the job's GPUs shall talk to each other, and what is to be said of it."""

    p2p: bool = True
    apart: bool = False
    note: str = ""


def probe_links(
    gpus: Sequence[Gpu], environment: Mapping[str, str], say: Say, stop: Stop
) -> tuple[list[Measure], Ways]:
    """Bandwidth between the GPUs, with P2P and without, and what follows."""
    if len(gpus) < 2:
        return [], Ways()
    off = environment.get("NCCL_P2P_DISABLE", "0") not in ("", "0")
    direct: dict[str, dict[str, Any]] = {}
    if not off:
        say("probe: between the GPUs")
        direct = _run_links(gpus, environment, stop)
    say("probe: between the GPUs, without P2P")
    around = _run_links(gpus, dict(environment) | {"NCCL_P2P_DISABLE": "1"}, stop)
    measures = []
    model = find_gpu(gpus[0].name)
    for suffix, found in (("", direct), (", no P2P", around)):
        normal = None if model is None else PCIE if suffix else model.link
        measures += [
            Measure(part + suffix, "between GPUs", told.get("value"), "GB/s", normal, told.get("error", ""))
            for part, told in found.items()
        ]
    return measures, choose_ways(direct, around, off)


def choose_ways(direct: Mapping[str, Mapping[str, Any]], around: Mapping[str, Mapping[str, Any]], off: bool) -> Ways:
    """By what was found with P2P and around it. ``off``: the environment forbids it."""
    without = around["all-reduce"]
    if off and "value" in without:
        return Ways(p2p=False, note="NCCL_P2P_DISABLE is set: the GPUs talk to each other through the host's memory")
    # Sharding sends in rings and from GPU to GPU: where either fails with P2P, P2P does not work.
    faults = [found["error"] for found in direct.values() if "error" in found]
    if not off and not faults:
        with_p2p = direct["all-reduce"]["value"]
        if without.get("value", 0.0) <= P2P_GAIN * with_p2p:
            return Ways()
        told = f"{without['value']:.0f} GB/s without P2P, {with_p2p:.0f} with it"
        return Ways(p2p=False, note=f"The GPUs reach {told}: P2P is switched off for the job")
    if "value" in without:
        why = faults[0]
        return Ways(p2p=False, note=f"P2P between the GPUs does not work here ({why}): it is switched off for the job")
    fault = "NCCL_P2P_DISABLE is set" if off else faults[0]
    return Ways(
        apart=True,
        note=f"The GPUs of this pod do not reach each other: {fault}; without P2P: {without['error']}. "
        "Training on several of them would hang: take another pod, or write gpus: 1",
    )


def _run_links(gpus: Sequence[Gpu], environment: Mapping[str, str], stop: Stop) -> dict[str, dict[str, Any]]:
    """What the first process found, or why not; none of them is left behind."""
    settings = child_environment(environment) | {
        "CUDA_VISIBLE_DEVICES": ",".join(str(gpu.index) for gpu in gpus),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(len(gpus)),
    }
    if lacks_shm(len(gpus), free_bytes(SHARED_MEMORY)):
        settings.setdefault("NCCL_SHM_DISABLE", "1")
    command = [sys.executable, "-m", "trainer.probe", "links"]
    parts = ("all-reduce", "GPU to GPU")
    others = [Child(command, settings | {"RANK": str(rank)}) for rank in range(1, len(gpus))]
    try:
        found = _collect(Child(command, settings | {"RANK": "0"}), parts, stop)
        if any("error" in told for told in found.values()):
            for other in others:  # the one that fails first says why
                while told := other.next(time.monotonic() + 0.5):
                    if "error" in told:
                        found[told["part"]] = told
        return found
    finally:
        for other in others:
            other.end()


def _collect(child: Child, parts: Sequence[str], stop: Stop) -> dict[str, dict[str, Any]]:
    """Both parts' ``value`` or ``error``; LINKS_SECONDS for them count from when torch is there."""
    deadline = time.monotonic() + START_SECONDS
    found: dict[str, dict[str, Any]] = {}
    try:
        while len(found) < len(parts) and (told := child.next(deadline, stop)):
            if told.get("begun"):
                deadline = time.monotonic() + LINKS_SECONDS
            else:
                found[told["part"]] = told
    finally:
        late = time.monotonic() >= deadline
        child.end()
    error = f"it hung and was cut off after {LINKS_SECONDS:.0f} s" if late else f"it ended: {child.last_words()}"
    return {part: found.get(part, {"error": error}) for part in parts}


# ---------------------------------------------------------------- children


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if not is_secret(name)}
    return kept | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


class Child:
    """A process whose every line of output is a finding."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.errors = b""
        self.silent = False  # it has closed its output: it is about to end
        self.readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self.readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.errors = (self.errors + line)[-20_000:]

    def next(self, deadline: float, stop: Stop | None = None) -> dict[str, Any] | None:
        """The next finding; None where the process ended, or the time did, or somebody asked to stop."""
        while not (stop and stop.requested):
            try:
                line = self.lines.get(timeout=max(0.0, min(0.5, deadline - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    return None
                continue
            if line is None:
                self.silent = True
                return None
            with contextlib.suppress(ValueError):  # a library's greeting is no finding
                if isinstance(told := json.loads(line), dict) and "part" in told:
                    return told
        return None

    def end(self) -> None:
        """Kills what is left of it. One that is stuck in the driver stays, as nothing can help it."""
        if self.silent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        for reader, pipe in zip(self.readers, (self.process.stdout, self.process.stderr), strict=True):
            reader.join(1)
            if pipe and not reader.is_alive():
                pipe.close()

    def last_words(self) -> str:
        """Its last line of error, or its exit status."""
        lines = self.errors.decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"exit status {self.process.poll()}"


def run_parts(
    command: Sequence[str],
    limits: Mapping[str, float],
    environment: Mapping[str, str],
    stop: Stop,
    deadline: float,
    begun: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Every part's ``value`` or ``error``, each within its limit in seconds, all before ``deadline``.

    A part that hangs or takes its process along is told, and a new process goes on with the next; but where the first
    part fails, the card is given up.
    """
    found: dict[str, dict[str, Any]] = {}
    left = list(limits)
    while left and not stop.requested:
        if time.monotonic() >= deadline:
            return found | {part: {"error": "not measured: the time of the probe was up"} for part in left}
        child = Child([*command, *left], environment)
        try:
            _follow(child, left, limits, stop, deadline, begun, found)
        finally:
            child.end()
        if left:  # the part at the head took the process along
            part = left.pop(0)
            found.setdefault(part, {"error": f"it ended: {child.last_words()}"})
            if part == next(iter(limits)):
                return found
    return found


def _follow(
    child: Child,
    left: list[str],
    limits: Mapping[str, float],
    stop: Stop,
    deadline: float,
    begun: Callable[[str], None],
    found: dict[str, dict[str, Any]],
) -> None:
    """Takes the findings of one process, part by part; returns when it is done, hangs or is gone."""
    until = time.monotonic() + START_SECONDS
    while left:
        told = child.next(min(deadline, until), stop)
        if told is None:
            if time.monotonic() >= min(deadline, until):
                found[left[0]] = {"error": f"it hung and was cut off after {limits[left[0]]:.0f} s"}
            return
        if told.get("begun"):
            until = time.monotonic() + limits[told["part"]]
            begun(told["part"])
        else:
            found[told["part"]] = told
            left.remove(told["part"])
            if "error" in told and told["part"] == next(iter(limits)):
                left.clear()
            until = time.monotonic() + limits[left[0]] if left else until
