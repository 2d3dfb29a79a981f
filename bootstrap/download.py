"""A model repository of the hub on the volume: the files of one commit, verified, published whole or not at all.

``models/<owner>--<name>/<commit>/`` holds the files and ``manifest.json`` (each file's size and sha256). Until every
file is there and verified the folder is called ``.<commit>.part``; a next start goes on with it. A fetched folder is
recognised by its manifest, without a request.

The transfer runs in a process of its own (``python -m bootstrap.download``): Xet transfers have stalled for hours and
cannot be ended from inside a process, so the parent watches the bytes arrive and starts anew when they stop.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bootstrap import hub
from bootstrap.hub import RemoteFile
from bootstrap.outcome import AccessError, PodError
from bootstrap.volume import flush_folder, read_json, write_json

Progress = Callable[[str], None]

MANIFEST = "manifest.json"
FOLDERS = ("transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler")
SPARE = 1 << 30  # bytes that a fetch leaves free on the volume
BLOCK = 16 * 1024 * 1024
AT_ONCE = 4  # files on the wire at a time: one HTTP stream of the hub's CDN fills no data-centre link


@dataclass(frozen=True)
class Patience:
    """How long a fetch puts up with trouble, in seconds."""

    stall: float = 180.0  # without a new byte, before the transfer is ended and started anew
    waits: tuple[float, ...] = (5.0, 30.0, 120.0)  # before each new try
    report: float = 5.0  # between two lines of progress


@dataclass(frozen=True)
class Manifest:
    """What a fetched folder holds: path -> (size in bytes, sha256)."""

    repo: str
    commit: str
    revisions: tuple[str, ...]  # as jobs asked for them: "main", a tag, a commit
    files: dict[str, tuple[int, str]]

    def write(self, folder: Path) -> None:
        write_json(folder / MANIFEST, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        value: Any = read_json(folder / MANIFEST)
        try:
            files = {path: (int(size), str(sha)) for path, (size, sha) in value["files"].items()}
            return cls(value["repo"], value["commit"], tuple(value["revisions"]), files)
        except (TypeError, KeyError, ValueError, AttributeError):
            return None

    def missing(self, folder: Path) -> list[str]:
        """Files that are absent or have another size. Contents were verified before the folder was published."""
        return [path for path, (size, _) in self.files.items() if _size(folder / path) != size]


def repo_folder(models: Path, repo: str) -> Path:
    return models / repo.replace("/", "--")


def find_fetched(models: Path, repo: str, revision: str) -> tuple[Path, Manifest] | None:
    """The newest published folder of that revision, complete or not."""
    found = []
    for path in repo_folder(models, repo).glob(f"*/{MANIFEST}"):
        folder = path.parent
        manifest = None if folder.name.startswith(".") else Manifest.read(folder)
        if manifest and (revision in manifest.revisions or revision == manifest.commit):
            found.append((path.stat().st_mtime, folder, manifest))
    return max(found, key=lambda entry: entry[0])[1:] if found else None


def fetch_repo(
    repo: str, revision: str, models: Path, token: str | None, progress: Progress, patience: Patience | None = None
) -> tuple[Path, Manifest]:
    """The folder of ``repo`` at ``revision``, fetched if need be; not one request where it is there and whole.

    Raises AccessError (with everything that is missing where a part is there), PodError where the volume is too small.
    """
    home = repo_folder(models, repo)
    home.mkdir(parents=True, exist_ok=True)
    with _alone(home / ".lock", lambda: progress(f"waiting for another fetch of {repo}")):
        missing: list[str] = []
        if found := find_fetched(models, repo, revision):
            folder, manifest = found
            if not (missing := manifest.missing(folder)):
                return found
            progress(f"{repo}: {len(missing)} files are no longer whole on the volume: {', '.join(missing)}")
            folder.rename(part := _part(folder))
        try:
            commit = _fetch_with_patience(repo, revision, home, hub.clean_token(token), progress, patience)
        except (AccessError, PodError) as error:
            if found and part.is_dir() and not folder.exists():
                part.rename(folder)  # so that the next start names what is missing as well
            lost = f" Missing on the volume: {', '.join(missing)}." if missing else ""
            raise type(error)(f"{error}{lost}") from None
        return home / commit, _read_published(home / commit)


def _part(folder: Path) -> Path:
    """What the folder of a commit is called until it is whole."""
    return folder.with_name(f".{folder.name}.part")


def _read_published(folder: Path) -> Manifest:
    manifest = Manifest.read(folder)
    assert manifest is not None
    return manifest


def _fetch_with_patience(
    repo: str, revision: str, home: Path, token: str | None, progress: Progress, patience: Patience | None
) -> str:
    patience = patience or Patience()
    for attempt in range(len(patience.waits) + 1):
        answer = _run_transfer(repo, revision, home, token, progress, patience, plain=attempt >= 2)
        if "commit" in answer:
            return str(answer["commit"])
        message = hub.without_token(str(answer["message"]), token)
        if answer["kind"] == "pod":
            raise PodError(message)
        if answer["kind"] == "access" or attempt == len(patience.waits):
            raise AccessError(message)
        wait = patience.waits[attempt]
        progress(f"{message} Trying again in {wait:.0f} s.")
        time.sleep(wait)
    raise AssertionError


def _run_transfer(
    repo: str, revision: str, home: Path, token: str | None, progress: Progress, patience: Patience, plain: bool
) -> dict[str, Any]:
    """One run of the transfer process. Answers {"commit"} or {"kind": access | passing | pod, "message"}."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONUNBUFFERED": "1"}
    if plain:  # after two failures: Xet may be what fails here
        environment["HF_HUB_DISABLE_XET"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-m", "bootstrap.download"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    try:
        assert process.stdin
        # The token goes through the pipe: an environment can be read from outside, e.g. in a crash report.
        request = {"repo": repo, "revision": revision, "home": str(home), "token": token}
        with suppress(BrokenPipeError):  # it died at once: what it said last tells why
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        return _watch(process, home, repo, progress, patience)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


def _watch(
    process: subprocess.Popen[str], home: Path, repo: str, progress: Progress, patience: Patience
) -> dict[str, Any]:
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []
    threading.Thread(target=_pump, args=(process.stdout, lines.put, lambda: lines.put(None)), daemon=True).start()
    threading.Thread(target=_pump, args=(process.stderr, errors.append, lambda: None), daemon=True).start()
    held = _bytes_below(home)
    begun = alive = reported = time.monotonic()
    start, total = held, 0
    while True:
        try:
            line = lines.get(timeout=min(1.0, patience.stall / 4))
        except queue.Empty:
            line = ""
        if line is None:
            process.wait()
            message = f"The transfer of {repo} ended with code {process.returncode}: {_tail(errors)}"
            return {"kind": "passing", "message": message}
        now = time.monotonic()
        if line:
            alive = now
            event = json.loads(line)
            if "commit" in event or "kind" in event:
                return event
            total = event.get("total", total)
            if "note" in event:
                progress(event["note"])
        if (size := _bytes_below(home)) != held:
            held, alive = size, now
        if now - alive > patience.stall:
            message = f"The transfer of {repo} stalled: no byte for {patience.stall:.0f} s."
            return {"kind": "passing", "message": message}
        if total and now - reported >= patience.report:
            reported = now
            rate = max(0, held - start) / (now - begun) / 1e6
            progress(f"{repo}: {held / 1e9:.1f} of {total / 1e9:.1f} GB, {rate:.0f} MB/s")


def _tail(errors: list[str]) -> str:
    return " ".join(" ".join(errors).split())[-500:] or "it said nothing"


def _pump(pipe: Any, put: Callable[[str], None], end: Callable[[], None]) -> None:
    for line in pipe:
        put(line)
    end()


def _bytes_below(home: Path) -> int:
    return sum(max(0, _size(path)) for part in home.glob(".*.part") for path in part.rglob("*"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else -1
    except OSError:  # gone between the listing and the look
        return -1


@contextmanager
def _alone(lock: Path, tell: Callable[[], None]) -> Iterator[None]:
    """Lets one process at a time fetch a repository; the next finds it there."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- the transfer process ----


def wanted(files: tuple[RemoteFile, ...]) -> tuple[RemoteFile, ...]:
    """What training needs of a FLUX repository: its diffusers folders, in safetensors, in their main precision.

    One copy of the transformer: the single file beside the folders holds the same numbers once more.
    """
    chosen = []
    for file in files:
        folder, _, name = file.path.rpartition("/")
        in_folder = folder in FOLDERS and name.endswith((".safetensors", ".json", ".txt", ".model"))
        variant = any(f".{kind}" in name for kind in ("fp16", "bf16", "fp8", "fp32"))
        if file.path == "model_index.json" or (in_folder and not variant):
            chosen.append(file)
    return tuple(chosen)


def transfer(repo: str, revision: str, home: Path, token: str | None, say: Callable[..., None]) -> str:
    """Fetches, verifies and publishes; gives the commit. Raises what huggingface_hub does, AccessError, PodError."""
    say(note=f"{repo}: asking the hub for revision '{revision}'")
    commit, every = hub.list_files(repo, revision, token)
    files = wanted(every)
    folders = {file.path.partition("/")[0] for file in files}
    if absent := [folder for folder in FOLDERS if folder not in folders]:
        raise AccessError(
            f"{repo} is not in the layout of diffusers: it has no {', '.join(absent)} folder. Choose a repository that "
            "has, e.g. black-forest-labs/FLUX.1-dev, or download its single file and give its path as base."
        )
    folder = home / commit
    if manifest := Manifest.read(folder):  # the same commit under another name
        known = tuple(dict.fromkeys((*manifest.revisions, revision)))
        Manifest(repo, commit, known, manifest.files).write(folder)
        if not manifest.missing(folder):
            return commit
        folder.rename(_part(folder))
    part = _part(folder)
    part.mkdir(exist_ok=True)
    for other in home.glob(".*.part"):  # begun when the revision was another commit: up to 34 GB that nobody wants
        if other != part:
            shutil.rmtree(other)
    for orphan in (part / ".cache").rglob("*.incomplete"):  # no later process goes on with them
        orphan.unlink(missing_ok=True)
    _need_space(repo, part, files)
    say(total=sum(file.size for file in files))
    sums = _fetch_all(repo, commit, part, files, token, say)
    shutil.rmtree(part / ".cache", ignore_errors=True)
    Manifest(repo, commit, (revision,), sums).write(part)
    _flush_all(part)
    part.rename(folder)
    flush_folder(home)
    return commit


def _need_space(repo: str, part: Path, files: tuple[RemoteFile, ...]) -> None:
    need = sum(file.size for file in files if _size(part / file.path) != file.size) + SPARE
    if (free := shutil.disk_usage(part).free) < need:
        raise PodError(
            f"{repo} needs {need / 1e9:.1f} GB more on the volume and {free / 1e9:.1f} GB are free. "
            "Make the volume larger, or delete models or runs that are not needed."
        )


def _fetch_all(
    repo: str, commit: str, part: Path, files: tuple[RemoteFile, ...], token: str | None, say: Callable[..., None]
) -> dict[str, tuple[int, str]]:
    largest_first = sorted(files, key=lambda file: -file.size)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tasks = {pool.submit(_fetch_one, repo, commit, part, file, token, say): file for file in largest_first}
        try:
            sums = {tasks[task].path: (tasks[task].size, task.result()) for task in as_completed(tasks)}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return dict(sorted(sums.items()))


def _fetch_one(
    repo: str, commit: str, part: Path, file: RemoteFile, token: str | None, say: Callable[..., None]
) -> str:
    """The sha256 of the file, once it is there and is what the hub says it is."""
    from huggingface_hub import hf_hub_download

    path = part / file.path
    if _size(path) == file.size and (known := verified_sha256(path, file, say)):
        return known  # from an earlier start
    for again in (False, True):
        path.unlink(missing_ok=True)
        hf_hub_download(repo, file.path, revision=commit, local_dir=part, token=token or False, force_download=again)
        if sha := verified_sha256(path, file, say):
            return sha
        say(note=f"{repo}: {file.path} arrived damaged")
    path.unlink()
    raise AccessError(
        f"{file.path} of {repo} arrived twice with other bytes than the hub's own checksum says. "
        "Nothing was kept of it. A proxy or a mirror (HF_ENDPOINT) may be at fault; try again later."
    )


def verified_sha256(path: Path, file: RemoteFile, say: Callable[..., None]) -> str | None:
    """The sha256 of ``path`` where it has the size and checksum that the hub gives, else None.

    Of small files the hub gives git's blob id: sha1 over "blob <size>", a zero byte and the content.
    """
    sha256, sha1 = hashlib.sha256(), hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    size = 0
    with path.open("rb") as content:
        while block := content.read(BLOCK):
            size += len(block)
            sha256.update(block)
            if file.sha256 is None:
                sha1.update(block)
            if size % (64 * BLOCK) == 0:
                say()  # a sign of life: the parent sees no bytes arrive
    right = sha256.hexdigest() == file.sha256 if file.sha256 else sha1.hexdigest() == file.blob
    return sha256.hexdigest() if right and size == file.size else None


def _flush_all(folder: Path) -> None:
    """Brings every file to the disk: huggingface_hub does not, and a published folder is trusted after a power cut."""
    for path in folder.rglob("*"):
        if path.is_dir():
            flush_folder(path)
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _end_with_parent() -> None:
    """The parent holds our standard input open as long as it lives: nothing is fetched for nobody."""
    sys.stdin.read()
    os._exit(1)


def main() -> int:
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    repo, revision, token = request["repo"], request["revision"], request["token"]
    speaking = threading.Lock()

    def say(**event: Any) -> None:
        with speaking:
            print(json.dumps(event), flush=True)

    try:
        say(commit=transfer(repo, revision, Path(request["home"]), token, say))
    except PodError as error:
        say(kind="pod", message=str(error))
    except AccessError as error:
        say(kind="access", message=hub.without_token(str(error), token))
    except Exception as error:
        message = hub.explain(error, repo, revision, token)
        if message is None and isinstance(error, OSError) and not isinstance(error, ConnectionError):
            say(kind="pod", message=f"{repo} cannot be written to the volume: {error}")
            return 0
        if message is None:
            raise
        kind = "passing" if hub.is_passing(error) else "access"
        say(kind=kind, message=hub.without_token(message, token))
    return 0


if __name__ == "__main__":
    sys.exit(main())
