"""Fetching from a hub on the loopback, through huggingface_hub in its own process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bootstrap.download import LEASE, fetch_repo, fetch_url, flux_files
from bootstrap.hub import RemoteFile, clean_token
from bootstrap.lease import HeldLease, Lease
from bootstrap.manifest import MANIFEST, Manifest, whole
from bootstrap.outcome import AccessError, PodError
from bootstrap.transfers import Patience
from bootstrap.volume import write_json
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
    patience = Patience(stall=5, waits=(0.1,) * 8)  # more than one: a busy machine may be silent for seconds
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


def asking(models: Path, **patience: object) -> subprocess.Popen[bytes]:
    """A process that fetches, to be killed."""
    call = f"fetch_repo({REPO!r}, 'main', Path({str(models)!r}), None, print, Patience(**{patience!r}))"
    imports = "from pathlib import Path; from bootstrap.download import fetch_repo; "
    imports += "from bootstrap.transfers import Patience; "
    return subprocess.Popen([sys.executable, "-c", imports + call], stdout=subprocess.DEVNULL)


def test_the_transfer_ends_with_who_asked_for_it(served: LoopbackHub, tmp_path: Path) -> None:
    served.fail(Fault("GET /cdn/", stall=60))
    process = asking(tmp_path)
    wait_for(lambda: any("GET /cdn/" in request for request in served.requests))
    transfer = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    process.kill()
    process.wait()
    wait_for(lambda: not Path(f"/proc/{transfer}").exists() or "Z" in state_of(transfer))


def test_what_a_killed_process_left_is_gone_on_with(served: LoopbackHub, small: Path, tmp_path: Path) -> None:
    name = "transformer/diffusion_pytorch_model.safetensors"
    served.fail(Fault(f"GET /cdn/.*{name}", stall=60, share=0.6), times=1)
    process = asking(tmp_path)
    left = lambda: [path for path in tmp_path.rglob(".*.part") if path.stat().st_size == 90_000]  # noqa: E731
    wait_for(lambda: bool(left()))
    process.kill()
    process.wait()
    served.fail(Fault(f"GET /cdn/.*{name}", cut=True, share=0.0), times=1)  # nothing of it comes this time
    folder, _ = fetch_repo(REPO, "main", tmp_path, None, print, Patience(waits=(0.1,)))
    assert (folder / name).read_bytes() == (small / name).read_bytes()
    assert {"bytes=90000-"} == {given for request, given in served.ranges if request.endswith(name) and given}
    assert not list(tmp_path.rglob(".*"))


def test_a_damaged_rest_is_fetched_from_its_beginning(served: LoopbackHub, small: Path, tmp_path: Path) -> None:
    name = "vae/diffusion_pytorch_model.safetensors"
    folder = tmp_path / "painter--flux" / served.repos[REPO].commit
    (folder / "vae").mkdir(parents=True)
    (folder / "vae" / ".diffusion_pytorch_model.safetensors.0123.part").write_bytes(bytes(100_000))
    lines: list[str] = []
    fetch_repo(REPO, "main", tmp_path, None, lines.append, AT_ONCE)
    assert (folder / name).read_bytes() == (small / name).read_bytes()
    assert any("from its beginning" in line for line in lines)


def test_200_where_206_was_asked(served: LoopbackHub, small: Path, tmp_path: Path) -> None:
    name = "vae/diffusion_pytorch_model.safetensors"
    served.fail(Fault(f"GET /cdn/.*{name}", cut=True), times=1)
    served.fail(Fault(f"GET /cdn/.*{name}", whole=True), times=1)
    folder, _ = fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)
    assert (folder / name).read_bytes() == (small / name).read_bytes()


def test_damage_behind_a_changed_time_is_found_and_only_that_file_fetched(
    served: LoopbackHub, small: Path, tmp_path: Path
) -> None:
    folder, manifest = fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)
    damaged, copied = folder / "vae/diffusion_pytorch_model.safetensors", folder / "model_index.json"
    damaged.write_bytes(bytes(150_000))
    for path in (damaged, copied):
        os.utime(path, (1e9, 1e9))
    assert set(manifest.changed(folder)) == {"vae/diffusion_pytorch_model.safetensors", "model_index.json"}
    served.requests.clear()
    lines: list[str] = []
    fetch_repo(REPO, "main", tmp_path, None, lines.append, AT_ONCE)
    assert damaged.read_bytes() == (small / "vae/diffusion_pytorch_model.safetensors").read_bytes()
    assert [request for request in served.requests if request.startswith(("GET /cdn", "GET /painter"))] == [
        f"GET /cdn/{REPO}/vae/diffusion_pytorch_model.safetensors"
    ]
    assert f"{REPO}: vae/diffusion_pytorch_model.safetensors is damaged" in lines
    served.requests.clear()
    fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)
    assert served.requests == []


def test_files_that_another_commit_brought_are_not_fetched_again(served: LoopbackHub, tmp_path: Path) -> None:
    fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)
    served.repos[REPO] = replace(served.repos[REPO], commit="d" * 40, revisions=("v2",))
    served.requests.clear()
    folder, manifest = fetch_repo(REPO, "v2", tmp_path, None, print, AT_ONCE)
    assert (folder.name, manifest.missing(folder)) == ("d" * 40, [])
    assert not [request for request in served.requests if "/cdn/" in request]


def test_two_at_once_fetch_once(served: LoopbackHub, tmp_path: Path) -> None:
    served.fail(Fault("GET /cdn/", rate=3e5))
    processes = [asking(tmp_path) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    asked = [request for request in served.requests if "GET /" in request and "harness" not in request]
    assert len(asked) == len(set(asked))
    assert not list(tmp_path.rglob(".*"))


def test_a_lease_that_another_pod_took_ends_the_fetch_and_waits(
    served: LoopbackHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other pod is played by a file; its fetch is over when the folder is whole."""
    whole_models = tmp_path / "other"
    fetch_repo(REPO, "main", whole_models, None, print, AT_ONCE)
    monkeypatch.setattr("bootstrap.lease.RENEW", 0.1)
    monkeypatch.setattr(HeldLease.__init__, "__defaults__", (*HeldLease.__init__.__defaults__[:-1], 0.1))  # type: ignore[index]
    served.fail(Fault("GET /cdn/", rate=1000))
    home, lines = tmp_path / "models" / "painter--flux", list[str]()

    def hear(line: str) -> None:
        lines.append(line)
        if line.startswith("waiting for another"):
            shutil.copytree(whole_models / "painter--flux", home, dirs_exist_ok=True)

    def rob() -> None:
        wait_for(lambda: any("GET /cdn/" in request for request in served.requests))
        write_json(home / LEASE, asdict(replace(Lease.mine("other"), boot="another")))

    served.requests.clear()
    threading.Thread(target=rob, daemon=True).start()
    folder, manifest = fetch_repo(REPO, "main", tmp_path / "models", None, hear, AT_ONCE)
    assert manifest.missing(folder) == []
    assert f"another pod took over fetching {REPO}" in lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_answered_at_once_and_nothing_is_lost(
    number: signal.Signals, served: LoopbackHub, tmp_path: Path
) -> None:
    """As in a run, where the handler raises."""
    served.fail(Fault("GET /cdn/.*transformer", stall=60), times=1)
    program = f"""
import signal, sys
from pathlib import Path
from bootstrap.download import fetch_repo
def stop(*_): raise KeyboardInterrupt
signal.signal({int(number)}, stop)
try:
    fetch_repo({REPO!r}, "main", Path({str(tmp_path)!r}), None, print)
except KeyboardInterrupt:
    sys.exit(75)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    wait_for(lambda: any(path.stat().st_size == 50_000 for path in tmp_path.rglob(".*.part")))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    assert process.wait(20) == 75
    assert not [child for child in children if state_of(int(child)) != "Z"]
    assert not list(tmp_path.rglob(LEASE))
    assert [path.stat().st_size for path in tmp_path.rglob(".*.part")] == [50_000]


def test_a_full_volume(served: LoopbackHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLUXPOD_VOLUME_GB", "0.9")
    with pytest.raises(PodError, match=r"needs 1\.1 GB more on the volume and 0\.9 GB are free"):
        fetch_repo(REPO, "main", tmp_path / "models", None, print, AT_ONCE)
    assert not [request for request in served.requests if "/resolve/" in request]


@pytest.mark.parametrize("name", ["HF_HUB_ENABLE_HF_TRANSFER", "HF_XET_HIGH_PERFORMANCE", "HF_HUB_DISABLE_XET"])
def test_switches_of_fast_downloads_without_their_packages(
    name: str, served: LoopbackHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(name, "1")
    folder, manifest = fetch_repo(REPO, "main", tmp_path, None, print, AT_ONCE)
    assert manifest.missing(folder) == []


def test_a_dataset(served: LoopbackHub, small: Path, tmp_path: Path) -> None:
    folder, manifest = fetch_repo(
        REPO, "main", tmp_path, None, print, AT_ONCE, kind="dataset", choose=lambda repo, files: files
    )
    assert (folder / "README.md").read_bytes() == (small / "README.md").read_bytes()
    assert f"GET /api/datasets/{REPO}/revision/main" in served.requests
    assert len(manifest.files) == len([path for path in small.rglob("*") if path.is_file()])


# ---- files of any address


@pytest.fixture
def address(served: LoopbackHub) -> str:
    return f"{served.endpoint}/cdn/{REPO}/vae/diffusion_pytorch_model.safetensors?signature=secret"


def test_an_address_is_fetched_once(served: LoopbackHub, address: str, small: Path, tmp_path: Path) -> None:
    target, lines = tmp_path / "datasets" / "pictures.zip", list[str]()
    served.fail(Fault("GET /cdn/", cut=True), times=2)
    assert fetch_url(address, target, tmp_path, lines.append, Patience(waits=(0.1,))) == target
    assert target.read_bytes() == (small / "vae/diffusion_pytorch_model.safetensors").read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["pictures.zip"]
    assert "secret" not in " ".join(lines)
    served.requests.clear()
    fetch_url(address, target, tmp_path, lines.append)
    assert served.requests == []


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault("GET /cdn/", status=404), "is not there (status 404)"),
        (Fault("GET /cdn/", status=403), "asks for a login (status 403)"),
        (Fault("GET /cdn/", status=503), "is not given for now (status 503)"),
    ],
)
def test_an_address_that_is_refused(fault: Fault, told: str, served: LoopbackHub, address: str, tmp_path: Path) -> None:
    served.fail(fault)
    with pytest.raises(AccessError) as caught:
        fetch_url(address, tmp_path / "x.zip", tmp_path, print, AT_ONCE)
    assert told in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_address_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="is no address that begins with https"):
        fetch_url("file:///etc/passwd", tmp_path / "x.zip", tmp_path, print, AT_ONCE)


def test_an_address_with_other_bytes_than_were_announced(address: str, served: LoopbackHub, tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="arrived twice with other bytes"):
        fetch_url(address, tmp_path / "x.zip", tmp_path, print, AT_ONCE, sha256="0" * 64)
    assert list(tmp_path.glob("*.zip")) == []


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
