from __future__ import annotations

import pytest

from bootstrap.links import LinkError, direct


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("https://example.org/set.zip?x=1", "https://example.org/set.zip?x=1"),
        (
            "https://www.dropbox.com/scl/fi/abc/set.zip?rlkey=k%2Bey&dl=0",
            "https://www.dropbox.com/scl/fi/abc/set.zip?rlkey=k%2Bey&dl=1",
        ),
        ("https://www.dropbox.com/s/abc/set.zip", "https://www.dropbox.com/s/abc/set.zip?dl=1"),
        (
            "https://drive.google.com/file/d/1a-B_2/view?usp=sharing",
            "https://drive.usercontent.google.com/download?id=1a-B_2&export=download&confirm=t",
        ),
        (
            "https://drive.google.com/open?id=1a-B_2",
            "https://drive.usercontent.google.com/download?id=1a-B_2&export=download&confirm=t",
        ),
        (
            "https://drive.google.com/uc?export=download&id=1a-B_2",
            "https://drive.usercontent.google.com/download?id=1a-B_2&export=download&confirm=t",
        ),
        (
            "https://me-my.sharepoint.com/:u:/g/personal/x/abc?e=1",
            "https://me-my.sharepoint.com/:u:/g/personal/x/abc?e=1&download=1",
        ),
        ("https://github.com/me/blob/blob/main/set.zip", "https://github.com/me/blob/raw/main/set.zip"),
        (
            "https://huggingface.co/datasets/me/x/blob/main/set.zip",
            "https://huggingface.co/datasets/me/x/resolve/main/set.zip",
        ),
        ("https://cloud.example.org/s/AbCdEfGhIjKlMnO", "https://cloud.example.org/s/AbCdEfGhIjKlMnO/download"),
        (
            "https://example.org/index.php/s/AbCdEfGhIjKlMnO/",
            "https://example.org/index.php/s/AbCdEfGhIjKlMnO/download",
        ),
        ("https://example.org/s/short", "https://example.org/s/short"),
    ],
)
def test_a_share_becomes_the_address_of_its_file(link: str, expected: str) -> None:
    assert direct(link) == expected
    assert direct(expected) == expected


def test_a_folder_of_google_drive_is_no_file() -> None:
    with pytest.raises(LinkError, match="pack it as a zip"):
        direct("https://drive.google.com/drive/folders/1a-B_2")
