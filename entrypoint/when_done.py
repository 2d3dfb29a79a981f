"""What becomes of the pod when its jobs are finished: it idles, stops, is terminated, or says that it is still billed.

``finish`` is called when nothing else runs or waits. What it does is in ``runs/<name>/when_done.json``, written before
the call and once RunPod said yes, so that a pod that its user starts again, to look at the result, is not stopped a
second time. Where a pod could not be stopped, ``.fluxpod/still-billing/<pod>.json`` tells it to its page, and
``notify`` to the user.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from bootstrap.outcome import ACCESS_REFUSED, JOB_WRONG, POD_WRONG, STOPPED, Outcome
from bootstrap.processes import start_time
from bootstrap.volume import RunFolder, Volume, read_json, write_json
from entrypoint.notify import Log, notify, say
from entrypoint.platform import Action, LeaveError, Patience, Pause, PlatformError, RunPod, sleep
from jobs.schema import Job

MARK = "when_done.json"
POD_ID, NETWORK_VOLUME, MAX_HOURS = "RUNPOD_POD_ID", "RUNPOD_VOLUME_ID", "FLUXPOD_MAX_HOURS"
# A run that did not end: it is held until somebody changes something, or goes on at the next start.
UNENDED = (JOB_WRONG, POD_WRONG, ACCESS_REFUSED, STOPPED)
AGAIN = 600.0  # seconds to the next try where RunPod did not answer: it has bad quarters of an hour too
AGAIN_REFUSED = 3600.0  # where it refused: a key's rights may be changed in the console meanwhile
BY_HAND = "Stop it in the console: https://console.runpod.io/pods"


@dataclass(frozen=True)
class Finish:
    """What was done. ``took`` false: what the user wanted did not happen; ``again``: seconds until it is worth another
    call of ``finish``, None where it is not."""

    action: Literal["idle", "stop", "terminate"]
    took: bool
    message: str
    again: float | None = None


@dataclass(frozen=True)
class StillBilling:
    """``.fluxpod/still-billing/<pod>.json``: what the banner of that pod's page says."""

    message: str
    pod: str
    job: str  # "" where it was FLUXPOD_MAX_HOURS
    action: str
    since: str  # UTC


@dataclass(frozen=True)
class Plan:
    """What is to be asked of the platform for a finished job, and why; ``action`` None: nothing."""

    action: Action | None
    reason: str
    alarm: bool = False  # the user counts on a stop that will not come


def plan(job: Job, outcome: Outcome, environ: Mapping[str, str], *, persistent: bool, uploaded: bool) -> Plan:
    """What ``when_done`` means here: pure, so that every case can be tested.

    Stopping loses what is on the container disk, terminating also what is on the pod's own volume disk. A run that
    failed for good is treated like one that is done, except that its pod is never deleted.
    """
    if job.when_done == "idle":
        return Plan(None, "when_done is idle: the pod stays, and stays billed")
    if outcome.code in UNENDED:
        return Plan(None, f"{job.name} has not ended: the pod stays")
    if not environ.get(POD_ID, "").strip():
        return Plan(None, f"when_done: {job.when_done} has no effect: this is no RunPod pod ({POD_ID} is not set)")
    if not (persistent or uploaded):
        reason = "the volume is the container's own disk, and stopping the pod would delete the results on it"
        return Plan(None, reason, alarm=True)
    if job.when_done == "stop":
        return Plan("stop", "when_done is stop")
    if outcome.code:
        return Plan("stop", f"{job.name} failed: the pod is stopped and not terminated, so that it can be looked at")
    if not (environ.get(NETWORK_VOLUME, "").strip() or uploaded):
        reason = "the pod is stopped and not terminated: its volume is no network volume and would be deleted with it"
        return Plan("stop", reason)
    return Plan("terminate", "when_done is terminate")


def finish(
    volume: Volume,
    job: Job,
    outcome: Outcome,
    environ: Mapping[str, str],
    *,
    persistent: bool | None = None,
    uploaded: bool = False,
    pause: Pause = sleep,
    patience: Patience | None = None,
    log: Log = say,
) -> Finish:
    """Does what ``when_done`` says, once for each end of a job; never raises for what RunPod does.

    The mark that the job is done (``outcome.json``) must be on the volume before. ``persistent``: the volume outlives
    the container (None: looked at here); ``uploaded``: the result is verified elsewhere; ``pause`` waits and gives true
    when this process was asked to end. Takes minutes where RunPod answers badly.
    """
    folder = volume.run(job.name)
    persistent = outlives_container(volume.root) if persistent is None else persistent
    wanted = plan(job, outcome, environ, persistent=persistent, uploaded=uploaded)
    if wanted.action is None and not wanted.alarm:
        return Finish("idle", job.when_done == "idle" or outcome.code in UNENDED, wanted.reason)
    mark = _Mark(folder, _digest(folder, job, outcome))
    if mark.accepted():
        return Finish("idle", True, f"{job.name}: the pod was stopped for it before, and was started again since")
    if wanted.action is None:
        _still_billing(volume, job, job.when_done, wanted.reason, environ, log)
        return Finish("idle", False, wanted.reason)
    log(f"{job.name}: asking RunPod to {wanted.action} this pod ({wanted.reason})")
    mark.write("asking", wanted.action)
    done = _leave(volume, job, wanted.action, environ, mark.write, pause, patience, log)
    if done.again is not None:
        mark.write("failed", wanted.action)
    return done


def stop_pod(
    volume: Volume,
    job: Job | None,
    environ: Mapping[str, str],
    *,
    pause: Pause = sleep,
    patience: Patience | None = None,
    log: Log = say,
) -> Finish:
    """Stops the pod because FLUXPOD_MAX_HOURS have passed; call it when the runs have saved and ended. ``job`` is one
    whose ``notify`` hears of a failure. A limit that the user set is kept on a container disk too."""
    if not environ.get(POD_ID, "").strip():
        return Finish("idle", False, f"{MAX_HOURS} has no effect: this is no RunPod pod ({POD_ID} is not set)")
    log(f"{MAX_HOURS}={environ.get(MAX_HOURS, '')} have passed: asking RunPod to stop this pod")
    return _leave(volume, job, "stop", environ, lambda state, action: None, pause, patience, log)


def _leave(
    volume: Volume,
    job: Job | None,
    action: Action,
    environ: Mapping[str, str],
    write_mark: Callable[[str, Action], None],
    pause: Pause,
    patience: Patience | None,
    log: Log,
) -> Finish:
    try:
        runpod = RunPod.from_environment(environ, patience, pause)
        runpod.leave(environ[POD_ID].strip(), action, lambda: write_mark("accepted", action))
    except LeaveError as error:
        return Finish(action, False, str(error))
    except PlatformError as error:
        _still_billing(volume, job, action, str(error), environ, log)
        return Finish(action, False, str(error), AGAIN_REFUSED if error.refused else AGAIN)
    clear_banner(volume, environ)
    done = "stops" if action == "stop" else "is terminated"
    log(f"RunPod says that this pod {done}")
    return Finish(action, True, f"this pod {done}")


# ---- what was asked before


@dataclass(frozen=True)
class _Mark:
    folder: RunFolder
    digest: str  # of the job's end: another end of the same job asks anew

    def accepted(self) -> bool:
        value = read_json(self.folder.root / MARK)
        return isinstance(value, dict) and value.get("end") == self.digest and value.get("state") == "accepted"

    def write(self, state: str, action: Action) -> None:
        value = {"end": self.digest, "state": state, "action": action, "at": _now()}
        try:
            write_json(self.folder.root / MARK, value)
        except OSError as error:  # a full volume must not keep a pod billed
            say(f"{self.folder.root / MARK} was not written: {error}")


def _digest(folder: RunFolder, job: Job, outcome: Outcome) -> str:
    """The same end has the same digest however it is told: the words of an outcome are not in it."""
    text = folder.job.read_bytes() if folder.job.is_file() else job.model_dump_json().encode()
    return hashlib.sha256(text + f"{outcome.code} {outcome.step}".encode()).hexdigest()


# ---- the banner


def banner_path(volume: Volume, environ: Mapping[str, str]) -> Path:
    """Each pod's own: several may mount one volume, and each is billed for itself."""
    pod = re.sub(r"[^A-Za-z0-9_-]", "_", environ.get(POD_ID, "").strip()) or "pod"
    return volume.root / ".fluxpod" / "still-billing" / f"{pod}.json"


def read_banner(volume: Volume, environ: Mapping[str, str]) -> StillBilling | None:
    value = read_json(banner_path(volume, environ))
    try:
        return StillBilling(**value) if isinstance(value, dict) else None
    except TypeError:
        return None


def clear_banner(volume: Volume, environ: Mapping[str, str]) -> None:
    """Also to be called when a pod starts: it was stopped since, or speaks again."""
    banner_path(volume, environ).unlink(missing_ok=True)


def _still_billing(
    volume: Volume, job: Job | None, action: str, reason: str, environ: Mapping[str, str], log: Log
) -> None:
    """Says loudly, in the log each time, in messages once, that the pod goes on costing money."""
    message = f"This pod is still billed: {_sentence(reason)} {BY_HAND}"
    log(f"!!! STILL BILLING !!! {message}")
    known = read_banner(volume, environ)
    name = job.name if job else ""
    pod = environ.get(POD_ID, "")
    told = known is not None and (known.job, known.pod, known.action) == (name, pod, action)
    since = known.since if known and told else _now()
    try:
        write_json(banner_path(volume, environ), asdict(StillBilling(message, pod, name, action, since)))
    except OSError as error:  # a full volume is no reason to be quiet
        log(f"the banner was not written: {error}")
    if job and not told:
        notify(job.notify, job.name, "still billing", message, environ, log=log)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def outlives_container(root: Path) -> bool:
    """Whether the volume is another file system than the container's own root."""
    return root.stat().st_dev != os.stat("/").st_dev


# ---- FLUXPOD_MAX_HOURS


def read_max_hours(environ: Mapping[str, str]) -> tuple[float | None, str]:
    """The limit in hours, and a line for people where the value is none (it is told at start, and ignored)."""
    text = environ.get(MAX_HOURS, "").strip()
    if not text:
        return None, ""
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not (math.isfinite(hours) and hours > 0):
        return None, f"{MAX_HOURS}={text} is no number of hours above 0: this pod is not limited. Write for example 12"
    return hours, ""


def container_start() -> float:
    """When PID 1 of this container started, on ``time.monotonic``'s clock; restarts of the pod loop do not reset it."""
    ticks = start_time(1)
    if ticks is None:
        return time.monotonic()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)


def max_hours_reached(started: float, environ: Mapping[str, str], now: float | None = None) -> bool:
    """Whether the limit has passed since ``started`` (see ``container_start``), both on the monotonic clock."""
    hours, _ = read_max_hours(environ)
    return hours is not None and (time.monotonic() if now is None else now) - started >= hours * 3600
