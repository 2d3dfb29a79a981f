"""The real image, built and run: `make test-image`."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from bootstrap.flux_tiny import make_flux_tiny
from tests.image import podman

pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("image")]  # the first build is in that time

JOB = """\
name: first
base: models/flux-tiny
method: full
datasets:
  - path: datasets/shapes
    trigger: shp
steps: 6
images_per_step: 4
resolution: 64
bucket_step: 16
warmup: 1
save: { every: 3 }
sample: { every: 6, prompts: ["shp red circle"], width: 64, height: 64, steps: 2 }
plan: { processes: 2 }
"""


def make_volume(root: Path) -> Path:
    """A volume as a user leaves it: a job, pictures with captions, and flux-tiny as the model on the disk."""
    make_flux_tiny(root / "models" / "flux-tiny")
    folder = root / "datasets" / "shapes" / "2_shape"
    folder.mkdir(parents=True)
    numbers = random.Random(1)
    for index, colour in enumerate(("red", "green", "blue", "orange", "purple", "black")):
        picture = Image.new("RGB", (96, 96) if index % 2 else (128, 80), "white")
        left, top = numbers.randrange(40), numbers.randrange(30)
        ImageDraw.Draw(picture).ellipse((left, top, left + 40, top + 40), fill=colour)
        picture.save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"a {colour} circle\n")
    (root / "jobs").mkdir()
    (root / "jobs" / "first.yaml").write_text(JOB)
    return root


def wait_for(reached: Callable[[], bool], container: podman.Container, what: str, seconds: float = 900) -> float:
    """Returns the seconds it took; fails with the container's last words."""
    start = time.monotonic()
    while not reached():
        assert container.is_running, f"the container has ended before {what}:\n{container.log[-6000:]}"
        assert time.monotonic() - start < seconds, f"no {what} in {seconds} s:\n{container.log[-6000:]}"
        time.sleep(0.5)
    return time.monotonic() - start


def phase(volume: Path) -> str:
    status = volume / "runs" / "first" / "status.json"
    return json.loads(status.read_text())["phase"] if status.exists() else ""


def results(volume: Path) -> dict[str, tuple[int, int]]:
    """Everything of the run that must stay as it is once the run is done, with size and time of change."""
    run = volume / "runs" / "first"
    files = [
        run / "metrics.jsonl",
        *(file for part in ("output", "states", "samples") for file in run.glob(f"{part}/**/*")),
    ]
    return {str(file.relative_to(run)): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def test_dropped_job_runs_once(tmp_path: Path, report: list[str]) -> None:
    volume = make_volume(tmp_path)
    with podman.Container(volume) as container:
        seconds = wait_for(lambda: phase(volume) in ("done", "failed", "held"), container, "end of the job")
        assert phase(volume) == "done", container.log[-6000:]
        report.append(f"start of the container to finished job: {seconds:.0f} s (6 steps, 2 processes on CPU)")
        assert container.is_running
        container.stop(30)

    run = volume / "runs" / "first"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert (run / "output" / "first.safetensors").stat().st_size > 1_000_000
    assert (run / "states" / "step-000006" / "state.json").exists()
    assert list(run.glob("samples/*"))

    before = results(volume)
    with podman.Container(volume) as container:
        wait_for(lambda: "first is done" in container.log, container, "word that the job is done")
        time.sleep(5)  # long enough that a second run would have begun
        assert phase(volume) == "done"
        assert container.is_running
        assert container.stop(30) < 28, "SIGTERM to an idle pod must not need SIGKILL"
    assert results(volume) == before


def test_arguments_become_the_command() -> None:
    assert podman.output_of("bash", "-c", 'echo "$0 $FLUXPOD_VOLUME $HF_HOME"') == (
        "bash /workspace /workspace/cache/huggingface\n"
    )
    assert "usage: fluxpod" in podman.output_of("fluxpod", "--help").lower()


def test_programs_outlive_everything(tmp_path: Path) -> None:
    """Also with an empty volume, and when supervisord itself is killed; ssh answers all the while."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def ssh_answers() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
                return connection.recv(8) == b"SSH-2.0-"
        except OSError:
            return False

    environment = {"PUBLIC_KEY": "ssh-ed25519 AAAA nobody's 50% key", "FLUXPOD_SSH_PORT": str(port)}
    with podman.Container(tmp_path, network="host", environment=environment) as container:
        wait_for(ssh_answers, container, "ssh", 30)
        container.execute("bash", "-c", "kill -KILL $(cat /run/fluxpod/supervisord.pid) $(cat /run/sshd.pid)")
        wait_for(lambda: "starting it again" in container.log, container, "new supervisord", 30)
        wait_for(ssh_answers, container, "ssh again", 30)
        assert "pod " in container.execute("bash", "-c", "supervisorctl status || true")


def test_image_holds_no_secret_and_no_weights_but_flux_tinys() -> None:
    found = podman.output_of(
        "bash", "-c", "ls /etc/ssh/ssh_host_* /root/.ssh /workspace 2> /dev/null; cat /etc/pip.conf 2> /dev/null;"
        "find / -xdev -name '*.safetensors' -size +100k -not -path '/proc/*' -not -path '*/flux_tiny_weights/*'; true"
    )  # fmt: skip
    assert found == ""
    names = [entry.partition("=")[0] for entry in podman.inspect_image()["Config"]["Env"]]
    assert not [name for name in names if any(word in name for word in ("TOKEN", "SECRET", "PASSWORD", "KEY"))]


def test_image_compiles_against_python() -> None:
    """What torch.compile does at its first step on a GPU: gcc builds a small extension against Python's headers."""
    program = (
        "printf '#include <Python.h>\\n#include <stdio.h>\\nint answer(void) { return 42; }\\n' > /tmp/a.c;"
        "gcc -shared -fPIC -I/usr/include/python3.11 /tmp/a.c -o /tmp/a.so;"
        "python -c \"import ctypes; print(ctypes.CDLL('/tmp/a.so').answer())\""
    )
    assert podman.output_of("bash", "-c", program) == "42\n"
