"""Fixtures: flux-tiny and flux-tiny-schnell, made once in a test session, also where several workers share it.

They are read-only: a test that changes a file copies the folder first.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from bootstrap.flux_tiny import make_flux_tiny


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
