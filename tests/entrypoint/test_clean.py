from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bootstrap.manifest import KnownFile, Manifest, find_fetched
from bootstrap.outcome import DONE, JOB_WRONG, Outcome
from bootstrap.state import Validated, folder_name, list_states
from bootstrap.volume import Volume
from entrypoint import cli
from entrypoint.clean import KINDS, Kind, clean, find
from tests.states import make_state

DEV = "black-forest-labs/FLUX.1-dev"
COMMIT = "c0ffee" + "0" * 34
JOB = "name: {name}\nbase: {base}\nmethod: lora\ndatasets: [{{path: datasets/x}}]\n"


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    """Two models, caches, a run that is done, and what a user keeps there; all of it 30 days old."""
    made = Volume(tmp_path / "volume")
    made.create()
    fetch(made, DEV)
    fetch(made, "someone/flux-finetune")
    for name in ("shard-a.safetensors", "shard-b.safetensors", "inductor/x/kernel.so", "huggingface/hub/blob"):
        write(made.cache / name, 1000)
    for name in ("digests.json", "huggingface/token", "tmp/pod/x", "configs/y/config.json"):
        write(made.cache / name, 10)
    end(made, "flowers")
    for name in (
        "datasets/x/1.png",
        "models/mine.safetensors",
        "models/mine--folder/x.bin",
        "python/opt.py",
        "notes.txt",
    ):
        write(made.root / name, 5000)
    write(made.jobs / "flowers.yaml", 0, JOB.format(name="flowers", base=DEV))
    age(made.root, 30)
    return made


def write(path: Path, size: int, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if text else b"x" * size)


def fetch(volume: Volume, repo: str, commit: str = COMMIT) -> Path:
    folder = volume.models / repo.replace("/", "--") / commit
    write(folder / "transformer" / "model.safetensors", 20_000)
    Manifest(repo, commit, ("main",), {"transformer/model.safetensors": KnownFile(20_000, "0")}, complete=True).write(
        folder
    )
    return folder


def end(volume: Volume, name: str, code: int = DONE, phase: str = "done") -> None:
    run = volume.run(name)
    for step in (250, 500, 750):
        make_state(run.states, step, whole=step == 750)
    write(run.output / f"{name}.safetensors", 900)
    write(run.log, 100)
    write(run.samples / "step-000250-00.png", 100)
    Outcome(code, "", 750).write(run.outcome)
    run.status.write_text(json.dumps({"phase": phase, "message": ""}))


def age(root: Path, days: float) -> None:
    then = time.time() - days * 86400
    for path in (*root.rglob("*"), root):
        os.utime(path, (then, then), follow_symlinks=False)


def names(volume: Volume, days: float = 7, kinds: Sequence[Kind] = KINDS) -> list[str]:
    return sorted(str(each.path.relative_to(volume.root)) for each in find(volume, days, kinds, time.time())[0])


def everything(volume: Volume) -> set[str]:
    return {str(path.relative_to(volume.root)) for path in volume.root.rglob("*") if path.is_file()}


OLD = [
    "cache/huggingface/hub",
    "cache/inductor",
    "cache/shard-*.safetensors",
    f"models/someone--flux-finetune/{COMMIT}",
    "runs/flowers/states/step-000250",
    "runs/flowers/states/step-000500",
    "runs/flowers/states/step-000750/optimizer.safetensors",
]


def test_what_may_go_is_listed_and_nothing_is_touched(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(volume)
    assert names(volume) == OLD
    assert clean(volume, yes=False) == DONE
    assert everything(volume) == before
    out = capsys.readouterr().out
    assert "someone/flux-finetune (main), named by no job" in out
    assert "Nothing was removed" in out
    assert "30 days" in out


def test_yes_removes_that_and_nothing_else(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(volume)
    assert cli.main(["clean", "--yes", "--volume", str(volume.root)]) == DONE
    gone = before - everything(volume)
    for path in gone:
        assert any(path.startswith(old.replace("shard-*.safetensors", "shard-")) for old in OLD), path
    assert "GB removed" in capsys.readouterr().out
    states, notes = list_states(volume.run("flowers").states)
    assert ([state.step for state in states], notes) == ([750], [])
    assert not states[0].resumable
    assert find_fetched(volume.models, DEV, "main")
    assert find_fetched(volume.models, "someone/flux-finetune", "main") is None
    assert volume.run("flowers").output.joinpath("flowers.safetensors").is_file()
    assert names(volume) == []


def test_what_is_young_stays(volume: Volume) -> None:
    assert names(volume, days=31) == []
    write(volume.cache / "shard-c.safetensors", 1000)
    by_path = {each.path.name: each for each in find(volume, 7, KINDS, time.time())[0]}
    assert by_path["shard-*.safetensors"].size == 2000
    by_path["shard-*.safetensors"].remove()
    assert [path.name for path in volume.cache.glob("shard-*")] == ["shard-c.safetensors"]


def test_kinds_can_be_chosen(volume: Volume) -> None:
    assert [name.split("/")[0] for name in names(volume, kinds=["models"])] == ["models"]
    assert cli.main(["clean", "--yes", "--only", "models", "--older-than", "1", "--volume", str(volume.root)]) == DONE
    assert len(names(volume)) == len(OLD) - 1


@pytest.mark.parametrize("phase", ["preparing", "training", "stopping"])
def test_nothing_that_a_running_job_may_need_goes(volume: Volume, phase: str) -> None:
    end(volume, "other", phase=phase)
    age(volume.root, 30)
    assert names(volume) == [name for name in OLD if name.startswith("runs/")]
    assert "other may be using" in find(volume, 7, KINDS, time.time())[1][0]


def test_a_lease_is_a_running_job(volume: Volume) -> None:
    volume.run("flowers").lease.write_text("{}")
    assert names(volume) == []


def test_states_of_runs_that_have_not_ended_well_stay(volume: Volume) -> None:
    end(volume, "held", code=JOB_WRONG, phase="held")
    end(volume, "again", phase="pending")  # edited since, to be longer
    make_state(volume.run("killed").states, 5)
    age(volume.root, 30)
    assert names(volume) == OLD


@pytest.mark.parametrize(
    "base", ["someone/flux-finetune", f"someone/flux-finetune@{COMMIT}", f"models/someone--flux-finetune/{COMMIT}"]
)
def test_a_model_that_a_job_names_stays(volume: Volume, base: str) -> None:
    write(volume.jobs / "b.yml", 0, JOB.format(name="b", base=base))
    assert not [name for name in names(volume) if name.startswith("models")]


def test_an_older_commit_goes_when_the_branch_moved_on(volume: Volume) -> None:
    old = fetch(volume, DEV, "b" * 40)
    Manifest(DEV, "b" * 40, ("v1",), {}, complete=True).write(old)
    age(volume.root, 30)
    assert f"models/black-forest-labs--FLUX.1-dev/{'b' * 40}" in names(volume)


def test_a_job_that_cannot_be_read_may_name_any_model(volume: Volume) -> None:
    write(volume.jobs / "b.yaml", 0, "x: [")
    found, kept = find(volume, 7, KINDS, time.time())
    assert not [each for each in found if each.kind == "models"]
    assert "b.yaml cannot be read" in kept[0]


def test_what_interrupted_writes_left(volume: Volume) -> None:
    left = [
        volume.models / "a--b" / COMMIT / "transformer" / ".x.1234.part",
        volume.cache / ".shard-x.m.1-2.part",
        volume.run("flowers").states / ".step-000800.part" / "model.safetensors",
    ]
    for path in left:
        write(path, 10)
    begun = Manifest("a/b", COMMIT, ("main",), {"transformer/x": KnownFile(20, "0")}, complete=False)
    begun.write(volume.models / "a--b" / COMMIT)
    assert len(names(volume, days=0)) == len(OLD)  # they may still be written
    age(volume.root, 2)
    assert len(names(volume, days=1)) == len(OLD) + len(left)
    clean(volume, yes=True, days=1)
    assert not [path for path in left if path.exists()]


def test_links_lead_to_what_somebody_else_keeps(volume: Volume, tmp_path: Path) -> None:
    other = Volume(tmp_path / "other")
    fetch(other, "x/y")
    write(other.cache / "inductor" / "k", 10)
    (volume.models / "x--y").symlink_to(other.models / "x--y")
    (volume.cache / "triton").symlink_to(other.cache / "inductor")
    (volume.runs / "linked").symlink_to(volume.run("flowers").root)
    age(volume.root, 30)
    age(other.root, 30)
    before = everything(other)
    assert names(volume) == OLD
    clean(volume, yes=True)
    assert everything(other) == before


def test_a_file_with_another_name_frees_nothing(volume: Volume) -> None:
    states = volume.run("flowers").states
    os.link(states / "step-000250" / "model.safetensors", volume.root / "kept.safetensors")
    sizes = {each.path.name: each.size for each in find(volume, 7, KINDS, time.time())[0]}
    assert sizes["step-000250"] < sizes["step-000500"]
    clean(volume, yes=True)
    assert (volume.root / "kept.safetensors").is_file()


def test_an_embedded_base_goes_when_no_job_names_it(volume: Volume) -> None:
    write(volume.models / "flux-tiny" / "x", 10)
    age(volume.root, 30)
    assert "models/flux-tiny" in names(volume)
    write(volume.jobs / "t.yaml", 0, JOB.format(name="t", base="flux-tiny"))
    assert "models/flux-tiny" not in names(volume)


def test_an_empty_volume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert clean(Volume(tmp_path), yes=True) == DONE
    assert "nothing to remove" in capsys.readouterr().out


def test_fetched_datasets_that_no_job_names_may_go(tmp_path: Path) -> None:
    volume = Volume(tmp_path)
    volume.create()
    links = volume.fetched / "links"
    for link, sha256 in (("https://share.example/a.zip?k=1", "a" * 64), ("https://share.example/b.zip", "b" * 64)):
        record = links / f"{hashlib.sha256(link.encode()).hexdigest()[:32]}.json"
        write(record, 0, json.dumps({"from": link, "sha256": sha256, "size": 1000}))
        write(links / f"{sha256}.zip", 1000)
    write(links / ".x.arrived.1.part", 500)
    write(links / "x.arrived", 400)
    for repo in ("me--set", "me--other"):
        write(volume.fetched / repo / COMMIT / "a.png", 3000)
    age(tmp_path, 30)
    paths = '[{path: "https://share.example/a.zip?k=1"}, {path: "hf://datasets/me/set@v1/train"}]'
    write(volume.jobs / "a.yaml", 0, f"name: a\nbase: flux-tiny\nmethod: lora\ndatasets: {paths}\n")
    found, _ = find(volume, 7, ("datasets",), time.time())
    assert [str(each.path.relative_to(volume.fetched)) for each in found] == [
        "me--other",
        f"links/{'b' * 64}.zip",
        "links/.x.arrived.1.part",
        "links/x.arrived",
    ]
    write(volume.jobs / "b.yaml", 0, "name: [")
    found, kept = find(volume, 7, ("datasets",), time.time())
    assert [each.path.name for each in found] == [".x.arrived.1.part", "x.arrived"]
    assert "b.yaml cannot be read" in kept[0]


def test_the_weights_of_the_lowest_validation_loss_stay(volume: Volume) -> None:
    end(volume, "best")
    for step, loss in ((250, 0.5), (500, 0.3), (750, 0.4)):
        shutil.rmtree(volume.run("best").states / folder_name(step))
        make_state(volume.run("best").states, step, whole=False, validation=Validated(loss, "these"))
    age(volume.root, 30)
    assert [name for name in names(volume) if "best" in name] == ["runs/best/states/step-000250"]
