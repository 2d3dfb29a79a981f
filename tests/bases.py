"""Fixtures: flux-tiny and flux-tiny-schnell, made once in a test session, also where several workers share it.

They are read-only: a test that changes a file copies the folder first.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path

import pytest
import torch

from bootstrap.bases import HUB
from bootstrap.flux_tiny import make_flux_tiny, new_clip, new_t5, new_vae
from bootstrap.tensor_files import make_header


def made_once(factory: pytest.TempPathFactory, name: str, guidance: bool) -> Path:
    root = factory.getbasetemp()
    if root.name.startswith("popen-"):  # a worker's own folder, inside the session's
        root = root.parent
    folder = root / "bases" / name
    folder.parent.mkdir(exist_ok=True)
    with (root / "bases" / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            make_flux_tiny(folder, guidance)
    return folder


@pytest.fixture(scope="session")
def flux_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "flux-tiny", guidance=True)


@pytest.fixture(scope="session")
def flux_tiny_schnell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "flux-tiny-schnell", guidance=False)


def lay_out_flux_dev(folder: Path, flux_tiny: Path) -> None:
    """A FLUX.1-dev in size: its headers, and holes in place of 24 GB; nothing reads them before there is a GPU."""
    shape = HUB["black-forest-labs/FLUX.1-dev"]
    shutil.copytree(flux_tiny, folder, ignore=shutil.ignore_patterns("transformer", "*.safetensors"))
    (folder / "transformer").mkdir()
    config = {"_class_name": "FluxTransformer2DModel", **shape.config()}
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    start, header = make_header({name: (torch.bfloat16, size) for name, size in shape.tensors().items()}, {})
    with (folder / "transformer" / "diffusion_pytorch_model.safetensors").open("wb") as file:
        file.write(start)
        file.truncate(header.size)
    new_vae().bfloat16().save_pretrained(folder / "vae")
    new_clip(1000, 999, shape.pooled_size).bfloat16().save_pretrained(folder / "text_encoder")
    new_t5(200, shape.text_size).bfloat16().save_pretrained(folder / "text_encoder_2")
