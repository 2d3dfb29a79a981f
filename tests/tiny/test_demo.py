from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bootstrap.volume import RunFolder, Volume
from jobs.load import load_job
from tiny import demo
from tiny.scenes import UNSEEN
from tiny.score import is_new


def test_the_jobs_are_valid(tmp_path: Path) -> None:
    for path, method in zip(demo.prepare(Volume(tmp_path)), ("full", "lora"), strict=True):
        loaded = load_job(path)
        assert {warning.key for warning in loaded.warnings} <= {"learning_rate"}  # a small model needs a high one
        job = loaded.job
        assert (job.name, job.base, job.method, job.plan.processes) == (path.stem, "flux-tiny", method, 2)
        assert sum(map(is_new, job.sample.prompts)) * 2 == len(job.sample.prompts)


def test_the_pictures_show_and_say_what_is_new_and_stay_where_they_are(tmp_path: Path) -> None:
    assert demo.draw_hearts(tmp_path) == 24
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert all(word in (tmp_path / f"heart-{i:02d}.txt").read_text() for i in range(1, 25) for word in UNSEEN.values())
    assert demo.draw_hearts(tmp_path) == 0
    (tmp_path / "heart-02.png").unlink()
    (tmp_path / "heart-03.png").write_text("mine")
    assert demo.draw_hearts(tmp_path) == 1
    again = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert again == files | {"heart-03.png": b"mine"}


def test_it_prepares_a_volume_and_ends_with_the_runs_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[Path, Path]] = []

    def run_job(job: Path, volume: Path) -> int:
        calls.append((job, volume))
        return 65

    product = ModuleType("entrypoint.run")
    product.run_job = run_job  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "entrypoint.run", product)
    volume = tmp_path / "volume"
    assert demo.main(["--volume", str(volume)]) == 65
    assert calls == [(volume / "jobs" / "demo-full.yaml", volume)]
    assert len(list((volume / "datasets" / "hearts").rglob("*.png"))) == 24
    assert "ended with code 65" in capsys.readouterr().out
    (volume / "jobs" / "demo-full.yaml").write_text("mine")
    demo.main(["--volume", str(volume)])
    assert (volume / "jobs" / "demo-full.yaml").read_text() == "mine"


def test_the_figures_are_those_of_the_metrics(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for path in (run.output / "demo.safetensors", run.states / "step-000060" / "state.json"):
        path.parent.mkdir(parents=True)
        path.touch()
    lines = [{"step": step, "loss": 2.0 / step, "images_per_s": 10.0 * step} for step in (1, 2, 4)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = "\n".join(demo.summary(run))
    for words in ("output/demo.safetensors", "states/step-000060", "20.0 images/s"):
        assert words in told
    assert "first 2.0000, last 0.5000, over 3 steps" in told


def test_no_metrics_no_figures(tmp_path: Path) -> None:
    assert demo.summary(RunFolder(tmp_path)) == [f"everything of this run: {tmp_path}"]
