"""RunPod's API, v2: stop or terminate a pod, look whether it took, make templates and pods.

The address is FLUXPOD_RUNPOD_API. Keys: FLUXPOD_RUNPOD_API_KEY, the user's own, then RUNPOD_API_KEY, which RunPod puts
into every pod; whether that one may stop its pod is not certain, so a refused key is followed by the next. Keys are in
no message and no repr.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote, urlencode, urlsplit

from entrypoint import web

API = "https://api.runpod.io/v2"
KEYS = ("FLUXPOD_RUNPOD_API_KEY", "RUNPOD_API_KEY")
KEYS_PAGE = "https://console.runpod.io/user/settings"
REFUSED = (401, 403, 404)  # 404: RunPod shows nobody the things of another account
GONE = ("EXITED", "TERMINATED")  # a pod's status once it costs no GPU
ASKS = 2  # times a pod is asked to go, where the first time is answered well and nothing happens
MOST_PAGES = 20

Action = Literal["stop", "terminate"]
Pause = Callable[[float], bool]  # waits some seconds; true where one should leave instead of going on


@dataclass(frozen=True)
class Patience:
    """Seconds that a call may take and waits for, before it counts as failed."""

    limit: float = web.LIMIT
    waits: tuple[float, ...] = (2.0, 10.0, 30.0)  # before each new try
    looks: tuple[float, ...] = (2.0, 3.0, 5.0, 10.0, 20.0, 40.0)  # before each look whether an action took


class PlatformError(Exception):
    """RunPod did not do it; the message says why and what to do. ``status`` 0: there was no answer."""

    def __init__(self, message: str, status: int = 0, unknown: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.unknown = unknown  # it may have been done nevertheless

    @property
    def refused(self) -> bool:
        return self.status in REFUSED


class LeaveError(PlatformError):
    """This process was asked to end while it waited."""


@dataclass(frozen=True)
class Key:
    name: str  # of the variable
    value: str = field(repr=False)


def sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@dataclass(frozen=True)
class RunPod:
    base: str
    keys: tuple[Key, ...]
    patience: Patience = Patience()
    pause: Pause = sleep

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str], patience: Patience | None = None, pause: Pause = sleep
    ) -> RunPod:
        """Raises PlatformError where there is no usable key, or where the key would go over an open line."""
        base = environ.get("FLUXPOD_RUNPOD_API", "").strip().rstrip("/") or API
        if not (base.startswith("https://") or web.is_loopback(base)):
            raise PlatformError("FLUXPOD_RUNPOD_API must begin with https://, or the key could be read on the way")
        keys, faults = read_keys(environ)
        if not keys:
            told = " ".join(faults) or f"neither {' nor '.join(KEYS)} is set."
            raise PlatformError(f"there is no key for RunPod's API: {told} Make one at {KEYS_PAGE}", status=401)
        return cls(base, keys, patience or Patience(), pause)

    # ---- a pod's life ----

    def leave(self, pod: str, action: Action, accepted: Callable[[], None] = lambda: None) -> None:
        """Stops or terminates ``pod`` and looks until it took; ``accepted`` is called when RunPod said yes.

        Called inside the pod it seldom returns: the container gets SIGTERM first, and ``pause`` tells. Raises
        PlatformError where RunPod refused, did not answer, or said yes and did nothing.
        """
        conflict: PlatformError | None = None
        for _ in range(ASKS):
            try:
                self._call("POST", f"/pods/{quote(pod, safe='')}/action", {"action": action})
            except PlatformError as error:
                if error.status != 409:
                    raise
                conflict = error  # on its way already, or locked: the looks tell which
            else:
                accepted()
            if self._took(pod):
                return
        if conflict:
            raise conflict
        waited = ASKS * sum(self.patience.looks)
        raise PlatformError(f"RunPod took the request to {action} this pod, but it still runs {waited:.0f} s later")

    def _took(self, pod: str) -> bool:
        for seconds in self.patience.looks:
            if self.pause(seconds):
                return True  # asked to end: the stop has arrived
            try:
                if self.pod_status(pod) in GONE:
                    return True
            except LeaveError:
                return True
            except PlatformError:
                continue  # a key may be allowed to stop and not to look; that this process lives says the same, later
        return False

    def pod_status(self, pod: str) -> str:
        """RUNNING, EXITED and so on; TERMINATED where there is no such pod."""
        try:
            value = self._call("GET", f"/pods/{quote(pod, safe='')}")
        except PlatformError as error:
            if error.status == 404:
                return "TERMINATED"
            raise
        return str(_object(value).get("status", ""))

    def create_pod(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The new pod, which costs money from now on. Tried again only where it surely was not made."""
        return _object(self._call("POST", "/pods", body, repeat=False))

    # ---- what pods are made of ----

    def templates(self) -> list[dict[str, Any]]:
        return self._list("/templates", "templates")

    def save_template(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The template of that name, made or changed, and whether it is new."""
        for known in self.templates():
            if known.get("name") == body["name"]:
                path = f"/templates/{quote(str(known['id']), safe='')}"
                return _object(self._call("PATCH", path, body)), False
        return _object(self._call("POST", "/templates", body, repeat=False)), True

    def gpu_types(self) -> list[dict[str, Any]]:
        return self._list("/catalog/gpus", "gpus")

    def network_volume(self, volume: str) -> dict[str, Any]:
        return _object(self._call("GET", f"/network-volumes/{quote(volume, safe='')}"))

    def _list(self, path: str, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        query = ""
        for _ in range(MOST_PAGES):
            page = _object(self._call("GET", path + query))
            entries = page.get(name, [])
            found += [entry for entry in entries if isinstance(entry, dict)]
            cursor = (page.get("pagination") or {}).get("nextCursor")
            if not cursor:
                break
            query = "?" + urlencode({"cursor": cursor})
        return found

    # ---- one call ----

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, repeat: bool = True) -> Any:
        """The value answered, None where the answer is empty; by the first key that is not refused."""
        refusals: list[PlatformError] = []
        for key in self.keys:
            try:
                return self._call_with(key, method, path, body, repeat)
            except PlatformError as error:
                if not error.refused:
                    raise
                refusals.append(error)
        if len(refusals) > 1:
            raise PlatformError(" ".join(str(error) for error in refusals), refusals[0].status)
        raise refusals[0]

    def _call_with(self, key: Key, method: str, path: str, body: Mapping[str, Any] | None, repeat: bool) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key.value}", "Accept": "application/json"}
        headers |= {"Content-Type": "application/json"} if data is not None else {}
        waits: Sequence[float | None] = (*self.patience.waits, None)
        for wait in waits:
            least = 0.0
            try:
                answer = web.send(method, self.base + path, data, headers, self.patience.limit)
            except web.NoAnswerError as error:
                again = repeat or not error.sent
                trouble = PlatformError(f"RunPod's API ({urlsplit(self.base).hostname}) {error}.", 0, error.sent)
            else:
                if answer.good:
                    return _value(answer.body)
                again = answer.passing and (repeat or answer.status == 429)
                least = answer.retry_after
                trouble = self._explained(answer, key)
            if not again or wait is None:
                raise trouble
            if self.pause(max(wait, least)):
                raise LeaveError("RunPod's API was not reached before this pod ended")
        raise AssertionError

    def _explained(self, answer: web.Answer, key: Key) -> PlatformError:
        said = self._without_keys(_message(answer.body))
        told = f" It says: {said}" if said else ""
        words = {
            401: f"RunPod does not know the key in {key.name}: it is mistyped, expired or deleted. See {KEYS_PAGE}",
            403: f"RunPod does not allow this to the key in {key.name}. Set FLUXPOD_RUNPOD_API_KEY to one with write "
            f"access to pods, from {KEYS_PAGE}",
            404: f"RunPod finds no such thing for the account of the key in {key.name}.",
            429: "RunPod answers too many requests (429).",
        }
        default = "RunPod's API is down" if answer.status >= 500 else "RunPod refused the request"
        text = words.get(answer.status, f"{default} ({answer.status}).")
        return PlatformError(text + told, answer.status, unknown=answer.status >= 500)

    def _without_keys(self, text: str) -> str:
        for key in self.keys:
            text = text.replace(key.value, "***")
        return text


def read_keys(environ: Mapping[str, str]) -> tuple[tuple[Key, ...], list[str]]:
    """The keys of the environment, cleaned, and a sentence for each that cannot be one."""
    keys, faults = list[Key](), list[str]()
    for name in KEYS:
        value = environ.get(name, "").strip().strip("\"'").strip()
        if not value:
            continue
        if "{{" in value:
            faults.append(f"{name} holds {{{{ ... }}}} in place of a secret: RunPod has no secret of that name.")
        elif not re.fullmatch(r"[!-~]+", value):
            faults.append(f"{name} is malformed: there is a space or a line end inside it.")
        elif value not in [key.value for key in keys]:
            keys.append(Key(name, value))
    return tuple(keys), faults


def _value(body: bytes) -> Any:
    try:
        return json.loads(body) if body.strip() else None
    except ValueError:
        return None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlatformError("What answers is not RunPod's API. Check FLUXPOD_RUNPOD_API and any proxy in between.")
    return value


def _message(body: bytes) -> str:
    """What an error's answer says, on one line, short; nothing of an answer in another form."""
    value = _value(body)
    for name in ("message", "error", "detail", "title"):
        inner = value.get(name) if isinstance(value, dict) else None
        if isinstance(inner, dict):
            inner = inner.get("message")
        if isinstance(inner, str) and inner.strip():
            return " ".join(inner.split())[:300]
    return ""
