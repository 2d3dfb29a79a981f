"""When no job runs or will: asks for the pod's end as the jobs say, once for each end, until it takes or is refused."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bootstrap.outcome import Outcome
from bootstrap.uploads import all_uploaded
from bootstrap.volume import Volume
from entrypoint.ended import already_done
from entrypoint.job_files import JobFile
from entrypoint.notify import Event, notify
from entrypoint.platform import Pause
from entrypoint.when_done import container_start, finish, max_hours_reached, stop_pod
from jobs.schema import Job, Notify


@dataclass
class EndOfWork:
    """``persistent``: the volume outlives the container; ``pause`` waits, and is true once this process should end."""

    volume: Volume
    environment: Mapping[str, str]
    pause: Pause
    persistent: bool = True
    last: tuple[Job, Outcome] | None = None  # the job that ended last in this process
    due: float | None = 0.0  # when to ask (again), on this process's clock; None: not any more
    started: float = field(default_factory=container_start)
    messages: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="notify"))

    def notify(self, to: Notify, name: str, event: Event, message: str) -> None:
        """Sends a message in the background."""
        self.messages.submit(notify, to, name, event, message, self.environment)

    def work_goes_on(self) -> None:
        self.due = 0.0

    def look(self, files: Iterable[JobFile]) -> None:
        """To be called while nothing runs and nothing will by itself: does what the job that ended last says of the
        pod. Done jobs of an earlier start, whose pod should have been stopped then, are made up for; a mark on the
        volume keeps it at one call for each."""
        if self.due is None or time.monotonic() < self.due or not self._news_are_out():
            return
        again = None
        for job, outcome in [self.last] if self.last else self._done_before(files):
            done = finish(
                self.volume,
                job,
                outcome,
                self.environment,
                persistent=self.persistent,
                uploaded=all_uploaded(self.volume.run(job.name), job),
                pause=self.pause,
            )
            print(f"{job.name}: {done.message}", flush=True)
            again = done.again
            if done.action != "idle":
                break
        self.due = None if again is None else time.monotonic() + again

    def _news_are_out(self) -> bool:
        """Waits for messages, each of which has a limit, before the pod goes down; False where a stop came first."""
        sent = self.messages.submit(lambda: None)
        while not sent.done():
            if self.pause(0.1):
                return False
        return True

    def _done_before(self, files: Iterable[JobFile]) -> list[tuple[Job, Outcome]]:
        found = []
        for loaded in (file.loaded for file in files if file.loaded):
            folder = self.volume.run(loaded.job.name)
            if loaded.job.when_done != "idle" and already_done(loaded, folder):
                outcome = Outcome.read(folder.outcome)
                assert outcome
                found.append((loaded.job, outcome))
        return found

    def out_of_time(self) -> bool:
        return max_hours_reached(self.started, self.environment)

    def stay_stopped(self) -> None:
        """After FLUXPOD_MAX_HOURS: asks for the pod's stop until it takes. Ends only on a signal: were it to end by
        itself, supervisor would start the loop again."""
        print("FLUXPOD_MAX_HOURS have passed: nothing is started any more", flush=True)
        job = self.last[0] if self.last else None
        again: float | None = 0.0
        while not self.pause(60.0 if again is None else again):
            if again is not None:
                again = stop_pod(self.volume, job, self.environment, pause=self.pause).again
