"""Jobs in the real container: dropped, broken, stopped in every phase, killed, started again, by two pods at once."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bootstrap.lease import Lease
from bootstrap.outcome import JOB_WRONG, POD_WRONG, STOPPED, Outcome
from bootstrap.state import list_states, newest_whole
from bootstrap.volume import RunFolder, Volume, write_json
from entrypoint.status import Status
from tests.bases import lay_out_flux_dev
from tests.entrypoint.test_run import losses, status_of
from tests.image import podman
from tests.image.test_container import free_ports
from tests.loopback_hub import Fault, LoopbackHub, Repo
from tests.loopback_runpod import LoopbackRunPod
from tests.training import JOB, prepared
from tiny.drawn import draw_dataset

pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("image")]  # the first build is in that time

GRACE = 30  # seconds from SIGTERM to SIGKILL
ONE = {"plan": {"processes": 1}}
TWO = {"plan": {"processes": 2}}
LEASE_SECONDS = 15.0  # three beats


# ---------------------------------------------------------------- volumes and pods


def lay_out(root: Path, flux_tiny: Path) -> Volume:
    """A volume with the toy base and ten pictures, and nothing encoded."""
    volume = Volume(root)
    volume.create()
    shutil.copytree(flux_tiny, volume.models / "flux-tiny")
    draw_dataset(volume.datasets / "drawn", 10)
    return volume


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path) -> Path:
    """The cache of what most jobs here need, made once and outside: encoding in a container is one test's matter."""
    volume = lay_out(tmp_path_factory.mktemp("encoded"), flux_tiny)
    prepared(volume, name="encoded")
    return volume.cache


@pytest.fixture
def volume(tmp_path: Path, flux_tiny: Path, encoded: Path) -> Volume:
    volume = lay_out(tmp_path, flux_tiny)
    shutil.copytree(encoded, volume.cache, dirs_exist_ok=True)
    return volume


def job_text(name: str, **keys: Any) -> str:
    """JSON is YAML."""
    return json.dumps(JOB | ONE | {"name": name, "steps": 4} | keys, indent=1)


def drop(volume: Volume, name: str, **keys: Any) -> RunFolder:
    (volume.jobs / f"{name}.yaml").write_text(job_text(name, **keys))
    return volume.run(name)


def start(volume: Volume, *more: str, **environment: str) -> podman.Container:
    settings = {"FLUXPOD_QUIET_SECONDS": "1", "FLUXPOD_LEASE_SECONDS": f"{LEASE_SECONDS:g}"}
    settings["FLUXPOD_PAGE_PORT"] = str(free_ports()["page"])
    settings["RUNPOD_CPU_COUNT"] = "1"  # one thread a process: several on a machine that is busy wait for each other
    return podman.Container(volume.root, "host", settings | environment, more)


def wait_until(reached: Callable[[], object], container: podman.Container, what: str, seconds: float = 300) -> None:
    """Looks often, since phases are short; asks podman seldom, since that is slow."""
    begun = asked = time.monotonic()
    while not reached():
        now = time.monotonic()
        if now - asked > 5:
            asked = now
            assert container.is_running, f"the container has ended before {what}:\n{container.log[-6000:]}"
        assert now - begun < seconds, f"no {what} in {seconds:.0f} s:\n{container.log[-6000:]}"
        time.sleep(0.02)


def says(container: podman.Container, words: str, times: int = 1) -> Callable[[], bool]:
    return lambda: container.log.count(words) >= times


def phase_of(folder: RunFolder) -> str:
    status = Status.read(folder.status)
    return status.phase if status else ""


def is_done(folder: RunFolder) -> bool:
    phase = phase_of(folder)
    assert phase != "failed", status_of(folder).message
    return phase == "done"


def steps_told(folder: RunFolder) -> int:
    return len(folder.metrics.read_bytes().splitlines()) if folder.metrics.exists() else 0


def half_written(volume: Volume) -> list[str]:
    """What a reader would stumble over: temporary names of every kind, and states that are not whole."""
    found = [str(path) for path in volume.root.rglob("*") if path.name.endswith((".part", ".tmp"))]
    found = [path for path in found if not path.startswith(str(volume.models))]  # a fetch is gone on with
    return found + [note for run in volume.runs.iterdir() for note in newest_whole(run / "states")[1]]


def sizes(volume: Volume) -> dict[str, tuple[int, int]]:
    """Every file but logs, with its size and its time of change."""
    files = (path for path in volume.root.rglob("*") if path.is_file() and "log" not in path.name)
    return {str(f.relative_to(volume.root)): (f.stat().st_size, f.stat().st_mtime_ns) for f in files}


# ---------------------------------------------------------------- jobs that come to a running pod


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path, encoded: Path
) -> Iterator[tuple[Volume, podman.Container]]:
    """A pod that was started with a job in its environment and nothing on its volume but a base and pictures."""
    volume = lay_out(tmp_path_factory.mktemp("served"), flux_tiny)
    shutil.copytree(encoded, volume.cache, dirs_exist_ok=True)
    with start(volume, FLUXPOD_JOB=job_text("sent")) as container:
        yield volume, container


def test_a_job_in_the_environment_and_one_dropped_meanwhile_are_trained(
    served: tuple[Volume, podman.Container], report: list[str]
) -> None:
    volume, container = served
    begun = time.monotonic()
    sent = volume.run("sent")
    wait_until(lambda: phase_of(sent) in ("preparing", "training"), container, "start of the job")
    dropped = drop(volume, "dropped")
    wait_until(lambda: phase_of(dropped) == "pending", container, "word of the dropped job", 60)
    wait_until(lambda: is_done(sent), container, "end of the job in the environment")
    report.append(f"container to finished job, encoded before: {time.monotonic() - begun:.0f} s")
    wait_until(lambda: is_done(dropped), container, "end of the dropped job")
    assert str(sent.output / "sent.safetensors").removeprefix(str(volume.root)) in container.log
    large = ("find", "/", "-xdev", "-newer", "/run/fluxpod/temporary", "-type", "f", "-size", "+1000k")
    assert container.execute(*large, "-not", "-path", "/proc/*", "-not", "-path", "/sys/*") == "", "off the volume"
    for folder in (sent, dropped):
        assert list(losses(folder)) == [1, 2, 3, 4]
        assert (folder.output / f"{folder.root.name}.safetensors").exists()
        assert not folder.lease.exists()
    assert not half_written(volume)


def test_a_broken_job_is_held_with_its_problems_until_it_is_fixed(served: tuple[Volume, podman.Container]) -> None:
    volume, container = served
    folder = drop(volume, "broken", method="ful", lerning_rate=1e-5)
    wait_until(lambda: phase_of(folder) == "held", container, "word of the broken job", 60)
    status = status_of(folder)
    assert status.code == JOB_WRONG
    for word in ("broken.yaml:3: method: ", "lerning_rate"):
        assert word in status.message
    unreadable = volume.jobs / "torn.yaml"
    unreadable.write_text("name: torn\ndatasets: [")
    wait_until(lambda: phase_of(volume.run("torn")) == "held", container, "word of the torn job", 60)
    time.sleep(6)  # three looks
    assert status_of(folder) == status, "a held job is not written again and again"
    assert "starting broken" not in container.log
    assert container.execute("supervisorctl", "status", "pod").split()[1] == "RUNNING"

    drop(volume, "broken", steps=2)
    unreadable.unlink()
    wait_until(lambda: is_done(folder), container, "end of the fixed job")
    assert container.log.count("starting broken") == 1
    assert list(losses(folder)) == [1, 2]


RESTARTS = int(os.environ.get("RESTARTS", "5"))


def test_restarts_change_no_file_and_run_nothing_again(
    served: tuple[Volume, podman.Container], report: list[str]
) -> None:
    """Of the container itself, on a volume with jobs that are done and one that is held. Five here, since each takes
    ten seconds; ``make test-image RESTARTS=100 TESTS=restarts`` does a hundred."""
    volume, container = served
    held = drop(volume, "wrong", method="ful")
    wait_until(lambda: phase_of(held) == "held", container, "word of the wrong job", 60)
    wait_until(lambda: is_done(volume.run("sent")), container, "end of the job in the environment")
    restart = ("podman", "--runtime", "runc", "restart", "--time", str(GRACE), container.id)
    podman.command(*restart)
    wait_until(lambda: container.log.count("sent is done") >= 1, container, "word that the job is done", 60)
    before = sizes(volume)
    runs = container.log.count("--- ")
    begun = time.monotonic()
    for count in range(2, RESTARTS + 1):
        podman.command(*restart)
        wait_until(says(container, "sent is done", count), container, "another start", 60)
    report.append(f"a restart of the container to its first look: {(time.monotonic() - begun) / (RESTARTS - 1):.1f} s")
    assert sizes(volume) == before
    assert container.log.count("--- ") == runs
    assert container.stop(GRACE) < GRACE - 2


# How start.sh is run where its output goes to a plain file, as some platforms and people do.
TO_A_FILE = """
/opt/fluxpod/start.sh > /run/said.txt 2>&1 &
for _ in $(seq 600); do grep -q 'sent is done' /run/said.txt && break; sleep 0.1; done
kill -TERM $!; wait $!
cat /run/said.txt
"""


def test_a_plain_file_gets_every_line(served: tuple[Volume, podman.Container]) -> None:
    volume, container = served
    wait_until(lambda: is_done(volume.run("sent")), container, "end of the job in the environment")
    words = podman.run_words("--rm", "--volume", f"{volume.root}:/workspace", "--env", "FLUXPOD_QUIET_SECONDS=1")
    said = podman.command(*words, podman.IMAGE, "bash", "-c", TO_A_FILE, timeout=120)
    order = ["page: port 7860", "watching /workspace/jobs", "sent is done", "stopped: pod"]
    assert [said.count(line) for line in order] == [1] * len(order), said
    assert [said.index(line) for line in order] == sorted(said.index(line) for line in order)


# ---------------------------------------------------------------- stopped and killed

CHAIN = TWO | {
    "steps": 1000,  # until the last start, however fast this machine is
    "save": {"every": 5},
    "sample": {"every": 100, "prompts": [f"a {n} circle" for n in range(16)], "width": 64, "height": 64, "steps": 4},
}


def stopped(volume: Volume, container: podman.Container, folder: RunFolder) -> Status:
    """SIGTERM to the container: it ends by itself within the grace, and what it leaves is whole."""
    seconds = container.stop(GRACE)
    facts = json.loads(podman.command("podman", "inspect", container.id))[0]["State"]
    assert facts["ExitCode"] == 0, container.log[-4000:]
    assert seconds < GRACE
    assert not half_written(volume)
    assert not folder.lease.exists()
    assert not list(folder.processes.glob("*.json"))
    status = status_of(folder)
    assert (status.phase, status.code) == ("pending", STOPPED), status
    return status


def test_sigterm_in_every_phase_then_sigkill_and_the_run_ends_as_if_nothing_had_been(
    tmp_path: Path, flux_tiny: Path, report: list[str]
) -> None:
    volume = lay_out(tmp_path, flux_tiny)
    folder = drop(volume, "chain", **CHAIN)
    took: list[str] = []

    def interrupted(what: str, reached: Callable[[], object]) -> Status:
        with start(volume) as container:
            wait_until(reached, container, what)
            begun = time.monotonic()
            status = stopped(volume, container, folder)
            took.append(f"{what} {time.monotonic() - begun:.1f} s")
            return status

    status = interrupted("preparing", lambda: phase_of(folder) == "preparing")
    assert "before training" in status.message
    assert not folder.metrics.exists()

    status = interrupted("caching", lambda: (folder.processes / "child-1.json").exists())
    assert "before training" in status.message
    assert not folder.metrics.exists()

    status = interrupted("sampling", lambda: len(list(folder.samples.glob("*.png"))) > 1)
    last = status.step

    status = interrupted("training", lambda: steps_told(folder) > last + 2)
    assert status.step > last + 2
    assert list(losses(folder)) == list(range(1, status.step + 1))
    last = status.step

    drop(volume, "chain", **CHAIN | {"save": {"every": 1}})
    with start(volume, FLUXPOD_QUIET_SECONDS="3") as container:  # what was known stays while it waits
        wait_until(lambda: "unchanged" in status_of(folder).message, container, "word that it waits", 60)
        assert f"so far: step {last} of" in status_of(folder).message
        wait_until(lambda: phase_of(folder) == "preparing", container, "preparing")
        assert status_of(folder).step == last
        container.stop(GRACE)
    status = interrupted("saving", lambda: steps_told(folder) > last and list(folder.states.glob(".*.part")))
    assert status.step > last
    assert list_states(folder.states)[0][-1].step == status.step
    last = status.step
    report.append(f"SIGTERM to end: {', '.join(took)}")

    steps = last + 20
    drop(volume, "chain", **CHAIN | {"steps": steps})
    with start(volume) as first, start(volume) as rival:
        wait_until(lambda: Lease.read(folder.lease), first, "start of the job")
        owner = Lease.read(folder.lease)
        assert owner
        inside = first.execute("readlink", "/proc/self/ns/pid").strip()
        busy, idle = (first, rival) if inside == owner.pid_space else (rival, first)
        wait_until(says(idle, "another pod runs it"), idle, "word of the other pod", 120)
        assert "going on at step" not in idle.log
        wait_until(lambda: steps_told(folder) > last + 2, busy, "training")
        podman.command("podman", "--runtime", "runc", "kill", busy.id)
        assert "going on at step" in busy.log
        state = list_states(folder.states)[0][-1]
        killed = time.monotonic()
        with start(volume) as third:
            owners = [owner.owner]

            def watched() -> bool:
                lease = Lease.read(folder.lease)
                if lease and lease.owner not in owners:
                    owners.append(lease.owner)
                    report.append(f"SIGKILL to another pod's lease: {time.monotonic() - killed:.0f} s")
                return is_done(folder)

            wait_until(watched, third, "end of the run")
            went_on = [c for c in (idle, third) if f"going on at step {state.step} of {steps}" in c.log]
            assert len(went_on) == 1
            assert len(owners) == 2
            for container in (idle, third):
                wait_until(says(container, "chain is done"), container, "word that the job is done", 90)
                assert container.is_running
            time.sleep(5)
            assert phase_of(folder) == "done"
    assert list(losses(folder)) == list(range(1, steps + 1))
    assert Outcome.read(folder.outcome) == Outcome(0, f"all {steps} steps are done", steps)
    assert not half_written(volume)
    text = folder.log.read_text(errors="replace")
    assert text.count(f"saved the state of step {steps} in") == 1


@pytest.mark.parametrize("trouble", [Fault("^GET /cdn/", stall=600), Fault("^GET /cdn/", status=503)], ids=str)
def test_sigterm_during_a_download_is_answered(
    tmp_path: Path, flux_tiny: Path, report: list[str], trouble: Fault
) -> None:
    """While bytes do not come, and while it waits before the next try."""
    volume = lay_out(tmp_path, flux_tiny)
    with LoopbackHub() as hub:
        hub.repos["me/tiny"] = Repo(flux_tiny)
        hub.fail(trouble)
        folder = drop(volume, "fetched", base="me/tiny")
        with start(volume, HF_ENDPOINT=hub.endpoint) as container:
            wait_until(lambda: any("/cdn/" in request for request in hub.requests), container, "transfer", 120)
            if trouble.status:
                wait_until(lambda: "rying again in" in folder.log.read_text(), container, "word of the next try", 120)
            time.sleep(2)
            begun = time.monotonic()
            stopped(volume, container, folder)
            seconds = time.monotonic() - begun
            report.append(f"SIGTERM to end, {'between tries' if trouble.status else 'in'} a download: {seconds:.1f} s")
        hub.faults.clear()
        with start(volume, HF_ENDPOINT=hub.endpoint) as container:  # what was fetched is gone on with
            wait_until(folder.run_file.exists, container, "end of the download")


# On a CPU torch.compile asks for a C++ compiler, which the image does without. This one takes for ever, as those of a
# GPU's kernels may seem to; TERM reaches it too, being of the trainer's process group.
COMPILER = "#!/bin/sh\n{first}\necho called >> /workspace/called\nexec sleep 1000\n"


@pytest.mark.parametrize("hears", [True, False])
def test_sigterm_while_a_step_compiles_is_answered(
    volume: Volume, tmp_path: Path, report: list[str], hears: bool
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(COMPILER.format(first="" if hears else "trap '' TERM"))
    compiler.chmod(0o755)
    folder = drop(volume, "compiled", plan={"processes": 1, "compile": True}, sample={"prompts": []})
    mount = ("--volume", f"{compiler}:/usr/local/bin/g++:ro")
    called = volume.root / "called"
    with start(volume, *mount) as container:
        wait_until(called.exists, container, "compiler")
        begun = time.monotonic()
        status = stopped(volume, container, folder)
        seconds = time.monotonic() - begun
        report.append(
            f"SIGTERM to end, in a compile that {'dies of it' if hears else 'does not hear it'}: {seconds:.1f} s"
        )
        assert "the newest state stands" in status.message
    if hears:
        return
    called.unlink()
    with start(volume, *mount) as container:
        wait_until(called.exists, container, "compiler")
        begun = time.monotonic()
        podman.command("podman", "--runtime", "runc", "kill", "--signal", "TERM", container.id)
        time.sleep(1)
        container.stop(GRACE)  # the second one
        seconds = time.monotonic() - begun
        report.append(f"two SIGTERM to end, in a compile: {seconds:.1f} s")
        assert seconds < GRACE / 2
        assert not half_written(volume)
        assert not folder.lease.exists()


def test_a_dead_machines_run_is_taken_over_and_a_living_ones_never(volume: Volume, report: list[str]) -> None:
    """Two pods with ids of their own, and the first one's lease as another machine would have left it."""
    folder = drop(volume, "moved", steps=1000, save={"every": 2})
    with start(volume, RUNPOD_POD_ID="first") as first:
        wait_until(lambda: list_states(folder.states)[0], first, "state")
        with start(volume, RUNPOD_POD_ID="second") as second:
            wait_until(says(second, "another pod runs it"), second, "word of the other pod", 120)
            time.sleep(LEASE_SECONDS + 3)  # a lease that moves is left alone however long one watches
            assert "starting moved" not in second.log
            assert first.log.count("starting moved") == 1
            podman.command("podman", "--runtime", "runc", "kill", first.id)
            state, killed = list_states(folder.states)[0][-1], time.monotonic()
            lease = Lease.read(folder.lease)
            assert lease
            write_json(folder.lease, asdict(replace(lease, boot="00000000-another-machine")))
            wait_until(says(second, "starting moved"), second, "takeover", 120)
            waited = time.monotonic() - killed
            assert waited > LEASE_SECONDS
            report.append(
                f"SIGKILL to the other machine's start, FLUXPOD_LEASE_SECONDS={LEASE_SECONDS:g}: {waited:.0f} s"
            )
            wait_until(says(second, f"going on at step {state.step} of"), second, "resume", 120)
            second.stop(GRACE)
    assert not half_written(volume)


# ---------------------------------------------------------------- GPUs that are not there


PAGE = """
import os, urllib.request
request = urllib.request.Request(f"http://127.0.0.1:{os.environ['FLUXPOD_PAGE_PORT']}/")
request.add_header("Authorization", "Basic Om1l")  # ":me" in base64
print(urllib.request.urlopen(request, timeout=20).read().decode())
"""
CARD = "NVIDIA H100 80GB HBM3, 81559, 81000, 580.95.05, 9.0, GPU-{index}, [N/A]"


def test_no_gpu_holds_a_real_model_and_two_gpus_take_it_up(tmp_path: Path, flux_tiny: Path) -> None:
    """There is no GPU here, so with two on paper it comes as far as the probe; the trainer's own are tests/gpu's."""
    volume = lay_out(tmp_path / "volume", flux_tiny)
    lay_out_flux_dev(volume.models / "flux-dev", flux_tiny)
    folder = drop(volume, "real", base="models/flux-dev", learning_rate=1e-5, plan={})
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    smi.chmod(0o755)
    mount = ("--volume", f"{smi}:/usr/local/bin/nvidia-smi:ro")

    with start(volume, *mount, RUNPOD_GPU_COUNT="2", FLUXPOD_PASSWORD="me") as container:
        wait_until(lambda: phase_of(folder) == "held", container, "word that there is no GPU")
        status = status_of(folder)
        assert status.code == POD_WRONG
        assert "This pod has no GPU" in status.message
        assert "RUNPOD_GPU_COUNT says 2 GPUs, nvidia-smi shows 0" in container.log
        page = container.execute("python", "-c", PAGE)
        for words in ("GPUs: none", "No devices were found", "RUNPOD_GPU_COUNT says 2", "This pod has no GPU"):
            assert words in page
        assert "captions: 10/10" in container.log
        time.sleep(5)
        assert container.is_running
        assert status_of(folder) == status
        assert container.log.count("starting real") == 1

        lines = "\n".join(f"echo '{index}, {CARD.format(index=index)}'" for index in range(2))
        smi.write_text(f"#!/bin/sh\n{lines}\n")
        podman.command("podman", "--runtime", "runc", "restart", "--time", str(GRACE), container.id)
        wait_until(lambda: "on GPU 0, 1" in container.log, container, "start on two GPUs")
        wait_until(lambda: "does not work with torch" in status_of(folder).message, container, "word of the probe")
        assert (phase_of(folder), status_of(folder).code) == ("held", POD_WRONG)
        assert container.log.count("RUNPOD_GPU_COUNT says") == 1
        time.sleep(5)
        assert container.log.count("starting real") == 2, "a held job is not started again and again"
        assert container.is_running


# ---------------------------------------------------------------- the pod's own end


def test_a_finished_job_stops_the_pod_once_and_so_do_its_hours(volume: Volume) -> None:
    folder = drop(volume, "ends", when_done="stop", steps=2)
    with LoopbackRunPod() as api:
        with start(volume, **api.environment()) as container:
            wait_until(api.actions, container, "call of the API")
            assert phase_of(folder) == "done"
            wait_until(lambda: "RunPod says that this pod stops" in container.log, container, "its answer", 60)
            assert api.actions() == [("pod-1", "stop")]
            api.pods["pod-1"]["status"] = "RUNNING"  # its user starts it again, to look at the result
            podman.command("podman", "--runtime", "runc", "restart", "--time", str(GRACE), container.id)
            wait_until(lambda: "was started again since" in container.log, container, "word of the mark", 60)
            time.sleep(3)
            assert api.actions() == [("pod-1", "stop")]
            assert container.is_running
        long = drop(volume, "long", steps=100_000)
        with start(volume, **api.environment(), FLUXPOD_MAX_HOURS="0.02") as container:
            wait_until(lambda: len(api.actions()) > 1, container, "call of the API after 72 s")
            assert phase_of(long) == "pending"
            assert status_of(long).code == STOPPED
            wait_until(lambda: "nothing is started any more" in container.log, container, "word of the hours", 60)
            time.sleep(3)
            assert container.is_running
            assert api.actions() == [("pod-1", "stop")] * 2
    assert not half_written(volume)
