"""Fetches from a hub that misbehaves, killed at random moments, over and over: seeded trials.

Whatever happens, a file that has its name is right, is never fetched again, and a fetch ends with the right bytes or
with an AccessError (code 69) and its reason. A few trials run with all tests; ``make trials`` runs a hundred.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.loopback_hub import Fault, LoopbackHub, Repo

REPO = "painter/flux"
LARGE = {"transformer/a.safetensors": 900_000, "transformer/b.safetensors": 400_000, "vae/c.safetensors": 150_000}
SMALL = ("transformer/config.json", "vae/config.json")
ROUNDS = 12  # more starts than that would be a fetch that gets nowhere

PROGRAM = f"""
import sys
from pathlib import Path
from bootstrap import transfers
from bootstrap.download import fetch_repo
from bootstrap.outcome import AccessError
transfers.LARGE, transfers.AT_ONCE = 100_000, int(sys.argv[2])  # so many transfers side by side
patience = transfers.Patience(stall=4, waits=(0.05, 0.1, 0.2))
try:
    fetch_repo({REPO!r}, "main", Path(sys.argv[1]), None, print, patience, choose=lambda repo, files: files)
except AccessError as error:
    sys.exit(f"refused: {{error}}")
"""


def draw_faults(chance: random.Random) -> list[tuple[Fault, int]]:
    """One to four faults, each for a random part of the hub and a few times."""
    kinds = [
        lambda match: Fault(match, cut=True, share=chance.random()),
        lambda match: Fault(match, spoil=True),
        lambda match: Fault(match, whole=True),
        lambda match: Fault(match, rate=chance.uniform(2e5, 2e6)),
        lambda match: Fault(match, status=chance.choice((401, 403, 404))),
        lambda match: Fault(match, status=chance.choice((429, 500, 503)), headers={"Retry-After": "0"}),
        lambda match: Fault(match, stall=6, share=chance.random()),
    ]
    places = ["GET /cdn/", "GET /cdn/.*/a", "GET /cdn/.*/b", "GET .*config", "HEAD ", "auth-check", "revision"]
    weights = [5, 4, 4, 3, 1, 3, 1]
    return [
        (chance.choices(kinds, weights)[0](chance.choice(places)), chance.randint(1, 3))
        for _ in range(chance.randint(1, 4))
    ]


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    chance = random.Random(1)
    return {name: chance.randbytes(size) for name, size in LARGE.items()} | {
        name: f'{{"name": "{name}"}}'.encode() for name in SMALL
    }


def named(models: Path) -> dict[str, bytes]:
    """The files that have their names."""
    folders = [path for path in models.glob("*/*") if path.is_dir()]
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {
        path.relative_to(folders[0]).as_posix(): path.read_bytes()
        for path in paths
        if not path.name.startswith(".") and path.name != "manifest.json"
    }


def fetched(hub: LoopbackHub) -> set[str]:
    return {
        name
        for name in (*LARGE, *SMALL)
        if any(request.startswith("GET ") and request.endswith(f"/{name}") for request in hub.requests)
    }


@pytest.mark.parametrize("seed", range(int(os.environ.get("TRIALS", "4"))))
def test_a_trial(seed: int, hub: LoopbackHub, content: dict[str, bytes], tmp_path: Path) -> None:
    for name, data in content.items():
        (tmp_path / "repo" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repo" / name).write_bytes(data)
    hub.repos[REPO] = Repo(tmp_path / "repo")
    chance = random.Random(seed)
    for fault, times in draw_faults(chance):
        hub.fail(fault, times)
    at_once = str(chance.choice((1, 1, 2)))
    kills, models = chance.randint(0, 3), tmp_path / "models"
    for _ in range(ROUNDS):
        before = set(named(models))
        hub.requests.clear()
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(models), at_once],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if kills:
            kills -= 1
            time.sleep(chance.uniform(0.2, 4.0))
            process.kill()
        told = "".join(process.communicate(timeout=300))
        assert not before & fetched(hub), "a verified file was fetched again"
        assert all(content[name] == data for name, data in named(models).items()), "a wrong file has its name"
        if process.returncode == 0:
            break
        assert process.returncode < 0 or "refused: " in told, told  # killed, or an exit with its reason
        assert "Traceback" not in told
    assert named(models) == content
    assert not list(models.rglob(".*"))
