"""The probe's children are real processes: small programs that answer, hang and die as a GPU's would."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bootstrap.nvidia_smi import Gpu
from bootstrap.outcome import PodError
from bootstrap.pod import Pod
from bootstrap.probe import CARD_PARTS, normal_of
from bootstrap.volume import Volume, write_json
from bootstrap.volume_probe import VolumeFacts
from entrypoint import probe
from entrypoint.launch import Stop, child_environment
from entrypoint.probe import Child, choose_ways, examine, probe_pod, run_parts, second_witness
from entrypoint.run import dropped_attention
from tests.runs import make_job, make_run

FACTS = VolumeFacts(True, True, True, True, True, 1 << 40, None, 300e6, 250e6)
A40 = Gpu(0, "NVIDIA A40", 45 << 30, uuid="GPU-a")
CPU_POD = Pod((), cpus=1, memory=8 << 30, shm=0, disk_free=1 << 40)
GPU_POD = replace(CPU_POD, gpus=(A40, replace(A40, index=1, uuid="GPU-b")))
LIMITS = {"one": 5.0, "two": 0.5, "three": 5.0}


def program(text: str) -> list[str]:
    """One that has ``parts`` as its arguments and says what it finds with ``say(part, ...)``."""
    start = "import json, os, sys, time\nparts = sys.argv[1:]\ndef say(part, **found):\n"
    start += "    print(json.dumps({'part': part, **found}), flush=True)\n"
    return [sys.executable, "-c", start + text]


def run(text: str, limits: dict[str, float] = LIMITS, seconds: float = 20.0) -> tuple[dict[str, Any], list[str]]:
    begun: list[str] = []
    return run_parts(program(text), limits, {}, Stop(), time.monotonic() + seconds, begun.append), begun


EACH = "for part in parts:\n    say(part, begun=True)\n"


def test_every_part_is_told() -> None:
    found, begun = run("print('a greeting')\n" + EACH + "    say(part, value=len(part))")
    assert {part: told["value"] for part, told in found.items()} == {"one": 3, "two": 3, "three": 5}
    assert begun == ["one", "two", "three"]


def test_a_part_that_hangs_is_cut_off_and_the_next_is_measured() -> None:
    start = time.monotonic()
    found, begun = run(EACH + "    if part == 'two': time.sleep(60)\n    say(part, value=1.0)")
    assert time.monotonic() - start < 15
    assert found["two"]["error"] == "it hung and was cut off after 0 s"
    assert found["three"]["value"] == 1.0
    assert begun == ["one", "two", "three"]


def test_a_part_that_takes_the_process_along_is_told() -> None:
    found, _ = run(EACH + "    if part == 'two': sys.exit('CUDA error: the card is gone')\n    say(part, value=1.0)")
    assert found["two"]["error"] == "it ended: CUDA error: the card is gone"
    assert found["three"]["value"] == 1.0
    found, _ = run(EACH + "    if part == 'two': os.kill(os.getpid(), 9)\n    say(part, value=1.0)")
    assert found["two"]["error"] == "it ended: exit status -9"


def test_a_card_whose_first_part_fails_so_is_given_up() -> None:
    found, _ = run("sys.exit('ModuleNotFoundError: no torch')")
    assert found == {"one": {"error": "it ended: ModuleNotFoundError: no torch"}}


def test_the_time_for_all_is_limited() -> None:
    found, _ = run(
        EACH + "    time.sleep(0.4)\n    say(part, value=1.0)", {str(n): 5.0 for n in range(20)}, seconds=1.5
    )
    assert "value" in found["0"]
    assert "time of the probe was up" in found["19"]["error"]
    assert len(found) == 20


def test_a_stop_ends_it() -> None:
    stop = Stop()
    stop.requested = True
    assert run_parts(program("time.sleep(60)"), LIMITS, {}, stop, time.monotonic() + 60, lambda part: None) == {}


def test_a_child_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"HF_TOKEN": "hf_x", "RUNPOD_API_KEY": "k", "PATH": "/bin", "NCCL_NVLS_ENABLE": "0"}
    kept = probe.child_environment(given)
    assert "HF_TOKEN" not in kept
    assert "RUNPOD_API_KEY" not in kept
    assert kept["NCCL_NVLS_ENABLE"] == "0"
    assert kept["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


# ---------------------------------------------------------------- P2P


def told(value: float | None, error: str = "cut off after 12 s") -> dict[str, dict[str, Any]]:
    return {"all-reduce": {"error": error} if value is None else {"value": value}}


@pytest.mark.parametrize(
    ("direct", "around", "off", "p2p", "word"),
    [
        (told(300.0), told(20.0), False, True, ""),
        (told(20.0), told(22.0), False, True, ""),
        (told(None), told(20.0), False, False, "switched off for the job"),
        (told(None, "the sum over the GPUs is wrong"), told(20.0), False, False, "the sum over the GPUs is wrong"),
        (told(5.0), told(20.0), False, False, "20 GB/s without P2P, 5 with it"),
        ({}, told(20.0), True, False, "NCCL_P2P_DISABLE is set"),
        (told(300.0), told(None), False, True, ""),
        (told(300.0) | {"GPU to GPU": {"error": "it hung"}}, told(20.0), False, False, "does not work here (it hung)"),
    ],
)
def test_p2p(direct: Any, around: Any, off: bool, p2p: bool, word: str) -> None:
    ways = choose_ways(direct, around, off)
    assert ways.p2p is p2p
    assert not ways.apart
    assert word in ways.note
    assert bool(ways.note) == bool(word)


@pytest.mark.parametrize(("direct", "off"), [(told(None), False), ({}, True)])
def test_gpus_that_do_not_reach_each_other_are_told_apart(direct: Any, off: bool) -> None:
    ways = choose_ways(direct, told(None, "no route"), off)
    assert ways.apart
    assert "without P2P: no route" in ways.note
    assert ("NCCL_P2P_DISABLE is set" in ways.note) == off


def test_p2p_that_hangs_is_cut_off_and_switched_off_for_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = program(
        "say('links', begun=True)\n"
        "if 'NCCL_P2P_DISABLE' not in os.environ: time.sleep(60)\n"
        "say('all-reduce', value=20.0); say('GPU to GPU', value=21.0)"
    )
    monkeypatch.setattr(probe, "Child", lambda command, environment: Child(hangs, environment))
    monkeypatch.setattr(probe, "LINKS_SECONDS", 1.5)
    begun = time.monotonic()
    found, ways = probe.probe_links(GPU_POD.gpus, {}, lambda line: None, Stop())
    assert time.monotonic() - begun < 20
    assert not ways.p2p
    assert "(it hung and was cut off after 2 s): it is switched off for the job" in ways.note
    assert [(each.name, each.value) for each in found] == [
        ("all-reduce", None),
        ("GPU to GPU", None),
        ("all-reduce, no P2P", 20.0),
        ("GPU to GPU, no P2P", 21.0),
    ]
    assert [each.normal for each in found] == [22.0] * 4

    run = make_run(Path("/nowhere"), device="cuda", gpus=(0, 1), processes=2, p2p=ways.p2p)
    assert child_environment(run, {})["NCCL_P2P_DISABLE"] == "1"
    assert "NCCL_P2P_DISABLE" not in child_environment(replace(run, plan=replace(run.plan, p2p=True)), {})


def test_why_the_links_fail_is_told_by_the_process_that_failed() -> None:
    fails = program("say('links', begun=True)\nsys.exit('NCCL error: unhandled system error')")
    child = Child(fails, {})
    found = probe._collect(child, ("all-reduce", "GPU to GPU"), Stop())
    assert found["all-reduce"]["error"] == "it ended: NCCL error: unhandled system error"


# ---------------------------------------------------------------- whole pods


def test_a_pod_without_gpu_is_measured_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "Child", None)
    found = probe_pod(CPU_POD, FACTS, {}, lambda line: None, Stop(), download=False)
    assert [(each.where, each.name) for each in found.measures] == [
        ("volume", "write"),
        ("volume", "read"),
        ("1 CPUs", "sha256"),
    ]
    assert "No GPU here" in found.notes[0]


ANSWERS = {"device": {"name": "NVIDIA A40", "memory": 45 << 30, "capability": [8, 6], "uuid": "", "torch": "2.13.0",
                      "cuda": "13.0", "kernels": ["sm_80"]}, "8-bit step": 0.0}  # fmt: skip


def card_program(share: float, broken: str = "") -> list[str]:
    """A stand-in for trainer.probe on A40s that reach a share of normal; ``broken`` fails on GPU 1."""
    values = ANSWERS | {
        part: share * normal for part in CARD_PARTS if (normal := normal_of(part, probe.find_gpu("A40")))
    }
    text = f"values = {values!r}\n"
    if broken == "links":
        text += "if parts[0] == 'links': sys.exit('no way')\n"
    text += "if parts[0] == 'links': say('all-reduce', value=20.0); say('GPU to GPU', value=20.0); sys.exit()\n"
    text += "for part in parts[1:]:\n    say(part, begun=True)\n"
    text += f"    if part == {broken!r} and os.environ['CUDA_VISIBLE_DEVICES'] == '1': say(part, error='broken')\n"
    text += "    else: say(part, value=values.get(part, 1.0))\n"
    return program(text)


@pytest.fixture
def pod_that(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the probe's children the given program; the time until clocks are read goes."""
    monkeypatch.setattr(probe, "AT_WORK", 0.0)

    def make(share: float, broken: str = "") -> None:
        stand_in = card_program(share, broken)

        class StandIn(Child):
            def __init__(self, command: list[str], environment: Any):
                super().__init__([*stand_in, *command[3:]], environment)

        monkeypatch.setattr(probe, "Child", StandIn)

    return make


def examined(tmp_path: Path, lines: list[str] | None = None, **keys: Any) -> Pod:
    volume = Volume(tmp_path)
    told = [] if lines is None else lines
    return examine(make_job(**keys), GPU_POD, FACTS, volume, told.append, Stop(), download=False)


def test_a_healthy_pod_is_measured_once(tmp_path: Path, pod_that: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pod_that(0.95)
    lines: list[str] = []
    assert examined(tmp_path, lines) == GPU_POD
    assert "This pod runs at 95% of a normal A40" in lines[-1]
    assert (tmp_path / "runs/test/pod.json").is_file()
    monkeypatch.setattr(probe, "Child", None)
    assert examined(tmp_path, lines, name="second") == GPU_POD
    assert lines[-1].startswith("probe: measured before, on this pod since its boot. This pod runs at 95%")
    assert (tmp_path / "runs/second/pod.json").is_file()


def test_a_slow_pod_holds_the_job_and_is_measured_again(tmp_path: Path, pod_that: Any) -> None:
    pod_that(0.26)
    with pytest.raises(PodError, match=r"26% of a normal A40 .* change it.* least_speed"):
        examined(tmp_path)
    assert (tmp_path / "runs/test/pod.json").is_file()
    assert examined(tmp_path, name="patient", least_speed=0.2) == GPU_POD
    pod_that(0.9)
    assert examined(tmp_path) == GPU_POD


def test_an_ill_card_is_left_out(tmp_path: Path, pod_that: Any) -> None:
    pod_that(0.9, broken="device")
    pod = examined(tmp_path)
    assert [gpu.index for gpu in pod.gpus] == [0]
    assert pod.notes == ("left out: GPU 1 (NVIDIA A40) does not work with torch: broken",)


def test_bitsandbytes_that_fails_is_a_fault(tmp_path: Path, pod_that: Any) -> None:
    pod_that(0.9, broken="8-bit step")
    assert "bitsandbytes, which the optimizers run on, fails: broken" in examined(tmp_path).notes[0]


def test_a_pod_with_no_sound_card_is_refused(tmp_path: Path) -> None:
    """The real child: this torch has no CUDA, and says so."""
    with pytest.raises(PodError, match=r"No GPU of this pod can train: GPU 0 .*does not work with torch"):
        examine(
            make_job(),
            replace(GPU_POD, gpus=(A40,)),
            FACTS,
            Volume(tmp_path),
            lambda line: None,
            Stop(),
            download=False,
        )


def test_gpus_that_do_not_reach_each_other_hold_a_job_of_several(tmp_path: Path, pod_that: Any) -> None:
    pod_that(0.9, broken="links")
    with pytest.raises(PodError, match=r"do not reach each other: .*no way.* gpus: 1\."):
        examined(tmp_path)
    assert examined(tmp_path, gpus=1).gpus == GPU_POD.gpus
    assert examined(tmp_path, images_per_step=1).gpus == GPU_POD.gpus


def test_torch_is_asked_where_nvidia_smi_lists_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [ANSWERS["device"], ANSWERS["device"] | {"name": "NVIDIA A100 MIG 3g.40gb"}]  # type: ignore[operator]
    stand_in = program(f"say('cards', value={seen!r})")
    monkeypatch.setattr(probe, "Child", lambda command, environment: Child(stand_in, environment))
    assert second_witness(CPU_POD, {}, Stop(), tmp_path) == CPU_POD
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    pod = second_witness(CPU_POD, {}, Stop(), tmp_path)
    assert [(gpu.name, gpu.capability) for gpu in pod.gpus] == [("NVIDIA A40", (8, 6))]
    assert "torch sees 1 GPUs all the same" in pod.notes[-1]
    assert second_witness(GPU_POD, {}, Stop(), tmp_path) == GPU_POD
    shown = second_witness(CPU_POD, {"CUDA_VISIBLE_DEVICES": "3,4"}, Stop(), tmp_path)
    assert [gpu.index for gpu in shown.gpus] == [3]


def test_the_status_names_an_attention_that_was_found_wrong(tmp_path: Path) -> None:
    folder = Volume(tmp_path).run("test")
    assert dropped_attention(folder) == ""
    for right, told in ((True, ""), (False, " (without cudnn attention, which is wrong on this card)")):
        verdicts = {"cudnn": {"right": right}, "flash": {"right": True}}
        write_json(folder.attention, {"key": "", "verdicts": verdicts})
        assert dropped_attention(folder) == told
