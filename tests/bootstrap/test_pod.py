from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bootstrap.pod import Pod, parse_gpus, read_cpus, read_gpus, read_memory, read_oom_kills, read_pod, share_of

A40 = "0, NVIDIA A40, 46068, 45634, 580.95.05, 8.6, GPU-aaaa1111, [N/A]"
A40_2 = "1, NVIDIA A40, 46068, 45634, 580.95.05, 8.6, GPU-bbbb2222, [N/A]"
MIB = 1 << 20


def smi(folder: Path, script: str) -> str:
    """A stand-in for nvidia-smi that runs a shell script."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def printing(text: str, code: int = 0) -> str:
    return f"cat <<'END'\n{text}\nEND\nexit {code}"


def test_two_gpus(tmp_path: Path) -> None:
    gpus, notes = read_gpus(smi(tmp_path, printing(f"{A40}\n{A40_2}")), {}, 10)
    assert notes == ()
    assert [gpu.index for gpu in gpus] == [0, 1]
    assert gpus[0].name == "NVIDIA A40"
    assert gpus[0].memory == 46068 * MIB
    assert gpus[0].free == 45634 * MIB
    assert gpus[0].driver == "580.95.05"
    assert gpus[0].capability == (8, 6)


def test_found_on_the_path_with_the_documented_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, f'echo "$@" > {tmp_path}/arguments\n{printing(A40)}')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pod = read_pod(tmp_path)
    assert len(pod.gpus) == 1
    query, layout = (tmp_path / "arguments").read_text().split()
    assert query.startswith("--query-gpu=index,name,memory.total,memory.free,driver_version,compute_cap")
    assert layout == "--format=csv,noheader,nounits"


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


def write(root: Path, contents: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text("MemTotal:       1000000 kB\nMemFree: 1 kB\n")
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


GROUP = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("contents", "environment", "expected"),
    [
        ({}, {}, 1_024_000_000),
        ({f"{GROUP}/memory.max": "max\n"}, {}, 1_024_000_000),
        ({f"{GROUP}/memory.max": "500000000\n"}, {}, 500_000_000),
        ({f"{GROUP}/memory.max": "9000000000000\n"}, {}, 1_024_000_000),
        ({f"{GROUP}/memory/memory.limit_in_bytes": "400000000\n"}, {}, 400_000_000),
        ({f"{GROUP}/memory/memory.limit_in_bytes": "9223372036854771712\n"}, {}, 1_024_000_000),
        ({"proc/self/cgroup": "0::/a/b\n", f"{GROUP}/a/memory.max": "300000000\n"}, {}, 300_000_000),
        ({"proc/self/cgroup": "4:memory:/x\n", f"{GROUP}/memory/x/memory.limit_in_bytes": "9\n"}, {}, 9),
        ({}, {"RUNPOD_MEM_GB": "0.5"}, 500_000_000),
        ({}, {"RUNPOD_MEM_GB": "lots"}, 1_024_000_000),
        ({f"{GROUP}/memory.max": "700000000\n"}, {"RUNPOD_MEM_GB": "0.5"}, 700_000_000),
    ],
)
def test_memory(tmp_path: Path, contents: dict[str, str], environment: dict[str, str], expected: int) -> None:
    assert read_memory(write(tmp_path, contents), environment) == expected


@pytest.mark.parametrize(
    ("contents", "environment", "expected"),
    [
        ({}, {}, 16),
        ({f"{GROUP}/cpu.max": "max 100000\n"}, {}, 16),
        ({f"{GROUP}/cpu.max": "850000 100000\n"}, {}, 8),
        ({f"{GROUP}/cpu.max": "50000 100000\n"}, {}, 1),
        ({f"{GROUP}/cpu/cpu.cfs_quota_us": "-1\n", f"{GROUP}/cpu/cpu.cfs_period_us": "100000\n"}, {}, 16),
        ({f"{GROUP}/cpu/cpu.cfs_quota_us": "400000\n", f"{GROUP}/cpu/cpu.cfs_period_us": "100000\n"}, {}, 4),
        ({}, {"RUNPOD_CPU_COUNT": "9"}, 9),
        ({}, {"RUNPOD_CPU_COUNT": "64"}, 16),
    ],
)
def test_cpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    contents: dict[str, str],
    environment: dict[str, str],
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert read_cpus(write(tmp_path, contents), environment) == expected


def test_the_pod_of_this_test(tmp_path: Path) -> None:
    pod = read_pod(tmp_path / "not" / "yet", str(tmp_path / "nvidia-smi"), environment={})
    assert isinstance(pod, Pod)
    assert pod.gpus == ()
    assert pod.cpus >= 1
    assert pod.memory > 0
    assert pod.disk_free > 0


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 5\noom 3\noom_kill 2\noom_group_kill 0\n"),
        ("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_processes_killed_for_memory_are_counted(tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / "sys/fs/cgroup" / file
    path.parent.mkdir(parents=True)
    assert read_oom_kills(tmp_path) == 0
    path.write_text(text, encoding="utf-8")
    assert read_oom_kills(tmp_path) == 2


def test_jobs_side_by_side_share_the_pod_by_their_gpus() -> None:
    pod = Pod((), 9, 100, 10, 1000)
    share = share_of(pod, 1, 4)
    assert (share.cpus, share.memory, share.disk_free) == (2, 25, 250)
    assert share_of(Pod((), 1, 100, 10, 1000), 1, 4).cpus == 1
