from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from bootstrap.gpus import find_gpu
from bootstrap.nvidia_smi import Gpu, Health
from bootstrap.probe import (
    CardFacts,
    Measure,
    Probe,
    hardware,
    kernels_for,
    known_probe,
    no_kernels,
    normal_of,
    render,
    slowest,
    too_slow,
    verdict,
)

A100 = find_gpu("A100 80GB")
GPUS = tuple(Gpu(index, "NVIDIA A100-SXM4-80GB", 80 << 30, uuid=f"GPU-{index}") for index in range(2))
KERNELS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


def facts(index: int = 0, name: str = "NVIDIA A100-SXM4-80GB", capability: tuple[int, int] = (8, 0)) -> CardFacts:
    return CardFacts(index, name, 80 << 30, capability, "2.13.0", "13.0", KERNELS)


def measures(index: int, share: float) -> tuple[Measure, ...]:
    found = []
    for name in ("matrix product", "attention", "memory"):
        normal = normal_of(name, A100)
        assert normal
        found.append(Measure(name, f"GPU {index}", share * normal, "TFLOP/s", normal))
    return tuple(found)


def probe(*shares: float, **more: object) -> Probe:
    found = tuple(each for index, share in enumerate(shares) for each in measures(index, share))
    cards = tuple(facts(index) for index in range(len(shares)))
    return replace(Probe(hardware(GPUS), 12.0, found, cards), **more)  # type: ignore[arg-type]


def test_a_slow_pod_is_told_in_words_and_refused() -> None:
    slow = probe(0.98, 0.26, health=((1, Health(clock=300, slowed=("power brake: the host cannot feed it",))),))
    assert verdict(slow) == "This pod runs at 26% of a normal A100 80GB (GPU 1, matrix product): change it"
    told = too_slow(slow, 0.5)
    assert "26% of a normal A100 80GB" in told
    assert "The job asks for 50% at least (least_speed)" in told
    assert "GPU 1 at work: power brake" in told
    assert "deploy another" in told


def test_a_job_may_allow_it() -> None:
    assert too_slow(probe(0.26), None) == ""
    assert too_slow(probe(0.26), 0.2) == ""
    assert too_slow(probe(0.5), 0.5) == ""
    assert "change it" not in verdict(probe(0.9))


def test_a_pod_of_unknown_gpus_is_never_too_slow() -> None:
    strange = Probe("", 1.0, (Measure("matrix product", "GPU 0", 3.0, "TFLOP/s"),), (facts(name="Foo 9000"),))
    assert slowest(strange) is None
    assert too_slow(strange, 0.9) == ""
    assert "not in the table" in verdict(strange)
    assert "no GPU of it was measured" in verdict(Probe("", 1.0, ()))


def test_what_could_not_be_measured_judges_nothing() -> None:
    hung = Measure("attention", "GPU 0", None, "TFLOP/s", 100.0, "it hung and was cut off after 8 s")
    found = replace(probe(0.9), measures=(*measures(0, 0.9), hung))
    assert slowest(found) != hung
    assert "it hung and was cut off" in render(found)


def test_the_table() -> None:
    found = probe(0.9, health=((0, Health(60, 1400, 1410, 390, 400, 0, power_capped=True)),), notes=("P2P is off",))
    text = render(found)
    assert "This pod, measured in 12 s" in text
    assert "GPU 0  matrix product   236 TFLOP/s   90% of the 262 that is normal" in text
    assert "GPU 0 at work: 1400 of 1410 MHz, 60 °C, 390 of 400 W, held by its power limit, no ECC errors" in text
    assert "! P2P is off" in text
    assert text.endswith(verdict(found))


def test_it_is_kept_and_read_again(tmp_path: Path) -> None:
    whole = probe(0.9, 0.8, health=((0, Health(60, slowed=("hot",))),), faults=((1, "GPU 1 is ill"),), p2p=False)
    whole.write(tmp_path / "pod.json")
    assert Probe.read(tmp_path / "pod.json") == whole
    (tmp_path / "pod.json").write_text('{"another": "version"}')
    assert Probe.read(tmp_path / "pod.json") is None
    assert Probe.read(tmp_path / "absent.json") is None


def test_one_measure_serves_every_run_on_the_same_hardware_and_boot(tmp_path: Path) -> None:
    assert known_probe(tmp_path, GPUS, 0.5) is None
    good = probe(0.9, 0.9)
    good.write(tmp_path / "one" / "pod.json")
    probe(0.8, 0.8).write(tmp_path / "two" / "pod.json")
    os.utime(tmp_path / "one" / "pod.json", (2e9, 2e9))
    assert known_probe(tmp_path, GPUS, 0.5) == good
    assert known_probe(tmp_path, GPUS[:1], 0.5) is None
    assert known_probe(tmp_path, (*GPUS[:1], replace(GPUS[1], uuid="GPU-other")), 0.5) is None
    replace(good, hardware="another boot").write(tmp_path / "one" / "pod.json")
    assert known_probe(tmp_path, GPUS, 0.5) == probe(0.8, 0.8)


@pytest.mark.parametrize("bad", [probe(0.9, 0.3), probe(0.9, faults=((1, "it hangs"),))])
def test_what_was_wrong_is_measured_again(tmp_path: Path, bad: Probe) -> None:
    bad.write(tmp_path / "one" / "pod.json")
    assert known_probe(tmp_path, GPUS, 0.5) is None


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [
        ((8, 6), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((12, 0), ("sm_75", "sm_80", "sm_90"), False),
        ((12, 0), ("sm_90", "compute_90"), True),
        ((12, 0), ("sm_90a", "compute_90a"), False),
        ((9, 0), ("sm_90a",), True),
        ((10, 3), ("sm_100",), True),
        ((7, 0), KERNELS, False),
        ((12, 1), KERNELS, True),
        ((8, 0), ("rubbish", ""), False),
    ],
)
def test_kernels(capability: tuple[int, int], kernels: tuple[str, ...], runs: bool) -> None:
    assert kernels_for(capability, kernels) is runs


def test_a_card_that_torch_has_no_kernels_for_is_named_with_the_remedy() -> None:
    assert no_kernels(facts()) == ""
    assert no_kernels(replace(facts(), kernels=())) == ""  # nothing known
    old = replace(facts(0, "NVIDIA GeForce RTX 5090", (12, 0)), kernels=("sm_80", "sm_90"), torch="2.6.0", cuda="12.4")
    told = no_kernels(old)
    for part in ("GPU 0 (NVIDIA GeForce RTX 5090)", "12.0", "torch 2.6.0", "CUDA 12.4", "sm_80, sm_90", "CUDA 12.8"):
        assert part in told


def test_normal_speeds() -> None:
    h200 = find_gpu("NVIDIA H200")
    assert h200
    assert normal_of("matrix product", h200) == pytest.approx(784, rel=0.01)  # as measured
    assert normal_of("attention", h200) == pytest.approx(284)
    assert normal_of("memory", h200) == pytest.approx(4300, rel=0.03)
    assert normal_of("attention", find_gpu("RTX 4090")) is None
    assert normal_of("matrix product", None) is None
    assert normal_of("something new", h200) is None
