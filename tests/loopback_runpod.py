"""RunPod's API v2 on the loopback, for as much of it as fluxpod uses, and the faults it can show.

Point FLUXPOD_RUNPOD_API at ``api.base``. Everything that arrives is kept in ``api.requests``. Bodies are held against
the fields that the published schema knows: it refuses others.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import pytest

KEY = "rpa_LOOPBACKLOOPBACKLOOPBACK"
CONTAINER = {"name", "image", "args", "disk", "ports", "env", "registry", "mounts", "startSsh", "startJupyter"}
TEMPLATE = CONTAINER | {"category", "public", "serverless", "allowedCudaVersions"}
POD = CONTAINER | {"gpu", "cloud", "dataCenterIds", "globalNetworking", "templateId"}
GPU = {"id", "count", "minCudaVersion", "allowedCudaVersions"}

Rights = Literal["all", "read", "stop", "none"]  # of a key: "stop" may act on pods and not look at them


@dataclass(frozen=True)
class Request:
    method: str
    path: str  # below the base
    body: Any
    key: str
    agent: str


@dataclass
class Fault:
    """An answer given in place of the right one to requests that ``match`` ("POST /pods/x/action"), ``times`` times."""

    match: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b'{"error": "told so"}'
    stall: float = 0.0  # seconds of silence before the answer
    cut: bool = False  # the connection ends without an answer
    acts: bool = False  # what was asked is done nevertheless
    times: int = 1_000_000


class LoopbackRunPod:
    """A context manager with one running pod, ``pod-1``."""

    def __init__(self) -> None:
        self.keys: dict[str, Rights] = {KEY: "all"}
        self.pods: dict[str, dict[str, Any]] = {"pod-1": {"id": "pod-1", "status": "RUNNING", "env": {"HF_TOKEN": "x"}}}
        self.templates: list[dict[str, Any]] = []
        self.volumes = {"vol-1": {"id": "vol-1", "name": "flux", "size": 300, "dataCenter": "EU-RO-1"}}
        self.gpus = [
            {"id": "NVIDIA A40", "name": "A40", "memory": 48, "price": {"secure": 0.4, "community": 0.35}},
            {"id": "NVIDIA L40S", "name": "L40S", "memory": 48, "price": {"secure": 0.86, "community": 0.79}},
            {"id": "NVIDIA A100 80GB PCIe", "name": "A100 PCIe", "memory": 80, "price": {"secure": 1.64}},
            {"id": "NVIDIA A100-SXM4-80GB", "name": "A100 SXM", "memory": 80, "price": {"secure": 1.74}},
        ]
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.looks_until_gone = 0  # GETs that still show RUNNING after a pod was asked to go
        self.ignored_actions = 0  # actions that are answered well and have no effect
        self._going: dict[str, tuple[str, int]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.base = f"http://127.0.0.1:{self._server.server_address[1]}/v2"

    def __enter__(self) -> LoopbackRunPod:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fail(self, match: str, status: int = 0, **keys: Any) -> None:
        self.faults.append(Fault(match, status, **keys))

    def environment(self, pod: str = "pod-1", key: str = KEY, **more: str) -> dict[str, str]:
        """What a pod of this platform has."""
        return {"FLUXPOD_RUNPOD_API": self.base, "RUNPOD_POD_ID": pod, "RUNPOD_API_KEY": key} | more

    def actions(self) -> list[tuple[str, str]]:
        """Every action that was asked for: (pod, action)."""
        found = []
        for request in self.requests:
            if match := re.fullmatch(r"/pods/([^/]+)/action", request.path):
                found.append((match[1], request.body["action"]))
        return found

    # ---- answers

    def answer(self, request: Request) -> tuple[int, Any]:
        rights = self.keys.get(request.key)
        if rights is None:
            return 401, {"error": "Unauthorized"}
        if not request.agent or request.agent.startswith("Python-urllib"):
            return 403, {"error": "error code: 1010"}
        action = request.path.endswith("/action")
        if rights == "none" or (rights == "read" and request.method != "GET") or (rights == "stop" and not action):
            return 403, {"error": "Forbidden"}
        for pattern, method, handle in self._routes():
            if request.method == method and (match := re.fullmatch(pattern, request.path)):
                return handle(match, request.body)
        return 404, {"error": "Not Found"}

    def _routes(self) -> list[tuple[str, str, Callable[[Any, Any], tuple[int, Any]]]]:
        return [
            (r"/pods/([^/]+)/action", "POST", self._act),
            (r"/pods/([^/]+)", "GET", self._pod),
            (r"/pods", "POST", self._create_pod),
            (r"/templates", "GET", lambda match, body: (200, {"templates": self.templates})),
            (r"/templates", "POST", self._create_template),
            (r"/templates/([^/]+)", "PATCH", self._change_template),
            (r"/catalog/gpus", "GET", lambda match, body: (200, {"gpus": self.gpus})),
            (r"/network-volumes/([^/]+)", "GET", self._volume),
        ]

    def _act(self, match: re.Match[str], body: Any) -> tuple[int, Any]:
        pod = self.pods.get(match[1])
        if pod is None:
            return 404, {"error": "pod not found"}
        if body.get("action") not in ("start", "stop", "restart", "terminate"):
            return 422, {"error": "unknown action"}
        if pod["status"] == "EXITED" and body["action"] == "stop":
            return 409, {"error": "pod is not running"}
        if self.ignored_actions:
            self.ignored_actions -= 1
        else:
            status = "TERMINATED" if body["action"] == "terminate" else "EXITED"
            self._going[match[1]] = (status, self.looks_until_gone)
            if not self.looks_until_gone:
                self._go(match[1])
        return 204, None

    def _go(self, pod: str) -> None:
        status, _ = self._going.pop(pod)
        self.pods[pod]["status"] = status
        if status == "TERMINATED":
            del self.pods[pod]

    def _pod(self, match: re.Match[str], body: Any) -> tuple[int, Any]:
        if match[1] in self._going:
            status, left = self._going[match[1]]
            if left <= 0:
                self._go(match[1])
            else:
                self._going[match[1]] = (status, left - 1)
        pod = self.pods.get(match[1])
        return (404, {"error": "pod not found"}) if pod is None else (200, pod)

    def _create_pod(self, match: Any, body: Any) -> tuple[int, Any]:
        if trouble := _unknown(body, POD) or _unknown(body.get("gpu", {}), GPU):
            return 422, {"error": trouble}
        if not body.get("name") or not body.get("image") or not body.get("gpu", {}).get("id"):
            return 422, {"error": "name, image and gpu.id are required"}
        if set(body.get("mounts", {})) - {"persistent", "network"} or len(body.get("mounts", {})) > 1:
            return 400, {"error": "at most one of persistent and network"}
        pod = body | {"id": f"pod-{len(self.pods) + 1}", "status": "PROVISIONING", "cost": 0.4}
        self.pods[pod["id"]] = pod
        return 201, pod

    def _create_template(self, match: Any, body: Any) -> tuple[int, Any]:
        if trouble := _unknown(body, TEMPLATE):
            return 422, {"error": trouble}
        if any(template["name"] == body["name"] for template in self.templates):
            return 400, {"error": "Template name must be unique"}
        template = body | {"id": f"tpl-{len(self.templates) + 1}"}
        self.templates.append(template)
        return 201, template

    def _change_template(self, match: re.Match[str], body: Any) -> tuple[int, Any]:
        for template in self.templates:
            if template["id"] == match[1]:
                template.update(body)
                return 200, template
        return 404, {"error": "template not found"}

    def _volume(self, match: re.Match[str], body: Any) -> tuple[int, Any]:
        volume = self.volumes.get(match[1])
        return (200, volume) if volume else (404, {"error": "network volume not found"})


def _unknown(body: dict[str, Any], known: set[str]) -> str:
    more = set(body) - known
    return f"unevaluated properties: {', '.join(sorted(more))}" if more else ""


def _handler(api: LoopbackRunPod) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = unquote(urlsplit(self.path).path).removeprefix("/v2")
            key = self.headers.get("Authorization", "").removeprefix("Bearer ")
            body = json.loads(data) if data else None
            request = Request(self.command, path, body, key, self.headers.get("User-Agent", ""))
            api.requests.append(request)
            fault = self._fault(f"{self.command} {path}")
            if fault and fault.acts:
                api.answer(request)
            if fault:
                time.sleep(fault.stall)
                if fault.cut or not fault.status:
                    self.close_connection = True
                    return
                self._send(fault.status, fault.body, fault.headers)
                return
            status, value = api.answer(request)
            self._send(status, b"" if value is None else json.dumps(value).encode(), {})

        do_GET = do_POST = do_PATCH = do_DELETE = _any  # noqa: N815

        def _fault(self, line: str) -> Fault | None:
            for fault in api.faults:
                if fault.times > 0 and re.search(fault.match, line):
                    fault.times -= 1
                    return fault
            return None

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if status != 204:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Quiet: ``requests`` holds what was asked."""

    return Handler


@pytest.fixture
def runpod() -> Iterator[LoopbackRunPod]:
    with LoopbackRunPod() as api:
        yield api
