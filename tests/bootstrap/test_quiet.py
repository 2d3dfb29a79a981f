from __future__ import annotations

import zipfile
from pathlib import Path

from bootstrap.quiet import QuietWatch


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_dataset_is_quiet_when_it_stood_still_for_a_while(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"1")
    clock = Clock()
    watch = QuietWatch(10, clock)
    assert "unchanged for 10 s" in watch.waiting_for([tmp_path])
    clock.now = 9
    assert watch.waiting_for([tmp_path])
    (tmp_path / "b.png").write_bytes(b"2")  # one more arrives
    clock.now = 11
    assert watch.waiting_for([tmp_path])
    clock.now = 22
    assert watch.waiting_for([tmp_path]) == ""


def test_a_growing_file_is_a_change(tmp_path: Path) -> None:
    file, clock = tmp_path / "a.png", Clock()
    watch = QuietWatch(10, clock)
    for size in range(1, 5):
        file.write_bytes(b"x" * size)
        assert watch.waiting_for([tmp_path])
        clock.now += 11
    assert watch.waiting_for([tmp_path]) == ""


def test_what_is_plainly_not_whole_is_waited_for(tmp_path: Path) -> None:
    clock = Clock()
    watch = QuietWatch(0, clock)
    part = tmp_path / "set.zip.part"
    part.write_bytes(b"x")
    assert "still coming" in watch.waiting_for([tmp_path])
    part.unlink()
    whole = tmp_path / "set.zip"
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("a.png", b"picture" * 100)
    data = whole.read_bytes()
    whole.write_bytes(data[: len(data) // 2])
    assert "not whole" in watch.waiting_for([whole])
    whole.write_bytes(data)
    clock.now = 1
    assert watch.waiting_for([whole]) == ""


def test_a_missing_dataset_is_quiet(tmp_path: Path) -> None:
    """The job's check then says that it is missing."""
    clock = Clock()
    watch = QuietWatch(10, clock)
    watch.waiting_for([tmp_path / "none"])
    clock.now = 11
    assert watch.waiting_for([tmp_path / "none"]) == ""


def test_a_look_is_good_for_a_while(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"1")
    clock = Clock()
    watch = QuietWatch(10, clock)
    watch.waiting_for([tmp_path], 30)
    first = watch.fingerprint([tmp_path])
    (tmp_path / "b.png").write_bytes(b"2")
    clock.now = 29
    assert not watch.differs([tmp_path], first, 30)
    assert watch.waiting_for([tmp_path], 30) == ""
    assert watch.waiting_for([tmp_path])  # whoever wants to begin looks anew
    clock.now = 60
    assert watch.differs([tmp_path], first, 30)


def test_what_a_link_leads_to_is_watched_and_loops_end(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.png").write_bytes(b"1")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "d" / "loop").symlink_to(tmp_path / "d")
    clock = Clock()
    watch = QuietWatch(10, clock)
    assert watch.waiting_for([tmp_path / "d"])
    clock.now = 11
    (tmp_path / "elsewhere" / "a.png").write_bytes(b"22")
    assert watch.waiting_for([tmp_path / "d"])
    clock.now = 22
    assert watch.waiting_for([tmp_path / "d"]) == ""
