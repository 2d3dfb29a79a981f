"""May this token write to a repository of the hub, and the hub's refusals to take something in words that help.

Like ``bootstrap.hub`` to be used in processes of their own, which import huggingface_hub once HF_ENDPOINT is right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bootstrap import hub
from bootstrap.hub import TOKENS_PAGE
from bootstrap.outcome import AccessError

BILLING_PAGE = "https://huggingface.co/settings/billing"
# What the hub says where an account may store no more (403 or 402).
_STORAGE = re.compile(r"storage.*(limit|quota|exceed)|(limit|quota).*storage", re.IGNORECASE | re.DOTALL)


def upload_token(environ: Mapping[str, str]) -> str | None:
    """HF_UPLOAD_TOKEN, or HF_TOKEN where there is none of its own. Raises AccessError for what can be no token."""
    name = "HF_UPLOAD_TOKEN"
    return hub.clean_token(environ.get(name), name) or hub.clean_token(environ.get("HF_TOKEN"))


def look_at(repo: str, private: bool, token: str | None) -> bool:
    """Whether ``repo`` is there; changes nothing. Raises AccessError where this token plainly may not write to it, or
    where it is public and should be ``private``; else what huggingface_hub does: ``explain`` tells it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    if token is None:
        raise AccessError(
            f"{repo} cannot be written to: neither HF_UPLOAD_TOKEN nor HF_TOKEN is set. Make a token of the kind "
            f"'write' at {TOKENS_PAGE} and set HF_UPLOAD_TOKEN."
        )
    api = HfApi(token=token)
    if told := why_not(api.whoami(), repo):
        raise AccessError(told)
    try:
        info = api.repo_info(repo)
    except RepositoryNotFoundError:
        return False
    if private and not info.private:
        raise AccessError(
            f"{repo} is there and public, and output.private is true. Make it private at "
            f"https://huggingface.co/{repo}/settings, write private: false, or choose another repository."
        )
    return True


def why_not(account: Mapping[str, Any], repo: str) -> str:
    """Why the token that the hub describes so (``whoami``) may not write to ``repo``; "" where nothing speaks against
    it. What an answer does not say is no reason."""
    owner, user = repo.partition("/")[0], str(account.get("name", ""))
    orgs = {org.get("name"): org.get("roleInOrg") for org in account.get("orgs") or ()}
    given = (account.get("auth") or {}).get("accessToken") or {}
    scopes = (given.get("fineGrained") or {}).get("scoped") or ()
    rights = {(scope.get("entity") or {}).get("name"): scope.get("permissions") or () for scope in scopes}
    if any("repo.write" in rights.get(name, ()) for name in (owner, repo)):
        return ""
    if owner != user and owner not in orgs:
        mine = ", ".join(filter(None, [user, *map(str, orgs)]))
        return (
            f"The account of the token, {user}, may not write to {owner}, which is another account. Write one of "
            f"{mine} before the / of output.hub, or use a token of {owner}."
        )
    if orgs.get(owner) == "read":
        return f"{user} may only read in {owner}. Ask an admin of {owner} for the role 'write', or choose {user}/..."
    if given.get("role") == "read":
        return (
            f"The token may only read, and {repo} is to be written to. Make one of the kind 'write' at {TOKENS_PAGE} "
            "and set HF_UPLOAD_TOKEN; HF_TOKEN may stay as it is."
        )
    if given.get("role") == "fineGrained":
        return (
            f"The token has no right to write to {owner}'s repositories. At {TOKENS_PAGE} give it 'Write access to "
            f"contents/settings of all repos' under {owner}, or under {repo}."
        )
    return ""


def explain(error: BaseException, repo: str, token: str | None) -> str | None:
    """What a failure of huggingface_hub while something is brought to ``repo`` means and what to do; None where it is
    none that we know."""
    from huggingface_hub import errors

    for cause in hub.causes(error):
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return f"Nothing is uploaded to {repo}: HF_HUB_OFFLINE forbids it. Unset HF_HUB_OFFLINE."
        if isinstance(cause, errors.HFValidationError):
            return f"'{repo}' is no name of a hub repository. Write owner/name, such as me/paper-flowers."
        if isinstance(cause, errors.HfHubHTTPError):
            return _explain_status(cause, repo)
        if type(cause).__module__.startswith("httpx"):
            return (
                f"The hub at {hub.endpoint()} cannot be reached to upload to {repo} ({type(cause).__name__}). "
                "This pod has no network, or the hub is down: see https://status.huggingface.co."
            )
    if isinstance(error, ValueError) and "Invalid metadata in README.md" in str(error):
        return f"The hub refuses the model card of {repo}: {' '.join(str(error).split())[:300]}"
    return None


def _explain_status(error: Any, repo: str) -> str:
    from huggingface_hub import errors

    status, page = error.response.status_code, f"https://huggingface.co/{repo}"
    words = " ".join(str(error.server_message or "").split())[:200]
    said = f" The hub says: {words}" if words else ""
    if status in (402, 403) and _STORAGE.search(words):
        return (
            f"The hub takes no more for {repo}: its account may store no more.{said} Delete files or old versions, "
            f"or see {BILLING_PAGE}; public repositories (output.private: false) have more room."
        )
    if isinstance(error, errors.RepositoryNotFoundError) and status != 401:
        return f"{repo} is not on the hub any more, or the token's account may not see it. See {page}."
    if status == 401:
        return f"The hub does not know the token: it is mistyped, expired or deleted. Make a new one at {TOKENS_PAGE}."
    if status == 402:
        return f"The hub asks for a payment before it takes {repo}.{said} See {BILLING_PAGE}."
    if status == 403:
        return f"The token has no right to write to {repo}.{said} At {TOKENS_PAGE} make one of the kind 'write'."
    if status in (409, 412):
        return f"{repo} was changed by someone else at the same moment ({status}).{said}"
    if status == 413:
        return f"The hub takes nothing so large for {repo} (413).{said}"
    if status == 429:
        return f"The hub takes nothing for {repo} for now: too many requests (429)."
    if status >= 500:
        return (
            f"The hub is down ({status}) and did not take what was sent to {repo}. See https://status.huggingface.co."
        )
    return f"The hub refused what was sent to {repo} with status {status}.{said} See {page}."


def is_passing(error: BaseException) -> bool:
    """Whether the same request may well succeed a little later."""
    from huggingface_hub import errors

    for cause in hub.causes(error):
        if isinstance(cause, errors.HfHubHTTPError):
            return cause.response.status_code in (408, 409, 412) or hub.is_passing(cause)
    return hub.is_passing(error)
