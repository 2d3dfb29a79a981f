"""A process that is killed, held, or raises in the middle of a run in two of them: what ``python -m tests.soak`` does
many times, here a few."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootstrap.volume import Volume
from entrypoint import watch
from tests.soak import soak
from tests.training import fill_volume, shared_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory, flux_tiny: Path, flux_tiny_schnell: Path) -> Volume:
    bases = (flux_tiny, flux_tiny_schnell)
    return Volume(shared_folder(tmp_path_factory, "training", lambda root: fill_volume(root, *bases)))


@pytest.mark.parametrize(("method", "kinds"), [("full", ("hold one", "raise in one")), ("lora", ("kill one",))])
def test_it_ends_in_time_and_goes_on_to_the_same_end(
    method: str, kinds: tuple[str, ...], volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SILENCE", 5.0)
    soak(volume, f"lost-{method}", kinds, seed=8, method=method, steps=9)
