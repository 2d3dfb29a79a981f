from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootstrap.pod import Pod, read_cpus, read_memory, read_oom_kills, read_pod, share_of
from tests.fake_nvidia_smi import A40, printing, smi


def test_found_on_the_path_with_the_documented_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, f'echo "$@" >> {tmp_path}/arguments\n{printing(A40)}')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pod = read_pod(tmp_path)
    assert len(pod.gpus) == 1
    query, layout = (tmp_path / "arguments").read_text().splitlines()[0].split()
    assert query.startswith("--query-gpu=index,name,memory.total,memory.free,driver_version,compute_cap")
    assert layout == "--format=csv,noheader,nounits"


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
