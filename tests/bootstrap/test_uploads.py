from __future__ import annotations

import os
from pathlib import Path

from bootstrap.uploads import Record, Uploaded, all_uploaded, missing, owes_upload, pictures_of, unreadable
from jobs.load import load_job
from jobs.schema import Output
from tests.finished_run import finish_run, save_state


def uploaded(file: Path) -> Uploaded:
    found = file.stat()
    return Uploaded("aa", found.st_size, found.st_mtime_ns, "c0ffee")


def test_what_is_missing_and_what_is_not(tmp_path: Path) -> None:
    volume, file = finish_run(tmp_path, output={"hub": "me/flowers", "states": True})
    job, folder = load_job(file).job, volume.run("flowers")
    pieces = missing(folder, job, Record("me/flowers"), finished=True)
    names = ["flowers.safetensors", "states/flowers-000005.safetensors", "states/flowers-000010.safetensors"]
    assert [piece.path for piece in pieces] == names
    assert [(piece.step, piece.digest) for piece in pieces] == [(10, "d1gest"), (5, "d1gest"), (10, "d1gest")]
    assert [piece.path for piece in missing(folder, job, Record("me/flowers"), finished=False)] == names[1:]
    assert owes_upload(folder, job)

    record = Record("me/flowers").with_file(names[2], uploaded(pieces[2].file), "card")
    assert record.known_sha256(pieces[0].file) == "aa"  # the same bytes
    record = record.with_file(names[0], uploaded(pieces[0].file), "")
    record.write(folder)
    assert Record.read(folder, "me/flowers") == record
    assert record.card == "card"
    assert [piece.path for piece in missing(folder, job, record, finished=True)] == [names[1]]
    assert not all_uploaded(folder, job)
    assert all_uploaded(folder, job.model_copy(update={"output": Output(hub="me/flowers")}))
    record.with_file(names[1], uploaded(pieces[1].file), "").write(folder)
    assert all_uploaded(folder, job)
    assert not owes_upload(folder, job)

    assert Record.read(folder, "me/elsewhere") == Record("me/elsewhere")  # all of it anew
    os.utime(pieces[0].file)  # trained on since
    assert owes_upload(folder, job)


def test_what_a_hand_or_a_kill_left_is_no_upload(tmp_path: Path) -> None:
    volume, file = finish_run(tmp_path)
    job, folder = load_job(file).job, volume.run("flowers")
    for text in ("", "{", "[]", '{"repo": "me/flowers", "files": {"a": {"size": 1}}, "card": ""}'):
        folder.uploads.write_text(text)
        assert Record.read(folder, "me/flowers") == Record("me/flowers")
    (folder.output / "flowers.safetensors").unlink()
    assert missing(folder, job, Record("me/flowers"), finished=True) == []
    (folder.output / "flowers.safetensors").write_text("no weights")
    assert missing(folder, job, Record("me/flowers"), finished=True) == []
    assert not all_uploaded(folder, job)  # which would let the pod be deleted
    assert unreadable(folder, job) == [folder.output / "flowers.safetensors"]
    assert owes_upload(folder, job)


def test_without_a_repository_nothing_is_owed(tmp_path: Path) -> None:
    volume, file = finish_run(tmp_path, output={})
    job, folder = load_job(file).job, volume.run("flowers")
    assert not owes_upload(folder, job)
    assert not all_uploaded(folder, job)


def test_pictures_of_a_steps_weights_and_of_the_first(tmp_path: Path) -> None:
    volume, _ = finish_run(tmp_path)
    folder = volume.run("flowers")
    save_state(folder, 15)
    (folder.samples / ".step-000020-00.png.part").write_bytes(b"half")
    (folder.samples / "step-000010-01.png").write_bytes(b"damaged")
    found = [(picture.path, picture.prompt) for picture in pictures_of(folder, 15)]
    rain = "pprflwr in the rain"
    assert found == [
        ("samples/step-000010-00.png", rain),
        ("samples/step-000010-01.png", ""),
        ("samples/step-000000-00.png", rain),
    ]
    best = [(picture.path, picture.settings) for picture in pictures_of(folder, 9)]
    assert best == [("samples/step-000005-00.png", "seed 42"), ("samples/step-000000-00.png", "seed 42")]
