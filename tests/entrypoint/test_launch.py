"""Our own programs as children: the line accelerate understands, no secrets, and nothing left running."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootstrap.processes import living, record_process, start_time
from bootstrap.run_file import RunFile
from bootstrap.volume import Volume, read_json
from entrypoint import launch
from entrypoint.launch import (
    PORTS,
    Stop,
    Stopped,
    child_environment,
    describe_exit,
    encoder_command,
    end_leftovers,
    free_port,
    run_children,
    trainer_command,
)
from tests.runs import make_run

RUN_FILE = Path("/v/runs/test/run.json")


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return make_run(tmp_path)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LOOK_EVERY", 0.02)


# ---------------------------------------------------------------- command lines


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_accelerate_understands_the_line(processes: int, run: RunFile) -> None:
    """Its own parser, so that a new version that calls things otherwise fails here and not on a pod."""
    from accelerate.commands.launch import launch_command_parser

    plan = make_run(run.volume, processes=processes).plan
    python, *line = trainer_command(plan, RUN_FILE)
    assert python == sys.executable
    assert line[:2] == ["-m", "accelerate.commands.launch"]
    options = launch_command_parser().parse_args(line[2:])
    found = vars(options)
    expected: dict[str, Any] = {
        "use_fsdp": True,
        "fsdp_version": "2",
        "num_machines": 1,
        "mixed_precision": "no",
        "dynamo_backend": "no",
        "num_processes": processes,
        "module": True,
        "training_script": "trainer.train",
        "training_script_args": [str(RUN_FILE)],
        "cpu": False,
        "multi_gpu": False,
    }
    assert {name: str(found[name]) for name in expected} == {name: str(value) for name, value in expected.items()}
    assert 1024 < options.main_process_port < 65536


def test_the_line_is_this_one(run: RunFile) -> None:
    line = trainer_command(run.plan, RUN_FILE)[1:]
    line[line.index("--main_process_port") + 1] = "PORT"
    assert " ".join(line) == (
        "-m accelerate.commands.launch --use_fsdp --fsdp_version 2 --num_machines 1 --mixed_precision no "
        "--dynamo_backend no --num_processes 1 --main_process_port PORT -m trainer.train /v/runs/test/run.json"
    )


def test_the_encoder_takes_its_part() -> None:
    assert encoder_command(RUN_FILE, 1, 3)[1:] == ["-m", "trainer.encode", str(RUN_FILE), "--part", "1", "--parts", "3"]


def test_a_port_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """P53: the launcher's own 29500 may be held by a leftover or a second job."""
    with socket.socket() as taken:
        taken.bind(("", PORTS[5]))
        monkeypatch.setattr(launch, "PORTS", PORTS[5:7])
        assert {free_port() for _ in range(20)} == {PORTS[6]}
        monkeypatch.setattr(launch, "PORTS", PORTS[5:6])
        with pytest.raises(OSError, match="no port from"):
            free_port()


# ---------------------------------------------------------------- environments

SECRETS = [
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "hf_token", "RUNPOD_API_KEY", "WANDB_API_KEY", "CIVITAI_KEY", "GITHUB_PAT"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "JUPYTER_PASSWORD", "SSH_PASSPHRASE"),
    *("CLIENT_SECRET", "GOOGLE_CREDENTIALS", "REGISTRY_AUTH", "FLUXPOD_JOB"),
    *("DISCORD_WEBHOOK", "NTFY_TOPIC", "NOTIFY_URL"),
]


@pytest.mark.parametrize("name", SECRETS)
def test_no_secret_is_handed_down(name: str, run: RunFile) -> None:
    environment = child_environment(run, {"PATH": "/bin", name: "very secret"})
    assert "very secret" not in environment.values()
    assert environment["PATH"] == "/bin"


def test_what_children_need_is_kept() -> None:
    run = make_run(Path("/v"))
    given = dict.fromkeys(("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "PWD", "SSH_AUTH_SOCK", "TOKENIZERS"), "x")
    assert child_environment(run, given).items() >= given.items()


def test_on_a_cpu(tmp_path: Path) -> None:
    environment = child_environment(make_run(tmp_path, threads=3), {"HF_HUB_OFFLINE": "0"})
    assert environment == {
        "ACCELERATE_USE_CPU": "1",
        "HF_HOME": str(tmp_path / "cache" / "huggingface"),  # no settings of a launcher that lie in somebody's home
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache" / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "cache" / "triton"),
    }


def test_on_gpus_by_nvidia_smis_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path, device="cuda", gpus=(1, 3), processes=2)
    environment = child_environment(run, {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert environment["ACCELERATE_USE_CPU"] == "0"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    mine = child_environment(run, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    assert mine["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"


# ---------------------------------------------------------------- children


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
POLITE = "import time; print('up', flush=True); time.sleep(60)"


def nothing() -> None:
    pass


def when_up(run: RunFile, children: int, then: Any) -> Any:
    """A look that acts, once, when so many children have said that they are up."""
    acted = False

    def look() -> None:
        nonlocal acted
        if not acted and run.folder.log.read_text().count("up") == children:
            acted = True
            then()

    return look


def test_statuses_and_output(run: RunFile) -> None:
    statuses = run_children(
        [python("print('one')"), python("import sys; sys.exit('two')"), python("import os; os.kill(os.getpid(), 9)")],
        run,
        Stop(),
        nothing,
    )
    assert statuses == [0, 1, -signal.SIGKILL]
    assert sorted(run.folder.log.read_text().split()) == ["one", "two"]


def test_the_log_is_continued(run: RunFile) -> None:
    for word in ("first", "second"):
        run_children([python(f"print({word!r})")], run, Stop(), nothing)
    assert run.folder.log.read_text() == "first\nsecond\n"


def test_a_childs_environment_input_and_session(run: RunFile) -> None:
    code = "import os, sys, json; print(json.dumps([dict(os.environ), sys.stdin.read(), os.getsid(0) == os.getpid()]))"
    run_children([python(code)], run, Stop(), nothing, {"HF_TOKEN": "very secret", "PATH": os.environ["PATH"]})
    environment, stdin, own_session = json.loads(run.folder.log.read_text())
    assert "HF_TOKEN" not in environment
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert (stdin, own_session) == ("", True)


@pytest.mark.parametrize(("free", "value"), [(64 << 20, "1"), (1 << 30, None)])
def test_nccl_does_without_a_shared_memory_that_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, value: str | None
) -> None:
    monkeypatch.setattr(launch, "free_bytes", lambda path: free)
    run = make_run(tmp_path, device="cuda", gpus=(0, 1), processes=2)
    assert child_environment(run, {}).get("NCCL_SHM_DISABLE") == value
    assert child_environment(run, {"NCCL_SHM_DISABLE": "0"})["NCCL_SHM_DISABLE"] == "0"
    assert "NCCL_SHM_DISABLE" not in child_environment(make_run(tmp_path, device="cuda", gpus=(0,)), {})


def test_looks_go_on_while_a_child_runs_and_once_after(run: RunFile) -> None:
    seen: list[str] = []
    run_children(
        [python("import time; time.sleep(0.3); print('last words')")],
        run,
        Stop(),
        lambda: seen.append(run.folder.log.read_text()),
    )
    assert len(seen) >= 3
    assert seen[-1] == "last words\n"


def test_children_are_recorded_while_they_run(run: RunFile) -> None:
    """So that a start after a kill of this process finds them."""
    seen: list[set[str]] = []
    stop = Stop()

    def look() -> None:
        seen.append(set(living(run.folder.processes)))
        stop.requested = True

    run_children([python(POLITE), python(POLITE)], run, stop, look)
    assert seen[0] == {"entrypoint", "child-0", "child-1"}
    assert list(run.folder.processes.iterdir()) == []


def test_a_stop_reaches_every_child(run: RunFile) -> None:
    stop = Stop()
    look = when_up(run, 2, lambda: setattr(stop, "requested", True))
    assert run_children([python(POLITE), python(POLITE)], run, stop, look) == [-signal.SIGTERM, -signal.SIGTERM]


def test_one_that_does_not_listen_is_killed(run: RunFile) -> None:
    stop = Stop()
    look = when_up(run, 2, lambda: setattr(stop, "requested", True))
    statuses = run_children([python(STUBBORN), python(POLITE)], run, stop, look, limit=lambda: 0.2)
    assert statuses == [-signal.SIGKILL, -signal.SIGTERM]


def test_within_at_once_a_signal_ends_any_wait(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        stop = Stop()
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        stop.on_signals()
        try:
            sender = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
            sender.start()
            with pytest.raises(Stopped), stop.at_once():
                fcntl.flock(second, fcntl.LOCK_EX)
            with pytest.raises(Stopped), stop.at_once():
                pytest.fail("it was asked to stop before")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    assert stop.requested
    assert not stop.leaving


OUTLIVING = """
import os, signal, sys, time
from entrypoint.launch import Stop
stop = Stop()
stop.on_signals()
print("ready", flush=True)
while not os.path.exists(sys.argv[1] + "/gone"):
    time.sleep(0.02)
for _ in range(100):
    print("to nobody", flush=True)
    print("to nobody", file=sys.stderr, flush=True)
open(sys.argv[1] + "/alive", "w").close()
"""


def test_a_run_outlives_its_terminal(tmp_path: Path) -> None:
    """Row P49: the shell that began it ends, and its terminal with it."""
    master, terminal = pty.openpty()
    child = subprocess.Popen(
        [*python(OUTLIVING), str(tmp_path)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # closing it now sends HUP, as a lost connection does
    )
    os.close(terminal)
    assert os.read(master, 5) == b"ready"
    os.close(master)
    while child.poll() is None and os.readlink(f"/proc/{child.pid}/fd/1") != os.devnull:
        time.sleep(0.02)
    (tmp_path / "gone").touch()
    assert child.wait(30) == 0
    assert (tmp_path / "alive").exists()


WORKER_OF_A_LAUNCHER = """
import subprocess, sys, time
code = '''
import sys, time
from pathlib import Path
from bootstrap.processes import record_process
record_process(Path(sys.argv[1]), "trainer-0")
print("up", flush=True)
time.sleep(60)
'''
subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], start_new_session=True)
time.sleep(60)
"""


def test_a_worker_in_a_session_of_its_own_does_not_live_on(run: RunFile) -> None:
    """As the launcher's are when it is killed."""
    worker: list[int] = []

    def kill_the_launcher() -> None:
        worker.append(read_json(run.folder.processes / "trainer-0.json")["pid"])
        os.kill(read_json(run.folder.processes / "child-0.json")["pid"], signal.SIGKILL)

    command = python(WORKER_OF_A_LAUNCHER, run.folder.processes)
    assert run_children([command], run, Stop(), when_up(run, 1, kill_the_launcher)) == [-signal.SIGKILL]
    assert worker
    assert start_time(worker[0]) is None


def test_an_error_while_looking_leaves_nothing_running(run: RunFile) -> None:
    pids: list[int] = []

    def fail() -> None:
        pids.extend(living(run.folder.processes).values())
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        run_children([python(STUBBORN)], run, Stop(), when_up(run, 1, fail))
    assert [start_time(pid) for pid in pids if pid != os.getpid()] == [None]


def test_a_command_that_cannot_start_takes_the_others_with_it(run: RunFile) -> None:
    with pytest.raises(FileNotFoundError):
        run_children([python(STUBBORN), ["/nowhere/python"]], run, Stop(), nothing)
    assert living(run.folder.processes) == {}


# ---------------------------------------------------------------- leftovers


@pytest.fixture
def leftover(run: RunFile) -> Iterator[int]:
    """A trainer of an earlier start whose entrypoint was killed."""
    pid = os.spawnv(os.P_NOWAIT, sys.executable, python("import time; time.sleep(60)"))
    record_process(run.folder.processes, "trainer-0", pid)
    yield pid
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def test_leftovers_of_a_killed_start_are_ended(run: RunFile, leftover: int) -> None:
    assert end_leftovers(Volume(run.volume), "test") == {"trainer-0": leftover}
    assert start_time(leftover) is None
    assert end_leftovers(Volume(run.volume), "test") == {}


def test_a_run_that_somebody_else_has_in_hand_is_left_alone(run: RunFile, leftover: int) -> None:
    record_process(run.folder.processes, "entrypoint")
    with pytest.raises(RuntimeError, match=f"test is being run by process {os.getpid()}"):
        end_leftovers(Volume(run.volume), "test")
    assert start_time(leftover) is not None


# ---------------------------------------------------------------- signals and words


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_leaves_and_the_third_hurries(
    number: signal.Signals, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    stop = Stop()
    stop.on_signals()
    assert not stop.requested
    signal.raise_signal(number)
    assert stop.requested
    assert left == []
    with pytest.raises(SystemExit) as raised:
        signal.raise_signal(number)
    assert raised.value.code == 128 + number
    assert left == []
    signal.raise_signal(number)
    assert left == [128 + number]


def test_leaving_at_once_leaves_nothing_running(run: RunFile) -> None:
    def leave() -> None:
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        run_children([python(STUBBORN)], run, Stop(), when_up(run, 1, leave))
    assert list(run.folder.processes.iterdir()) == []


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (1, "exit status 1"),
        (0, "exit status 0"),
        (-9, "killed by SIGKILL: usually the host's memory ran out"),
        (-11, "ended by SIGSEGV"),
        (-7, "ended by SIGBUS"),
        (-200, "ended by signal 200"),
        (-40, "ended by signal 40"),  # a real-time one, which has no name
    ],
)
def test_an_exit_in_words(status: int, words: str) -> None:
    assert describe_exit(status).startswith(words)
