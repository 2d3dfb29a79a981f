"""What a run brings to the hub, beside training and after it, and ``fluxpod upload``.

The work is done by a thread of the entrypoint and the process that it watches (``bootstrap.transfers``): the trainer
neither knows the token nor waits for anything. While training goes on a failure is a warning and tried again later;
after it, one that lasts ends the run with code 69, and the next start goes on with what is missing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from bootstrap.bases import Base, parse_base
from bootstrap.hub_writes import upload_token
from bootstrap.model_card import Facts, model_card
from bootstrap.outcome import ACCESS_REFUSED, DONE, JOB_WRONG, AccessError, NotNowError, Outcome, PodError
from bootstrap.run_file import RunFile
from bootstrap.send import Parcel
from bootstrap.state import list_states
from bootstrap.transfers import SEND, Patience, Transfers
from bootstrap.uploads import Piece, Record, Uploaded, missing, pictures_of, state_path, unreadable
from bootstrap.volume import RunFolder, Volume
from entrypoint.states import OUTPUT, named_part
from jobs.problem import JobError
from jobs.schema import Job

Say = Callable[[str], None]

LOOK_EVERY = 10.0  # seconds between two looks for a new state
AGAIN = 600.0  # seconds to the next try of what failed while training goes on
# At the end: about ten minutes of a hub in trouble, then the run is held with code 69 and tried again from outside.
PATIENCE = Patience(waits=(2.0, 10.0, 30.0, 120.0, 300.0), flush=1000.0)
BESIDE_TRAINING = Patience(waits=(10.0, 60.0), flush=1000.0, report=60.0)
BEFORE_TRAINING = Patience(stall=30.0, waits=(2.0, 10.0))  # the GPU is billed meanwhile
CHECK = Patience(stall=30.0, waits=())  # a person waits
END_LIMIT = 5.0  # seconds for the thread to end; it looks several times a second


class _Ended(BaseException):
    """Whoever wanted the upload wants it no more."""


def refuse_unwritable(job: Job, environ: Mapping[str, str], say: Say) -> None:
    """Makes the repository of the job's output, if it is not there. Raises AccessError, in words, where the token may
    not write to it: before hours of training rather than after. A hub that does not answer is only told: it may by
    then."""
    if job.output.hub is None:
        return
    token = upload_token(environ)
    say(f"output: asking for the right to write to {job.output.hub}")
    try:
        with Transfers(token, say, lambda: None, BEFORE_TRAINING, program=SEND, bar=False) as transfers:
            made = _open(transfers, job, "")["made"]
    except NotNowError as error:
        say(f"warning: output: {error} The run begins all the same.")
        return
    if made:
        kind = "private" if job.output.private else "public"
        say(f"output: made https://huggingface.co/{job.output.hub}, {kind}")


def look_at(job: Job, environ: Mapping[str, str]) -> str:
    """What ``fluxpod check`` says of the job's output; changes nothing. Raises AccessError, in words."""
    repo, kind = job.output.hub, "private" if job.output.private else "public"
    with Transfers(upload_token(environ), _print, lambda: None, CHECK, program=SEND, bar=False) as transfers:
        there = transfers.ask({"look": {"repo": repo, "private": job.output.private}})["looked"]
    return f"output: {repo} " + ("is there and may be written to" if there else f"will be made, {kind}")


def _open(transfers: Transfers, job: Job, base: str) -> dict[str, object]:
    asked = {"repo": job.output.hub, "private": job.output.private, "base": base}
    return dict(transfers.ask({"open": asked})["opened"])


class Uploads:
    """Brings what is missing of one run, piece by piece. ``line`` is the last thing there was to say."""

    def __init__(self, run: RunFile, job: Job, environ: Mapping[str, str], say: Say, attend: Callable[[], None]):
        assert job.output.hub is not None
        self.run, self.job, self.repo = run, job, job.output.hub
        self.environ, self._say, self.attend = environ, say, attend
        self.line = ""
        self._base = _base_of(job, Volume(run.volume))
        self._licence: dict[str, str] | None = None  # not asked yet

    @property
    def folder(self) -> RunFolder:
        return self.run.folder

    def say(self, line: str) -> None:
        self.line = line
        self._say(line)

    def lacking(self, finished: bool) -> list[Piece]:
        return missing(self.folder, self.job, Record.read(self.folder, self.repo), finished)

    def refuse_unreadable(self) -> None:
        """Raises PodError for what is left out of a finished run since its file is damaged here."""
        if damaged := unreadable(self.folder, self.job):
            raise PodError(
                f"{' and '.join(map(str, damaged))} cannot be read: damaged, or cut short. Take away what is damaged, "
                "and start the run again: it goes on from its newest whole state"
            )

    def bring(self, pieces: list[Piece], patience: Patience, bar: bool) -> None:
        """Raises AccessError and PodError. A piece that is removed here meanwhile is told and left out."""
        if not pieces:
            return
        token = upload_token(self.environ)
        with Transfers(token, self.say, self.attend, patience, program=SEND, bar=bar) as transfers:
            if self._licence is None:
                opened = _open(transfers, self.job, self._base.repo)
                self._licence = dict(opened["licence"])  # type: ignore[call-overload]
            for piece in pieces:
                self._bring_if_there(piece, transfers)
        self.line = ""

    def _bring_if_there(self, piece: Piece, transfers: Transfers) -> None:
        for _ in range(2):
            try:
                self._bring(piece, transfers)
                return
            except FileNotFoundError as error:
                if not piece.file.exists():
                    self.say(f"upload: {error}")
                    return
                told = error  # a picture beside it: once more with those that are there now
        raise PodError(f"upload: {told}")

    def _bring(self, piece: Piece, transfers: Transfers) -> None:
        record, begun = Record.read(self.folder, self.repo), time.monotonic()
        self.line = f"uploading {piece.path}"
        parcel = self._parcel(piece, record)
        done = transfers.send(parcel, f"upload: {piece.path}")
        file = Uploaded(done["sha256"], piece.size, piece.modified, done["commit"])
        record.with_file(piece.path, file, done["card"]).write(self.folder)
        took = time.monotonic() - begun
        if parcel.card and not done["card"]:
            self.say(f"upload: README.md of {self.repo} was edited there and stays as it is")
        what = f"{piece.size / 1e9:.2f} GB in {took:.0f} s, sha256 verified"
        self.say(f"upload: {piece.path} is on https://huggingface.co/{self.repo}: {what}")

    def _parcel(self, piece: Piece, record: Record) -> Parcel:
        pictures = pictures_of(self.folder, piece.step)
        facts = Facts(
            job=self.job,
            repo=self.repo,
            file=piece.path,
            step=piece.step,
            digest=piece.digest,
            base_repo=self._base.repo,
            guidance=self.run.weights.shape.guidance,
            licence=self._licence or {},
            pictures=tuple(pictures),
            toy=self._base.kind == "embedded",
        )
        finished = f"{self.job.name}.safetensors"
        tells = piece.path == finished or finished not in record.files  # else the card is the finished file's
        return Parcel(
            repo=self.repo,
            path=piece.path,
            file=str(piece.file),
            size=piece.size,
            message=f"{self.job.name}: {piece.step} steps",
            sha256=record.known_sha256(piece.file),
            pictures={picture.path: str(picture.file) for picture in pictures},
            card=model_card(facts) if tells else "",
            known_card=record.card,
        )


def _base_of(job: Job, volume: Volume) -> Base:
    try:
        return parse_base(job.base, volume)
    except JobError:  # a file that was removed since; the result is there all the same
        return Base("file", job.base)


class BackgroundUploads:
    """Uploads on a thread of their own: new states while training goes on, and at its end the finished file."""

    def __init__(self, run: RunFile, job: Job, log: Path, environ: Mapping[str, str] = os.environ):
        self.job, self.log = job, log
        self.refused: AccessError | PodError | None = None  # why something is still missing after the end
        self._over, self._ended, self._finished = threading.Event(), threading.Event(), False
        self._uploads = Uploads(run, job, environ, self._tell, self._attend) if job.output.hub else None
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        if self._uploads:
            self._thread.start()

    @property
    def line(self) -> str:
        """What is being uploaded now, for the status; "" where nothing is."""
        return self._uploads.line if self._uploads else ""

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    def training_is_over(self, finished: bool) -> None:
        """Nothing new comes. ``finished``: the finished file is there and is to be uploaded, too."""
        self._finished = finished
        self._over.set()

    def end(self) -> None:
        """Gives up at once; what was verified stays so."""
        self._ended.set()
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(END_LIMIT)

    def wait(self, seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _attend(self) -> None:
        if self._ended.is_set():
            raise _Ended

    def _tell(self, line: str) -> None:
        print(line, flush=True)
        with suppress(OSError), self.log.open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    def _work(self) -> None:
        uploads, again = self._uploads, 0.0
        assert uploads
        with suppress(_Ended):
            while not self._over.wait(LOOK_EVERY):
                if time.monotonic() < again:
                    continue
                try:
                    uploads.bring(uploads.lacking(finished=False), BESIDE_TRAINING, bar=False)
                except Exception as error:  # whatever it is, training matters more
                    again = time.monotonic() + AGAIN
                    self._failed(error, f"Training goes on; it is tried again in {AGAIN / 60:.0f} minutes.")
            self._attend()
            if self._finished:
                self._last(uploads)

    def _last(self, uploads: Uploads) -> None:
        try:
            uploads.bring(uploads.lacking(finished=True), PATIENCE, bar=True)
            uploads.refuse_unreadable()
        except (AccessError, PodError) as error:
            self.refused = error
        except Exception as error:
            self.refused = AccessError(f"the upload failed ({type(error).__name__}: {error})")

    def _failed(self, error: Exception, then: str) -> None:
        told = str(error) if isinstance(error, (AccessError, PodError)) else f"{type(error).__name__}: {error}"
        if self._uploads:
            self._uploads.line = ""
        self._tell(f"warning: upload: {told} {then}")


def held(job: Job, refused: Exception, step: int) -> Outcome:
    """The outcome of a run that is done but for its upload."""
    told = f"all steps are done and the result is on the volume, but not on {job.output.hub}: {refused}"
    return Outcome(ACCESS_REFUSED, told, step)


# ---- fluxpod upload


def upload(volume: Volume, named: str, repo: str | None, public: bool, environ: Mapping[str, str]) -> int:
    """Brings the finished file of RUN, or the weights of the state RUN/STEP, to the hub; gives the exit code."""
    name, which = named_part(volume, named)
    folder = volume.run(name)
    try:
        run = RunFile.read(folder.run_file)
    except OSError:
        told = "write RUN, RUN/output or RUN/STEP; `fluxpod states RUN` lists the steps"
        print(f"there is no run {name} in {volume.runs}: {told}")
        return JOB_WRONG
    except ValueError:
        print(f"{folder.run_file} is damaged, or of another version: start the run again, which writes it anew")
        return JOB_WRONG
    repo = repo or run.job.output.hub
    if repo is None:
        print(f"where to? The job of {name} has no output.hub: write --repo owner/name")
        return JOB_WRONG
    try:
        output = {"hub": repo, "private": run.job.output.private and not public}
        job = Job.model_validate(run.job.model_dump() | {"output": output})
    except ValueError:
        print(f"'{repo}' is no name of a hub repository: write owner/name, such as me/paper-flowers")
        return JOB_WRONG
    piece = _chosen(folder, job, which)
    if piece is None:
        print(f"{named} has nothing to upload, or it is damaged: `fluxpod states {name}` lists its states")
        return JOB_WRONG
    if Record.read(folder, repo).holds(piece.path, piece.file):
        print(f"{piece.path} is on https://huggingface.co/{repo} already, verified")
        return DONE
    try:
        Uploads(run, job, environ, _print, lambda: None).bring([piece], PATIENCE, bar=True)
    except (AccessError, PodError) as error:
        print(error)
        return ACCESS_REFUSED
    return DONE


def _print(line: str) -> None:
    print(line, flush=True)


def _chosen(folder: RunFolder, job: Job, which: str) -> Piece | None:
    """``which``: a step, "output", or "" for the finished file, else the newest state."""
    states = list_states(folder.states)[0]
    output = folder.output / f"{job.name}.safetensors"
    if which in ("", OUTPUT) and (which or output.exists()):
        return Piece.of(output.name, output)
    found = [state for state in states if not which or str(state.step) == which]
    return Piece.of(state_path(job, found[-1].step), found[-1].model) if found else None
