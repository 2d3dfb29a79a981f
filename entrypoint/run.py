"""One job from its file to its outcome: load, look at the pod, fetch, scan, plan, encode, launch.

Data goes one way; each step is one function of bootstrap or one child process. What stands on the volume is all that
the next start needs.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bootstrap import clocks
from bootstrap.assistant import assistant_bytes, fetch_assistant, find_assistant
from bootstrap.bases import Base, parse_base
from bootstrap.cache import Cache
from bootstrap.dataset import Dataset, scan
from bootstrap.doubts import doubts_of_base, doubts_of_pictures, doubts_of_start
from bootstrap.download import refuse_unreadable
from bootstrap.lease import HeldLease, Lease, LeaseTakenError, LeaseWatch
from bootstrap.manifest import find_fetched
from bootstrap.outcome import (
    ACCESS_REFUSED,
    CRASH,
    DONE,
    JOB_WRONG,
    POD_WRONG,
    STOPPED,
    AccessError,
    Outcome,
    PodError,
)
from bootstrap.plan import Plan, make_plan, ways_out_of
from bootstrap.pod import Pod, read_oom_kills, read_pod, share_of
from bootstrap.processes import living
from bootstrap.prompts import with_prompts
from bootstrap.remote import fetch_datasets
from bootstrap.resume import changed_settings, choose_state, refuse_absent_adapter, refuse_unlike_adapter
from bootstrap.room import refuse_without_room
from bootstrap.run_file import RunFile
from bootstrap.shortage import RETRIES, Shortage, read_failed, write_failed
from bootstrap.state import State, list_states, read_state, remove_leftovers
from bootstrap.uploads import owes_upload
from bootstrap.volume import RunFolder, Volume, read_json, remove_parts, write_atomically
from bootstrap.volume_probe import VolumeFacts, probe_volume, room
from bootstrap.wanted import Wanted
from bootstrap.weights import fetch_weights
from bootstrap.whereabouts import Whereabouts
from entrypoint.check import render_plan
from entrypoint.data_table import render_data
from entrypoint.ended import already_done, output_of
from entrypoint.launch import (
    LOOK_EVERY,
    PARENT,
    SHARE,
    Stop,
    Stopped,
    describe_exit,
    encoder_command,
    end_leftovers,
    end_with,
    run_children,
    stale_seconds,
    trainer_command,
)
from entrypoint.mirror import mirrored
from entrypoint.pace import PaceWatch
from entrypoint.probe import examine
from entrypoint.progress import Tail, TrainingProgress
from entrypoint.status import Phase, StatusFile
from entrypoint.uploads import BackgroundUploads, held, refuse_unwritable
from entrypoint.watch import Fallen, Watch
from jobs.load import LoadedJob, load_job, read_text
from jobs.problem import JobError, Problem
from jobs.schema import Job

LAST_LINES = 50  # of the log, shown when something fails
LARGEST_LOG = 10_000_000  # bytes; a larger one is set aside at the next start
PHASES: dict[int, Phase] = {
    DONE: "done",
    JOB_WRONG: "held",
    POD_WRONG: "held",
    ACCESS_REFUSED: "held",
    STOPPED: "pending",
}

Say = Callable[[str], None]


class PreparationError(Exception):
    """One of our programs crashed before training; the message says which, with the end of its log."""


@dataclass(frozen=True)
class Running:
    """What every step of one job's way needs."""

    job_file: Path
    text: str  # of the job, as this run took it
    volume: Volume
    folder: RunFolder
    status: StatusFile
    stop: Stop

    def tell(self, line: str) -> None:
        """A line for people, on the terminal and in the run's log, where the volume takes it."""
        print(line, flush=True)
        with suppress(OSError), self.folder.log.open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    def say(self, line: str) -> None:
        """The same while the run is prepared; a chance to stop, and for the volume to show that it fails."""
        print(line, flush=True)
        with self.folder.log.open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        if self.stop.requested:
            raise Stopped

    def lease_lost(self) -> None:
        """Another pod took this run over, believing this one dead. The folder is its own now: everything here ends at
        once, and nothing more is written."""
        print("the lease of this run was taken over by another pod: ending here", flush=True)
        for pid in living(self.folder.processes).values():
            if pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(STOPPED)

    def notice(self) -> str:
        """What a changed job file means while the run is on: nothing until the next start, and it says so."""
        try:
            same = read_text(self.job_file) == self.text
        except (OSError, JobError):
            return ""
        return "" if same else " (the job file was edited: that takes effect at the next start of this run)"

    def preparing(self, line: str) -> None:
        self.status.tell("preparing", line)
        self.say(line)


def run_job(job_file: Path, volume_root: Path, stop: Stop | None = None) -> int:
    """Runs a job to its outcome, whose code it gives; every problem is told in words, here and in ``status.json``."""
    if stop is None:
        stop = Stop()
        stop.on_signals()
    parent = os.environ.get(PARENT)
    if parent:
        end_with(int(parent))
    volume = Volume(volume_root.absolute())
    volume.create()
    try:
        loaded = load_job(job_file)
    except JobError as error:
        print(error, flush=True)
        hold_unreadable(volume, job_file, str(error))
        return JOB_WRONG
    folder = volume.run(loaded.job.name)
    folder.root.mkdir(parents=True, exist_ok=True)
    running = Running(job_file, loaded.text, volume, folder, StatusFile(folder.status), stop)
    if _nothing_to_do(loaded, folder):
        return _still_done(loaded.job, running)
    lease = HeldLease(folder.lease, os.environ.get("RUNPOD_POD_ID", ""), running.lease_lost, running.status.beat)
    if not wait_for_lease(lease, stop, patient=not parent):
        return STOPPED
    with lease:
        if _nothing_to_do(loaded, folder):  # done by the other pod, while this one waited for it
            return _still_done(loaded.job, running)
        outcome = _outcome_of(loaded, running)
        _tell(outcome, loaded.job, running)
    return outcome.code


def wait_for_lease(lease: HeldLease, stop: Stop, patient: bool = True) -> bool:
    """Takes the lease, waiting while it may be a dead process's; False where a stop came first, or a process of this
    machine is at work. Not ``patient``: the pod loop waits, without the GPUs that this process was given."""
    stale = stale_seconds(os.environ)
    watch = LeaseWatch(os.environ.get("RUNPOD_POD_ID", ""), stale)
    told = False
    while not stop.requested:
        try:
            lease.take(watch)
            return True
        except LeaseTakenError as error:
            held = Lease.read(lease.path)
            if held and held.lives_here():
                print(f"process {held.pid} of this machine runs this job: wait for it, or stop it first", flush=True)
                return False
            if not patient:
                print(f"{error}, which was faster", flush=True)
                return False
            if not told:
                print(f"waiting: {error}; it is taken over {stale:.0f} s after its last sign of life", flush=True)
                told = True
            time.sleep(0.5)
    return False


def _outcome_of(loaded: LoadedJob, running: Running) -> Outcome:
    """What became of the job; whatever went wrong is an outcome with its reason in words."""
    try:
        return _run(loaded, running)
    except JobError as error:
        return Outcome(JOB_WRONG, str(_in_file(error, loaded, running.job_file)), 0)
    except PodError as error:
        return Outcome(POD_WRONG, str(error), 0)
    except AccessError as error:
        return Outcome(ACCESS_REFUSED, str(error), 0)
    except Stopped:
        return Outcome(STOPPED, "stopped by a signal before training; what was prepared stays", 0)
    except PreparationError as error:
        return Outcome(CRASH, str(error), 0)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            told = f"the volume is full ({error}): make room (fluxpod clean), or choose a larger one"
            return Outcome(POD_WRONG, told, 0)
        return _fault(error, running)
    except Exception as error:  # a fault of ours, or of the machine: for the log whole, for people in one line
        return _fault(error, running)


def _fault(error: Exception, running: Running) -> Outcome:
    with suppress(OSError), running.folder.log.open("a", encoding="utf-8") as log:
        traceback.print_exception(error, file=log)
    return Outcome(CRASH, f"{type(error).__name__}: {error} (more in {running.folder.log})", 0)


def _nothing_to_do(loaded: LoadedJob, folder: RunFolder) -> bool:
    return already_done(loaded, folder) and not owes_upload(folder, loaded.job)


def _still_done(job: Job, running: Running) -> int:
    """A finished job run again does nothing, and says so."""
    print(f"done: {job.name} is done already: {output_of(running.folder, job)}", flush=True)
    return DONE


def hold_unreadable(volume: Volume, job_file: Path, message: str) -> None:
    """A job that cannot be read has no name but its file's; its problems stand where its run would be."""
    StatusFile(volume.run(job_file.stem).status).tell("held", message, code=JOB_WRONG)


def _in_file(error: JobError, loaded: LoadedJob, file: Path) -> JobError:
    return JobError(
        [loaded.placed(p, file.name) if p.key else replace(p, file=p.file or file.name) for p in error.problems]
    )


def _tell(outcome: Outcome, job: Job, running: Running) -> None:
    phase = PHASES.get(outcome.code, "failed")
    step = None if outcome.code == CRASH else outcome.step or None  # what crashed cannot say how far it was
    reason = outcome.reason + (sample_alarm(running.folder) if outcome.code == DONE else "")
    running.status.tell(phase, reason, step=step, code=outcome.code)
    where = f": {output_of(running.folder, job)}" if outcome.code == DONE else ""
    line = f"{phase}: {reason}{where}"
    print(line, flush=True)
    with suppress(OSError), running.folder.log.open("a", encoding="utf-8") as log:
        log.write(line + "\n")


def _run(loaded: LoadedJob, running: Running) -> Outcome:
    job, folder = loaded.job, running.folder
    end_leftovers(running.volume, job.name)
    if already_done(loaded, folder):  # but for the upload
        run = RunFile.read(folder.run_file)
        return bring_result(Outcome(DONE, f"all {run.plan.steps} steps are done", run.plan.steps), run, running)
    rotate(folder.log)
    for warning in loaded.warnings:
        running.say(f"warning: {warning}")
    write_atomically(folder.job, loaded.text)
    retries = RETRIES
    while (outcome := _plan_and_train(loaded, running, retries)) is None:
        retries -= 1
    return outcome


def _plan_and_train(loaded: LoadedJob, running: Running, retries: int) -> Outcome | None:
    """None where a GPU's memory ran out and another plan is worth trying: what was measured is on record."""
    job, folder = loaded.job, running.folder
    remove_leftovers(folder.states)
    remove_parts(folder.root, folder.processes, folder.samples, folder.output)
    folder.outcome.unlink(missing_ok=True)
    with running.stop.at_once():
        prepared = prepare(loaded, running)
    run = prepared.run
    if run.resume and _last_step_of(run) >= run.plan.steps and output_of(folder, job).exists():
        outcome = Outcome(DONE, f"{job.name} is done already", run.plan.steps)
        outcome.write(folder.outcome)
        return bring_result(outcome, run, running)
    encode(run, prepared.dataset, running)
    uploads = BackgroundUploads(run, job, folder.log)
    try:
        outcome = train(run, running, uploads)
        if outcome.shortage is not None:
            return _after(outcome.shortage, outcome, prepared, running, retries)
        return finish_uploads(outcome, job, uploads, running)
    finally:
        uploads.end()


def _after(shortage: Shortage, outcome: Outcome, prepared: Prepared, running: Running, retries: int) -> Outcome | None:
    """Puts the plan that ran out of memory on record; None where another one is tried, else the ways out are told."""
    run, folder = prepared.run, running.folder
    failed = run.plan.that_failed(shortage)
    write_failed(folder.memory, (*read_failed(folder.memory), failed))
    if run.job.plan.retry is not False and retries:
        running.say(f"{outcome.reason}. It is planned anew, with less memory and the same numbers")
        return None
    ways = ways_out_of(run.plan, run.job, prepared.pod, run.weights.shape, prepared.dataset.summary(), failed)
    outcome = replace(outcome, reason=f"{outcome.reason}. {ways}".rstrip())
    outcome.write(folder.outcome)
    return outcome


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to train, and what its plan was made from."""

    run: RunFile
    dataset: Dataset
    pod: Pod


def prepare(loaded: LoadedJob, running: Running) -> Prepared:
    """Weights, data, plan and ``run.json``. On a pod without a GPU a real model gets as far as the plan."""
    volume = running.volume
    job = with_prompts(loaded.job, volume)
    facts = probe_volume(volume.root)
    pod = pod_of_this_run(facts, running)
    coming = to_be_fetched(job.base, volume)
    if coming is not None:  # before anything that takes time: a token that is refused is no matter of the GPU's
        running.preparing(f"weights: asking for {job.base}")
        refuse_unreadable(coming.repo, coming.revision, os.environ.get("HF_TOKEN"), running.preparing)
    refuse_unwritable(job, os.environ, running.preparing)
    running.status.tell("preparing", "measuring the pod")
    pod = examine(job, pod, facts, volume, running.say, running.stop, download=coming is not None)
    # The data first: what is wrong with them should not come out after an hour of fetching weights.
    refuse_absent_adapter(job, volume)
    find_assistant(job, volume)
    running.preparing("data: looking through the pictures")
    fetch_datasets(job, volume, os.environ.get("HF_TOKEN"), running.preparing)
    dataset = scan(job, volume, running.say, remember=True)
    for note in dataset.notes:
        running.say(f"data: {note}")
    running.say(render_data(dataset))
    for doubt in doubts_of_pictures(job, dataset.items):
        running.say(f"warning: {loaded.placed(doubt, running.job_file.name)}")
    running.preparing(f"weights: {job.base}")
    weights = fetch_weights(job, volume, os.environ.get("HF_TOKEN"), running.preparing)
    for doubt in doubts_of_base(job, weights.shape):
        running.say(f"warning: {loaded.placed(doubt, running.job_file.name)}")
    assistant = fetch_assistant(job, volume, os.environ.get("HF_TOKEN"), running.preparing)
    size = assistant_bytes(job, weights.shape, volume)
    failed = read_failed(running.folder.memory)
    plan = make_plan(job, pod, weights.shape, dataset.summary(), failed, assistant=size)
    running.say(render_plan(plan, job, pod))
    state = state_to_go_on_from(job, plan, running)
    if state is None:
        refuse_unlike_adapter(job, volume, weights.shape)
        for doubt in doubts_of_start(job, volume):
            running.say(f"warning: {loaded.placed(doubt, running.job_file.name)}")
    refuse_without_room(plan, job, running.folder, pod.disk_free)
    run = RunFile(job, plan, weights, volume.root, state.path if state else None, assistant)
    run.write(dataset.items, dataset.held_out)
    return Prepared(run, dataset, pod)


def pod_of_this_run(facts: VolumeFacts, running: Running) -> Pod:
    """The pod, or the part of it that the pod loop leaves to this run."""
    pod = replace(read_pod(running.volume.root), disk_free=facts.free)  # what the user says of a quota counts
    share = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", os.environ.get(SHARE, ""))
    if share is None or share[1] == share[2]:
        return pod
    running.say(f"GPUs: {share[1]} of this pod's {share[2]}; as much of its CPUs, RAM and free disk is counted on")
    return share_of(pod, int(share[1]), int(share[2]))


def to_be_fetched(base: str, volume: Volume) -> Base | None:
    """The job's base where it comes from the hub and is not on the volume yet."""
    named = parse_base(base, volume)
    if named.kind != "hub":
        return None
    fetched = find_fetched(volume.models, named.repo, named.revision)
    return named if fetched is None or not fetched[1].complete else None


def state_to_go_on_from(job: Job, plan: Plan, running: Running) -> State | None:
    """The newest whole state; says where the run goes on. Raises JobError where the job no longer fits it."""
    folder = running.folder
    chosen = choose_state(folder, job)
    for note in chosen.notes:
        running.say(f"states: {note}")
    state = chosen.state
    if state is None:
        return _without_a_whole_state(job, plan, running)
    if state.step >= plan.steps:
        running.say(f"the newest state is of step {state.step}: all {plan.steps} steps are done")
    else:
        running.say(f"going on at step {state.step} of {plan.steps}")
    for line in changed_settings(folder.run_file, job):
        running.say(line)
    if state.manifest.processes != plan.processes:
        running.say(
            f"saved on {state.manifest.processes} processes, going on with {plan.processes}: nothing else changes"
        )
    return state


def _without_a_whole_state(job: Job, plan: Plan, running: Running) -> State | None:
    """Starting anew is right only where nothing stands yet: it would write over what an earlier start has made."""
    left, notes = list_states(running.folder.states)
    if not left and not notes:
        running.say(f"starting at step 0 of {plan.steps}")
        return None
    if left and left[-1].step >= plan.steps and output_of(running.folder, job).exists():
        return left[-1]  # all is done; a checkpoint need not be gone on from
    told = f"{running.folder.states} holds checkpoints or damaged states, but none that can be gone on from"
    remedy = "Give the job another name to start anew, or move that folder away"
    raise JobError([Problem(told, remedy, key="name")])


def encode(run: RunFile, dataset: Dataset, running: Running) -> None:
    """Latents and text outputs that the cache lacks, before any process group exists, spread over the GPUs."""
    with running.stop.at_once():
        cache = Cache(run.cache)
        for note in cache.notes:
            running.say(f"cache: {note}")
        cache.tidy()
        wanted = Wanted.of(run.job, run.plan, dataset.items, run.weights, dataset.held_out)
        missing = wanted.beyond(cache)
    if wanted.drawn:
        running.say("data: the captions have more texts than the run shows images; those that it will draw are cached")
    if not missing:
        running.say("cache: everything is there")
        return
    running.preparing(f"encoding {missing}")
    require_room(missing, run, room(run.volume))
    parts = min(run.plan.processes, len(missing))
    log = Tail(run.folder.log, from_end=True)

    commands = [encoder_command(run.folder.run_file, part, parts) for part in range(parts)]
    with Whereabouts.made(parts) as whereabouts:
        watch = Watch(whereabouts, run.plan.gpus, together=False)

        def look() -> None:
            for line in log.lines():
                if line.startswith("encoded "):
                    print(line, flush=True)
                    running.status.tell("preparing", line)
            watch.look()

        try:
            statuses = run_children(commands, run, running.stop, look, whereabouts=whereabouts)
        except Fallen as fallen:
            raise PreparationError(f"encoding was ended: {fallen}. What is cached stays") from fallen
    if running.stop.requested:
        raise Stopped
    if any(statuses):
        raise _encoding_failed(statuses, run)


def require_room(missing: Wanted, run: RunFile, free: int) -> None:
    """Raises PodError where the cache would fill the volume."""
    need = missing.bytes(run.weights)
    if need <= free:
        return
    ways = ["make room (`fluxpod clean` tells what may go)", "take a larger volume"]
    if len(missing.texts) > len(missing.crops):
        ways.append("write fewer {a|b} and lines into the captions, or fewer steps")
    if len(run.job.resolutions) > 1:
        ways.append("train at one resolution")
    raise PodError(
        f"caching {missing} takes {need / 1e9:.1f} GB; the volume has {free / 1e9:.1f} GB free: {', or '.join(ways)}"
    )


def _encoding_failed(statuses: list[int], run: RunFile) -> Exception:
    worst = next(status for status in statuses if status)
    text = f"encoding failed ({describe_exit(worst)}). The end of the log:\n{last_lines(run.folder.log)}"
    if worst == JOB_WRONG:
        return JobError([Problem(text)])
    return PodError(text) if worst == POD_WRONG else PreparationError(text)


def train(run: RunFile, running: Running, uploads: BackgroundUploads) -> Outcome:
    """Launches the trainer and follows it to its outcome."""
    start, steps = _last_step_of(run), run.plan.steps
    progress = TrainingProgress(run.folder.metrics, run.folder.log, start, steps)
    running.status.tell("training", "training", step=start, steps=steps)

    with mirrored(run, os.environ, lambda: running.stop.requested):
        ended, knows_better = _launch(run, running, progress, uploads)
    progress.close()
    outcome = Outcome.read(run.folder.outcome)
    if outcome is None or (outcome.code == CRASH and knows_better):
        outcome = Outcome(CRASH, ended, progress.step)
        outcome.write(run.folder.outcome)
    if running.stop.requested and outcome.code == CRASH:
        # A compiler, say, that TERM reached too. What crashes by itself will do so again at the next start.
        why = f" ({outcome.reason.splitlines()[0]})" if outcome.reason else ""
        told = (
            f"stopped by a signal in the middle of something that could not be finished{why}; the newest state stands"
        )
        return Outcome(STOPPED, told, progress.step)
    if outcome.code == CRASH:
        print(f"The end of {run.folder.log}:\n{last_lines(run.folder.log)}", flush=True)
    return outcome


def bring_result(outcome: Outcome, run: RunFile, running: Running) -> Outcome:
    """Uploads what is missing of a run whose steps are done, where its job asks for it."""
    uploads = BackgroundUploads(run, run.job, running.folder.log)
    try:
        return finish_uploads(outcome, run.job, uploads, running)
    finally:
        uploads.end()


def finish_uploads(outcome: Outcome, job: Job, uploads: BackgroundUploads, running: Running) -> Outcome:
    """Waits until the result is verified on the hub. A run that is not done yet uploads nothing more for now."""
    if outcome.code != DONE:
        return outcome
    uploads.training_is_over(finished=True)
    told = ""
    while uploads.busy:
        uploads.wait(LOOK_EVERY)
        if running.stop.requested:
            reason = "all steps are done; stopped by a signal in the upload, which goes on at the next start"
            return Outcome(STOPPED, reason, outcome.step)
        if uploads.busy and told != (told := uploads.line or "uploading"):
            running.status.tell("uploading", told, step=outcome.step, steps=outcome.step)
    return held(job, uploads.refused, outcome.step) if uploads.refused else outcome


def _launch(run: RunFile, running: Running, progress: TrainingProgress, uploads: BackgroundUploads) -> tuple[str, bool]:
    """Runs the trainer's processes to their end. Gives how they ended, seen from outside, and whether that is more than
    they know themselves: that one of them was lost, of which the others see only that it is gone."""
    oom_kills = read_oom_kills()

    def limit() -> float:
        return clocks.RUN if progress.step > progress.start else clocks.NOTHING_NEW

    with Whereabouts.made(run.plan.processes) as whereabouts:
        watch = Watch(whereabouts, run.plan.gpus, together=True)
        pace = PaceWatch(whereabouts, run.plan.gpus, run.folder.pace, running.tell)

        def look() -> None:
            if progress.look():
                phase: Phase = "stopping" if running.stop.requested else "training"
                uploading = f" ({uploads.line})" if uploads.line else ""
                told = dropped_attention(run.folder) + sample_alarm(run.folder) + pace.notice + uploading
                told = phase + told + running.notice()
                running.status.tell(phase, told, step=progress.step, steps=progress.steps, figures=progress.figures)
            pace.look()
            watch.look()

        command = trainer_command(run.plan, run.folder.run_file)
        try:
            (status,) = run_children([command], run, running.stop, look, limit=limit, whereabouts=whereabouts)
            lost = "" if running.stop.requested else watch.gone()
        except Fallen as fallen:
            status, lost = 1, f"{fallen}"
    ended, knows_better = lost or describe_exit(status), bool(lost)
    if killed := read_oom_kills() - oom_kills:
        ended = f"the container's memory ran out, {killed} killed{f'; {ended}' if knows_better else ''}"
    if knows_better:
        return f"{ended}. All processes of the trainer were ended; the newest state stands", True
    return f"the trainer crashed ({ended})", False


def dropped_attention(folder: RunFolder) -> str:
    """Which kernels the trainer's self-check found wrong on this pod, for the status; "" where none is."""
    found = read_json(folder.attention)
    wrong = [name for name, verdict in found["verdicts"].items() if not verdict["right"]] if found else []
    return f" (without {', '.join(wrong)} attention, which is wrong on this card)" if wrong else ""


def sample_alarm(folder: RunFolder) -> str:
    """What the newest samples show of a broken model, for the status; "" where nothing is wrong with them."""
    found = read_json(folder.alarm)
    return f". ALARM: {found['message']}" if found else ""


def rotate(log: Path) -> None:
    """Keeps a log and its predecessor, each at most LARGEST_LOG."""
    if log.exists() and log.stat().st_size > LARGEST_LOG:
        log.replace(log.with_suffix(".1.txt"))


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    if not log.exists():
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


def _last_step_of(run: RunFile) -> int:
    if run.resume is None:
        return 0
    return read_state(run.resume).step
