"""Starting our own programs as children: command lines, environments, signals, and nothing left behind."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bootstrap import clocks
from bootstrap.lease import RENEW, STALE
from bootstrap.plan import Plan
from bootstrap.pod import free_bytes, lacks_shm
from bootstrap.processes import end_with_parent, living, reap, record_process
from bootstrap.run_file import RunFile
from bootstrap.volume import RunFolder, Volume
from bootstrap.whereabouts import PATH, Whereabouts
from entrypoint.environment import read_seconds
from jobs.secret import is_secret

LOOK_EVERY = 0.2  # seconds between two looks at a child
SHARED_MEMORY = Path("/dev/shm")
PORTS = range(20_000, 32_768)  # for the launcher; Linux gives those above to outgoing connections


class StillRunning(RuntimeError):
    """Another process of ours is in charge of this run."""


PARENT = "FLUXPOD_PARENT"  # the pod loop's pid, for the runs it starts
SHARE = "FLUXPOD_SHARE"  # "1/4": how many of the pod's GPUs such a run has; others run beside it


def end_with(parent: int) -> None:
    """Gives this process a TERM when its parent dies, so that a killed pod loop leaves no run behind that it does not
    know of. A run started by hand outlives its terminal."""
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it died before
        os.kill(os.getpid(), signal.SIGTERM)


def stale_seconds(environment: Mapping[str, str]) -> float:
    """How long a lease must stand still before it is taken over; three beats at least, or the living are robbed."""
    return read_seconds(environment, "FLUXPOD_LEASE_SECONDS", STALE, least=3 * RENEW)


class Stopped(BaseException):
    """Somebody asked to stop. Like KeyboardInterrupt no error: nothing that handles errors may swallow it."""


@dataclass
class Stop:
    """Whether somebody asked to stop. Handlers set it, loops look at it."""

    requested: bool = field(default=False)
    leaving: bool = field(default=False)
    raising: bool = field(default=False)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, a request to stop raises Stopped wherever the program is, also in a wait, a lock, or gigabytes of
        hashing. For work that may be left at any point."""
        self.raising = True
        try:
            if self.requested:
                raise Stopped
            yield
        finally:
            self.raising = False

    def on_signals(self) -> None:
        """TERM and INT ask once; a second one leaves at once, as people expect of it, and a third without a word.

        At once, but not alone: on the way out ``run_children`` kills what it started, which would train on unwatched.
        HUP, the end of the terminal, ends nothing: the log has every line.
        """

        def asked(number: int, _frame: object) -> None:
            if self.leaving:
                os._exit(128 + number)
            elif self.requested:
                self.leaving = True
                raise SystemExit(128 + number)
            else:
                self.requested = True
                if self.raising:
                    self.raising = False
                    raise Stopped

        def hung_up(_number: int, _frame: object) -> None:
            nowhere = os.open(os.devnull, os.O_WRONLY)  # writing to a terminal that is gone would be an error
            for output in (1, 2):
                os.dup2(nowhere, output)
            os.close(nowhere)

        signal.signal(signal.SIGTERM, asked)
        signal.signal(signal.SIGINT, asked)
        signal.signal(signal.SIGHUP, hung_up)


def trainer_command(plan: Plan, run_file: Path) -> list[str]:
    return [*launcher_command(plan.processes), "-m", "trainer.train", str(run_file)]


def launcher_command(processes: int) -> list[str]:
    """One line for every number of processes. Without --use_fsdp a single process is started by a plain launcher, which
    dies on TERM and leaves its child behind."""
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--use_fsdp", "--fsdp_version", "2", "--num_machines", "1", "--mixed_precision", "no"),
        *("--dynamo_backend", "no", "--num_processes", str(processes), "--main_process_port", str(free_port())),
    ]


def encoder_command(run_file: Path, part: int, parts: int) -> list[str]:
    return [sys.executable, "-m", "trainer.encode", str(run_file), "--part", str(part), "--parts", str(parts)]


def child_environment(run: RunFile, environment: Mapping[str, str]) -> dict[str, str]:
    """What our programs get: no secret, no hub (everything is on the volume by now), caches on the volume."""
    plan = run.plan
    kept = {name: value for name, value in environment.items() if not is_secret(name)}
    kept |= {
        "ACCELERATE_USE_CPU": "1" if plan.device == "cpu" else "0",
        "HF_HOME": str(run.cache / "huggingface"),  # not the home's, where a launcher's own settings may lie
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(plan.threads),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(run.cache / "inductor"),
        "TRITON_CACHE_DIR": str(run.cache / "triton"),
    }
    if plan.device == "cuda":
        kept["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the plan's numbers are nvidia-smi's
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(str(index) for index in plan.gpus)
        kept.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        if lacks_shm(plan.processes, free_bytes(SHARED_MEMORY)):
            kept.setdefault("NCCL_SHM_DISABLE", "1")
        if not plan.p2p:
            kept["NCCL_P2P_DISABLE"] = "1"
    return kept


def free_port() -> int:
    """A port nobody listens on now: the launcher's own default is one, and taken by a leftover or a second job. Not one
    that the kernel would give: until the launcher listens, seconds later, any connection might get it."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(errno.EADDRINUSE, f"no port from {PORTS[0]} to {PORTS[-1]} is free")


def run_children(
    commands: Sequence[Sequence[str]],
    run: RunFile,
    stop: Stop,
    look: Callable[[], None],
    environment: Mapping[str, str] = os.environ,
    limit: Callable[[], float] = lambda: clocks.RUN,
    whereabouts: Whereabouts | None = None,
) -> list[int]:
    """Runs the commands side by side, their output in the run's log; gives their exit statuses (negative: by signal).

    ``look`` is called several times a second. Once ``stop`` is requested every child gets TERM, and what is left of
    them ``limit()`` seconds later, which may change meanwhile, is killed; nothing of ours runs on afterwards, nor after
    an error that ``look`` raises. ``whereabouts``: where the children tell how far they are.
    """
    folder = run.folder
    settings = child_environment(run, environment) | ({PATH: str(whereabouts.path)} if whereabouts else {})
    record_process(folder.processes, "entrypoint")
    folder.log.parent.mkdir(parents=True, exist_ok=True)
    children: list[subprocess.Popen[bytes]] = []
    with folder.log.open("ab") as log:
        try:
            for number, command in enumerate(commands):
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=settings,
                    start_new_session=True,  # Ctrl-C on a terminal reaches the entrypoint alone, which asks in order
                )
                children.append(child)
                record_process(folder.processes, f"child-{number}", child.pid)
            _wait(children, stop, look, limit)
        finally:
            _end(children, folder)
    return [child.returncode for child in children]


def _wait(
    children: Sequence[subprocess.Popen[bytes]], stop: Stop, look: Callable[[], None], limit: Callable[[], float]
) -> None:
    asked: float | None = None
    while any(child.poll() is None for child in children):
        if stop.requested and asked is None:
            asked = time.monotonic()
            for child in children:
                child.terminate()
        if asked is not None and time.monotonic() > asked + limit():
            return
        look()
        time.sleep(LOOK_EVERY)
    look()


def _end(children: Sequence[subprocess.Popen[bytes]], folder: RunFolder) -> None:
    """Kills what is left: the children's groups, and recorded workers, which live in sessions of their own."""
    for child in children:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    (folder.processes / "entrypoint.json").unlink(missing_ok=True)
    reap(folder.processes)


def describe_exit(status: int) -> str:
    """An exit status for people. Without an outcome only the launcher's is known."""
    if status >= 0:
        return f"exit status {status}"
    number = -status
    name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
    if number == signal.SIGKILL:
        return f"killed by {name}: usually the host's memory ran out"
    return f"ended by {name}"


def end_leftovers(volume: Volume, name: str) -> dict[str, int]:
    """Ends what an earlier, killed start of this run left running. Raises StillRunning where one is still in charge."""
    folder = volume.run(name)
    alive = living(folder.processes)
    if "entrypoint" in alive:
        raise StillRunning(f"{name} is being run by process {alive['entrypoint']} on this machine")
    return reap(folder.processes)
