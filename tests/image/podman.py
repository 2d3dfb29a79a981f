"""Builds and runs the real image where there is no container registry: podman, and a base made from Debian's packages.

What this machine needs to reach Debian and the Python package index (mirror, certificates, pip's settings and the local
folders that they name) is read from its own configuration at run time and mounted for the build only: nothing of it is
in the Dockerfile, and nothing but empty mount points stays in the image.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BASE = "docker.io/library/debian:bookworm-slim"
IMAGE = "localhost/fluxpod:test"
NEEDED = ("podman", "buildah", "runc", "debootstrap")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

# How the published debian:bookworm-slim differs from plain packages, as far as it shows in the image's size.
SLIM = {
    "etc/apt/apt.conf.d/docker-clean": 'Dir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\n'
    'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb || true"; };\n',
    "etc/dpkg/dpkg.cfg.d/docker": "".join(
        f"path-exclude /usr/share/{folder}/*\n" for folder in ("doc", "info", "locale", "man")
    ),
}


@dataclass(frozen=True)
class Built:
    seconds: float
    bytes: int

    def __str__(self) -> str:
        return f"image {IMAGE}: {self.bytes / 1e9:.2f} GB uncompressed, built in {self.seconds:.0f} s"


def command(*words: str | Path, timeout: float = 600) -> str:
    """Runs a command and returns its output; a failure raises with all that it said."""
    done = subprocess.run(
        [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}\nended with {done.returncode}:\n{done.stdout[-8000:]}")
    return done.stdout


def missing_tools() -> list[str]:
    return [tool for tool in NEEDED if not shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin")]


# --- The base ---------------------------------------------------------------------------------------------------------


def debian_mirror() -> list[str]:
    """The mirror that apt on this machine takes bookworm from; none on another system: debootstrap then has its own."""
    if not shutil.which("apt-get"):
        return []
    targets = command("apt-get", "indextargets", "--format", "$(CREATED_BY) $(CODENAME) $(REPO_URI)")
    found = [line.split()[2] for line in targets.splitlines() if line.startswith("Packages bookworm ")]
    return found[:1]


def ensure_base(cache: Path) -> None:
    """Makes the base image unless podman has it. The packed root file system is kept in ``cache``: the slow part."""
    if subprocess.run(["podman", "image", "exists", BASE]).returncode == 0:
        return
    packed = cache / "debian-bookworm.tar"
    if not packed.exists():
        cache.mkdir(parents=True, exist_ok=True)
        root = cache / f"root.{os.getpid()}"
        part = packed.with_suffix(f".{os.getpid()}.part")
        try:
            mirror = debian_mirror()
            options = ["--variant=minbase", "--include=ca-certificates"]
            command("/usr/sbin/debootstrap", *options, "bookworm", root, *mirror, timeout=1200)
            for name, content in SLIM.items():
                (root / name).write_text(content)
            for folder in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man"):
                shutil.rmtree(root / folder)
                (root / folder).mkdir()
            command("tar", "--numeric-owner", "-C", root, "-cf", part, ".")
            part.rename(packed)
        finally:
            shutil.rmtree(root, ignore_errors=True)
            part.unlink(missing_ok=True)
    command("podman", "import", packed, BASE)


# --- The build --------------------------------------------------------------------------------------------------------


def pip_settings() -> dict[str, str]:
    """pip's settings on this machine, from its files and its environment: ``find-links`` -> its value."""
    settings: dict[str, str] = {}
    for line in command(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, equals, value = line.partition("=")
        where, _, key = name.partition(".")
        if equals and where in ("global", "install", ":env:"):
            settings[key] = ast.literal_eval(value)
    return settings


def named_paths(settings: dict[str, str]) -> list[Path]:
    """Files and folders here that pip's settings name, those that exist. A ``file:`` index stands with the folder that
    holds it, since its pages link to files beside it."""
    paths = set()
    for word in " ".join(settings.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            paths.add(path.parent if word.startswith("file://") else path)
    return sorted(paths)


def build(context: Path, scratch: Path) -> Built:
    """Builds the image of ``context``. Layers of earlier builds are used again, as any builder does."""
    settings = pip_settings()
    pip_conf = scratch / "pip.conf"
    pip_conf.touch(mode=0o600)  # an index may be named with a password
    lines = [f"{key} = " + value.strip().replace("\n", "\n    ") for key, value in settings.items()]
    pip_conf.write_text("\n".join(["[global]", *lines, ""]))
    mounts = [f"{pip_conf}:/etc/pip.conf:ro"]
    mounts += [f"{path}:{path}:ro" for path in {CERTIFICATES, *named_paths(settings)} if path.exists()]

    start = time.monotonic()
    volumes = [word for mount in sorted(mounts) for word in ("--volume", mount)]
    options = ["--pull=never", "--isolation", "chroot", "--network", "host", "--layers"]
    command("podman", "build", *options, *volumes, "--tag", IMAGE, context, timeout=3600)
    seconds = time.monotonic() - start
    command("podman", "image", "prune", "--force", "--filter", "label=org.opencontainers.image.title=fluxpod")
    return Built(seconds, inspect_image()["Size"])


def compressed_layers(scratch: Path) -> list[int]:
    """Bytes of each layer as a registry holds and a pod pulls it (gzip), the base first."""
    command("podman", "push", "--compress", IMAGE, f"dir:{scratch / 'image'}", timeout=1200)
    manifest = json.loads((scratch / "image" / "manifest.json").read_text())
    shutil.rmtree(scratch / "image")
    return [layer["size"] for layer in manifest["layers"]]


def inspect_image() -> dict:
    return json.loads(command("podman", "image", "inspect", IMAGE))[0]


# --- Containers -------------------------------------------------------------------------------------------------------


def limits() -> list[str]:
    """podman asks for more than an unprivileged host grants; ask for what this process itself may have."""
    words = []
    for name, limit, wanted in (("nofile", resource.RLIMIT_NOFILE, 1024), ("nproc", resource.RLIMIT_NPROC, 4096)):
        hard = resource.getrlimit(limit)[1]
        number = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        words += ["--ulimit", f"{name}={number}:{number}"]
    return words


def run_words(*options: str, network: str = "none") -> list[str]:
    return ["podman", "--runtime", "runc", "run", "--network", network, *limits(), *options]


def output_of(*arguments: str) -> str:
    """What the image prints when it is run with ``arguments``, to its end."""
    return command(*run_words("--rm"), IMAGE, *arguments, timeout=120)


class Container:
    """A container of the image with ``volume`` mounted, running in the background; without network unless it is given
    the ``host``'s. ``more``: further options of podman."""

    def __init__(
        self,
        volume: Path | None,
        network: str = "none",
        environment: dict[str, str] | None = None,
        more: Sequence[str] = (),
    ) -> None:
        options = ["--detach", *(["--volume", f"{volume}:/workspace"] if volume else []), *more]
        for name, value in (environment or {}).items():
            options += ["--env", f"{name}={value}"]
        self.id = command(*run_words(*options, network=network), IMAGE).split()[-1]

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *error: object) -> None:
        command("podman", "--runtime", "runc", "rm", "--force", "--time", "5", self.id)

    @property
    def log(self) -> str:
        return command("podman", "logs", self.id)

    @property
    def is_running(self) -> bool:
        return bool(json.loads(command("podman", "inspect", self.id))[0]["State"]["Running"])

    def execute(self, *arguments: str) -> str:
        return command("podman", "--runtime", "runc", "exec", self.id, *arguments, timeout=120)

    def stop(self, grace: int) -> float:
        """Sends SIGTERM, and SIGKILL after ``grace`` seconds; returns the seconds that it took."""
        start = time.monotonic()
        command("podman", "--runtime", "runc", "stop", "--time", str(grace), self.id)
        return time.monotonic() - start
