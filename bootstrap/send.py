"""Brings files of a run to a repository of the hub: one large file with a card and pictures at a time, as one commit.

It is a process of its own (``python -m bootstrap.send``), watched by ``bootstrap.transfers``, as ``bootstrap.receive``.
Bytes go by Xet where the hub has it, else by LFS in parts, several at once. A part that the store has taken is told, so
that the next try, in a new process, goes on behind it. What the repository's store holds already is not sent again: the
commit names it. Nothing is taken for uploaded that the hub, asked afterwards, does not show with the right hash.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bootstrap import hub, hub_writes
from bootstrap.outcome import AccessError
from bootstrap.receive import BrokenOffError, Order, VolumeError, hash_file
from bootstrap.worker import Tell, serve

BLOCK = 256 * 1024  # bytes given to the network at once
PARTS_AT_ONCE = 4  # one HTTP stream fills no data-centre link
QUIET_LIMIT = 60.0  # seconds in which a server takes nothing, or says nothing after the last byte
COMPLETE_LIMIT = 900.0  # seconds for the store to put 24 GB together and to hash them
NICENESS = 10  # behind the trainer
CARD = "README.md"


@dataclass(frozen=True)
class Parcel:
    """What one commit brings."""

    repo: str
    path: str  # of the large file, in the repository
    file: str
    size: int  # bytes
    message: str  # of the commit
    sha256: str | None = None  # of the file, where it is known
    pictures: dict[str, str] = field(default_factory=dict)  # path in the repository: file
    card: str = ""  # README.md; none where it is empty
    known_card: str = ""  # git's id of the README.md that we brought before; another one is somebody's, and stays
    plain: bool = False  # LFS even where the hub offers Xet
    begun: dict[str, Any] | None = None  # an LFS upload that an earlier try began: what the store asks, and what it has


class AnewError(Exception):
    """The store does not go on with an upload that was begun: it is begun anew."""


class DiffersError(Exception):
    """The hub shows other bytes than were sent."""


def send(parcel: Parcel, token: str, tell: Tell) -> dict[str, str]:
    """Brings a parcel; gives commit, sha256 and the card's id once the hub shows them. Raises what goes wrong."""
    from huggingface_hub import HfApi, constants

    api, headers = HfApi(token=token), _headers(token)
    sha256 = parcel.sha256 or hash_file(Path(parcel.file), Order("", parcel.size), tell)
    if sha256 is None:
        raise VolumeError(None, f"it is not {parcel.size} bytes long any more")
    tell(sha256=sha256)  # a new try need not read 24 GB for it
    if parcel.plain or not _takes_xet(parcel.repo, headers):
        constants.HF_HUB_DISABLE_XET = True  # of this process: pictures go the same way as the large file
    info: Any = api.repo_info(parcel.repo, files_metadata=True)
    there = {one.rfilename: one.lfs.sha256 if one.lfs else one.blob_id for one in info.siblings or ()}
    if sha256 not in there.values():
        carry = _by_lfs if constants.HF_HUB_DISABLE_XET else _by_xet
        carry(parcel, sha256, headers, tell)
    tell(flushing=True)
    brings_card = bool(parcel.card) and there.get(CARD) in (None, parcel.known_card, git_id(parcel.card.encode()))
    commit = _commit(api, parcel, sha256, there, brings_card)
    _verify(api, parcel, sha256, commit, brings_card)
    return {"commit": commit, "sha256": sha256, "card": git_id(parcel.card.encode()) if brings_card else ""}


def git_id(content: bytes) -> str:
    """What git calls a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _headers(token: str) -> dict[str, str]:
    from huggingface_hub.utils._headers import build_hf_headers

    return build_hf_headers(token=token)


def _commit(api: Any, parcel: Parcel, sha256: str, there: dict[str, str], brings_card: bool) -> str:
    """The commit's id; the newest one's where the repository is as it should be already."""
    from huggingface_hub import CommitOperationAdd

    operations = [CommitOperationAdd(path, file) for path, file in parcel.pictures.items()]
    if brings_card:
        operations.append(CommitOperationAdd(CARD, parcel.card.encode()))
    if there.get(parcel.path) != sha256:
        large = CommitOperationAdd(parcel.path, parcel.file)
        large.upload_info.sha256 = bytes.fromhex(sha256)
        large._upload_mode, large._is_uploaded = "lfs", True  # the store has its bytes: the commit only names it
        operations.append(large)
    return str(api.create_commit(parcel.repo, operations, commit_message=parcel.message).oid)


def _verify(api: Any, parcel: Parcel, sha256: str, commit: str, brings_card: bool) -> None:
    """Raises DiffersError where the hub shows another hash or size than what lies here."""
    paths = [parcel.path, *parcel.pictures, *[CARD] * brings_card]
    shown = {one.path: one for one in api.get_paths_info(parcel.repo, paths, revision=commit)}
    for path in paths:
        found = shown.get(path)
        if found is None:
            raise DiffersError(f"The hub does not show {path} of {parcel.repo} after the upload.")
        if path == parcel.path:
            right = found.lfs is not None and (found.lfs.sha256, found.size) == (sha256, parcel.size)
        else:
            content = parcel.card.encode() if path == CARD else Path(parcel.pictures[path]).read_bytes()
            ours = hashlib.sha256(content).hexdigest() if found.lfs else git_id(content)
            right = ours == (found.lfs.sha256 if found.lfs else found.blob_id)
        if not right:
            raise DiffersError(f"The hub shows another checksum for {path} of {parcel.repo} than the file here has.")


# ---- Xet


def _takes_xet(repo: str, headers: dict[str, str]) -> bool:
    """Whether this hub gives this token the right to write to ``repo`` by Xet; a hub without Xet has no such page."""
    from huggingface_hub import get_session
    from huggingface_hub.utils._http import hf_raise_for_status
    from huggingface_hub.utils._runtime import is_xet_available

    if not is_xet_available():
        return False
    response = get_session().get(_xet_address(repo), headers=headers)
    if response.status_code == 404:
        return False
    hf_raise_for_status(response)
    return True


def _xet_address(repo: str) -> str:
    from huggingface_hub.utils._xet import XetTokenType, xet_connection_info_refresh_url

    kind = XetTokenType.WRITE
    return xet_connection_info_refresh_url(token_type=kind, repo_id=repo, repo_type="model", revision="main")


def _by_xet(parcel: Parcel, sha256: str, headers: dict[str, str], tell: Tell) -> None:
    """What a broken Xet upload has brought is found again by its chunks' hashes, in HF_HOME and on the server."""
    from huggingface_hub.utils._xet import get_xet_session, xet_headers_without_auth

    last = (0, 0)

    def note(report: Any, _: object) -> None:  # comes ten times a second, whether anything moves or not
        nonlocal last
        if last != (last := (report.total_bytes_completed, report.total_transfer_bytes_completed)):
            tell(bytes=last[0], moved=last[1])

    try:
        with get_xet_session().new_upload_commit(
            token_refresh_url=_xet_address(parcel.repo),
            token_refresh_headers=headers,
            custom_headers=xet_headers_without_auth(headers),
            progress_callback=note,
        ) as commit:
            commit.start_upload_file(parcel.file, sha256=sha256)
    except (RuntimeError, ValueError, OSError) as error:  # hf_xet's own errors are of these kinds
        raise BrokenOffError(f"Xet: {hub.without_signatures(str(error))}") from error


# ---- LFS


def _by_lfs(parcel: Parcel, sha256: str, headers: dict[str, str], tell: Tell) -> None:
    begun = parcel.begun
    if begun is None:
        actions = _ask_store(parcel, sha256, headers)
        if not actions:
            return  # the store has it
        begun = {"actions": actions, "parts": {}}
        tell(begun=begun)
    upload = begun["actions"]["upload"]
    chunk = int((upload.get("header") or {}).get("chunk_size") or 0)
    if chunk:
        _put_parts(parcel, sha256, upload, chunk, begun["parts"], tell)
    else:
        sent = _Sent(parcel, 0, tell)
        _put(upload["href"], parcel, 0, parcel.size, sent, upload.get("header") or {})
    if verify := begun["actions"].get("verify"):
        _post(verify["href"], {"oid": sha256, "size": parcel.size}, headers)
    tell(begun=None, kept=parcel.size)  # a new try finds it in the store


def _ask_store(parcel: Parcel, sha256: str, headers: dict[str, str]) -> dict[str, Any]:
    """Where the bytes go; nothing where they are there. See git-lfs' docs/api/batch.md."""
    from huggingface_hub.lfs import UploadInfo, post_lfs_batch_info

    info = UploadInfo(parcel.size, b"", bytes.fromhex(sha256))
    found, refused, _ = post_lfs_batch_info(
        [info], token=None, repo_type="model", repo_id=parcel.repo, revision="main", headers=headers
    )
    if refused:
        words = " ".join(str(refused[0]["error"]["message"]).split())[:200]
        raise AccessError(f"The hub does not take {parcel.path} of {parcel.repo}. The hub says: {words}")
    return dict(found[0].get("actions") or {})


class _Sent:
    """Counts the bytes on their way, over several threads."""

    def __init__(self, parcel: Parcel, kept: int, tell: Tell):
        self.total, self.kept, self.tell = parcel.size, kept, tell
        self.bytes, self.over = kept, False
        self._lock = threading.Lock()

    def more(self, count: int) -> None:
        with self._lock:
            self.bytes += count
        self.tell(bytes=min(self.bytes, self.total))

    def keep(self, number: int, tag: str, count: int) -> None:
        with self._lock:
            self.kept += count
        self.tell(part=[number, tag], kept=self.kept)


def _put_parts(
    parcel: Parcel, sha256: str, upload: dict[str, Any], chunk: int, taken: dict[str, str], tell: Tell
) -> None:
    """Sends the parts that the store has not ``taken`` yet, then has it put them together."""
    addresses = {int(name): url for name, url in upload["header"].items() if name.isdecimal()}
    count = math.ceil(parcel.size / chunk)
    if set(addresses) != set(range(1, count + 1)):
        raise AnewError(f"the hub asks for {len(addresses)} parts of {chunk} bytes of a file of {parcel.size}")
    tags = {int(number): tag for number, tag in taken.items()}
    length = {n: min(chunk, parcel.size - chunk * (n - 1)) for n in addresses}
    sent = _Sent(parcel, sum(length[n] for n in tags), tell)

    def put(number: int) -> None:
        tag = _put(addresses[number], parcel, chunk * (number - 1), length[number], sent, {})
        if not tag:
            raise AnewError("the store gave no mark for a part")
        tags[number] = tag
        sent.keep(number, tag, length[number])

    with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
        tasks = [pool.submit(put, number) for number in sorted(addresses) if number not in tags]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            sent.over = True
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    tell(flushing=True)
    parts = [{"partNumber": number, "etag": tags[number]} for number in sorted(tags)]
    _post(upload["href"], {"oid": sha256, "parts": parts}, None)


def _put(url: str, parcel: Parcel, first: int, length: int, sent: _Sent, header: dict[str, str]) -> str:
    """Sends a run of bytes; gives what the store calls it. The address is signed: it is shown nowhere, and gets no
    token."""
    from huggingface_hub import get_session
    from huggingface_hub.utils._http import fix_hf_endpoint_in_url

    blocks = _blocks(Path(parcel.file), first, length, sent)
    headers = {**header, "Content-Length": str(length)}
    response = get_session().put(
        fix_hf_endpoint_in_url(url, endpoint=None), content=blocks, headers=headers, timeout=QUIET_LIMIT
    )
    _require(response)
    return str(response.headers.get("etag") or "")


def _blocks(file: Path, first: int, length: int, sent: _Sent) -> Iterator[bytes]:
    try:
        with file.open("rb", buffering=0) as content:
            content.seek(first)
            left = length
            while left and (block := content.read(min(BLOCK, left))):
                if sent.over:
                    raise BrokenOffError("given up with the other parts")
                left -= len(block)
                yield block
                sent.more(len(block))
            with suppress(OSError):  # these bytes are not needed again, the trainer's may be
                os.posix_fadvise(content.fileno(), first, length, os.POSIX_FADV_DONTNEED)
    except (FileNotFoundError, BrokenOffError):
        raise
    except OSError as error:
        raise VolumeError(error.errno, error.strerror or str(error)) from error


def _post(url: str, value: dict[str, Any], headers: dict[str, str] | None) -> None:
    from huggingface_hub import get_session
    from huggingface_hub.lfs import LFS_HEADERS
    from huggingface_hub.utils._http import fix_hf_endpoint_in_url

    _require(
        get_session().post(
            fix_hf_endpoint_in_url(url, endpoint=None),
            json=value,
            headers=LFS_HEADERS | (headers or {}),
            timeout=COMPLETE_LIMIT,
        )
    )


def _require(response: Any) -> None:
    """Raises AnewError where the store refuses for good what was begun, BrokenOffError where it may take it later."""
    status = response.status_code
    if status in (408, 429) or status >= 500:
        raise BrokenOffError(f"the hub's store answers {status}")
    if status >= 300:
        raise AnewError(f"the hub's store answers {status}")


# ---- the process


def open_repository(repo: str, private: bool, base: str, token: str | None) -> dict[str, Any]:
    """Makes ``repo`` if it is not there, and asks for the right to write to it. Gives whether it was made, and what the
    hub says of the licence of ``base`` (a repository, or ""). Raises AccessError, and what huggingface_hub does."""
    from huggingface_hub import CommitOperationAdd, HfApi

    there = hub_writes.look_at(repo, private, token)
    api = HfApi(token=token)
    if not there:
        api.create_repo(repo, private=private, exist_ok=True)
    api.preupload_lfs_files(repo, [CommitOperationAdd(CARD, b"may this be written?")])  # asks how, and sends nothing
    return {"made": not there, "licence": _licence_of(api, base) if base else {}}


def _licence_of(api: Any, base: str) -> dict[str, str]:
    """``license``, ``license_name`` and ``license_link`` of a repository's card. Not to know it stops nothing."""
    with suppress(Exception):
        card = api.model_info(base).card_data
        found = {name: card.get(name) for name in ("license", "license_name", "license_link")}
        return {name: str(value) for name, value in found.items() if isinstance(value, str) and value}
    return {}


def _answer(request: dict[str, Any], token: str | None, tell: Tell) -> dict[str, Any]:
    """What became of one request: {"looked"}, {"opened"}, {"done"}, or {"failed": kind, "message": ...}."""
    work: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "look": lambda what: {"looked": hub_writes.look_at(**what, token=token)},
        "open": lambda what: {"opened": open_repository(**what, token=token)},
        "send": lambda what: {"done": send(Parcel(**what), token or "", tell)},
    }
    ((kind, what),) = request.items()
    try:
        return work[kind](what)
    except Exception as error:
        return {"failed": "", **_told(error, what, token)}


def _told(error: Exception, what: dict[str, Any], token: str | None) -> dict[str, Any]:
    """What a failure is: access (asking again changes nothing), passing, gone, volume, fault (ours)."""
    shown = f"{what['path']} of {what['repo']}" if "path" in what else str(what["repo"])
    files = [what["file"], *what["pictures"].values()] if "path" in what else []
    told: dict[str, Any] = {"failed": "passing"}
    if isinstance(error, AccessError):
        told |= {"failed": "access", "message": str(error)}
    elif not all(map(os.path.exists, files)):
        told |= {"failed": "gone", "message": f"{shown} was removed here before it was uploaded."}
    elif isinstance(error, VolumeError):
        told |= {"failed": "volume", "message": f"{shown} cannot be read from the volume: {error.strerror}."}
    elif isinstance(error, AnewError):
        told |= {"message": f"The upload of {shown} must be begun anew: {error}.", "anew": True}
    elif isinstance(error, DiffersError):
        told |= {"message": str(error), "anew": True}
    elif explained := hub_writes.explain(error, what["repo"], token):
        told |= {"failed": "passing" if hub_writes.is_passing(error) else "access", "message": explained}
    elif isinstance(error, OSError):
        told |= {"message": f"{shown}: {error or type(error).__name__}."}
    else:
        traceback.print_exception(error)
        told |= {"failed": "fault", "message": f"{shown}: {type(error).__name__}: {error}"}
    message = hub.without_token(str(told["message"]), token)
    return told | {"message": message, "after": hub.retry_after(error)}


def _get_ready() -> None:
    import huggingface_hub.hf_api
    import huggingface_hub.lfs  # noqa: F401

    os.nice(NICENESS)


if __name__ == "__main__":
    serve(_answer, _get_ready)
