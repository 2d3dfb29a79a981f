"""The container's environment, put right once before anything else starts.

Platforms hand over what a person typed into a form: tokens with quotes and line ends, the name of a secret that does
not exist. And what every library takes for granted, a large home folder, is not there: the container's own disk is
small and wiped at every stop. ``prepare_environment`` decides, purely; ``main`` is what start.sh calls: it prints the
changes as shell code and writes the file that login shells read, which inherit nothing from the container.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from jobs.secret import is_secret

RUN = Path("/run/fluxpod")  # this container's own; `login`, `temporary` and what the page should say below it
NOTES, POD_NOTES = "notes.json", "pod.json"  # of the environment, by start.sh; of GPUs and volume, by the pod loop

# Everything that grows, and where below the volume it goes unless the user says otherwise.
CACHES = {
    "HF_HOME": "cache/huggingface",
    "XDG_CACHE_HOME": "cache/xdg",  # pip, matplotlib and whoever else asks
    "TORCH_HOME": "cache/torch",
    "TORCHINDUCTOR_CACHE_DIR": "cache/inductor",
    "TRITON_CACHE_DIR": "cache/triton",
    "CUDA_CACHE_PATH": "cache/cuda",
}
TEMPORARY = "cache/tmp"  # a folder for each container below it
PORTS = {"FLUXPOD_SSH_PORT": 22, "FLUXPOD_PAGE_PORT": 7860, "FLUXPOD_JUPYTER_PORT": 8888}
OLD_TOKEN_NAMES = ("HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HUGGINGFACE_TOKEN")
TOKENS = ("HF_TOKEN", "HF_UPLOAD_TOKEN", *OLD_TOKEN_NAMES, "RUNPOD_API_KEY", "FLUXPOD_RUNPOD_API_KEY", "WANDB_API_KEY")
PASSWORDS = ("FLUXPOD_PASSWORD", "JUPYTER_PASSWORD")

# A shell on the pod downloads from the hub and uploads to it. It calls no platform and knows no password.
SHELL_SECRETS = ("HF_TOKEN", "HF_UPLOAD_TOKEN")
_OF_THE_SHELL = {"HOME", "HOSTNAME", "LOGNAME", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "USER", "_", "container"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MISSING_SECRET = re.compile(r"\{\{\s*RUNPOD_SECRET_([^\s{}]*)\s*\}\}")
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff"  # pasted from web pages; str.strip keeps them
OLD = 30 * 86400.0  # seconds after which another container's temporary folder is taken for abandoned
SOCKET_PATH = 60  # characters of TMPDIR that leave room for a socket's name in the 107 that Linux allows


def prepare_environment(environ: Mapping[str, str], temporary: str = "pod") -> tuple[dict[str, str], tuple[str, ...]]:
    """The whole environment as the programs get it, and notes for people; no value of a secret is in a note.

    ``temporary`` names this container's folder for temporary files. Values that the user chose win, but a cache away
    from the volume is told.
    """
    result, notes = dict(environ), list[str]()
    for step in (_drop_missing_secrets, _clean_tokens, _clean_public_key, _check_volume, _check_ports):
        step(result, notes)
    volume = result["FLUXPOD_VOLUME"]
    for name, folder in {**CACHES, "TMPDIR": f"{TEMPORARY}/{temporary}"}.items():
        if not result.get(name):
            result[name] = f"{volume}/{folder}"
        elif name != "TMPDIR" and not Path(result[name]).is_relative_to(volume):
            notes.append(
                f"{name}={result[name]} is not on the volume: it fills the container's small disk, and what is in it "
                f"is gone when the pod stops. Leave {name} unset; it then is {volume}/{folder}."
            )
    return result, tuple(notes)


def _drop_missing_secrets(result: dict[str, str], notes: list[str]) -> None:
    for name, value in list(result.items()):
        found = _MISSING_SECRET.search(value)
        if found and name != "FLUXPOD_JOB":
            notes.append(
                f"{name} is literally {found[0]}: the platform has no secret named {found[1] or '(empty)'}. Make it in "
                f"the console under Secrets, or set {name} itself, and restart the pod. Until then {name} counts as "
                "not set."
            )
            del result[name]


def _clean_tokens(result: dict[str, str], notes: list[str]) -> None:
    for name in TOKENS:
        if name in result:
            token = clean(result[name])
            if token and token != result[name]:
                notes.append(f"{name}: quotes, spaces or line ends around it were taken off")
            if re.search(r"\s", token):
                notes.append(f"{name} has a space or line end inside it, which no token has. Copy it again.")
            result[name] = token
            if not token:
                del result[name]
    for name in OLD_TOKEN_NAMES:
        if name in result and "HF_TOKEN" not in result:
            result["HF_TOKEN"] = result[name]
    if not result.get("HF_TOKEN", "hf_").startswith("hf_"):
        notes.append("HF_TOKEN does not begin with hf_, as tokens of the Hugging Face hub do. Is it another one?")
    for name in PASSWORDS:  # any sign may be meant in a password; only a line end at its end never is
        if name in result:
            result[name] = result[name].rstrip("\r\n")
            if not result[name]:
                del result[name]


def _clean_public_key(result: dict[str, str], notes: list[str]) -> None:
    """One key a line, as authorized_keys wants them."""
    if "PUBLIC_KEY" not in result:
        return
    lines = clean(result["PUBLIC_KEY"]).splitlines()
    result["PUBLIC_KEY"] = "\n".join(line.strip() for line in lines if line.strip())
    if "PRIVATE KEY" in result["PUBLIC_KEY"]:
        notes.append(
            "PUBLIC_KEY holds a PRIVATE key, and everyone who may see this pod's settings could take it: make a new "
            "pair. What belongs here is the file that ends in .pub. ssh stays off."
        )
        result["PUBLIC_KEY"] = ""
    if not result["PUBLIC_KEY"]:
        del result["PUBLIC_KEY"]


def _check_volume(result: dict[str, str], notes: list[str]) -> None:
    volume = result.get("FLUXPOD_VOLUME", "").strip()
    if volume and not volume.startswith("/"):
        notes.append(f"FLUXPOD_VOLUME={volume} is no absolute path; /workspace is used")
        volume = ""
    result["FLUXPOD_VOLUME"] = volume.rstrip("/") or "/workspace"


def _check_ports(result: dict[str, str], notes: list[str]) -> None:
    taken: set[int] = set()
    for name, default in PORTS.items():
        text = result.get(name, "").strip() or str(default)
        port = int(text) if re.fullmatch(r"[0-9]{1,5}", text) else 0
        if not 0 < port < 65536 or port in taken:
            why = "another of our programs has it" if port in taken else "that is no port (1 to 65535)"
            port = next(free for free in range(default, 65536) if free not in taken)
            notes.append(f"{name}={text}: {why}; {port} is used")
        taken.add(port)
        result[name] = str(port)


def clean(text: str) -> str:
    """A token as meant: no quotes, spaces, line ends or invisible signs around it."""
    before = None
    while text != before:
        before = text
        text = text.strip().strip(_INVISIBLE).removeprefix("Bearer ")
        if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
            text = text[1:-1]
        text = text.strip("\"'") if text.count('"') + text.count("'") == 1 else text
    return text


def read_seconds(environ: Mapping[str, str], name: str, default: float, least: float = 0.0) -> float:
    """A variable's number of seconds; what is none, or too small to work with, is said and replaced."""
    text = environ.get(name, "").strip()
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < least:
        used = least if math.isfinite(seconds) else default
        print(f"{name}={text} is not a number of seconds of at least {least:g}; {used:g} is used", flush=True)
        return used
    return seconds


# --- Shells -----------------------------------------------------------------------------------------------------------


def login_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a shell on the pod gets: everything but what is the shell's own, and the secrets it has no use for."""
    return {
        name: value
        for name, value in environ.items()
        if _NAME.fullmatch(name) and name not in _OF_THE_SHELL and (name in SHELL_SECRETS or not is_secret(name))
    }


def exports(environ: Mapping[str, str]) -> bytes:
    """Shell code; any value survives it, also one with quotes, line ends or bytes that are no UTF-8."""
    return b"".join(os.fsencode(f"export {name}={shlex.quote(value)}\n") for name, value in sorted(environ.items()))


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> bytes:
    """Shell code that turns one environment into the other."""
    gone = sorted(name for name in before if name not in after and _NAME.fullmatch(name))
    new = {name: value for name, value in after.items() if before.get(name) != value and _NAME.fullmatch(name)}
    return b"".join(os.fsencode(f"unset -v {name}\n") for name in gone) + exports(new)


def write_login_environment(path: Path, environ: Mapping[str, str]) -> None:
    """Replaces ``path``, which only its owner may read; there is no moment at which others could."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(exports(login_environment(environ)))
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


# --- Temporary files --------------------------------------------------------------------------------------------------


def own_temporary(run: Path) -> str:
    """A name for this container's temporary folder: the same after a restart, another in every other container. Host
    names do not tell containers apart that share a network."""
    kept = run / "temporary"
    with contextlib.suppress(OSError):
        name = kept.read_text(encoding="ascii", errors="replace").strip()
        if re.fullmatch(r"[0-9a-f]{12}", name):
            return name
    name = secrets.token_hex(6)
    kept.write_text(name + "\n", encoding="ascii")
    return name


def make_temporary(folder: Path) -> str:
    """Makes ``folder`` fit for TMPDIR; gives the reason where it cannot be, "" where it is."""
    if len(str(folder)) > SOCKET_PATH:
        return "its path is too long for sockets"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # some volumes hold no modes
            folder.chmod(0o1777)  # apt works as a user of its own
        name = folder / f"probe-{os.getpid()}"
        with socket.socket(socket.AF_UNIX) as listener:  # data loading passes tensors through sockets in TMPDIR
            listener.bind(str(name))
        name.unlink()
    except OSError as error:
        return str(error)
    return ""


def remove_abandoned(folder: Path) -> None:
    """Empties this container's temporary folder (nothing of ours runs yet), and removes those that other containers
    left long ago. Ages are differences of times on the same volume, so that no clock need be right."""
    for entry in folder.iterdir():
        _remove(entry)
    os.utime(folder)
    now = folder.stat().st_mtime
    for other in folder.parent.iterdir():
        if other != folder and now - other.stat().st_mtime > OLD:
            _remove(other)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


# --- What start.sh calls ----------------------------------------------------------------------------------------------


def set_up(environ: Mapping[str, str], run: Path, command: bool) -> tuple[dict[str, str], tuple[str, ...]]:
    """Prepares the environment and writes what goes with it below ``run``. Nothing that fails here is a reason not to
    start: it becomes a note.

    ``command``: a single command is run in place of the pod; it makes no folder on a volume that is not there.
    """
    troubles: list[str] = []

    def attempt(what: str, action: Callable[[], object]) -> object:
        try:
            return action()
        except OSError as error:
            troubles.append(f"{what}: {error}")
            return None

    attempt("the container's own disk", lambda: run.mkdir(parents=True, exist_ok=True))
    name = "commands" if command else attempt("the container's own disk", lambda: own_temporary(run)) or "pod"
    result, notes = prepare_environment(environ, str(name))
    folder = Path(result["TMPDIR"])
    ours = folder.is_relative_to(Path(result["FLUXPOD_VOLUME"], TEMPORARY))
    if ours and (not command or Path(result["FLUXPOD_VOLUME"]).is_dir()):
        reason = make_temporary(folder)
        if reason:
            troubles.append(f"temporary files stay on the container's own disk, not in {folder}: {reason}")
        elif not command:
            attempt("old temporary files", lambda: remove_abandoned(folder))
    if ours and not folder.is_dir():
        del result["TMPDIR"]
    attempt("the file for login shells", lambda: write_login_environment(run / "login", result))
    told = (*notes, *troubles)
    attempt("notes for the page", lambda: (run / NOTES).write_text(json.dumps(told), encoding="utf-8"))
    return result, told


def main() -> int:
    """Shell code on standard output, notes on standard error."""
    parser = argparse.ArgumentParser(prog="python -m entrypoint.environment", description=__doc__)
    parser.add_argument("--command", action="store_true", help="for a single command: says nothing")
    options = parser.parse_args()
    before = dict(os.environ)
    after, notes = set_up(before, RUN, options.command)
    for note in () if options.command else notes:
        print(f"environment: {note}", file=sys.stderr, flush=True)
    sys.stdout.buffer.write(changes(before, after))
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
