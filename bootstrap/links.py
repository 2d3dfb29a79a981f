"""Where the bytes of a shared link really are. Shares give out the address of a page; of the public, long-standing ones
the address of the file follows from it."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

# A share of Nextcloud or ownCloud, on anybody's host: /s/ and fifteen letters.
_CLOUD_SHARE = re.compile(r"(?:/index\.php)?/s/[A-Za-z0-9]{15}/?")
# What an address may hold as it is. % is among it: what is quoted already stays.
_PLAIN = "/%:=&?~+!$,;'@()*[]"
_DRIVE_FILE = re.compile(r"/file/(?:u/\d+/)?d/([\w-]+)")


class LinkError(Exception):
    """A link that can never give a file; the message says what to give instead."""


def direct(link: str) -> str:
    """The address to fetch, in ASCII. A link of no known share leads where it did. Raises LinkError."""
    try:
        parts = _quoted(urlsplit(link))
    except ValueError:  # its text may repeat a password
        raise LinkError("is no address: its host or port is malformed") from None
    host = (parts.hostname or "").removeprefix("www.")
    if host == "dropbox.com":
        return _with(parts, dl="1")
    if host == "drive.google.com":
        return _drive(parts)
    if host.endswith(".sharepoint.com"):
        return _with(parts, download="1")
    if host == "github.com":
        return parts._replace(path=re.sub(r"^(/[^/]+/[^/]+)/blob/", r"\1/raw/", parts.path)).geturl()
    if host == "huggingface.co":
        return parts._replace(path=parts.path.replace("/blob/", "/resolve/", 1)).geturl()
    if _CLOUD_SHARE.fullmatch(parts.path):
        return parts._replace(path=f"{parts.path.rstrip('/')}/download").geturl()
    return parts.geturl()


def _quoted(parts: SplitResult) -> SplitResult:
    """As it goes over the wire: a browser shows and takes signs that a request must not hold. Raises ValueError."""
    _ = parts.port  # raises where it is no number
    login, at, host = parts.netloc.rpartition("@")
    if not host.isascii():
        host = host.encode("idna").decode()
    return parts._replace(
        netloc=f"{login}{at}{host}",
        path=quote(parts.path, safe=_PLAIN),
        query=quote(parts.query, safe=_PLAIN),
        fragment="",  # no server is told it
    )


def _drive(parts: SplitResult) -> str:
    if "/folders/" in parts.path:
        raise LinkError("is a Google Drive folder, which is no one file: pack it as a zip and share that")
    file = _DRIVE_FILE.match(parts.path)
    name = file[1] if file else dict(parse_qsl(parts.query)).get("id")
    if not name:
        return parts.geturl()
    # confirm: large files come with a page in between that says that they were not scanned for viruses.
    query = {"id": name, "export": "download", "confirm": "t"}
    if key := dict(parse_qsl(parts.query)).get("resourcekey"):  # some files shared before autumn 2021 need it
        query["resourcekey"] = key
    return f"https://drive.usercontent.google.com/download?{urlencode(query)}"


def _with(parts: SplitResult, **added: str) -> str:
    return parts._replace(query=urlencode(dict(parse_qsl(parts.query, keep_blank_values=True)) | added)).geturl()
