"""``fluxpod run`` from a job file to its outcome: the real launcher, real processes, real signals, on CPU.

What can be seen with the trainer alone is in tests/trainer/test_train.py. A start takes ten seconds of imports, so few
are made, and much is asked of each.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.flux_tiny import SINGLE_FILE
from bootstrap.outcome import Outcome, PodError
from bootstrap.processes import living, reap, start_time
from bootstrap.state import State, list_states, read_state, verify
from bootstrap.tensor_files import read_tensors
from bootstrap.volume import RunFolder, Volume, read_json
from bootstrap.wanted import Text, Wanted
from entrypoint.run import require_room
from entrypoint.status import Status
from tests.bases import lay_out_flux_dev
from tests.loopback_hub import LoopbackHub, Repo
from tests.runs import make_job, make_run
from tests.training import JOB, fill_volume, read_metrics, shared_folder

pytestmark = pytest.mark.timeout(900)  # four starts in one fixture, on a machine that may have other things to do

ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + "aB3" * 11 + "x"
CHAIN: dict[str, Any] = JOB | {
    "name": "chain",
    "steps": 10,
    "save": {"every": 3},
    "sample": {"every": 5, "prompts": ["a large red circle"], "width": 64, "height": 64, "steps": 2},
    "plan": {"processes": 2},
}


@dataclass
class Program:
    """A ``fluxpod run`` under way."""

    process: subprocess.Popen[bytes]
    console: Path
    folder: RunFolder
    beat: int  # the status's heartbeat before

    def said(self) -> str:
        return self.console.read_text(errors="replace")

    def ends(self, limit: float = 400.0) -> int:
        """Its exit code. What takes longer is killed, and all that it started."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            reap(self.folder.processes)
            raise AssertionError(f"still running after {limit:g} s:\n{self.said()}") from None

    def wait_until(self, condition: Callable[[], object], limit: float = 400.0) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.said()}"
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        """Until this start (not the one before) has told of a step."""

        def there() -> bool:
            status = Status.read(self.folder.status)
            training = status is not None and status.phase == "training" and status.heartbeat > self.beat
            return training and status is not None and status.step >= step

        self.wait_until(there)

    def pid_of(self, role: str) -> int:
        return living(self.folder.processes)[role]


def begin(volume: Volume, job: dict[str, Any] | str, **environment: str) -> Program:
    """Drops a job and starts it. JSON is YAML."""
    text = job if isinstance(job, str) else json.dumps(job, indent=1)
    name = "wrong" if isinstance(job, str) else job["name"]
    file = volume.jobs / f"{name}.yaml"
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
    folder = volume.run(name)
    last = Status.read(folder.status)
    console = volume.root.with_name(f"{volume.root.name}-{name}-{time.monotonic_ns()}.txt")
    with console.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "entrypoint.cli", "run", str(file), "--volume", str(volume.root)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,  # a machine with GPUs tests the same
        )
    return Program(process, console, folder, last.heartbeat if last else 0)


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in root.rglob("*")}


def outcome_of(folder: RunFolder) -> Outcome:
    outcome = Outcome.read(folder.outcome)
    assert outcome is not None
    return outcome


def status_of(folder: RunFolder) -> Status:
    status = Status.read(folder.status)
    assert status is not None
    return status


def losses(folder: RunFolder) -> dict[int, float]:
    lines = read_metrics(folder.metrics)
    assert len({line["step"] for line in lines}) == len(lines)
    return {int(line["step"]): line["loss"] for line in lines}


# ---------------------------------------------------------------- interrupted, and not


def uninterrupted(root: Path, flux_tiny: Path) -> None:
    program = begin(fill_volume(root / "volume", flux_tiny), CHAIN)
    code = program.ends()
    (root / "told.json").write_text(json.dumps({"code": code, "said": program.said()}))


def interrupted(root: Path, flux_tiny: Path, cache: Path) -> None:
    """The same job, killed in two ways, stopped, and run to its end: what was seen of each start."""
    volume = fill_volume(root / "volume", flux_tiny)
    shutil.copytree(cache, volume.cache, dirs_exist_ok=True)
    told: list[dict[str, Any]] = []

    def seen(program: Program, **facts: Any) -> None:
        code = program.ends()
        steps = list(losses(program.folder)) if program.folder.metrics.exists() else []
        states = [state.step for state in list_states(program.folder.states)[0]]
        kept = {"code": code, "said": program.said(), "steps": steps, "states": states}
        told.append(kept | {"status": read_json(program.folder.status)} | facts)

    program = begin(volume, CHAIN)
    program.wait_for_step(4)
    workers = [program.pid_of("trainer-0"), program.pid_of("trainer-1")]
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)  # or they would be done before the next start is up
    for victim in (program.process.pid, program.pid_of("child-0")):
        os.kill(victim, signal.SIGKILL)
    seen(program, orphans=[worker for worker in workers if start_time(worker)])

    program = begin(volume, CHAIN)
    program.wait_for_step(5)
    orphans = [worker for worker in workers if start_time(worker)]
    for pid in living(program.folder.processes).values():
        os.kill(pid, signal.SIGKILL)
    seen(program, orphans=orphans)

    program = begin(volume, CHAIN)
    program.wait_for_step(5)
    program.process.terminate()
    program.ends()
    seen(program, outcome=read_json(program.folder.outcome), living=living(program.folder.processes))

    seen(begin(volume, CHAIN))
    (root / "told.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path) -> Path:
    return shared_folder(tmp_path_factory, "uninterrupted", lambda root: uninterrupted(root, flux_tiny))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path, whole: Path) -> Path:
    cache = whole / "volume" / "cache"
    return shared_folder(tmp_path_factory, "interrupted", lambda root: interrupted(root, flux_tiny, cache))


def told(scenario: Path) -> Any:
    return json.loads((scenario / "told.json").read_text())


def chain(scenario: Path) -> RunFolder:
    return Volume(scenario / "volume").run("chain")


def newest(scenario: Path) -> State:
    return list_states(chain(scenario).states)[0][-1]


def test_a_job_is_run_to_its_output(whole: Path) -> None:
    folder, report = chain(whole), told(whole)
    assert report["code"] == 0, report["said"]
    assert list(losses(folder)) == list(range(1, 11))
    assert outcome_of(folder) == Outcome(0, "all 10 steps are done", 10)
    status = status_of(folder)
    assert (status.phase, status.step, status.steps, status.code) == ("done", 10, 10, 0)
    last = newest(whole)
    verify(last)
    assert (folder.output / "chain.safetensors").samefile(last.model)
    assert [state.step for state in list_states(folder.states)[0]] == [9, 10]
    names = [f"step-{step:06d}-00.png" for step in (0, 5, 10)]
    assert sorted(path.name for path in folder.samples.iterdir()) == names
    assert list(folder.tensorboard.iterdir())
    assert not living(folder.processes)
    assert not list(Volume(whole / "volume").root.rglob("*.part"))


def test_it_says_what_it_does_in_the_right_order(whole: Path) -> None:
    lines = ["2 circle|captions: 10/10", "\nweights: ", "images .* 2 x 2", "starting at step 0 of 10", "encoding 10"]
    lines += [r"encoded \d+/\d+ captions", r"encoded \d+/\d+ images", "step 10/10  loss", "done: all 10 steps are done"]
    said = told(whole)["said"]
    places = [re.search(line, said) for line in lines]
    assert all(places), said
    starts = [place.start() for place in places if place]
    assert starts == sorted(starts)
    assert "Traceback" not in said


def test_the_pictures_are_encoded_once_by_two_processes(whole: Path) -> None:
    assert len(re.findall(r"encoded 5/5 images", told(whole)["said"])) == 2


@pytest.mark.slow
def test_kill_9_of_entrypoint_and_launcher_leaves_workers_which_the_next_start_ends(broken: Path) -> None:
    killed, again, *_ = told(broken)
    assert killed["code"] == -signal.SIGKILL
    assert len(killed["orphans"]) == 2
    assert again["orphans"] == []
    assert "going on at step 3 of 10" in again["said"]


@pytest.mark.slow
def test_kill_9_of_everything_goes_on_at_the_newest_state(broken: Path) -> None:
    _, killed, again, _ = told(broken)
    assert killed["code"] == -signal.SIGKILL
    assert f"going on at step {killed['states'][-1]} of 10" in again["said"]


@pytest.mark.slow
def test_a_stop_finishes_the_step_and_saves_its_state(broken: Path) -> None:
    stopped, again = told(broken)[2:]
    step = stopped["steps"][-1]
    assert stopped["code"] == 75
    assert stopped["outcome"]["code"] == 75
    assert stopped["outcome"]["step"] == step
    assert stopped["outcome"]["reason"].startswith(f"stopped by a signal after step {step}")
    assert (stopped["status"]["phase"], stopped["status"]["code"], stopped["status"]["step"]) == ("pending", 75, step)
    assert 5 <= step < 10
    assert stopped["states"][-1] == step
    assert stopped["living"] == {}
    assert f"going on at step {step} of 10" in again["said"]


@pytest.mark.slow
def test_an_interrupted_run_equals_an_uninterrupted_one_to_the_bit(broken: Path, whole: Path) -> None:
    """Two kills and a stop later: every step once, the same losses, weights, optimizer and pictures."""
    report = told(broken)[-1]
    assert report["code"] == 0, report["said"]
    assert losses(chain(broken)) == losses(chain(whole))
    one, other = newest(broken), newest(whole)
    assert one.step == other.step == 10
    assert one.model.read_bytes() == other.model.read_bytes()
    assert one.optimizer.read_bytes() == other.optimizer.read_bytes()
    output = Path("output") / "chain.safetensors"
    assert (chain(broken).root / output).read_bytes() == (chain(whole).root / output).read_bytes()
    for picture in chain(whole).samples.iterdir():
        assert (chain(broken).samples / picture.name).read_bytes() == picture.read_bytes()


def test_a_finished_job_run_again_changes_no_file(whole: Path) -> None:
    volume = Volume(whole / "volume")
    before = snapshot(volume.root)
    program = begin(volume, CHAIN)
    assert program.ends() == 0
    assert "chain is done already" in program.said()
    assert snapshot(volume.root) == before


@pytest.mark.slow
def test_more_steps_and_fewer_processes_go_on_and_a_second_signal_leaves_at_once(
    broken: Path, whole: Path, tmp_path: Path, flux_tiny: Path
) -> None:
    volume = fill_volume(tmp_path / "volume", flux_tiny)
    for name in ("cache", "runs"):
        shutil.copytree(broken / "volume" / name, volume.root / name, dirs_exist_ok=True)
    program = begin(volume, CHAIN | {"steps": 500, "plan": {"processes": 1}})
    program.wait_for_step(12)
    workers = living(program.folder.processes)
    program.process.terminate()
    time.sleep(0.05)
    program.process.terminate()
    begun = time.monotonic()
    assert program.ends() == 128 + signal.SIGTERM
    assert time.monotonic() - begun < 10
    assert len(workers) == 3
    assert not any(start_time(pid) for pid in workers.values())
    said = program.said()
    assert "going on at step 10 of 500" in said
    assert said.count("saved on 2 processes, going on with 1") == 1
    steps = losses(program.folder)
    assert list(steps) == list(range(1, len(steps) + 1))
    assert {step: steps[step] for step in range(1, 11)} == losses(chain(whole))
    assert read_state(program.folder.states / "step-000010").manifest.processes == 2


# ---------------------------------------------------------------- before training


def test_preparing_is_stopped_and_its_crash_told(tmp_path: Path, flux_tiny: Path) -> None:
    volume = fill_volume(tmp_path / "volume", flux_tiny)
    job = CHAIN | {"name": "prepared"}

    program = begin(volume, job)
    program.wait_until(lambda: "child-1" in living(program.folder.processes))
    os.kill(program.pid_of("child-1"), signal.SIGKILL)
    assert program.ends() == 1
    status = status_of(program.folder)
    assert (status.phase, status.code) == ("failed", 1)
    assert "encoding failed (killed by SIGKILL" in status.message
    assert "Traceback" not in program.said()

    program = begin(volume, job)
    program.wait_until(lambda: "child-1" in living(program.folder.processes))
    children = living(program.folder.processes)
    program.process.terminate()
    begun = time.monotonic()
    assert program.ends() == 75
    assert time.monotonic() - begun < 10
    assert not any(start_time(pid) for pid in children.values())
    status = status_of(program.folder)
    assert (status.phase, status.code) == ("pending", 75)
    assert "before training" in status.message


INVALID = """\
name: wrong
base: flux-tiny
method: ful
datasets:
  - path: datasets/drawn
lerning_rate: 1e-5
steps: many
resolution: 500
"""


def test_an_invalid_job_is_held_with_all_its_problems(tmp_path: Path) -> None:
    program = begin(Volume(fill_volume(tmp_path / "volume").root), INVALID)
    assert program.ends() == 64
    status = status_of(program.folder)
    assert (status.phase, status.code) == ("held", 64)
    for line, key in ((3, "method"), (6, "lerning_rate"), (7, "steps"), (8, "resolution")):
        assert f"wrong.yaml:{line}: {key}: " in status.message
    assert status.message in program.said()


def test_broken_pictures_are_all_named(tmp_path: Path, flux_tiny: Path) -> None:
    volume = fill_volume(tmp_path / "volume", flux_tiny)
    first, second = sorted(volume.datasets.rglob("*.png"))[:2]
    first.write_bytes(first.read_bytes()[:-300])
    second.write_bytes(b"not a picture")
    program = begin(volume, CHAIN)
    assert program.ends() == 64
    status = status_of(program.folder)
    assert status.phase == "held"
    assert first.name in status.message
    assert second.name in status.message
    assert not (program.folder.root / "states").exists()
    assert "Traceback" not in program.said()


def test_a_real_model_without_a_gpu_is_prepared_and_then_held(tmp_path: Path, flux_tiny: Path) -> None:
    volume = fill_volume(tmp_path / "volume")
    lay_out_flux_dev(volume.models / "flux-dev", flux_tiny)
    job = CHAIN | {"name": "real", "base": "models/flux-dev", "learning_rate": 1e-5, "plan": {}}
    program = begin(volume, job)
    assert program.ends() == 65
    status = status_of(program.folder)
    assert (status.phase, status.code) == ("held", 65)
    assert "This pod has no GPU" in status.message
    assert "captions: 10/10" in program.said()


# ---------------------------------------------------------------- a crash


def test_a_crash_of_the_trainer_is_told_with_the_end_of_its_log(whole: Path, tmp_path: Path, flux_tiny: Path) -> None:
    volume = fill_volume(tmp_path / "volume", flux_tiny)
    shutil.copytree(whole / "volume" / "cache", volume.cache, dirs_exist_ok=True)
    job = CHAIN | {"name": "crash", "optimizer": "tests.entrypoint.test_run.Stumbles", "sample": {}, "plan": {}}
    program = begin(volume, job)
    assert program.ends() == 1
    status = status_of(program.folder)
    assert (status.phase, status.code) == ("failed", 1)
    assert status.message == outcome_of(program.folder).reason
    assert status.message == "ZeroDivisionError: a stone in the way (process 0, training)"
    said = program.said()
    assert f"The end of {program.folder.log}:" in said
    assert "a stone in the way" in said[said.index("The end of") :]
    assert not living(program.folder.processes)


class Stumbles(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError("a stone in the way")


# ---------------------------------------------------------------- bases


@pytest.mark.slow
def test_a_single_file_with_its_encoders(whole: Path, tmp_path: Path, flux_tiny: Path) -> None:
    """The file is the same model as the folder's, so it trains alike; in one process, so not to the bit."""
    volume = fill_volume(tmp_path / "volume", flux_tiny)
    shutil.copytree(whole / "volume" / "cache", volume.cache, dirs_exist_ok=True)
    base = {
        "base": f"models/flux-tiny/{SINGLE_FILE}",
        "vae": "models/flux-tiny/vae",
        "text_encoders": {"clip": "models/flux-tiny/text_encoder", "t5": "models/flux-tiny/text_encoder_2"},
    }
    program = begin(volume, CHAIN | base | {"name": "single", "steps": 2, "sample": {}, "plan": {}})
    assert program.ends() == 0, program.said()
    assert "cache: everything is there" in program.said()
    expected = losses(chain(whole))
    # As far apart as tests/trainer/test_train.py has it.
    assert losses(program.folder) == pytest.approx({step: expected[step] for step in (1, 2)}, rel=1e-2)


def test_a_base_from_the_hub_leaves_the_token_nowhere(
    hub: LoopbackHub, tmp_path: Path, flux_tiny_schnell: Path
) -> None:
    """schnell, gated, fetched by id with HF_TOKEN; trained as an adapter."""
    hub.repos["me/schnell"] = Repo(flux_tiny_schnell, gated=True, readers=(TOKEN,))
    hub.tokens.add(TOKEN)
    volume = fill_volume(tmp_path / "volume")
    job = JOB | {"name": "fetched", "base": "me/schnell", "method": "lora", "steps": 200, "learning_rate": 1e-4}
    program = begin(volume, job, HF_TOKEN=TOKEN, HF_ENDPOINT=hub.endpoint)
    program.wait_for_step(2)
    environments = {
        role: Path(f"/proc/{pid}/environ").read_bytes() for role, pid in living(program.folder.processes).items()
    }
    program.process.terminate()
    assert program.ends() == 75, program.said()
    assert f"Bearer {TOKEN}" in hub.authorizations
    assert {"child-0", "trainer-0"} <= set(environments)
    assert TOKEN.encode() in environments.pop("entrypoint")
    assert not any(TOKEN.encode() in environment for environment in environments.values())
    assert TOKEN not in program.said()
    holding = [path for path in volume.root.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert holding == []
    weights = read_tensors(list_states(program.folder.states)[0][-1].model)
    assert all(name.startswith("lora_unet_") for name in weights)


def test_a_refused_download_is_held_as_such(hub: LoopbackHub, tmp_path: Path, flux_tiny_schnell: Path) -> None:
    hub.repos["me/schnell"] = Repo(flux_tiny_schnell, gated=True)
    volume = fill_volume(tmp_path / "volume")
    program = begin(volume, CHAIN | {"name": "refused", "base": "me/schnell"}, HF_ENDPOINT=hub.endpoint)
    assert program.ends() == 69
    status = status_of(program.folder)
    assert (status.phase, status.code) == ("held", 69)
    assert "HF_TOKEN" in status.message
    assert "Traceback" not in program.said()


def test_a_cache_that_would_fill_the_volume_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, make_job(method="lora", resolution=[64, 128]))
    texts = {f"{number}": Text("x", False, "a.png") for number in range(1000)}
    missing = Wanted(texts, {}, {})
    need = missing.bytes(run.weights)
    require_room(missing, run, free=need)
    with pytest.raises(PodError) as caught:
        require_room(missing, run, free=need - 1)
    for words in (
        "1000 captions takes",
        "GB free",
        "fluxpod clean",
        "fewer {a|b} and lines",
        "train at one resolution",
    ):
        assert words in str(caught.value)
