"""run.json tells the trainer everything, exactly, and nothing secret."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bootstrap.dataset import Item
from bootstrap.plan import Choice
from bootstrap.run_file import RunFile
from tests.runs import make_job, make_run

ITEMS = (
    Item(
        "datasets/a/ä b.png",
        "0" * 64,
        'a "flower"\nin {two|lines}',
        3,
        640,
        480,
        (576, 448),
        1,
        "masks/b.png",
        "2" * 64,
    ),
    Item("/elsewhere/b.jpg", "1" * 64, "", 1, 512, 512, (512, 512)),
)
JOBS: list[dict[str, Any]] = [
    {},
    {"method": "lora"},
    {"method": "lora", "lora": {"rank": 4, "alpha": 2, "targets": ["*.to_q", "proj_out"]}},
    {"steps": 7, "resolution": [512, 768], "save": {"every": 3, "weights": "all"}, "sample": {"prompts": ["ü"]}},
    {"timestep_sampling": "shift", "discrete_flow_shift": 2.5, "optimizer_args": {"betas": [0.9, 0.99]}},
    {"schedule": "cosine", "schedule_args": {"end": 0.1}, "plan": {"processes": 2}, "max_grad_norm": 0.5},
    {"base": "/x/flux.safetensors", "vae": "/x/ae.sft", "text_encoders": {"clip": "/x/c.safetensors", "t5": "/x/t"}},
]


@pytest.mark.parametrize("keys", JOBS)
def test_a_run_comes_back(keys: dict[str, Any], tmp_path: Path) -> None:
    choices = (Choice("split", "2+1+1", "four images on three GPUs"),)
    run = replace(make_run(tmp_path, make_job(**keys), choices=choices), resume=tmp_path / "states" / "step-000500")
    path = run.write(ITEMS)
    assert path == tmp_path / "runs" / "test" / "run.json"
    assert RunFile.read(path) == run
    assert RunFile.read(path).read_items() == ITEMS


def test_a_run_knows_its_folders(tmp_path: Path) -> None:
    run = make_run(tmp_path, make_job(name="flowers"))
    assert run.folder.root == tmp_path / "runs" / "flowers"
    assert run.cache == tmp_path / "cache"


def test_no_token_gets_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    make_run(tmp_path).write(ITEMS)
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"verysecret" not in written
