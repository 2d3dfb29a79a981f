"""Fetching from a hub on the loopback, through huggingface_hub in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap.download import fetch_repo, flux_files
from bootstrap.hub import RemoteFile, clean_token
from bootstrap.manifest import MANIFEST, Manifest, whole
from bootstrap.outcome import AccessError
from bootstrap.transfers import Patience
from tests.loopback_hub import Fault, LoopbackHub, Repo

REPO = "painter/flux"
GOOD, STRANGER, NARROW, UNKNOWN = "hf_good0123456789", "hf_stranger456789", "hf_narrow98765432", "hf_unknown7654321"
AT_ONCE = Patience(waits=())


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository in the hub's layout with files of a few kilobytes, two of them LFS objects."""
    folder = tmp_path / "repo"
    for part in ("transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler"):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(f'{{"part": "{part}"}}')
    (folder / "model_index.json").write_text("{}")
    for name in ("transformer/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors"):
        (folder / name).write_bytes(os.urandom(150_000))
    (folder / "flux1.safetensors").write_bytes(b"the same once more")
    (folder / "transformer" / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"a variant")
    (folder / "README.md").write_text("not needed")
    return folder


@pytest.fixture
def served(hub: LoopbackHub, small: Path) -> LoopbackHub:
    hub.repos[REPO] = Repo(small)
    return hub


def everything_under(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_fetches_what_is_needed_and_then_asks_no_more(served: LoopbackHub, small: Path, tmp_path: Path) -> None:
    models, lines = tmp_path / "models", list[str]()
    served.tokens = {GOOD}
    folder, manifest = fetch_repo(REPO, "main", models, GOOD, lines.append)
    assert folder == models / "painter--flux" / served.repos[REPO].commit
    assert (manifest.commit, manifest.revisions) == (folder.name, ("main",))
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert here == {MANIFEST, *manifest.files}
    assert "flux1.safetensors" not in here
    assert "transformer/diffusion_pytorch_model.fp16.safetensors" not in here
    for path in manifest.files:
        assert (folder / path).read_bytes() == (small / path).read_bytes()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert GOOD.encode() not in everything_under(tmp_path / "models")
    assert GOOD not in " ".join(lines)
    assert served.authorizations == {f"Bearer {GOOD}"}

    served.requests.clear()
    assert fetch_repo(REPO, "main", models, None, lines.append) == (folder, manifest)
    assert fetch_repo(REPO, folder.name, models, None, lines.append) == (folder, manifest)
    assert served.requests == []


def test_the_same_commit_under_another_name_is_not_fetched_twice(served: LoopbackHub, tmp_path: Path) -> None:
    served.repos[REPO] = replace(served.repos[REPO], revisions=("main", "v1"))
    fetch_repo(REPO, "main", tmp_path, None, print)
    served.requests.clear()
    _, manifest = fetch_repo(REPO, "v1", tmp_path, None, print)
    assert manifest.revisions == ("main", "v1")
    assert not [request for request in served.requests if "/resolve/" in request]


@pytest.mark.parametrize(
    ("token", "repo", "revision", "told"),
    [
        (None, "gated/flux", "main", "HF_TOKEN is not set. Accept its licence at https://huggingface.co/gated/flux"),
        (STRANGER, "gated/flux", "main", "licence of gated/flux is not accepted"),
        (NARROW, "gated/flux", "main", "has no right to read gated/flux"),
        (UNKNOWN, "gated/flux", "main", "does not know HF_TOKEN"),
        (f" '{GOOD[:5]} {GOOD[5:]}'\n", "gated/flux", "main", "HF_TOKEN is malformed"),
        (None, "nobody/nothing", "main", "is private and HF_TOKEN is not set"),
        (GOOD, "nobody/nothing", "main", "HF_TOKEN's account may not see it"),
        (GOOD, "gated/flux", "v9", "gated/flux has no revision 'v9'"),
        (GOOD, "bare/files", "main", "not in the layout of diffusers"),
    ],
)
def test_refusals(
    token: str | None, repo: str, revision: str, told: str, served: LoopbackHub, small: Path, tmp_path: Path
) -> None:
    served.tokens = {GOOD, STRANGER, NARROW}
    served.restricted = {NARROW}
    served.repos["gated/flux"] = Repo(small, gated=True, readers=(GOOD,))
    served.repos["bare/files"] = Repo(small / "vae")
    lines: list[str] = []
    with pytest.raises(AccessError) as caught:
        fetch_repo(repo, revision, tmp_path / "models", token, lines.append, AT_ONCE)
    assert told in str(caught.value)
    for secret in (GOOD, STRANGER, NARROW, UNKNOWN):
        assert secret not in f"{caught.value} {lines}"
        assert secret.encode() not in everything_under(tmp_path / "models")
    assert not list((tmp_path / "models").glob("*/[!.]*"))


def test_a_good_token_with_quotes_and_a_line_end_opens_the_gate(
    served: LoopbackHub, small: Path, tmp_path: Path
) -> None:
    served.tokens = {GOOD}
    served.repos[REPO] = Repo(small, gated=True, readers=(GOOD,))
    folder, manifest = fetch_repo(REPO, "main", tmp_path, f'"{GOOD}"\r\n', print, AT_ONCE)
    assert manifest.missing(folder) == []


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault("auth-check", 429, {"Retry-After": "1"}), "too many requests (429)"),
        (Fault("auth-check", 503), "The hub is down (503)"),
        (Fault("revision", 500), "The hub is down (500)"),
        (Fault("HEAD .*model_index", 401), "does not know HF_TOKEN|is not on the hub"),
        (Fault("HEAD .*/vae/", 403), "has no right to read"),
    ],
)
def test_a_hub_in_trouble(fault: Fault, told: str, served: LoopbackHub, tmp_path: Path) -> None:
    served.fail(fault)
    with pytest.raises(AccessError) as caught:
        fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)
    assert any(text in str(caught.value) for text in told.split("|")), caught.value


def test_trouble_that_passes_is_waited_out(served: LoopbackHub, tmp_path: Path) -> None:
    served.fail(Fault("auth-check", 503), times=1)
    lines: list[str] = []
    folder, manifest = fetch_repo(REPO, "main", tmp_path, None, lines.append, Patience(waits=(0.1,)))
    assert manifest.missing(folder) == []
    assert any("Trying again" in line for line in lines)


def test_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(AccessError, match="cannot be reached to fetch painter/flux"):
        fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)


def test_wrong_bytes_of_the_right_size_are_never_published(served: LoopbackHub, tmp_path: Path) -> None:
    spoilt = "transformer/diffusion_pytorch_model.safetensors"
    served.repos[REPO].wrong_bytes.add(spoilt)
    with pytest.raises(AccessError, match=f"{spoilt} of {REPO} arrived twice with other bytes"):
        fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)
    assert whole(tmp_path, REPO, "main") is None
    assert not list(tmp_path.glob(f"*/*/{spoilt}"))

    served.repos[REPO].wrong_bytes.clear()
    served.requests.clear()
    folder, manifest = fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)
    assert manifest.missing(folder) == []
    fetched = {request for request in served.requests if request.startswith("GET /cdn/")}
    assert fetched == {f"GET /cdn/{REPO}/{spoilt}"}  # the verified rest was kept


def test_small_files_are_verified_too(served: LoopbackHub, tmp_path: Path) -> None:
    served.repos[REPO].wrong_bytes.add("vae/config.json")
    with pytest.raises(AccessError, match=r"vae/config\.json"):
        fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)


def test_a_cut_in_mid_body_is_gone_on_from(served: LoopbackHub, tmp_path: Path) -> None:
    served.fail(Fault("GET /cdn/.*/vae/", cut=True), times=1)
    folder, manifest = fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)
    assert manifest.missing(folder) == []


def test_a_stalled_transfer_is_ended_and_started_anew(served: LoopbackHub, tmp_path: Path) -> None:
    served.fail(Fault("GET /cdn/.*/vae/", stall=60), times=1)
    lines: list[str] = []
    patience = Patience(stall=5, waits=(0.1, 0.1, 0.1))  # more than one: on a busy machine a start takes seconds
    folder, manifest = fetch_repo(REPO, "main", tmp_path, None, lines.append, patience)
    assert manifest.missing(folder) == []
    assert any("stalled" in line for line in lines)


def test_a_lost_file_is_named_and_only_it_is_fetched(
    served: LoopbackHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, manifest = fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)
    (folder / "vae" / "config.json").unlink()
    assert manifest.missing(folder) == ["vae/config.json"]
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(AccessError, match=r"HF_HUB_OFFLINE.*Missing on the volume: vae/config\.json"):
            fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)
        with pytest.raises(AccessError, match="Missing on the volume"):  # and again at the next start
            fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)
    served.requests.clear()
    assert fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)[0] == folder
    assert [request for request in served.requests if request.startswith("GET /painter")] == [
        f"GET /{REPO}/resolve/{folder.name}/vae/config.json"
    ]


def test_a_part_of_a_commit_that_is_no_longer_meant_goes(served: LoopbackHub, tmp_path: Path) -> None:
    served.fail(Fault("HEAD .*/vae/", 403), times=1)
    with pytest.raises(AccessError):
        fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)
    served.repos[REPO] = replace(served.repos[REPO], commit="f" * 40)
    folder, _ = fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)
    assert {path.name for path in folder.parent.iterdir()} == {"f" * 40}


def test_the_transfer_ends_with_who_asked_for_it(served: LoopbackHub, tmp_path: Path) -> None:
    served.fail(Fault("GET /cdn/", stall=60))
    call = f"fetch_repo({REPO!r}, 'main', Path({str(tmp_path)!r}), None, print)"
    program = f"from pathlib import Path; from bootstrap.download import fetch_repo; {call}"
    asking = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    wait_for(lambda: any("GET /cdn/" in request for request in served.requests))
    transfer = int(Path(f"/proc/{asking.pid}/task/{asking.pid}/children").read_text().split()[0])
    asking.kill()
    asking.wait()
    wait_for(lambda: not Path(f"/proc/{transfer}").exists() or "Z" in state_of(transfer))


def wait_for(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def state_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"


def test_manifests_of_others_are_not_trusted(tmp_path: Path) -> None:
    for text in ("", "[]", '{"files": 3}', '{"repo": "a/b", "commit": "c", "revisions": ["main"], "files": {"x": 1}}'):
        (tmp_path / MANIFEST).write_text(text)
        assert Manifest.read(tmp_path) is None


@pytest.mark.parametrize(
    ("given", "clean"),
    [
        (None, None),
        ("", None),
        (" \n", None),
        ('"hf_abc"', "hf_abc"),
        ("hf_abc\r\n", "hf_abc"),
        ("' hf_abc '", "hf_abc"),
    ],
)
def test_clean_token(given: str | None, clean: str | None) -> None:
    assert clean_token(given) == clean


@pytest.mark.parametrize("given", ["hf_ab cd", "hf_ab\nhf_cd", "hf_äb", "HF_TOKEN=hf_ab"])
def test_a_malformed_token_is_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(AccessError) as caught:
        clean_token(given)
    assert "malformed" in str(caught.value)
    assert given not in str(caught.value)


def test_one_copy_of_the_transformer_is_taken() -> None:
    names = {
        "flux1-dev.safetensors": False,
        "ae.safetensors": False,
        "model_index.json": True,
        "transformer/config.json": True,
        "transformer/diffusion_pytorch_model-00001-of-00003.safetensors": True,
        "transformer/diffusion_pytorch_model.fp16.safetensors": False,
        "text_encoder_2/model.safetensors.index.json": True,
        "text_encoder/pytorch_model.bin": False,
        "text_encoder/model.safetensors": True,
        "vae/diffusion_pytorch_model.safetensors": True,
        "scheduler/scheduler_config.json": True,
        "tokenizer/merges.txt": True,
        "tokenizer_2/spiece.model": True,
        "README.md": False,
    }
    files = tuple(RemoteFile(name, 1, None, None) for name in names)
    assert [file.path for file in flux_files(REPO, files)] == [name for name, taken in names.items() if taken]
