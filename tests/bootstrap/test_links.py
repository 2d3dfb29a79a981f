from __future__ import annotations

import pytest

from bootstrap.hub import shown_address
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
            "https://drive.google.com/file/d/1a-B_2/view?usp=sharing&resourcekey=0-ab",
            "https://drive.usercontent.google.com/download?id=1a-B_2&export=download&confirm=t&resourcekey=0-ab",
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
        ("https://h/Blüten.zip#ü", "https://h/Bl%C3%BCten.zip"),
        ("https://h/my pics%20.zip?sig=a b%2B+c/=", "https://h/my%20pics%20.zip?sig=a%20b%2B+c/="),
        ("https://blüten.example:8443/x.zip", "https://xn--blten-lva.example:8443/x.zip"),
    ],
)
def test_a_share_becomes_the_address_of_its_file(link: str, expected: str) -> None:
    assert direct(link) == expected
    assert direct(expected) == expected


def test_a_folder_of_google_drive_is_no_file() -> None:
    with pytest.raises(LinkError, match="pack it as a zip"):
        direct("https://drive.google.com/drive/folders/1a-B_2")


@pytest.mark.parametrize("link", ["https://[::1/x.zip", "https://h:port/x.zip", "https://h:99999/x", "https://ü..h/x"])
def test_what_can_be_no_address(link: str) -> None:
    with pytest.raises(LinkError, match="malformed"):
        direct(link)


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("https://me:word@h:1/x.zip?sig=SECRET#y", "https://h:1/x.zip?..."),
        ("https://me:word@[::1/x.zip?sig=SECRET#y", "https://[::1/x.zip"),
        ("https://[::1", "https://[::1"),
    ],
)
def test_an_address_is_shown_without_its_secrets(link: str, shown: str) -> None:
    assert shown_address(link) == shown
