from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bootstrap.volume import RunFolder
from entrypoint import demo
from jobs.load import load_job


def test_the_job_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "demo.yaml"
    path.write_text(demo.JOB)
    loaded = load_job(path)
    assert {warning.key for warning in loaded.warnings} <= {"learning_rate"}  # high for a model that knows something
    assert (loaded.job.name, loaded.job.base, loaded.job.plan.processes) == ("demo", "flux-tiny", 2)


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
    assert calls == [(volume / "jobs" / "demo.yaml", volume)]
    assert len(list((volume / "datasets" / "demo").rglob("*.png"))) == demo.PICTURES
    assert "ended with code 65" in capsys.readouterr().out
    (volume / "jobs" / "demo.yaml").write_text("mine")
    demo.main(["--volume", str(volume)])
    assert (volume / "jobs" / "demo.yaml").read_text() == "mine"


def test_the_figures_are_those_of_the_metrics(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for path in (run.output / "demo.safetensors", run.states / "step-000060" / "state.json", run.samples / "a.png"):
        path.parent.mkdir(parents=True)
        path.touch()
    lines = [{"step": step, "loss": 2.0 / step, "images_per_s": 10.0 * step} for step in (1, 2, 4)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = "\n".join(demo.summary(run))
    for words in ("output/demo.safetensors", "states/step-000060", "samples/a.png", "20.0 images/s"):
        assert words in told
    assert "first 2.0000, last 0.5000, over 3 steps" in told


def test_no_metrics_no_figures(tmp_path: Path) -> None:
    assert demo.summary(RunFolder(tmp_path)) == [f"everything of this run: {tmp_path}"]
