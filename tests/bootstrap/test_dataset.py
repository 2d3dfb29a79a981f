from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bootstrap.dataset import Dataset, scan
from bootstrap.pictures import read_item
from bootstrap.volume import Volume
from jobs.problem import JobError
from jobs.schema import Job


def picture(path: Path, size: tuple[int, int] = (128, 128), colour: str = "red", caption: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def job(*entries: dict[str, Any], **keys: Any) -> Job:
    wanted = {"name": "t", "base": "flux-tiny", "method": "full", "resolution": 128, "bucket_step": 16} | keys
    return Job(**wanted, datasets=list(entries) or [{"path": "datasets/d"}])


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    volume = Volume(tmp_path)
    volume.create()
    return volume


@pytest.fixture
def folder(volume: Volume) -> Path:
    return volume.datasets / "d"


def problems(job: Job, volume: Volume) -> list[str]:
    with pytest.raises(JobError) as caught:
        scan(job, volume)
    return [str(problem) for problem in caught.value.problems]


def names(data: Dataset) -> list[str]:
    return [item.path.removeprefix("datasets/d/") for item in data.items]


def test_kohya_folders_multiply_repeats_and_name_the_class(volume: Volume, folder: Path) -> None:
    picture(folder / "5_sks flower" / "a.jpg")
    picture(folder / "5_sks flower" / "b.jpg", caption="a written one")
    picture(folder / "other" / "c.png")
    data = scan(job({"path": "datasets/d", "repeats": 2}), volume)
    assert [(item.caption, item.repeats) for item in data.items] == [
        ("sks flower", 10),
        ("a written one", 10),
        ("", 2),
    ]
    summary = data.summary()
    assert (summary.images, summary.items_per_epoch, summary.buckets) == (3, 22, ((128, 128, 22),))
    assert (data.images, data.captions) == (3, 1)
    assert any("captions: 1/3" in note for note in data.notes)
    assert any("5 repeats by its name" in note for note in data.notes)


def test_the_order_is_that_of_the_paths(volume: Volume, folder: Path) -> None:
    for name in ("b/1.png", "a/2.png", "a/10.png", "z.png"):
        picture(folder / name)
    assert names(scan(job(), volume)) == ["z.png", "a/10.png", "a/2.png", "b/1.png"]


def test_nested_and_linked_folders_are_walked_and_loops_end(volume: Volume, folder: Path, tmp_path: Path) -> None:
    picture(folder / "x" / "y" / "deep.png")
    picture(tmp_path / "elsewhere" / "linked.png")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "x" / "loop").symlink_to(folder)
    (folder / "gone.png").symlink_to(tmp_path / "nothing")
    data = scan(job(), volume)
    assert names(data) == ["link/linked.png", "x/y/deep.png"]
    assert any("x/loop" in note for note in data.notes)
    assert any("gone.png" in note for note in data.notes)


def test_system_files_are_counted_apart(volume: Volume, folder: Path) -> None:
    picture(folder / "a.jpg", caption="a")
    for name in ("._a.jpg", ".DS_Store", "Thumbs.db", "desktop.ini", "__MACOSX/._a.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\0\5\x16\7")
    data = scan(job(), volume)
    assert data.images == 1
    assert any("5 hidden or system files ignored" in note for note in data.notes)


def test_all_problems_of_all_entries_at_once(volume: Volume, folder: Path) -> None:
    whole = picture(folder / "good.jpg", (400, 300)).read_bytes()
    (folder / "half.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "page.jpg").write_text("<html>404</html>")
    picture(folder / "dot.png", (8, 8))
    (volume.datasets / "none").mkdir()
    (volume.datasets / "none" / "readme.doc").write_text("x")
    entries = [{"path": "datasets/d"}, {"path": "datasets/none"}, {"path": "datasets/missing"}]
    found = problems(job(*entries), volume)
    assert len(found) == 6
    for words in ("half.jpg: damaged", "empty.png: an empty file", "page.jpg: a web page", "dot.png: 8 x 8"):
        assert any(words in problem and "datasets[0]" in problem for problem in found), words
    assert any("datasets[1].path: no images" in problem and "1 x .doc" in problem for problem in found)
    assert any("datasets[2].path" in problem and "does not exist" in problem for problem in found)


@pytest.mark.parametrize(
    ("written", "guess"),
    [
        ("datasets/flwrs", "datasets/flowers"),
        ("datasets/Flowers", "datasets/flowers"),
        ("flowers", "datasets/flowers"),
        ("datasets\\flowers", "datasets/flowers"),
        ("dataset/flowers", "datasets/flowers"),
    ],
)
def test_a_missing_path_says_what_is_there(volume: Volume, written: str, guess: str) -> None:
    picture(volume.datasets / "flowers" / "a.png")
    (found,) = problems(job({"path": written}), volume)
    assert f"Did you mean {guess}?" in found


def test_a_path_without_its_first_slash(volume: Volume, folder: Path) -> None:
    picture(folder / "a.png")
    (found,) = problems(job({"path": str(folder).lstrip("/")}), volume)
    assert "Did you mean datasets/d?" in found
    assert scan(job({"path": str(folder)}), volume).images == 1


def test_a_file_is_not_a_folder(volume: Volume) -> None:
    (volume.datasets / "d.tar").write_bytes(b"tar")
    (found,) = problems(job({"path": "datasets/d.tar"}), volume)
    assert "is a file, and neither a folder nor a zip" in found


def test_a_zip_is_a_dataset_as_its_folder_is(volume: Volume, folder: Path) -> None:
    picture(folder / "set" / "3_cat" / "a.jpg", (128, 96))
    picture(folder / "set" / "b.png", caption="a written one")
    with zipfile.ZipFile(volume.datasets / "d.zip", "w") as archive:
        for file in sorted(folder.rglob("*.*")):
            archive.write(file, file.relative_to(folder))
        archive.writestr("__MACOSX/set/._b.png", b"\0\5\x16\7")
    plain, packed = scan(job(), volume), scan(job({"path": "datasets/d.zip"}), volume)
    assert [replace(item, path=item.path.replace("d.zip", "d")) for item in packed.items] == list(plain.items)
    assert any("1 hidden or system files ignored" in note for note in packed.notes)


def test_a_zip_that_must_not_be_used(volume: Volume) -> None:
    with zipfile.ZipFile(volume.datasets / "d.zip", "w") as archive:
        archive.writestr("../evil.jpg", b"x")
    (found,) = problems(job({"path": "datasets/d.zip"}), volume)
    assert "datasets/d.zip: '../evil.jpg' leads out of the archive" in found


def test_captions_with_a_foreign_ending_stop_the_job(volume: Volume, folder: Path) -> None:
    for name in ("a", "b"):
        picture(folder / f"{name}.jpg")
        (folder / f"{name}.cap").write_text("a caption")
    (found,) = problems(job({"path": "datasets/d", "trigger": "sks"}), volume)
    assert "captions: 0/2" in found
    assert "a.cap" in found
    assert scan(job({"path": "datasets/d", "caption": "all the same"}), volume).items[0].caption == "all the same"


def test_a_readme_does_not_stop_it(volume: Volume, folder: Path) -> None:
    for name in ("a", "b", "c"):
        picture(folder / f"{name}.jpg")
    (folder / "readme.md").write_text("mine")
    data = scan(job({"path": "datasets/d", "trigger": "sks"}), volume)
    assert {item.caption for item in data.items} == {""}
    assert not any("empty caption" in note for note in data.notes)
    assert any("captions: 0/3" in note for note in data.notes)


def test_trigger_default_and_empty_captions(volume: Volume, folder: Path) -> None:
    picture(folder / "a.jpg", caption="a cat")
    picture(folder / "b.jpg", caption="the sks cat")
    picture(folder / "c.jpg")
    picture(folder / "d.jpg", caption=" \n")
    data = scan(job({"path": "datasets/d", "trigger": "sks", "caption": "a photo"}), volume)
    assert [item.caption for item in data.items] == ["a cat", "the sks cat", "a photo", "a photo"]
    assert any("without a caption: c.jpg" in note for note in data.notes)
    assert any("empty caption files: d.txt" in note for note in data.notes)


def test_encodings_and_choices_are_told_by_name(volume: Volume, folder: Path) -> None:
    picture(folder / "a.jpg", caption="{red|blue} cat")
    picture(folder / "b.jpg")
    (folder / "b.jpg.txt").write_bytes("a cat’s toy".encode("cp1252"))
    data = scan(job(), volume)
    assert [item.caption for item in data.items] == ["{red|blue} cat", "a cat’s toy"]
    assert any("{a|b} are learned as they stand (wildcards: true draws a word): a.jpg" in note for note in data.notes)
    assert any("Windows-1252: b.jpg.txt" in note for note in data.notes)
    on = scan(job({"path": "datasets/d", "wildcards": True}), volume)
    assert not any("as they stand" in note for note in on.notes)
    picture(folder / "a.jpg", caption="{red|blue cat\nin two lines")
    on = scan(job({"path": "datasets/d", "wildcards": True}), volume)
    assert any("several lines are learned as they stand (multiline: true" in note for note in on.notes)
    assert any("lacks its partner" in note and "a.jpg" in note for note in on.notes)


def test_captions_from_a_list(volume: Volume, folder: Path) -> None:
    for name in ("a.jpg", "sub/b.jpg", "sub/c.jpg", "sub/d.jpg"):
        picture(folder / name)
    (folder / "sub" / "c.txt").write_text("beside it")
    (folder / "metadata.jsonl").write_text(
        '{"file_name": "a.jpg", "text": "a list\'s"}\n{"file_name": "sub/b.jpg", "text": "above"}\n'
        '{"file_name": "sub/c.jpg", "text": "above"}\n{"file_name": "sub/gone.jpg", "text": "x"}'
    )
    (folder / "sub" / "metadata.csv").write_text("file_name,text\nb.jpg,nearer\n")
    data = scan(job(), volume)
    assert [item.caption for item in data.items] == ["a list's", "nearer", "beside it", ""]
    assert data.captions == 3
    assert any("captions: 3/4" in note for note in data.notes)
    assert any("without a caption: sub/d.jpg" in note for note in data.notes)
    assert any("1 images that are not there, or not used" in note and "sub/gone.jpg" in note for note in data.notes)
    (folder / "metadata.jsonl").write_text('{"file_name": "a.jpg"}')
    (found,) = problems(job(), volume)
    assert "metadata.jsonl: line 1 has no text" in found
    assert "file_name" in found


def test_every_item_knows_its_dataset(volume: Volume, folder: Path) -> None:
    picture(folder / "a.jpg")
    picture(volume.datasets / "e" / "a.jpg", colour="blue")
    data = scan(job({"path": "datasets/d"}, {"path": "datasets/e"}), volume)
    assert [item.dataset for item in data.items] == [0, 1]


def test_one_item_for_every_distinct_bucket(volume: Volume, folder: Path) -> None:
    picture(folder / "large.png", (400, 400))
    picture(folder / "small.png", (100, 100))
    data = scan(job(resolution=[256, 128]), volume)
    assert [(Path(item.path).name, item.bucket) for item in data.items] == [
        ("large.png", (128, 128)),
        ("large.png", (256, 256)),
        ("small.png", (96, 96)),
    ]
    own = scan(job({"path": "datasets/d", "resolution": 64}, resolution=[256, 128]), volume)
    assert {item.bucket for item in own.items} == {(64, 64)}


def test_names_of_every_kind(volume: Volume, folder: Path) -> None:
    odd = ["😀.png", "two\nlines.png", "[x] {y} 100%.png", "n" * 251 + ".png", "UPPER.PNG"]
    for name in odd:
        picture(folder / name, caption=None)
    assert sorted(names(scan(job(), volume))) == sorted(odd)
    (folder / os.fsdecode(b"\xff.png")).write_bytes((folder / "UPPER.PNG").read_bytes())
    (found,) = problems(job(), volume)
    assert "not UTF-8" in found


def test_a_panorama_is_told(volume: Volume, folder: Path) -> None:
    picture(folder / "wide.png", (2000, 128))
    data = scan(job(), volume)
    assert any("more than half is cropped away" in note and "wide.png" in note for note in data.notes)


def test_progress_is_told(volume: Volume, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootstrap.dataset.PROGRESS_SECONDS", -1)
    for name in "ab":
        picture(folder / f"{name}.png")
    lines: list[str] = []
    scan(job(), volume, lines.append)
    assert lines == ["datasets/d: checked 1/2 images", "datasets/d: checked 2/2 images"]


def test_bad_images_are_skipped_where_the_job_says_so(volume: Volume, folder: Path) -> None:
    picture(folder / "good.jpg", caption="good")
    picture(folder / "small.png", (40, 40))
    picture(folder / "icon.png", (8, 8))
    (folder / "page.jpg").write_text("<html>404</html>")
    strict = problems(job(bucket_step=64), volume)
    assert len(strict) == 3
    assert all("or write bad_images: skip" in problem for problem in strict)
    data = scan(job(bucket_step=64, bad_images="skip"), volume)
    assert names(data) == ["good.jpg"]
    assert (data.images, data.parts[0].images, data.parts[0].skipped) == (1, 1, 3)
    skipped = [note for note in data.notes if "skipped" in note]
    for words in ("icon.png: 8 x 8 px is too small", "page.jpg: a web page", "small.png: 40 x 40 px is less than"):
        assert any(words in note for note in skipped), words


def test_skipping_all_is_a_problem(volume: Volume, folder: Path) -> None:
    folder.mkdir()
    (folder / "page.jpg").write_text("<html>404</html>")
    (found,) = problems(job(bad_images="skip"), volume)
    assert "not one of the 1 pictures in 'datasets/d' can be used" in found


def test_what_is_known_of_pictures_is_kept_on_the_volume(volume: Volume, folder: Path) -> None:
    picture(folder / "a.png")
    scan(job(), volume)
    assert not (volume.cache / "pictures").exists()
    scan(job(), volume, remember=True)
    assert len(list((volume.cache / "pictures").iterdir())) <= 1


def with_alpha(path: Path) -> None:
    image = Image.new("RGBA", (128, 128), (200, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 64, 128))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def test_masks_from_alpha(volume: Volume, folder: Path) -> None:
    with_alpha(folder / "a.png")
    picture(folder / "b.png")
    data = scan(job({"path": "datasets/d", "mask": "alpha"}), volume)
    assert [(item.mask, item.mask_digest) for item in data.items] == [("alpha", ""), ("", "")]
    assert any("without transparency, so without a mask: learned whole: b.png" in note for note in data.notes)
    assert {item.mask for item in scan(job(), volume).items} == {""}


def test_masks_from_a_folder_also_among_the_pictures(volume: Volume, folder: Path) -> None:
    for name in ("a", "2_cat/b", "c"):
        picture(folder / f"{name}.jpg")
    mask = Image.new("L", (64, 64), 255)
    for name in ("a", "2_cat/b"):
        (folder / "masks" / name).parent.mkdir(parents=True, exist_ok=True)
        mask.save(folder / "masks" / f"{name}.png")
    data = scan(job({"path": "datasets/d", "mask": "datasets/d/masks"}), volume)
    digest = hashlib.sha256((folder / "masks" / "a.png").read_bytes()).hexdigest()
    assert {Path(item.path).name: (item.mask, item.mask_digest) for item in data.items} == {
        "a.jpg": ("datasets/d/masks/a.png", digest),
        "b.jpg": ("datasets/d/masks/2_cat/b.png", digest),
        "c.jpg": ("", ""),
    }
    assert any("without a mask: learned whole: c.jpg" in note for note in data.notes)


def test_masks_that_do_not_fit_are_all_named(volume: Volume, folder: Path) -> None:
    masks = volume.datasets / "masks"
    for name in ("a", "b", "c", "d"):
        picture(folder / f"{name}.jpg")
        picture(masks / f"{name}.png", (64, 64), "white")
    picture(masks / "b.png", (64, 128), "white")
    picture(masks / "c.png", (64, 64), "black")
    (masks / "d.png").write_bytes(b"<html>")
    entry = {"path": "datasets/d", "mask": "datasets/masks"}
    found = problems(job(entry), volume)
    assert len(found) == 3
    for words in ("masks/b.png: the mask of b.jpg is 64 x 128 px", "c.jpg is black all over", "d.jpg a web page"):
        assert any(words in problem for problem in found), words
    assert names(scan(job(entry, bad_images="skip"), volume)) == ["a.jpg"]
    (found_path,) = problems(job(entry | {"mask": "datasets/maks"}), volume)
    assert "datasets[0].mask: 'datasets/maks' does not exist" in found_path
    assert "Did you mean datasets/masks?" in found_path


def test_a_zip_in_the_folder_is_named(volume: Volume, folder: Path) -> None:
    folder.mkdir()
    (folder / "pictures.zip").write_bytes(b"PK")
    (found,) = problems(job(), volume)
    assert f"give the zip itself, such as path: {folder / 'pictures.zip'}" in found


def test_masks_in_a_zip_for_pictures_in_a_zip(volume: Volume, folder: Path) -> None:
    picture(folder / "a.jpg")
    Image.new("L", (64, 64), 255).save(folder / "m.png")
    for name, member in (("d.zip", "set/a.jpg"), ("m.zip", "set/a.png")):
        with zipfile.ZipFile(volume.datasets / name, "w") as archive:
            archive.write(folder / ("a.jpg" if name == "d.zip" else "m.png"), member)
    (item,) = scan(job({"path": "datasets/d.zip", "mask": "datasets/m.zip"}), volume).items
    assert item.mask == "datasets/m.zip/set/a.png"
    mask = read_item(item, volume)[1]
    assert mask is not None
    assert mask.size == (64, 64)


# ---------------------------------------------------------------- validation


def digests(items: tuple[Any, ...]) -> set[str]:
    return {item.digest for item in items}


def test_a_share_of_the_pictures_is_held_out_at_all_sizes_and_counts_nowhere_else(volume: Volume, folder: Path) -> None:
    for number in range(20):
        picture(folder / f"{number}.png", colour=f"#0000{number:02x}", caption="a")
    plain = scan(job(resolution=[64, 128]), volume)
    data = scan(job(resolution=[64, 128], validation={"fraction": 0.3}), volume)
    held = len(digests(data.held_out))
    assert 0 < held < 20
    assert not digests(data.items) & digests(data.held_out)
    assert sorted(data.items + data.held_out, key=str) == sorted(plain.items, key=str)
    assert (data.images, data.captions, data.summary().items_per_epoch) == (20 - held, 20 - held, 40 - 2 * held)
    assert any(note.startswith(f"validation: {held} pictures are held out") for note in data.notes)


def test_the_same_picture_in_two_folders_is_held_out_in_both(volume: Volume) -> None:
    for number in range(8):
        for name in ("a", "b"):
            picture(volume.datasets / name / f"{number}.png", colour=f"#0000{number:02x}")
    data = scan(job({"path": "datasets/a"}, {"path": "datasets/b"}, validation={"fraction": 0.5}), volume)
    assert len(data.held_out) == 2 * len(digests(data.held_out))
    assert not digests(data.items) & digests(data.held_out)


def test_pictures_of_a_folder_of_their_own_are_dressed_as_the_first_dataset(volume: Volume, folder: Path) -> None:
    picture(folder / "a.png", colour="red")
    picture(volume.datasets / "others" / "b.png", colour="blue", caption="a blue one")
    picture(volume.datasets / "others" / "again.png", colour="red")  # trained on: tells nothing
    wanted = job({"path": "datasets/d", "repeats": 5, "trigger": "sks"}, validation={"path": "datasets/others"})
    data = scan(wanted, volume)
    assert names(data) == ["a.png"]
    (other,) = data.held_out
    assert (other.path, other.caption, other.repeats, other.dataset) == ("datasets/others/b.png", "a blue one", 1, 0)


@pytest.mark.parametrize(
    ("validation", "told"),
    [
        ({"path": "datasets/d"}, "every picture of datasets/d is also trained on"),
        ({"path": "datasets/nowhere"}, "validation.path"),
        ({"fraction": 0.5}, "holds out every picture"),
    ],
)
def test_nothing_is_left(validation: dict[str, Any], told: str, volume: Volume, folder: Path) -> None:
    picture(folder / "a.png")
    (found,) = problems(job(validation=validation), volume)
    assert told in found
