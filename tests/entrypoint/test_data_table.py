from __future__ import annotations

from bootstrap.dataset import Dataset, Item, Part
from entrypoint.data_table import render_data


def item(path: str, bucket: tuple[int, int], repeats: int) -> Item:
    return Item(path, "digest", "a caption", repeats, *bucket, bucket)


def test_a_row_for_each_dataset_and_one_for_all() -> None:
    items = (item("a", (512, 512), 5), item("b", (448, 576), 1), item("c", (512, 512), 2))
    parts = (
        Part("datasets/a", 2, 1, (1, 5), 2, 6, 0),
        Part("https://share.example/" + "x" * 60, 1, 1, (2, 2), 1, 2, 3),
    )
    lines = render_data(Dataset(items, 3, 2, (), parts)).splitlines()
    assert [line.split("  ")[0] for line in lines[:4]] == ["dataset", "datasets/a", "..." + "x" * 47, "all"]
    assert [line.split()[1:] for line in lines[1:4]] == [
        ["2", "1/2", "1-5", "2", "6", "0"],
        ["1", "1/1", "2", "1", "2", "3"],
        ["3", "2/3", "2", "8", "3"],
    ]
    assert lines[4] == "sizes, with their images in an epoch: 448 x 576: 1, 512 x 512: 7"
    assert max(map(len, lines)) <= 120


def test_what_is_yet_to_be_fetched_is_not_known() -> None:
    part = Part("hf://datasets/a/b", 0, 0, (0, 0), 0, 0, 0, fetched=False)
    assert render_data(Dataset((), 0, 0, (), (part,))).splitlines()[1].split() == ["hf://datasets/a/b", *"??????"]


def test_one_dataset_is_all() -> None:
    lines = render_data(Dataset((item("a", (64, 64), 1),), 1, 0, (), (Part("d", 1, 0, (1, 1), 1, 1, 0),))).splitlines()
    assert len(lines) == 3
