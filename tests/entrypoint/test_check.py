from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from bootstrap.bases import FLUX_TINY
from bootstrap.lora_file import tensors_of
from bootstrap.tensor_files import write_tensors
from bootstrap.volume import Volume
from entrypoint.check import check, parse_pods, render_pod
from jobs.problem import JobError
from tests.loras import make_adapter

TINY = (
    "name: demo\nbase: flux-tiny\nmethod: full\ndatasets: [{path: datasets/a}]\nresolution: 64\nsteps: 6\nwarmup: 0\n"
)
REAL = TINY.replace("flux-tiny", "black-forest-labs/FLUX.1-dev").replace("resolution: 64", "resolution: 512")


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Volume:
    """A volume with four pictures, on a pod without GPU."""
    folder = tmp_path / "datasets" / "a"
    folder.mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (512, 512), (60 * number, 80, 90)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a colour")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Volume(tmp_path)


def written(volume: Volume, text: str) -> Path:
    path = volume.root / "my-job.yaml"
    path.write_text(text)
    return path


def snapshot(volume: Volume) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in volume.root.rglob("*")}


def test_a_plan_is_printed_and_nothing_changed(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    job = written(volume, TINY)
    before = snapshot(volume)
    assert check(job, volume) == 0
    out = capsys.readouterr().out
    assert out.startswith("demo: full on flux-tiny") or "\ndemo: full on flux-tiny" in out
    assert "6 steps" in out
    assert "! nvidia-smi is not there" in out
    assert max(len(line) for line in out.splitlines()) <= 120
    assert snapshot(volume) == before


def test_a_real_model_on_a_pod_without_gpu(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(written(volume, REAL), volume) == 65
    told = capsys.readouterr()
    assert "no GPU" in told.out
    assert "started with a GPU" in " ".join(told.err.split())


def test_a_wrong_job(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    text = TINY.replace("steps: 6\nwarmup: 0", "stepz: 6\nlearning_rate: fast")
    assert check(written(volume, text), volume) == 64
    err = capsys.readouterr().err
    assert "my-job.yaml:6" in err
    assert "my-job.yaml:7" in err
    assert "2 problems" in err


def test_five_mistakes_are_told_at_once_with_their_lines(volume: Volume) -> None:
    """As a command: a misspelt key, one of another method, no number, a size that is none, one without effect."""
    mistakes = "learning_rat: 1e-5\nlora: {rank: 8}\nimages_per_step: four\nresolution: 500\ndiscrete_flow_shift: 3.0\n"
    text = TINY.replace("resolution: 64\nsteps: 6\nwarmup: 0\n", mistakes)
    command = [
        sys.executable,
        "-m",
        "entrypoint.cli",
        "check",
        str(written(volume, text)),
        "--volume",
        str(volume.root),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 64
    keys = ("learning_rat", "lora", "images_per_step", "resolution", "discrete_flow_shift")
    for line, key in enumerate(keys, start=5):
        assert f"my-job.yaml:{line}: {key}: " in result.stderr
    assert "5 problems" in result.stderr


def test_a_missing_folder_is_told_beside_the_pods(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    job = written(volume, REAL.replace("datasets/a", "datasets/b"))
    assert check(job, volume, "A40@0.5, 8xH100") == 64
    told = capsys.readouterr()
    assert "my-job.yaml:4" in told.err
    assert "datasets" in told.err
    assert "8 x H100 SXM" in told.out


def test_an_override_that_cannot_be_has_its_line(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(written(volume, TINY + "plan:\n  processes: 5\n"), volume) == 64
    assert "my-job.yaml:9: plan.processes: 5 processes" in capsys.readouterr().err


def test_pods_side_by_side(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    pods = "A40@0.44, L40S@0.86, T4, 2xA100 80GB@3.28, 3xH100, V100"
    assert check(written(volume, REAL.replace("steps: 6", "steps: 1000")), volume, pods) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line for line in lines}
    assert rows["pod"].split()[-1] == "cost"
    hourly, cost = 0.44, float(rows["A40"].split()[-1])
    assert "h" in rows["A40"]
    assert 0.5 * hourly < cost < 10 * hourly
    assert "does not fit" in rows["T4"]
    assert "does not fit" in rows["V100"]
    assert "2+1+1" in rows["3 x H100 SXM"]
    assert rows["3 x H100 SXM"].endswith("-")  # no price, no cost
    text = " ".join(" ".join(lines).split())
    assert "T4 has no bf16" in text
    assert "V100 has no bf16" in text
    assert f"Cheapest: {min(('A40', 'L40S', '2 x A100 80GB'), key=lambda pod: float(rows[pod].split()[-1]))}" in text
    assert "Fastest: 3 x H100 SXM" in text


def test_one_pod_shows_its_whole_plan(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(written(volume, REAL), volume, "A40@0.44") == 0
    out = capsys.readouterr().out
    assert "checkpointing" in out
    assert "1 x A40" in out


def test_no_pod_fits(volume: Volume) -> None:
    assert check(written(volume, REAL), volume, "V100, T4") == 65


def test_pods_are_read() -> None:
    found = parse_pods("A40, L40S@0.86 ,2xA100 80GB@$3.28, 8 x H100,4090")
    assert [(each.text, len(each.pod.gpus), each.price) for each in found] == [
        ("A40", 1, None),
        ("L40S", 1, 0.86),
        ("2 x A100 80GB", 2, 3.28),
        ("8 x H100 SXM", 8, None),
        ("RTX 4090", 1, None),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no pod is named"),
        (" , ", "no pod is named"),
        ("L4OS", "Did you mean L40S"),
        ("A40@cheap", "is not a price"),
        ("0xA40", "is not a number of GPUs"),
        ("999xA40", "is not a number of GPUs"),
        ("@3", "is not a number of GPUs"),
        ("toaster", "no GPU known here"),
    ],
)
def test_pods_that_cannot_be_read(text: str, told: str) -> None:
    with pytest.raises(JobError, match=told):
        parse_pods(text)


def test_a_wrong_pod_is_told(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(written(volume, REAL), volume, "A41, toaster") == 64
    assert "2 problems" in capsys.readouterr().err


def test_rendering_needs_no_volume() -> None:
    assert "GPU 0: A40, 45.0 GiB" in render_pod(parse_pods("A40")[0].pod)


def test_a_lora_to_start_from_is_looked_at(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    lora = TINY.replace("full", "lora") + "lora: {rank: 4, targets: attention, start: models/a.safetensors}\n"
    assert check(written(volume, lora), volume) == 64
    assert "my-job.yaml:8: lora.start: there is no file" in capsys.readouterr().err
    volume.models.mkdir()
    adapter = make_adapter(FLUX_TINY, "attention")
    write_tensors(volume.models / "a.safetensors", tensors_of(adapter, "kohya") | {"lora_te1_x.alpha": torch.ones(1)})
    assert check(written(volume, lora), volume) == 0
    assert "warning: my-job.yaml:8: lora.start: " in (told := capsys.readouterr().out)
    assert "a LoRA of text encoders too (1 tensors), which is left out" in told
    assert check(written(volume, lora.replace("rank: 4", "rank: 8")), volume) == 64
    assert "its rank is 4, not 8" in capsys.readouterr().err


def test_starts_without_torch() -> None:
    code = "import sys, entrypoint.check, bootstrap.plan, bootstrap.pod; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
