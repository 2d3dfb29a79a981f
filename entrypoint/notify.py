"""Short messages to where the user reads them: ntfy, Discord, Slack, or any web hook.

Addresses are as good as passwords, so a job names variables of the pod's environment (``$DISCORD_WEBHOOK``) and no log
line shows one. A message that does not arrive is a log line, never a failed run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from pydantic import ValidationError

from entrypoint import web
from jobs import yaml12
from jobs.problem import JobError
from jobs.schema import Notify
from jobs.secret import hidden
from jobs.values import VARIABLE

Event = Literal["done", "held", "failed", "still billing"]
Log = Callable[[str], None]

LIMIT = 10.0  # seconds for one message
TRIES = 2
LONGEST = 600  # characters; a phone shows fewer, and the rest is on the page
URGENT: tuple[Event, ...] = ("held", "failed", "still billing")
TAGS: dict[Event, str] = {
    "done": "white_check_mark",
    "held": "pause_button",
    "failed": "x",
    "still billing": "money_with_wings",
}


def say(line: str) -> None:
    print(line, flush=True)


def notify(
    to: Notify,
    job: str,
    event: Event,
    message: str,
    environ: Mapping[str, str],
    *,
    log: Log = say,
    limit: float = LIMIT,
) -> None:
    """Sends one message to every address of ``to``, side by side; takes up to 2 x ``limit`` seconds, never raises."""
    places = {kind: address for kind, address in to if address}
    if not places:
        return
    text = _short(hidden(message))
    with ThreadPoolExecutor(len(places)) as pool:
        tasks = {
            kind: pool.submit(_send, kind, address, job, event, text, environ, limit)
            for kind, address in places.items()
        }
        for kind, task in tasks.items():
            if trouble := task.result():
                log(f"{job}: the message '{event}' did not reach {kind}: {trouble}")


def unset(to: Notify, environ: Mapping[str, str]) -> list[str]:
    """A line for each address that cannot be used: to be told when a job starts, not when its news are lost."""
    lines = []
    for kind, address in to:
        if address and (trouble := _resolve(address, environ)[1]):
            lines.append(f"notify: {kind}: {trouble}")
    return lines


def notify_of(text: str) -> Notify:
    """The addresses of a job that cannot be loaded otherwise: its writer wants to hear just that."""
    try:
        value = yaml12.parse(text, "").value
        return Notify.model_validate(value["notify"])
    except (JobError, ValidationError, KeyError, TypeError):
        return Notify()


def _send(kind: str, address: str, job: str, event: Event, text: str, environ: Mapping[str, str], limit: float) -> str:
    """Why the message did not arrive; "" where it did."""
    url, trouble = _resolve(address, environ)
    if trouble:
        return trouble
    body, headers = payload(kind, job, event, text)
    for _ in range(TRIES):
        try:
            answer = web.send("POST", url, body, headers, limit)
        except web.NoAnswerError as error:
            trouble = f"it {error}"
            again = not error.sent  # a message that may have arrived is not sent twice
        else:
            if answer.good:
                return ""
            trouble, again = f"it answers {answer.status}", answer.passing
        if not again:
            break
    return trouble


def payload(kind: str, job: str, event: Event, text: str) -> tuple[bytes, dict[str, str]]:
    """Body and headers as the service wants them."""
    if kind == "ntfy":
        priority = "high" if event in URGENT else "default"
        return text.encode(), {"Title": f"{job}: {event}", "Priority": priority, "Tags": TAGS[event]}
    value: dict[str, Any]
    if kind == "discord":  # no mentions: a job's message must not ring a whole server
        value = {"content": f"**{job}: {event}**\n{text}", "allowed_mentions": {"parse": []}}
    elif kind == "slack":
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        value = {"text": f"*{job}: {event}*\n{escaped}"}
    else:
        value = {"job": job, "event": event, "message": text}
    return json.dumps(value).encode(), {"Content-Type": "application/json"}


def _resolve(address: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """The address with its variables filled in, and why it cannot be used ("" where it can)."""
    names = [match[1] or match[2] for match in VARIABLE.finditer(address)]
    for name in names:
        value = environ.get(name, "").strip()
        if not value:
            return "", f"{name} is not set in the pod's environment"
        if "{{" in value:
            return "", f"{name} holds {{{{ ... }}}} in place of a secret: RunPod has no secret of that name"
    url = VARIABLE.sub(lambda match: environ[match[1] or match[2]].strip().strip("\"'"), address)
    if not url.startswith(("http://", "https://")):
        return "", f"{' and '.join(names)} does not hold an address that begins with https://"
    return url, ""


def _short(text: str) -> str:
    line = "\n".join(" ".join(part.split()) for part in text.strip().splitlines())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 4]} ..."
