"""Which files ``fluxpod export``, ``merge`` and ``extract`` mean, and that they do their work."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bootstrap.bases import FLUX_TINY
from bootstrap.flux_tiny import SINGLE_FILE
from bootstrap.lora_file import tensors_of
from bootstrap.state import MODEL_FILE
from bootstrap.tensor_files import write_tensors
from bootstrap.volume import Volume
from entrypoint.cli import main
from entrypoint.model_files import NotFoundError, lora, model, state_or_file
from tests.loras import make_adapter
from tests.states import make_state


@pytest.fixture
def volume(tmp_path: Path, flux_tiny: Path) -> Volume:
    volume = Volume(tmp_path)
    volume.create()
    (volume.models / "flux-tiny").symlink_to(flux_tiny)
    shutil.copyfile(flux_tiny / SINGLE_FILE, volume.models / "tuned.safetensors")
    adapter = make_adapter(FLUX_TINY, "attention", scale=lambda _: 0.01)
    write_tensors(volume.models / "a@b.safetensors", tensors_of(adapter, "kohya"))
    return volume


def test_what_a_name_means(volume: Volume) -> None:
    folder = volume.run("test").states
    make_state(folder, 500)
    newest = make_state(folder, 1000)
    file = volume.models / "a@b.safetensors"
    assert state_or_file(volume, "test/500") == folder / "step-000500"
    assert state_or_file(volume, "test") == newest
    assert state_or_file(volume, "models/a@b.safetensors") == file
    assert lora(volume, f"{file}") == f"{file}@1"
    assert lora(volume, f"{file}@-0.5") == f"{file}@-0.5"
    assert lora(volume, "test/1000@2") == f"{newest / MODEL_FILE}@2"
    assert model(volume, "flux-tiny") == volume.models / "flux-tiny"
    assert model(volume, "test") == newest


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nothing", "there is no state nothing, and no such file: write a path, or RUN/STEP"),
        ("test/7", "test/7 is no state, and no model of that name was fetched"),
        ("black-forest-labs/FLUX.1-dev", "no model of that name was fetched to this volume: write a path"),
    ],
)
def test_a_name_that_means_nothing_is_told(text: str, told: str, volume: Volume) -> None:
    with pytest.raises(NotFoundError, match=told):
        model(volume, text)


def in_this_process(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    """What the command line starts, without waiting for another Python to import torch."""
    assert command[:2] == [sys.executable, "-m"]
    return subprocess.CompletedProcess(command, importlib.import_module(command[2]).main(command[3:]))


def test_merged_and_extracted_again(
    volume: Volume, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", in_this_process)
    at = f"--volume={volume.root}"
    merged, again = volume.root / "merged.safetensors", volume.root / "again.safetensors"
    named = ["models/a@b.safetensors@0.5", "--base=flux-tiny", "--dtype=fp32", f"--to={merged}"]
    assert main(["merge", *named, at]) == 0
    assert main(["extract", str(merged), "--base=models/tuned.safetensors", "--rank=4", f"--to={again}", at]) == 0
    out = capsys.readouterr().out
    assert "layers changed, their weights by" in out
    assert "in all 0.0 % of the change is lost" in out
    assert main(["export", str(again), "--layout=diffusers", at]) == 0
    assert (volume.root / "again-diffusers.safetensors").is_file()
    assert main(["merge", "nothing", "--base=flux-tiny", f"--to={merged}", at]) == 64
    assert "there is no state nothing" in capsys.readouterr().err
