from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from bootstrap.outcome import ACCESS_REFUSED, CRASH, DONE, JOB_WRONG
from entrypoint import cli
from entrypoint.deploy import Deployment, find_gpu_type, read_gpu, template_body
from entrypoint.dropped_job import job_text
from jobs.problem import JobError
from tests.loopback_runpod import KEY, LoopbackRunPod

JOB = "name: flowers\nbase: flux-tiny\nmethod: lora\ndatasets: [{path: datasets/x}]\ngpus: 2\nwhen_done: stop\n"
IMAGE = "me/fluxpod:0.1.0"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "flowers.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def with_key(runpod: LoopbackRunPod, monkeypatch: pytest.MonkeyPatch) -> LoopbackRunPod:
    monkeypatch.setenv("FLUXPOD_RUNPOD_API", runpod.base)
    monkeypatch.setenv("FLUXPOD_RUNPOD_API_KEY", KEY)
    return runpod


def create(job: Path, *options: str) -> int:
    return cli.main(["create-pod", str(job), "--image", IMAGE, *options])


def posted(api: LoopbackRunPod) -> list[Any]:
    return [request.body for request in api.requests if request.method == "POST"]


def test_without_a_key_the_template_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["template", "--image", IMAGE]) == DONE
    captured = capsys.readouterr()
    body = json.loads(captured.out)
    assert body == template_body(Deployment(IMAGE))
    assert body["disk"] == 40
    assert body["ports"] == ["22/tcp", "7860/http", "8888/http"]
    assert body["env"]["HF_TOKEN"] == "{{ RUNPOD_SECRET_HF_TOKEN }}"
    assert body["env"]["FLUXPOD_VOLUME_GB"] == "300"
    assert body["mounts"] == {"persistent": {"size": 300, "path": "/workspace"}}
    assert body["allowedCudaVersions"][:2] == ["13.0", "13.1"]
    assert "nothing was sent" in captured.err


def test_the_template_is_made_once_and_changed_then(with_key: LoopbackRunPod) -> None:
    assert cli.main(["template", "--image", IMAGE]) == DONE
    assert cli.main(["template", "--image", "me/fluxpod:0.2.0", "--volume-gb", "200", "--cuda", "12.8"]) == DONE
    assert len(with_key.templates) == 1
    template = with_key.templates[0]
    assert template["image"] == "me/fluxpod:0.2.0"
    assert template["mounts"]["persistent"]["size"] == 200
    assert template["allowedCudaVersions"][0] == "12.8"
    assert template["public"] is False


def test_more_secrets_are_handed_on_by_name(with_key: LoopbackRunPod) -> None:
    assert cli.main(["template", "--image", IMAGE, "--secret", "DISCORD_WEBHOOK"]) == DONE
    assert with_key.templates[0]["env"]["DISCORD_WEBHOOK"] == "{{ RUNPOD_SECRET_DISCORD_WEBHOOK }}"


def test_the_image_must_be_named_and_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        cli.main(["template"])
    monkeypatch.setenv("FLUXPOD_IMAGE", IMAGE)
    assert cli.main(["template"]) == DONE
    with pytest.raises(SystemExit):
        cli.main(["template", "--cuda", "13"])


def test_a_pod_is_made_with_the_job_inside(
    with_key: LoopbackRunPod, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert create(job, "--gpu", "a40") == DONE
    (body,) = posted(with_key)
    assert body["name"] == "flowers"
    assert body["image"] == IMAGE
    assert body["gpu"] == {"id": "NVIDIA A40", "count": 2, "minCudaVersion": "13.0"}
    assert job_text(body["env"]["FLUXPOD_JOB"]) == JOB
    assert body["mounts"]["persistent"]["path"] == "/workspace"
    captured = capsys.readouterr()
    assert "2 x NVIDIA A40 for about 0.80 USD per hour" in captured.out
    assert "https://pod-2-7860.proxy.runpod.net" in captured.out
    assert KEY not in captured.out + captured.err
    assert body["env"]["FLUXPOD_JOB"] not in captured.out
    assert with_key.pods["pod-2"]["status"] == "PROVISIONING"


def test_a_pod_takes_what_was_changed_in_the_template(with_key: LoopbackRunPod, job: Path) -> None:
    assert cli.main(["template", "--image", IMAGE]) == DONE
    with_key.templates[0] |= {"env": {"HF_TOKEN": "{{ RUNPOD_SECRET_other }}"}, "disk": 60, "registry": None}
    assert create(job, "--gpu", "1xL40S") == DONE
    body = posted(with_key)[-1]
    assert body["env"]["HF_TOKEN"] == "{{ RUNPOD_SECRET_other }}"
    assert (body["disk"], body["gpu"]["count"]) == (60, 1)
    assert "registry" not in body


def test_a_network_volume_brings_its_data_centre(with_key: LoopbackRunPod, job: Path) -> None:
    assert create(job, "--gpu", "A40", "--network-volume", "vol-1") == DONE
    (body,) = posted(with_key)
    assert body["mounts"] == {"network": [{"volumeId": "vol-1", "path": "/workspace"}]}
    assert body["dataCenterIds"] == ["EU-RO-1"]
    assert body["env"]["FLUXPOD_VOLUME_GB"] == "300"
    assert create(job, "--gpu", "A40", "--network-volume", "vol-9") == ACCESS_REFUSED
    assert len(with_key.pods) == 2


def test_without_a_key_the_pod_is_printed(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert create(job, "--gpu", "2xA100 80GB", "--network-volume", "vol-1", "--data-center", "EU-RO-1") == DONE
    body = json.loads(capsys.readouterr().out)
    assert body["gpu"]["id"] == "A100 80GB"
    assert body["env"]["FLUXPOD_JOB"] == "<flowers.yaml in base64>"


def test_a_wrong_job_rents_nothing(with_key: LoopbackRunPod, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_text(JOB + "stepz: 5\n")
    assert create(job, "--gpu", "A40") == JOB_WRONG
    assert "stepz" in capsys.readouterr().err
    job.write_text(JOB + "# " + "x" * 70_000 + "\n")
    assert create(job, "--gpu", "A40") == JOB_WRONG
    assert with_key.requests == []


@pytest.mark.parametrize("gpu", ["", "0xA40", "65xA40", "A41", "A100 80GB"])
def test_a_gpu_that_cannot_be_told_rents_nothing(with_key: LoopbackRunPod, job: Path, gpu: str) -> None:
    assert create(job, "--gpu", gpu) == JOB_WRONG
    assert posted(with_key) == []


def test_no_gpu_left_is_told(with_key: LoopbackRunPod, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_key.fail("POST /pods$", 400, body=b'{"error": "no instances available"}')
    assert create(job, "--gpu", "A40") == CRASH
    assert "no instances available" in capsys.readouterr().err


def test_an_api_that_knows_no_least_cuda_version(with_key: LoopbackRunPod, job: Path) -> None:
    with_key.fail("POST /pods$", 422, body=b'{"error": "unevaluated properties: minCudaVersion"}', times=1)
    assert create(job, "--gpu", "A40") == DONE
    assert posted(with_key)[-1]["gpu"] == {"id": "NVIDIA A40", "count": 2}


def test_an_answer_that_is_lost_may_be_a_pod_that_is_billed(
    with_key: LoopbackRunPod, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_key.fail("POST /pods$", cut=True, acts=True)
    assert create(job, "--gpu", "A40") == CRASH
    assert "may have been made nevertheless" in capsys.readouterr().err
    assert len(posted(with_key)) == 1


@pytest.mark.parametrize(
    ("text", "gpus", "found"),
    [
        ("A40", None, (1, "A40")),
        ("A40", 4, (4, "A40")),
        ("2xA100 80GB", 4, (2, "A100 80GB")),
        (" 8 × H100 ", None, (8, "H100")),
        ("NVIDIA A100-SXM4-80GB", None, (1, "NVIDIA A100-SXM4-80GB")),
    ],
)
def test_gpus_as_people_write_them(text: str, gpus: int | None, found: tuple[int, str]) -> None:
    assert read_gpu(text, gpus) == found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("a100 sxm", "NVIDIA A100-SXM4-80GB"),
        ("A100 pcie", "NVIDIA A100 80GB PCIe"),
        ("l40s", "NVIDIA L40S"),
    ],
)
def test_gpus_are_found_by_their_words(runpod: LoopbackRunPod, name: str, found: str) -> None:
    assert find_gpu_type(name, 1, "SECURE", runpod.gpus)[0] == found
    with pytest.raises(JobError, match="several GPUs"):
        find_gpu_type("A100", 1, "SECURE", runpod.gpus)


def test_the_job_survives_the_environment() -> None:
    text = "name: blüte\n# 'quotes' \"and\" $DOLLARS\n"
    assert job_text(base64.b64encode(text.encode()).decode()) == text
