from __future__ import annotations

import time
from pathlib import Path

import pytest

from bootstrap.nvidia_smi import (
    Load,
    parse_gpus,
    parse_health,
    parse_loads,
    parse_processes,
    read_gpus,
    read_health,
    read_loads,
)
from tests.fake_nvidia_smi import A40, A40_2, printing, smi

MIB = 1 << 20


def test_two_gpus(tmp_path: Path) -> None:
    gpus, notes = read_gpus(smi(tmp_path, printing(f"{A40}\n{A40_2}")), {}, 10)
    assert notes == ()
    assert [gpu.index for gpu in gpus] == [0, 1]
    assert gpus[0].name == "NVIDIA A40"
    assert gpus[0].memory == 46068 * MIB
    assert gpus[0].free == 45634 * MIB
    assert gpus[0].driver == "580.95.05"
    assert gpus[0].capability == (8, 6)


def test_absent(tmp_path: Path) -> None:
    gpus, notes = read_gpus(str(tmp_path / "nvidia-smi"), {}, 10)
    assert gpus == ()
    assert "is not there" in notes[0]


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ("No devices were found", 6),
        ("No devices were found", 0),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9),
        ("Failed to initialize NVML: Driver/library version mismatch", 18),
    ],
)
def test_no_gpu_and_why(tmp_path: Path, output: str, code: int) -> None:
    gpus, notes = read_gpus(smi(tmp_path, printing(output, code)), {}, 10)
    assert gpus == ()
    assert notes == (f"nvidia-smi: {output}",)


def test_nothing_printed(tmp_path: Path) -> None:
    assert read_gpus(smi(tmp_path, "exit 0"), {}, 10) == ((), ("nvidia-smi lists no GPU",))
    assert read_gpus(smi(tmp_path, "exit 3"), {}, 10)[1] == ("nvidia-smi ended with code 3: no output",)


def test_hanging(tmp_path: Path) -> None:
    start = time.monotonic()
    gpus, notes = read_gpus(smi(tmp_path, "sleep 60"), {}, 0.3)
    assert time.monotonic() - start < 5
    assert gpus == ()
    assert "did not answer" in notes[0]


def test_a_lost_card_leaves_the_others(tmp_path: Path) -> None:
    lost = "Unable to determine the device handle for GPU0000:41:00.0: Unknown Error"
    gpus, notes = read_gpus(smi(tmp_path, printing(f"{A40}\n{lost}", 15)), {}, 10)
    assert [gpu.index for gpu in gpus] == [0]
    assert any("Unable to determine" in note for note in notes)
    assert any("code 15" in note for note in notes)


@pytest.mark.parametrize("word", ["ERR!", "[Unknown Error]", "[GPU is lost]", "[GPU requires reset]"])
def test_an_ill_card_is_left_out(word: str) -> None:
    gpus, notes = parse_gpus(f"{A40}\n1, NVIDIA A40, {word}, {word}, 580.95.05, 8.6")
    assert [gpu.index for gpu in gpus] == [0]
    assert word in notes[0]


def test_fields_that_the_driver_does_not_tell() -> None:
    gpus, notes = parse_gpus("0, NVIDIA A40, [N/A], [N/A], [N/A], [N/A]\r\n1, Foo 3000, [N/A], [N/A], 580.1, [N/A]\r\n")
    assert len(gpus) == 1
    assert gpus[0].memory == pytest.approx(45 * (1 << 30), rel=0.01)
    assert gpus[0].free is None
    assert gpus[0].driver == ""
    assert gpus[0].capability == (8, 6)
    assert "Foo 3000" in notes[0]


def test_carriage_returns_and_units() -> None:
    gpus, notes = parse_gpus(A40.replace("46068,", "46068 MiB,") + "\r\n\r\n")
    assert notes == ()
    assert gpus[0].memory == 46068 * MIB


def test_an_old_driver_knows_no_capability(tmp_path: Path) -> None:
    script = 'case "$1" in *compute_cap*) echo \'Field "compute_cap" is not a valid field to query.\'; exit 2;; esac\n'
    gpus, notes = read_gpus(smi(tmp_path, script + printing("0, NVIDIA A40, 46068, 45634, 470.1")), {}, 10)
    assert notes == ()
    assert gpus[0].driver == "470.1"
    assert gpus[0].capability == (8, 6)


def test_mig_slices_are_explained() -> None:
    gpus, notes = parse_gpus("0, NVIDIA H100 80GB HBM3, 81559, 80000, 580.1, 9.0, GPU-a, Enabled")
    assert gpus == ()
    assert "MIG" in notes[0]


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        ("0,1", [0, 1]),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("7", []),
        ("0,0", [0]),
        ("GPU-bbbb", [1]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices(tmp_path: Path, setting: str, indices: list[int]) -> None:
    fake = smi(tmp_path, printing(f"{A40}\n{A40_2}"))
    gpus, notes = read_gpus(fake, {"CUDA_VISIBLE_DEVICES": setting}, 10)
    assert [gpu.index for gpu in gpus] == indices
    assert bool(notes) == (len(indices) < 2)


def test_who_holds_memory_is_named(tmp_path: Path) -> None:
    holders = (
        "GPU-aaaa1111, 4242, /usr/bin/python3, 20480\n"
        "GPU-aaaa1111, 77, [Not Found], [N/A]\n"
        "GPU-bbbb2222, 0, /opt/a, b/server, 512 MiB"
    )
    (tmp_path / "holders").write_text(holders)
    script = f'case "$1" in *compute-apps*) cat {tmp_path}/holders; exit 0;; esac\n' + printing(f"{A40}\n{A40_2}")
    gpus, notes = read_gpus(smi(tmp_path, script), {}, 10)
    assert notes == ()
    assert gpus[0].processes == ("python3 (process 4242) with 20.0 GiB", "a process of another container (process 77)")
    assert gpus[1].processes == ("server with 0.5 GiB",)


@pytest.mark.parametrize("answer", ["exit 1", "sleep 60", "echo '[N/A], [N/A], [N/A], [N/A]'; exit 0", "exit 0"])
def test_a_driver_that_does_not_tell_who_holds_memory(tmp_path: Path, answer: str) -> None:
    script = f'case "$1" in *compute-apps*) {answer};; esac\n' + printing(A40)
    gpus, notes = read_gpus(smi(tmp_path, script), {}, 1)
    assert [gpu.processes for gpu in gpus] == [()]
    assert notes == ()


def test_no_processes() -> None:
    assert parse_processes("No running processes found\n") == {}


def test_a_file_that_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("not a program")
    assert "does not start: Permission denied" in read_gpus(str(tmp_path / "nvidia-smi"), {}, 10)[1][0]


def test_health_of_a_card_at_work() -> None:
    health = parse_health("83, 1230, 1980, 698.20, 700.00, 3, Yes, 0x0000000000000064\r\n")
    assert (health.temperature, health.clock, health.most_clock) == (83, 1230, 1980)
    assert (health.power, health.power_limit, health.power_capped) == (698.2, 700, True)
    assert (health.ecc_errors, health.page_retirement_pending) == (3, True)
    assert len(health.slowed) == 2
    assert "too hot" in health.slowed[0]


def test_health_that_is_not_told() -> None:
    health = parse_health("[N/A], ERR!, [N/A], [Unknown Error], , [N/A], [N/A], Not Active")
    assert (health.temperature, health.clock, health.power, health.ecc_errors, health.slowed) == (*[None] * 4, ())
    assert parse_health("No devices were found").temperature is None
    assert parse_health("") == parse_health("No devices were found")


def test_health_by_the_older_name_of_the_clock_field(tmp_path: Path) -> None:
    refusal = 'Field "clocks_event_reasons.active" is not a valid field to query.'
    script = f"case \"$1\" in *event_reasons*) echo '{refusal}'; exit 2;; esac\n"
    health = read_health(0, smi(tmp_path, script + printing("40, 1980, 1980, 300, 700, 0, No, 0x0000000000000004")))
    assert health.temperature == 40
    assert health.ecc_errors == 0
    assert health.power_capped
    assert health.slowed == ()
    assert read_health(0, smi(tmp_path, "sleep 60"), time_limit=0.2).temperature is None
    assert read_health(0, str(tmp_path / "absent")).temperature is None


def test_what_cards_do_now() -> None:
    answer = "0, 98, 72192, 1755, 651.20, 61\n1, [N/A], 1024, [N/A], ERR!, 40\nNo devices were found\n2, 5\n"
    assert parse_loads(answer) == {
        0: Load(98.0, 70.5, 1755.0, 651.2, 61.0),
        1: Load(None, 1.0, None, None, 40.0),
    }


def test_loads_of_an_nvidia_smi_that_fails(tmp_path: Path) -> None:
    assert read_loads(str(tmp_path / "absent")) == {}
    assert read_loads(smi(tmp_path, "exit 9")) == {}
    assert read_loads(smi(tmp_path, "sleep 30"), time_limit=0.2) == {}
