"""``fluxpod template`` and ``fluxpod create-pod``: RunPod's template of the image, and a pod from it with a job inside.

Both print what they would send; with an API key in the environment (FLUXPOD_RUNPOD_API_KEY or RUNPOD_API_KEY) they send
it.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootstrap.gpus import MOST_GPUS, counted
from bootstrap.outcome import ACCESS_REFUSED, CRASH, DONE, JOB_WRONG
from entrypoint.platform import PlatformError, RunPod, read_keys
from jobs.load import LoadedJob, load_job
from jobs.problem import JobError, Problem
from jobs.secret import is_secret

MOUNT = "/workspace"
PORTS = ("22/tcp", "7860/http", "8888/http")  # ssh, page, JupyterLab
DISK = 40  # GB of the container's own disk: the image unpacked and nothing that grows
VOLUME = 300  # GB: FLUX with its encoders is 34, a checkpoint 24, a state about 45, twice while one is written
SECRETS = ("HF_TOKEN",)  # RunPod secrets that the template hands on, each under its own name
# What the driver of a host can run; RunPod matches a template's list exactly. An image built for CUDA 13 needs 13.0.
CUDA_VERSIONS = ("12.4", "12.5", "12.6", "12.7", "12.8", "12.9", "13.0", "13.1", "13.2", "13.3")
CUDA = "13.0"
OF_TEMPLATE_ONLY = ("id", "public", "serverless", "category", "allowedCudaVersions", "readme")
LONGEST_JOB = 60_000  # characters in the environment; Linux takes 128 KiB in one variable, a form takes less


@dataclass(frozen=True)
class Deployment:
    """What a user chooses of template and pod."""

    image: str
    name: str = "fluxpod"
    volume_gb: int = VOLUME
    disk_gb: int = DISK
    cuda: str = CUDA
    secrets: tuple[str, ...] = SECRETS
    public: bool = False
    gpu: str = ""  # as people say it: "A40", "2xA100 80GB", or RunPod's own id
    network_volume: str = ""  # id
    data_center: str = ""
    cloud: str = "SECURE"


def template_body(wanted: Deployment) -> dict[str, Any]:
    """The body of ``POST /v2/templates``."""
    return {
        "name": wanted.name,
        "image": wanted.image,
        "args": "",
        "disk": wanted.disk_gb,
        "ports": list(PORTS),
        "env": _environment(wanted),
        "mounts": {"persistent": {"size": wanted.volume_gb, "path": MOUNT}},
        "category": "NVIDIA",
        "public": wanted.public,
        "serverless": False,
        "allowedCudaVersions": [version for version in CUDA_VERSIONS if _at_least(version, wanted.cuda)],
        "startSsh": True,  # sets PUBLIC_KEY
        "startJupyter": True,  # sets JUPYTER_PASSWORD
    }


def _environment(wanted: Deployment) -> dict[str, str]:
    secrets = {name: f"{{{{ RUNPOD_SECRET_{name} }}}}" for name in wanted.secrets}
    return {"FLUXPOD_VOLUME": MOUNT, "FLUXPOD_VOLUME_GB": str(wanted.volume_gb)} | secrets


def _at_least(version: str, least: str) -> bool:
    return [int(part) for part in version.split(".")] >= [int(part) for part in least.split(".")]


def pod_body(
    wanted: Deployment,
    job: LoadedJob,
    template: Mapping[str, Any],
    gpu: str,
    count: int,
    volume: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The body of ``POST /v2/pods``: the template's fields spread into it (whether a pod may name its template differs
    between the API's descriptions; this works in either), the job in FLUXPOD_JOB.

    ``volume``: the network volume to mount in place of a volume disk; the pod goes to its data centre.
    """
    body = {name: value for name, value in template.items() if name not in OF_TEMPLATE_ONLY and value is not None}
    encoded = base64.b64encode(job.text.encode()).decode()
    body |= {
        "name": f"{job.job.name}"[:60],
        "gpu": {"id": gpu, "count": count, "minCudaVersion": wanted.cuda},
        "cloud": wanted.cloud,
        "env": dict(body.get("env") or {}) | {"FLUXPOD_JOB": encoded},
    }
    if volume is not None:
        body["mounts"] = {"network": [{"volumeId": volume["id"], "path": MOUNT}]}
        if volume.get("size"):
            body["env"]["FLUXPOD_VOLUME_GB"] = str(volume["size"])
    center = wanted.data_center or (volume or {}).get("dataCenter", "")
    return body | ({"dataCenterIds": [center]} if center else {})


# ---- the commands


def create_template(wanted: Deployment, environ: Mapping[str, str]) -> int:
    body = template_body(wanted)
    print(json.dumps(body, indent=2))
    for name in wanted.secrets:
        _note(f"{name} comes from the RunPod secret of that name: make it in the console under Secrets, once.")
    if not _has_key(environ):
        return DONE
    try:
        template, new = RunPod.from_environment(environ).save_template(body)
    except PlatformError as error:
        return _failed(error, "the template")
    print(f"{'made' if new else 'changed'} the template {wanted.name}: {template.get('id', '')}")
    return DONE


def create_pod(job_file: Path, wanted: Deployment, environ: Mapping[str, str]) -> int:
    """Prints the request; with a key creates the pod, which costs money from then on."""
    try:
        job = load_job(job_file)
        count, gpu = read_gpu(wanted.gpu, job.job.gpus)
        if len(job.text) > LONGEST_JOB:
            raise JobError([Problem("the job is too long for a pod's environment", "Put it on the volume instead")])
    except JobError as error:
        print(error, file=sys.stderr)
        return JOB_WRONG
    for warning in job.warnings:
        _note(f"warning: {warning}")
    runpod = None
    template: Mapping[str, Any] = template_body(wanted)
    volume: Mapping[str, Any] | None = {"id": wanted.network_volume} if wanted.network_volume else None
    price = ""
    try:
        if _has_key(environ):
            runpod = RunPod.from_environment(environ)
            gpu, price = find_gpu_type(gpu, count, wanted.cloud, runpod.gpu_types())
            template = _saved_template(runpod, wanted) or template
            volume = runpod.network_volume(wanted.network_volume) if wanted.network_volume else None
        body = pod_body(wanted, job, template, gpu, count, volume)
        shown = {name: _shown(name, value) for name, value in body["env"].items()}
        shown["FLUXPOD_JOB"] = f"<{job_file.name} in base64>"
        print(json.dumps(body | {"env": shown}, indent=2))
        if runpod is None:
            return DONE
        pod = _create(runpod, body)
    except JobError as error:
        print(error, file=sys.stderr)
        return JOB_WRONG
    except PlatformError as error:
        if error.unknown:
            _note("It may have been made nevertheless, and be billed: look at https://console.runpod.io/pods")
        return _failed(error, "the pod")
    print(f"made pod {pod.get('id', '')}: {count} x {gpu}{price}, billed from now on")
    print(f"its page, once the image is pulled: https://{pod.get('id', '')}-7860.proxy.runpod.net")
    if job.job.when_done == "idle":
        _note(
            "when_done is idle: this pod stays billed when the job is done. Write when_done: stop to have it stopped."
        )
    return DONE


def _shown(name: str, value: str) -> str:
    """A reference to a secret is shown, a secret written out is not."""
    return "<hidden>" if is_secret(name) and not value.strip().startswith("{{") else value


def _create(runpod: RunPod, body: dict[str, Any]) -> dict[str, Any]:
    """The new pod. Not every description of the API knows ``minCudaVersion``: refused for it, it is left out."""
    try:
        return runpod.create_pod(body)
    except PlatformError as error:
        if error.status not in (400, 422) or "cuda" not in str(error).lower():
            raise
    _note("RunPod does not take a least CUDA version: a host with an older driver may come, and the pod will say so.")
    gpu = {name: value for name, value in body["gpu"].items() if name != "minCudaVersion"}
    return runpod.create_pod(body | {"gpu": gpu})


def _saved_template(runpod: RunPod, wanted: Deployment) -> dict[str, Any] | None:
    """The user's template of that name, if there is one for this image: it may have been changed in the console."""
    for template in runpod.templates():
        if template.get("name") == wanted.name and template.get("image") == wanted.image:
            return template
    return None


def read_gpu(text: str, job_gpus: int | None) -> tuple[int, str]:
    """ "2xA100 80GB" as (2, "A100 80GB"); without a number, as many as the job asks for. Raises JobError."""
    written, name = counted(text)
    count = (job_gpus or 1) if written is None else written
    if not name or not 1 <= count <= MOST_GPUS:
        remedy = 'Write for example "NVIDIA A40" or "2xA100 80GB"'
        raise JobError([Problem(f"{text!r} names no GPU", remedy, key="--gpu")])
    return count, name


def find_gpu_type(name: str, count: int, cloud: str, types: list[dict[str, Any]]) -> tuple[str, str]:
    """RunPod's id of a GPU that a person named, and its price in words. Raises JobError for none or several."""
    words = _words(name)
    exact = [kind for kind in types if words in (_words(str(kind.get("id"))), _words(str(kind.get("name"))))]
    near = exact or [kind for kind in types if set(words) <= {*_words(str(kind["id"])), *_words(str(kind.get("name")))}]
    if len(near) != 1:
        known = ", ".join(sorted(str(kind["id"]) for kind in near or types))
        message = f"{name!r} is {'several GPUs' if near else 'no GPU'} of RunPod's"
        raise JobError([Problem(message, f"Write one of: {known}", key="--gpu")])
    hourly = (near[0].get("price") or {}).get("community" if cloud == "COMMUNITY" else "secure")
    price = f" for about {hourly * count:.2f} USD per hour" if isinstance(hourly, (int, float)) and hourly else ""
    return str(near[0]["id"]), price


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\s_-]+", name.lower()) if word != "nvidia"]


def _has_key(environ: Mapping[str, str]) -> bool:
    keys, faults = read_keys(environ)
    for fault in faults:
        _note(fault)
    if not keys:
        _note("nothing was sent: FLUXPOD_RUNPOD_API_KEY is not set. Paste the above into the API, or set it.")
    return bool(keys)


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _failed(error: PlatformError, what: str) -> int:
    _note(f"{what} was not made: {error}")
    return ACCESS_REFUSED if error.refused else CRASH
