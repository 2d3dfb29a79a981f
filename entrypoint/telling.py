"""What the pod loop says of jobs that do not run: in their status, on standard output, each thing once."""

from __future__ import annotations

from collections.abc import Container

from bootstrap.outcome import CRASH, JOB_WRONG
from bootstrap.volume import RunFolder, Volume
from entrypoint.status import Phase, Status, StatusFile

AGAIN_AND_AGAIN = "It crashed again and again: change the job file to try anew."


class Telling:
    def __init__(self, volume: Volume):
        self.volume = volume
        self.told: dict[str, tuple[str, str]] = {}  # the last phase and message of each
        self._unreadable = {name for name in _names(volume) if _holds_problems_only(volume.run(name))}

    def tell(self, name: str, phase: Phase, message: str, code: int | None = None) -> bool:
        """Writes a job's status where it changes (a restart writes nothing anew); whether it did."""
        if self.told.get(name) == (phase, message):
            return False
        self.told[name] = (phase, message)
        path = self.volume.run(name).status
        last = Status.read(path)
        far = f"; so far: step {last.step} of {last.steps}" if last and last.step and phase == "pending" else ""
        said = message + far
        if last and (last.phase, last.message) == (phase, said):
            return False
        print(f"{name}: {phase}: {said}", flush=True)
        StatusFile(path).tell(phase, said, code=code)
        if code == JOB_WRONG:
            self._unreadable.add(name)
        return True

    def crashed_too_often(self, name: str) -> None:
        last = Status.read(self.volume.run(name).status)
        if last is None or last.phase != "failed":
            self.tell(name, "failed", AGAIN_AND_AGAIN, CRASH)
        elif not last.message.startswith(AGAIN_AND_AGAIN):
            self.tell(name, "failed", f"{AGAIN_AND_AGAIN} The last time: {last.message}", CRASH)

    def once(self, name: str, line: str) -> None:
        """A line on standard output alone."""
        if self.told.get(name) != ("", line):
            self.told[name] = ("", line)
            print(line, flush=True)

    def forget(self, name: str) -> None:
        """What was told of a job is no longer so."""
        self.told.pop(name, None)

    def forget_unreadable(self, except_for: Container[str]) -> None:
        """Takes away what stood of a job file that could not be read, once it is gone or tells its job's own name."""
        for name in sorted(name for name in self._unreadable if name not in except_for):
            self._unreadable.remove(name)
            folder = self.volume.run(name)
            if _holds_problems_only(folder):
                folder.status.unlink()
                folder.root.rmdir()
                self.forget(name)


def _names(volume: Volume) -> list[str]:
    try:
        return [path.name for path in volume.runs.iterdir()]
    except OSError:
        return []


def _holds_problems_only(folder: RunFolder) -> bool:
    """Whether no run ever began there: a status with the problems of a job file is all there is."""
    try:
        alone = [path.name for path in folder.root.iterdir()] == [folder.status.name]
    except OSError:
        return False
    status = Status.read(folder.status) if alone else None
    return status is not None and status.code == JOB_WRONG
