from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from PIL import Image

from bootstrap import remote
from bootstrap.dataset import scan
from bootstrap.hub import RemoteFile
from bootstrap.outcome import AccessError
from bootstrap.remote import fetch_datasets, find_fetched, parse_hub, wanted
from bootstrap.volume import Volume
from jobs.problem import JobError
from jobs.schema import Job
from tests.loopback_hub import LoopbackHub, Repo


def picture(colour: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (128, 128), colour).save(file, "PNG")
    return file.getvalue()


def packed(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name.replace("__", "/")), data)
    return buffer.getvalue()


def job(*paths: str) -> Job:
    datasets = [{"path": path} for path in paths]
    return Job(name="t", base="flux-tiny", method="full", resolution=128, bucket_step=16, datasets=datasets)


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    volume = Volume(tmp_path / "volume")
    volume.create()
    return volume


class Share:
    """A loopback server of files by path; ``cut`` ends the first answer in mid-body."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[str, bytes]] = {}
        self.requests: list[str] = []
        self.cut = False
        self.announces = True
        share = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                share.requests.append(f"{self.path} {self.headers.get('Range', '')}".strip())
                kind, data = share.files.get(self.path, ("", b""))
                first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
                self.send_response(404 if not kind else 206 if first else 200)
                self.send_header("Content-Type", kind or "text/plain")
                self.send_header("ETag", '"one"')
                if first:
                    self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
                if share.announces:
                    self.send_header("Content-Length", str(len(data) - first))
                self.end_headers()
                stop = len(data) // 2 if share.cut else len(data)
                share.cut = False
                self.wfile.write(data[first:stop])

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def share() -> Iterator[Share]:
    share = Share()
    Thread(target=share.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield share
    share.server.shutdown()
    share.server.server_close()


def test_a_linked_zip_is_fetched_once_and_kept_by_its_hash(volume: Volume, share: Share) -> None:
    share.files["/a.zip?key=secret"] = share.files["/b.zip"] = (
        "application/zip",
        packed(**{"set__3_cat__a.png": picture(), "set__b.png": picture("blue")}),
    )
    first, second = f"{share.address}/a.zip?key=secret", f"{share.address}/b.zip"
    told: list[str] = []
    assert scan(job(first), volume).items == ()  # a check asks no network, and says so
    fetch_datasets(job(first, second), volume, None, told.append)
    assert len(list((volume.fetched / "links").glob("*.zip"))) == 1
    data = scan(job(first), volume)
    assert [item.caption for item in data.items] == ["", "cat"]
    assert [item.repeats for item in data.items] == [1, 3]
    asked = len(share.requests)
    fetch_datasets(job(first, second), volume, None, told.append)
    assert len(share.requests) == asked
    on_volume = "".join(path.read_text() for path in (volume.fetched / "links").glob("*.json"))
    assert "secret" not in on_volume + "".join(told) + "".join(data.notes) + data.parts[0].path
    assert not list((volume.fetched / "links").glob(".*"))


def test_a_broken_transfer_is_gone_on_with(volume: Volume, share: Share, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Image.effect_noise((900, 900), 90).convert("RGB")
    file = io.BytesIO()
    noise.save(file, "PNG")
    share.files["/a.zip"] = ("application/zip", packed(**{"a.png": file.getvalue()}))
    share.cut = True
    fetch_datasets(job(f"{share.address}/a.zip"), volume, None, lambda line: None)
    assert len(share.requests) == 2
    assert "bytes=" in share.requests[1]
    assert scan(job(f"{share.address}/a.zip"), volume).images == 1


def test_two_that_want_the_same_link_at_once(volume: Volume, share: Share) -> None:
    share.files["/a.zip"] = ("application/zip", packed(**{"a.png": picture()}))
    wanted = job(f"{share.address}/a.zip")
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: fetch_datasets(wanted, volume, None, lambda line: None), range(3)))
    assert scan(wanted, volume).images == 1
    assert [request.split()[0] for request in share.requests] == ["/a.zip"]


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("text/html", b"<!DOCTYPE html><html>Sign in", "gives a web page, not a zip"),
        ("application/x-rar", b"Rar!\x1a\x07" + bytes(2_000_000), "gives 2.0 MB that are no zip"),
    ],
)
def test_what_is_no_zip_is_said_so(volume: Volume, share: Share, kind: str, data: bytes, words: str) -> None:
    share.files["/a.zip"] = (kind, data)
    with pytest.raises(JobError, match=words) as caught:
        fetch_datasets(job(f"{share.address}/a.zip?key=secret".partition("?")[0]), volume, None, lambda line: None)
    assert caught.value.problems[0].key == "datasets[0].path"
    assert list((volume.fetched / "links").iterdir()) == []


@pytest.mark.parametrize("announces", [True, False])
def test_a_zip_that_is_too_large_is_not_fetched(
    volume: Volume, share: Share, monkeypatch: pytest.MonkeyPatch, announces: bool
) -> None:
    monkeypatch.setattr(remote, "MOST_BYTES", 1000)
    share.announces = announces
    share.files["/a.zip"] = ("application/zip", bytes(3_000_000))
    with pytest.raises(AccessError, match="the most that is fetched"):
        fetch_datasets(job(f"{share.address}/a.zip"), volume, None, lambda line: None)


def test_an_address_that_is_not_there(volume: Volume, share: Share) -> None:
    with pytest.raises(AccessError, match="is not there"):
        fetch_datasets(job(f"{share.address}/none.zip"), volume, None, lambda line: None)
    wrong = {"s3://bucket/set.zip": "is no address", "https://drive.google.com/drive/folders/1a": "pack it as a zip"}
    for path, words in wrong.items():
        with pytest.raises(JobError, match=words):
            fetch_datasets(job(path), volume, None, lambda line: None)
        with pytest.raises(JobError, match=words):
            scan(job(path), volume)


# ---------------------------------------------------------------- the hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield hub


def repo(folder: Path, files: dict[str, bytes]) -> Repo:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return Repo(folder)


def test_a_repository_of_pictures(volume: Volume, hub: LoopbackHub, tmp_path: Path) -> None:
    hub.repos["me/set"] = repo(
        tmp_path / "hub",
        {
            "README.md": b"# mine",
            "train/a.txt": b"a red one",
            "train/a.png": picture(),
            "test/b.png": picture("blue"),
            "script.py": b"x",
        },
    )
    path = "hf://datasets/me/set"
    assert "not known yet" in scan(job(path), volume).notes[0]
    fetch_datasets(job(path), volume, None, lambda line: None)
    assert [Path(item.path).name for item in scan(job(path), volume).items] == ["b.png", "a.png"]
    asked = len(hub.requests)
    only = "hf://datasets/me/set/train"
    fetch_datasets(job(path, only), volume, None, lambda line: None)
    assert [Path(item.path).name for item in scan(job(only), volume).items] == ["a.png"]
    assert len(hub.requests) == asked
    with pytest.raises(JobError, match="has no 'nowhere'; it has"):
        fetch_datasets(job("hf://datasets/me/set/nowhere"), volume, None, lambda line: None)


def tables(tmp_path: Path, names: dict[str, list[tuple[bytes | None, str]]]) -> dict[str, bytes]:
    import pyarrow
    import pyarrow.parquet

    files = {}
    for name, rows in names.items():
        pictures = pyarrow.array(
            [{"bytes": data, "path": "x.png"} for data, _ in rows],
            pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]),
        )
        table = pyarrow.table({"image": pictures, "id": [1] * len(rows), "text": [text for _, text in rows]})
        pyarrow.parquet.write_table(table, tmp_path / "table.parquet")
        files[name] = (tmp_path / "table.parquet").read_bytes()
    return files


def test_a_repository_of_tables(volume: Volume, hub: LoopbackHub, tmp_path: Path) -> None:
    files = tables(
        tmp_path,
        {
            "data/train-00000-of-00001.parquet": [(picture(c), f"a {c} one") for c in ("red", "blue")],
            "data/test-00000-of-00001.parquet": [(picture("lime"), "a test")],
        },
    )
    hub.repos["me/set"] = repo(tmp_path / "hub", files | {"README.md": b"x"})
    path = "hf://datasets/me/set"
    told: list[str] = []
    fetch_datasets(job(path), volume, None, told.append)
    data = scan(job(path), volume)
    assert [item.caption for item in data.items] == ["a red one", "a blue one"]
    assert any("2 pictures of 1 parquet tables" in line for line in told)
    assert not list(volume.fetched.rglob("*.part"))


def test_tables_without_pictures(volume: Volume, hub: LoopbackHub, tmp_path: Path) -> None:
    hub.repos["me/set"] = repo(tmp_path / "hub", tables(tmp_path, {"train.parquet": [(None, "a")]}))
    with pytest.raises(JobError, match="has no picture in row 1, only"):
        fetch_datasets(job("hf://datasets/me/set"), volume, None, lambda line: None)
    assert find_fetched("hf://datasets/me/set", volume) is None
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"a": [1], "b": ["x"]}), tmp_path / "hub" / "train.parquet")
    hub.repos["me/other"] = Repo(tmp_path / "hub", commit="d" * 40)
    with pytest.raises(JobError, match="has no column of pictures; it has a, b"):
        fetch_datasets(job("hf://datasets/me/other"), volume, None, lambda line: None)


def test_a_repository_with_a_zip(volume: Volume, hub: LoopbackHub, tmp_path: Path) -> None:
    hub.repos["me/set"] = repo(tmp_path / "hub", {"set.zip": packed(**{"2_cat__a.png": picture()})})
    fetch_datasets(job("hf://datasets/me/set"), volume, None, lambda line: None)
    assert [(item.caption, item.repeats) for item in scan(job("hf://datasets/me/set"), volume).items] == [("cat", 2)]


def test_a_gated_repository_says_what_to_do(volume: Volume, hub: LoopbackHub, tmp_path: Path) -> None:
    hub.repos["me/set"] = repo(tmp_path / "hub", {"a.png": picture()})
    hub.repos["me/set"].gated = True
    with pytest.raises(AccessError, match=r"HF_TOKEN is not set.*https://huggingface\.co/datasets/me/set,"):
        fetch_datasets(job("hf://datasets/me/set"), volume, None, lambda line: None)


def test_what_is_wanted() -> None:
    def files(*names: str) -> tuple[RemoteFile, ...]:
        return tuple(RemoteFile(name, 1, None, None) for name in names)

    def chosen(*names: str) -> list[str]:
        return [file.path for file in wanted("me/set", files(*names), "k")]

    assert chosen("a.JPG", "a.txt", "README.md", "x.parquet") == ["a.JPG", "a.txt"]
    assert chosen("data/x.parquet", "old.zip") == ["data/x.parquet"]
    assert chosen("a.zip", "b.bin") == ["a.zip"]
    with pytest.raises(JobError, match=r"holds neither pictures nor parquet tables nor zips, but \.bin"):
        chosen("b.bin")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("hf://datasets/me/set", ("me/set", "main", "")),
        ("hf://datasets/me/set@v1.0/train/a b/", ("me/set", "v1.0", "train/a b")),
        ("hf://models/me/set", None),
        ("hf://datasets/me", None),
        ("hf://datasets/me/set/../../x", None),
    ],
)
def test_hub_addresses(path: str, expected: tuple[str, str, str] | None) -> None:
    found = parse_hub(path)
    assert (found and (found.repo, found.revision, found.below)) == expected
