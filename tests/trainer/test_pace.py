"""A process's own pace does not count what it waits for others, and tells the slow one from the fast ones."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bootstrap.volume import Volume
from bootstrap.whereabouts import PATH, Whereabouts
from entrypoint.launch import free_port
from entrypoint.pace import lags
from tests.runs import make_world
from tests.training import fill_volume, finish, prepared, shared_folder, start
from trainer import pace
from trainer.pace import Pace, work_of

SLOW = 0.1  # seconds that process 1 takes more for each pass; a pass takes about as long


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path, flux_tiny_schnell: Path) -> Volume:
    bases = (flux_tiny, flux_tiny_schnell)
    return Volume(shared_folder(tmp_path_factory, "training", lambda root: fill_volume(root, *bases)))


def train_with_a_slow_one(page: Path, run_file: Path) -> int:
    from trainer import train

    os.environ[PATH] = str(page)
    predict = train.predict

    def slower(*arguments: Any) -> Any:
        time.sleep(SLOW if os.environ["RANK"] == "1" else 0)
        return predict(*arguments)

    train.predict = slower
    return train.main(run_file)


def test_among_replicas_the_slow_one_is_told(volume: Volume) -> None:
    """Both take every step in the same time: only what each does by itself tells them apart."""
    keys: dict[str, Any] = {"method": "lora", "steps": 8, "plan": {"processes": 2}, "lora": {"rank": 4}}
    run = prepared(volume, name="slow-one", **keys)
    with Whereabouts.made(2) as page:
        before = page.read()
        log, port = run.folder.log, free_port()
        arguments = (page.path, run.folder.run_file)
        world = [start(train_with_a_slow_one, *arguments, log=log, rank=r, size=2, port=port) for r in range(2)]
        assert finish(world, log) == [0, 0], log.read_text()
        found = page.read()
    assert [seen.step for seen in found] == [7, 7]
    assert found[1].seconds >= 8 * SLOW
    assert lags(before, found)[1] > lags(before, found)[0]


def test_shards_time_a_product(control: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(control)
    shards = Pace(world, 256, sharded=True)
    told: list[tuple[float, float, float]] = []
    monkeypatch.setattr(world.place, "did", lambda *what: told.append(what))
    for _ in range(3):
        shards.begin()
        shards.meet()
        shards.end(0.25)
    (first, *rest) = told
    assert first[0] == 1.0
    assert first[1] > 0
    assert rest == [(0.0, 0.0, 0.25)] * 2  # not again so soon
    monkeypatch.setattr(pace, "PRODUCT_EVERY", 0.0)
    shards.end(0.0)
    assert told[-1][0] == 1.0


def test_work_grows_with_images_tokens_and_attention() -> None:
    assert work_of(4, 1024, 3072) == 4 * work_of(1, 1024, 3072)
    assert work_of(1, 4096, 3072) > 4 * work_of(1, 1024, 3072)
