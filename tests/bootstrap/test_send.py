"""Uploading to a hub on the loopback, through huggingface_hub in its own process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bootstrap.hub_writes import why_not
from bootstrap.outcome import AccessError
from bootstrap.send import Parcel
from bootstrap.transfers import SEND, Patience, Transfers
from tests.loopback_hub import Fault, LoopbackHub, Repo
from tests.loopback_uploads import account

REPO = "me/flowers"
GOOD, READER, FINE, STRANGER, UNKNOWN = (f"hf_{name}0123456789" for name in ("good", "read", "fine", "else", "gone"))
CARD = "---\nlicense: apache-2.0\n---\n# flowers\n"
ONCE = Patience(waits=())
QUICK = Patience(waits=(0.05, 0.05, 0.05))


@pytest.fixture
def writable(hub: LoopbackHub, tmp_path: Path) -> LoopbackHub:
    """A hub where GOOD's account, me, may write."""
    hub.accounts = {
        GOOD: account(orgs=(("studio", "write"), ("school", "read"))),
        READER: account(role="read"),
        FINE: account(role="fineGrained", me=["repo.content.read"]),
        STRANGER: account(name="else"),
    }
    hub.tokens = set(hub.accounts)
    return hub


@pytest.fixture
def parcel(tmp_path: Path) -> Parcel:
    file, picture = tmp_path / "flowers.safetensors", tmp_path / "step-000010-00.png"
    file.write_bytes(os.urandom(190_000))
    picture.write_bytes(os.urandom(3000))
    pictures = {"samples/step-000010-00.png": str(picture)}
    return Parcel(REPO, "flowers.safetensors", str(file), 190_000, "step 10", pictures=pictures, card=CARD)


def opened(token: str | None = GOOD, repo: str = REPO, private: bool = True, base: str = "") -> dict[str, Any]:
    with Transfers(token, print, lambda: None, ONCE, program=SEND) as transfers:
        answer: dict[str, Any] = transfers.ask({"open": {"repo": repo, "private": private, "base": base}})["opened"]
        return answer


def sent(parcel: Parcel, patience: Patience = ONCE, say: Callable[[str], None] = print) -> dict[str, str]:
    """As a run does it: first the repository, then the file."""
    with Transfers(GOOD, say, lambda: None, patience, program=SEND, bar=False) as transfers:
        transfers.ask({"open": {"repo": REPO, "private": True, "base": ""}})
        return transfers.send(parcel, "upload")


def test_a_new_repository_is_private_and_holds_what_was_sent(writable: LoopbackHub, parcel: Parcel) -> None:
    assert opened() == {"made": True, "licence": {}}
    assert writable.repos[REPO].private
    done = sent(parcel)
    files = writable.repos[REPO].files()
    assert set(files) == {".gitattributes", "README.md", "flowers.safetensors", *parcel.pictures}
    assert files["flowers.safetensors"].read_bytes() == Path(parcel.file).read_bytes()
    assert files["README.md"].read_text() == CARD
    assert done["commit"] == writable.repos[REPO].commit
    assert len(writable.store.received) == 5  # 40,000 bytes at most
    assert writable.authorizations == {f"Bearer {GOOD}"}


def test_what_is_there_is_not_sent_again(writable: LoopbackHub, parcel: Parcel, tmp_path: Path) -> None:
    """Not under the same name, and not under another; and nothing of it makes a commit where nothing changes."""
    first = sent(parcel)
    received = len(writable.store.received)
    assert sent(parcel) == first
    assert writable.repos[REPO].history == ["step 10"]
    done = sent(replace(parcel, path="states/flowers-000010.safetensors", sha256=first["sha256"], message="again"))
    assert len(writable.store.received) == received
    assert writable.repos[REPO].history == ["step 10", "again"]
    assert done["commit"] == writable.repos[REPO].commit


def test_a_card_that_someone_edited_stays(writable: LoopbackHub, parcel: Parcel) -> None:
    ours = sent(parcel)["card"]
    readme = writable.repos[REPO].folder / "README.md"
    assert sent(replace(parcel, card=CARD + "more", known_card=ours))["card"]
    assert readme.read_text() == CARD + "more"
    readme.write_text("mine")
    assert sent(replace(parcel, card=CARD + "still more", known_card=ours))["card"] == ""
    assert readme.read_text() == "mine"


def test_parts_that_the_store_has_are_not_sent_again(writable: LoopbackHub, parcel: Parcel) -> None:
    """The store fails at the fourth part, a stall ends the process, and the next one goes on with what is missing."""
    lines: list[str] = []
    writable.fail(Fault("PUT /store/.*/4$", 503), times=1)
    writable.fail(Fault("PUT /store/.*/5$", stall=30.0), times=1)
    sent(parcel, replace(QUICK, stall=6.0), lines.append)
    assert writable.store.uploads == 1
    assert sum(writable.store.received) == 190_000
    assert any("the hub's store answers 503" in line or "stalled" in line for line in lines)
    assert "SECRET" not in " ".join(lines)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PUT /store/.*/2$", cut=True),
        Fault("PUT /store/.*/2$", 403),  # the signed address is too old
        Fault("POST /store/[0-9a-f]*/1/0", 400),
        Fault("POST /store/verify", 500),
        Fault("POST .*/commit/", 503),
        Fault("POST .*/commit/", 412),
        Fault("POST .*/commit/", 429, {"Retry-After": "1"}),
    ],
)
def test_trouble_that_passes(fault: Fault, writable: LoopbackHub, parcel: Parcel) -> None:
    writable.fail(fault, times=1)
    lines: list[str] = []
    sent(parcel, QUICK, lines.append)
    assert writable.repos[REPO].files()["flowers.safetensors"].read_bytes() == Path(parcel.file).read_bytes()
    assert [line for line in lines if "Trying again" in line or "Going on" in line]
    assert GOOD not in " ".join(lines)
    assert "SECRET" not in " ".join(lines)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            Fault("POST .*/commit/", 403, {"X-Error-Message": "Private repository storage limit reached"}),
            "store no more",
        ),
        (Fault("POST .*/commit/", 403, {"X-Error-Message": "Forbidden"}), "no right to write to me/flowers.*Forbidden"),
        (Fault("POST .*/commit/", 413), r"nothing so large for me/flowers \(413\)"),
        (Fault("POST .*/commit/", 409), r"changed by someone else at the same moment \(409\)"),
        (Fault("POST .*/commit/", 500), r"The hub is down \(500\) and did not take"),
        (Fault("PUT /store/", 500), "store answers 500"),
    ],
)
def test_trouble_that_stays_is_told(fault: Fault, told: str, writable: LoopbackHub, parcel: Parcel) -> None:
    writable.fail(fault)
    with pytest.raises(AccessError, match=told):
        sent(parcel)
    assert "flowers.safetensors" not in writable.repos[REPO].files()


def test_a_hub_that_does_not_answer(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(AccessError, match=r"The hub at http://127.0.0.1:9 cannot be reached to upload to me/flowers"):
        opened()


def test_a_hub_that_shows_other_bytes_is_not_believed(writable: LoopbackHub, parcel: Parcel) -> None:
    opened()
    writable.repos[REPO].wrong_sums = {"flowers.safetensors"}
    with pytest.raises(AccessError, match=r"another checksum for flowers.safetensors of me/flowers"):
        sent(parcel, QUICK)


def test_a_file_that_is_gone(writable: LoopbackHub, parcel: Parcel) -> None:
    Path(parcel.file).unlink()
    with pytest.raises(FileNotFoundError, match=r"flowers.safetensors of me/flowers was removed here before"):
        sent(parcel)


def test_where_xet_fails_lfs_is_taken(writable: LoopbackHub, parcel: Parcel) -> None:
    """This hub says that it has Xet, and what should be its server is none."""
    writable.xet = f"{writable.endpoint}/nothing"
    lines: list[str] = []
    sent(parcel, QUICK, lines.append)
    assert sum(writable.store.received) == 190_000
    assert any("Xet" in line for line in lines), lines


# ---------------------------------------------------------------- may it be written to?


@pytest.mark.parametrize(
    ("token", "repo", "private", "told"),
    [
        (None, REPO, True, "neither HF_UPLOAD_TOKEN nor HF_TOKEN is set"),
        (UNKNOWN, REPO, True, "The hub does not know the token"),
        (READER, REPO, True, "may only read, and me/flowers is to be written to"),
        (STRANGER, REPO, True, "The account of the token, else, may not write to me"),
        (GOOD, "me/public", True, "me/public is there and public, and output.private is true"),
    ],
)
def test_refusals(
    token: str | None, repo: str, private: bool, told: str, writable: LoopbackHub, tmp_path: Path
) -> None:
    (tmp_path / "public").mkdir()
    writable.repos["me/public"] = Repo(tmp_path / "public")
    with pytest.raises(AccessError, match=told) as caught:
        opened(token, repo, private)
    assert "hf_" not in str(caught.value)
    assert REPO not in writable.repos


def test_a_repository_that_is_there_is_taken_with_the_licence_of_the_base(
    writable: LoopbackHub, tmp_path: Path
) -> None:
    for name in ("public", "base"):
        (tmp_path / name).mkdir()
    licence = {"license": "other", "license_name": "its-own", "license_link": "LICENSE.md"}
    writable.repos["me/public"] = Repo(tmp_path / "public")
    writable.repos["a/base"] = Repo(tmp_path / "base", gated=True, card=licence)
    assert opened(repo="me/public", private=False, base="a/base") == {"made": False, "licence": licence}


@pytest.mark.parametrize(
    ("told", "repo", "why"),
    [
        (account(), "me/x", ""),
        (account(orgs=(("studio", "contributor"),)), "studio/x", ""),
        (account(orgs=(("school", "read"),)), "school/x", "may only read in school"),
        (account(), "you/x", "Write one of me before the /"),
        (account(role="fineGrained", me=["repo.write"]), "me/x", ""),
        (account(role="fineGrained", studio=["repo.write"]), "studio/x", ""),  # an org that the answer does not list
        (account(role="fineGrained", **{"me/x": ["repo.write"]}), "me/x", ""),
        (account(role="fineGrained", me=["repo.content.read"]), "me/x", "no right to write to me's repositories"),
        (account(role="fineGrained"), "me/x", "no right to write to me's repositories"),
        ({"name": "me"}, "me/x", ""),
    ],
)
def test_why_not(told: Any, repo: str, why: str) -> None:
    assert (why in why_not(told, repo)) if why else (why_not(told, repo) == "")
