"""Finds secrets in a job, and keeps them out of every message.

Jobs are copied into runs, shown on a page and sent to friends; tokens come from the environment instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from jobs.problem import Problem

REMEDY = (
    "Delete it here, and set it in the pod's environment (HF_TOKEN for the Hugging Face hub; in notify, write $NAME "
    "for a variable)"
)

_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{12,}"  # Hugging Face; real ones have 34
    r"|\b(?:ghp_|github_pat_|rpa_|sk-)[A-Za-z0-9_-]{16,}"  # GitHub, RunPod, and the many that begin with sk-
    r"|(?<=/api/webhooks/)\d+/[\w-]{16,}"  # Discord: who has the address can write to the channel
    r"|(?<=hooks\.slack\.com/services/)[\w/]{16,}"
    r"|\btk_[a-z0-9]{24,}"  # ntfy
    r"|(?<=://)[^\s/:@'\"]*:[^\s/@'\"]+(?=@)"  # user:password@ in an address
)
_NAME = re.compile(r"(?:^|_)(?:token|password|passwd|secret|api_?key|access_?key)$", re.IGNORECASE)

# Variables of the environment. Addresses of messages (jobs.values.ADDRESS_WORDS) are among them: who knows one can
# write there.
_VARIABLE = re.compile(
    r".*(TOKEN|KEY|KEY_ID|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIALS?|_PAT|_AUTH)"
    r"|.*(NTFY|DISCORD|SLACK|WEBHOOK|NOTIFY).*|FLUXPOD_JOB"
)


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds something that not every program needs to know."""
    return bool(_VARIABLE.fullmatch(name.upper()))


def find(text: str) -> Iterator[int]:
    """Where in ``text`` secrets begin, remarks included."""
    return (match.start() for match in _TOKEN.finditer(text))


def names_secret(key: str) -> bool:
    return bool(_NAME.search(key))


def hidden(text: str) -> str:
    return _TOKEN.sub("***", text)


def without_secrets(problem: Problem) -> Problem:
    return replace(
        problem,
        message=hidden(problem.message),
        remedy=hidden(problem.remedy),
        key=hidden(problem.key),
        excerpt=hidden(problem.excerpt),
    )
