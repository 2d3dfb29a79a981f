"""What to draw now: the job's prompts, or those that stand in its file by now."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from bootstrap.cache import Cache
from bootstrap.estimate import in_gib
from bootstrap.pod import read_free_memory
from bootstrap.prompts import read_prompts
from bootstrap.run_file import RunFile
from bootstrap.volume import Volume
from bootstrap.wanted import prompt_texts
from jobs.problem import JobError
from jobs.prompts import Drawing
from trainer.world import World

log = logging.getLogger(__name__)

# Seconds, in which the other processes wait: T5-XXL from a slow volume takes minutes, each prompt on a CPU up to one.
ENCODE_LIMIT = 10 * 60.0
ENCODE_MEMORY = 3 << 30  # bytes beside the encoders' weights


class Prompts:
    """The list that is drawn from; an edited file replaces it once all of it can be drawn."""

    def __init__(self, run: RunFile, world: World):
        self.run, self.world = run, world
        self.drawings = run.job.sample.drawings
        self._told = ""  # what was last said of the file: each round would say it again
        self._failed: tuple[int, int] | None = None  # time and size of a file whose prompts could not be encoded

    def now(self) -> tuple[Drawing, ...]:
        """The same on every process, all of which ask together. Never raises for what stands in the file."""
        if self.run.job.sample.prompts_file is None:
            return self.drawings
        if self.world.leads:
            self._look(Volume(self.run.volume).resolve(self.run.job.sample.prompts_file))
        self.drawings = self.world.from_lead(self.drawings)
        return self.drawings

    def _look(self, file: Path) -> None:
        saved = None
        with suppress(OSError):  # told below
            found = file.stat()
            saved = found.st_mtime_ns, found.st_size
        if saved is not None and saved == self._failed:
            return  # a try takes minutes, in which the GPU waits
        try:
            drawings = tuple(self.run.job.sample.drawing(prompt) for prompt in read_prompts(file))
            if drawings == self.drawings:
                self._told = ""
                return
            self._refuse_larger(drawings)
            self._encode(drawings)
        except (JobError, PromptsError, OSError) as error:
            self._failed = saved if isinstance(error, EncodingError) else None
            if str(error) != self._told:
                log.warning("prompts: the last good list is drawn, since %s", error)
            self._told = str(error)
            return
        log.info("prompts: %s has changed, %d are drawn from now on", file.name, len(drawings))
        self.drawings, self._told, self._failed = drawings, "", None

    def _refuse_larger(self, drawings: tuple[Drawing, ...]) -> None:
        """Raises PromptsError for a picture that the plan has left no memory for."""
        most = max((each.width * each.height for each in self.run.job.sample.drawings), default=0)
        for each in drawings:
            if each.width * each.height > most:
                told = f"{each.width}x{each.height} is larger than the samples that memory was planned for"
                raise PromptsError(f"{told}: it is drawn when the job is started again")

    def _encode(self, drawings: tuple[Drawing, ...]) -> None:
        """Has what the cache lacks encoded by a process of its own, on the CPU: the model keeps the GPU. Raises
        PromptsError."""
        run = self.run
        texts = prompt_texts(drawings, run.weights)
        missing = Cache(run.cache).missing(texts)
        if not missing:
            return
        # A process whose memory is gone when it ends, and which the kernel ends before the training.
        need = ENCODE_MEMORY + sum(file.stat().st_size for file in run.weights.t5.glob("*.safetensors"))
        if 0 < (free := read_free_memory()) < need:
            raise PromptsError(f"encoding new ones takes {in_gib(need)} of RAM and {in_gib(free)} are free")
        log.info("prompts: encoding the new ones on the CPU; training waits")
        prompts = [f"--prompt={texts[key].text}" for key in missing]
        child = subprocess.Popen([sys.executable, "-m", "trainer.encode", str(run.folder.run_file), *prompts])
        with suppress(OSError):
            Path(f"/proc/{child.pid}/oom_score_adj").write_text("1000")
        try:
            self._wait(child)
        finally:
            child.kill()
            child.wait()
        if Cache(run.cache).missing(texts):
            raise EncodingError(f"encoding the new ones failed (exit status {child.returncode}); the log has more")

    def _wait(self, child: subprocess.Popen[bytes]) -> None:
        begun = time.monotonic()
        while child.poll() is None:
            self.world.place.move()
            if self.world.stop_requested:
                raise PromptsError("a signal came while new ones were encoded")
            if time.monotonic() - begun > ENCODE_LIMIT:
                raise EncodingError(f"encoding new ones took more than {ENCODE_LIMIT / 60:.0f} min")
            time.sleep(0.1)


class PromptsError(RuntimeError):
    """New prompts that cannot be drawn yet; the message says why."""


class EncodingError(PromptsError):
    """New prompts whose encoding came to nothing: it would come to nothing again."""

    def __init__(self, told: str):
        super().__init__(f"{told}. They are tried again when the file is saved anew")
