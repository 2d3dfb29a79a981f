"""Where an assistant's file comes from, and what the plan counts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bootstrap.assistant import HubLora, assistant_bytes, fetch_assistant, find_assistant, parse
from bootstrap.bases import FLUX_TINY
from bootstrap.estimate import linear_layers
from bootstrap.outcome import AccessError
from bootstrap.volume import Volume
from jobs.problem import JobError
from jobs.schema import Job
from tests.loopback_hub import LoopbackHub, Repo
from tests.loras import write_lora
from tests.runs import make_job

SAID: list[str] = []


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    volume = Volume(tmp_path / "volume")
    volume.create()
    return volume


def job(text: str | None, **keys: Any) -> Job:
    return make_job(method="lora", assistant_lora=text, **keys)


def fetch(text: str, volume: Volume) -> Path | None:
    return fetch_assistant(job(text), volume, None, SAID.append)


def test_a_file_on_the_volume(volume: Volume) -> None:
    file = write_lora(volume.models / "a.safetensors", FLUX_TINY)
    assert find_assistant(job("models/a.safetensors"), volume) == file
    assert fetch("models/a.safetensors", volume) == file
    values = 3 * sum(out + size for out, size in linear_layers(FLUX_TINY).values())
    # q, k and v have three times the rank of zeros in one matrix, and each file its alphas.
    assert 2 * values < assistant_bytes(job("models/a.safetensors"), FLUX_TINY, volume) < 3 * 2 * values
    assert find_assistant(job(None), volume) is None
    assert assistant_bytes(job(None), FLUX_TINY, volume) == 0


@pytest.mark.parametrize("text", ["models/none.safetensors", "nowhere", "/abs/lora.safetensors", "hf://a/../b/c.ckpt"])
def test_a_name_that_leads_nowhere(text: str, volume: Volume) -> None:
    with pytest.raises(JobError, match=r"assistant_lora.*there is no file(.|\n)*hf://owner/name/FILE"):
        find_assistant(job(text), volume)


def test_what_is_no_lora_is_told(volume: Volume) -> None:
    (volume.models / "a.safetensors").write_bytes(b"<html>")
    with pytest.raises(JobError, match=r"assistant_lora.*cannot be read"):
        assistant_bytes(job("models/a.safetensors"), FLUX_TINY, volume)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("me/helper", HubLora("me/helper", "main", "")),
        ("me/helper@v2", HubLora("me/helper", "v2", "")),
        ("hf://me/helper/sub/a.safetensors", HubLora("me/helper", "main", "sub/a.safetensors")),
        ("hf://me/helper@v2/a.safetensors", HubLora("me/helper", "v2", "a.safetensors")),
    ],
)
def test_names_on_the_hub(text: str, meant: HubLora, volume: Volume) -> None:
    assert parse(text, volume) == meant
    assert find_assistant(job(text), volume) is None, "not fetched yet"
    assert assistant_bytes(job(text), FLUX_TINY, volume) > 0, "a guess"


def test_the_only_lora_of_a_repository_is_fetched_once(volume: Volume, hub: LoopbackHub, tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    write_lora(folder / "pytorch_lora_weights.safetensors", FLUX_TINY)
    (folder / "README.md").write_text("a card")
    hub.repos["me/helper"] = Repo(folder)
    file = fetch("me/helper", volume)
    assert file is not None
    assert file.read_bytes() == (folder / "pytorch_lora_weights.safetensors").read_bytes()
    assert [path.name for path in file.parent.iterdir() if path.suffix == ".md"] == []
    asked = len(hub.requests)
    assert fetch("me/helper", volume) == find_assistant(job("me/helper"), volume) == file
    assert len(hub.requests) == asked


def test_of_several_one_must_be_named(volume: Volume, hub: LoopbackHub, tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    for name in ("v1", "v2"):
        write_lora(folder / f"{name}.safetensors", FLUX_TINY)
    hub.repos["me/helper"] = Repo(folder)
    with pytest.raises(AccessError, match=r"hf://me/helper/FILE; it has v1\.safetensors, v2\.safetensors"):
        fetch("me/helper", volume)
    assert fetch("hf://me/helper/v2.safetensors", volume) is not None
    with pytest.raises(JobError, match=r"has no v1\.safetensors"):
        fetch("hf://me/helper/v1.safetensors", volume)
