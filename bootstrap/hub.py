"""What the Hugging Face hub says about a repository, and its refusals in words that tell what to do.

``huggingface_hub`` reads HF_ENDPOINT and its other settings when it is imported, so it is imported inside functions,
in the processes that ``bootstrap.transfers`` starts for a fetch.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bootstrap.outcome import AccessError

TOKENS_PAGE = "https://huggingface.co/settings/tokens"


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository. ``sha256`` is known of large files (LFS); of small ones the git blob's id is."""

    path: str
    size: int  # bytes
    sha256: str | None
    blob: str | None


def clean_token(text: str | None, name: str = "HF_TOKEN") -> str | None:
    """The token as meant: without quotes, spaces and line ends around it; None where there is none.

    Raises AccessError where what is left cannot be one. The message does not repeat it.
    """
    token = (text or "").strip().strip("\"'").removeprefix("Bearer ").strip()
    if not token:
        return None
    if not re.fullmatch(r"[!-~]+", token) or "=" in token:
        raise AccessError(
            f"{name} is malformed: there is a space, a line end or another sign inside it that no token has. "
            f"Copy it again from {TOKENS_PAGE}; it begins with hf_."
        )
    return token


def without_token(text: str, token: str | None) -> str:
    """``text`` fit for a log."""
    return text.replace(token, "<HF_TOKEN>") if token else text


def list_files(repo: str, revision: str, token: str | None, kind: str = "model") -> tuple[str, tuple[RemoteFile, ...]]:
    """The commit that ``revision`` is now, and its files; ``kind`` is model or dataset.

    Raises what huggingface_hub does: ``explain`` tells it.

    Access is asked first: of a gated repository the list is public and only the files are refused.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token or False)  # False: no login saved on this machine is used in its place
    api.auth_check(repo, repo_type=kind)
    info: Any = api.repo_info(repo, repo_type=kind, revision=revision, files_metadata=True)
    assert info.sha is not None
    files = tuple(
        RemoteFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else None, file.blob_id)
        for file in info.siblings or ()
    )
    return info.sha, files


def explain(error: BaseException, repo: str, revision: str, token: str | None, kind: str = "model") -> str | None:
    """What a failure of huggingface_hub means and what to do; None where it is none that we know.

    Known are refusals, an absent repository or revision, a hub that is down or busy, no network, offline mode.
    """
    from huggingface_hub import errors

    for cause in causes(error):  # a download wraps the answer in LocalEntryNotFoundError
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return f"{repo} is not on the volume, and HF_HUB_OFFLINE forbids to fetch it. Unset HF_HUB_OFFLINE."
        if isinstance(cause, errors.RevisionNotFoundError):
            return f"{repo} has no revision '{revision}'. Write a branch, tag or commit that its page shows, or none."
        if isinstance(cause, errors.HFValidationError):
            return f"'{repo}' is no name of a hub repository. Write owner/name, e.g. black-forest-labs/FLUX.1-dev."
        if isinstance(cause, errors.HfHubHTTPError):
            return _explain_status(cause, repo, token, kind)
        if isinstance(cause, errors.FileMetadataError | json.JSONDecodeError):
            return f"What answers at {endpoint()} is not the hub. Check HF_ENDPOINT and any proxy in between."
        if type(cause).__module__.startswith("httpx"):  # which client the library uses changes; its name shows
            return (
                f"The hub at {endpoint()} cannot be reached to fetch {repo} ({type(cause).__name__}). "
                "This pod has no network, or the hub is down: see https://status.huggingface.co and try again."
            )
    return None


def is_passing(error: BaseException) -> bool:
    """Whether the same request may well succeed a little later."""
    from huggingface_hub import errors

    for cause in causes(error):
        if isinstance(cause, errors.HfHubHTTPError):
            return cause.response.status_code in (408, 429) or cause.response.status_code >= 500
        if type(cause).__module__.startswith("httpx"):
            return True
    return False


def retry_after(error: BaseException) -> float:
    """Seconds that the server asks to wait before the next request; 0 where it asks nothing."""
    response = getattr(error, "response", None) or error
    text = (getattr(response, "headers", None) or {}).get("Retry-After") or ""
    return float(text) if text.isdigit() else 0.0


def shown_address(url: str) -> str:
    """``url`` fit for a log: a login or a signature in it is as good as a password."""
    try:
        parts = urlsplit(url)
    except ValueError:  # e.g. [ without ]
        scheme, _, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}" + ("?..." if parts.query else "")


def without_signatures(text: str) -> str:
    """``text`` with every address in it fit for a log."""
    return re.sub(r"https?://[^\s'\"<>]+", lambda url: shown_address(url[0]), text)


def causes(error: BaseException) -> list[BaseException]:
    """An error and what led to it, the latest first."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def _explain_status(error: Any, repo: str, token: str | None, kind: str) -> str:
    from huggingface_hub import errors

    status = error.response.status_code
    page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{repo}"
    if isinstance(error, errors.GatedRepoError):  # a subclass of RepositoryNotFoundError
        if token is None:
            return (
                f"{repo} asks for a login, and HF_TOKEN is not set. Accept its licence at {page}, make a token at "
                f"{TOKENS_PAGE} and set HF_TOKEN."
            )
        return f"The licence of {repo} is not accepted by the account of HF_TOKEN. Accept it at {page}, then try again."
    if isinstance(error, errors.RepositoryNotFoundError):
        if token is None:
            return f"{repo} is not on the hub, or is private and HF_TOKEN is not set. See {page}."
        return f"{repo} is not on the hub, or HF_TOKEN's account may not see it. See {page}."
    if status == 401:
        return f"The hub does not know HF_TOKEN: it is mistyped, expired or deleted. Make a new one at {TOKENS_PAGE}."
    if status == 403:
        return (
            f"HF_TOKEN has no right to read {repo}. At {TOKENS_PAGE} allow it to read public gated repositories, or "
            "make a token of the kind 'read'."
        )
    if status == 429:
        return f"The hub refuses {repo} for now: too many requests (429). Wait some minutes and try again."
    if status >= 500:
        return f"The hub is down ({status}) and did not give {repo}. See https://status.huggingface.co and try again."
    return f"The hub refused {repo} with status {status}. See {page}."


def endpoint() -> str:
    """Where the hub is, for people."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
