"""The container around the jobs: ssh, page and Jupyter, what shells find, what PID 1 does, and what is in the image."""

from __future__ import annotations

import base64
import json
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

from tests.image import podman
from tests.image.test_image import wait_for

pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("image")]  # the first build is in that time

PASSWORD = "50% of a 'pass word'"
ODD = 'it\'s  "odd" $HOME `id` \\\nsecond line '


@dataclass
class Pod:
    """A running container with all programs on, on ports of this machine."""

    container: podman.Container
    volume: Path
    ports: dict[str, int]

    def get(self, program: str, path: str, password: str = "") -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports[program]}{path}")
        if password:
            request.add_header("Authorization", "Basic " + base64.b64encode(f"me:{password}".encode()).decode())
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def ssh(self, *words: str, key: str = "id", strict: str = "accept-new", options: tuple[str, ...] = ()) -> str:
        """What a command over ssh prints. The client is the image's own; its files lie on the volume, in client/."""
        known = (
            "-o",
            "UserKnownHostsFile=/workspace/client/known_hosts",
            "-o",
            f"StrictHostKeyChecking={strict}",
            "-o",
            "HostKeyAlias=pod",
        )
        login = (
            "-i",
            f"/workspace/client/{key}",
            "-o",
            "BatchMode=yes",
            "-o",
            "IdentitiesOnly=yes",
            "-o",
            "LogLevel=ERROR",
        )
        port = str(self.ports["ssh"])
        return self.container.execute("ssh", *known, *login, *options, "-p", port, "root@127.0.0.1", *words)


def free_ports() -> dict[str, int]:
    with (
        socket.create_server(("127.0.0.1", 0)) as a,
        socket.create_server(("127.0.0.1", 0)) as b,
        socket.create_server(("127.0.0.1", 0)) as c,
    ):
        return {name: s.getsockname()[1] for name, s in (("ssh", a), ("page", b), ("jupyter", c))}


def start_pod(volume: Path, environment: dict[str, str] | None = None) -> Pod:
    ports = free_ports()
    settings = {f"FLUXPOD_{name.upper()}_PORT": str(port) for name, port in ports.items()}
    settings |= {"PUBLIC_KEY": (volume / "client" / "id.pub").read_text(), "JUPYTER_PASSWORD": PASSWORD}
    return Pod(podman.Container(volume, "host", settings | (environment or {})), volume, ports)


def make_keys(volume: Path) -> None:
    (volume / "client").mkdir()
    for name in ("id", "stranger"):
        words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"/workspace/client/{name}")
        podman.command(*podman.run_words("--rm", "--volume", f"{volume}:/workspace"), podman.IMAGE, *words)


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory, image: podman.Built) -> Iterator[Pod]:
    volume = tmp_path_factory.mktemp("volume")
    make_keys(volume)
    (volume / "python").mkdir()
    (volume / "python" / "my_optimizer.py").write_text("ANSWER = 42\n")
    (volume / "python" / "yaml.py").write_text("raise RuntimeError('this one must not be taken')\n")
    secrets = {"RUNPOD_API_KEY": "k3y", "HF_TOKEN": ' "hf_abc"\r\n', "WANDB_API_KEY": "{{ RUNPOD_SECRET_wandb }}"}
    pod = start_pod(volume, {**secrets, "ODD": ODD})
    with pod.container:
        wait_for(lambda: pod.get("page", "/health")[0] == 200, pod.container, "page", 120)
        wait_for(lambda: pod.get("jupyter", "/login")[0] == 200, pod.container, "Jupyter", 240)
        yield pod


def test_page_and_ssh_are_up_soon(tmp_path: Path, report: list[str]) -> None:
    make_keys(tmp_path)
    start = time.monotonic()
    pod = start_pod(tmp_path)
    with pod.container:
        wait_for(lambda: pod.get("page", "/health")[0] == 200, pod.container, "page", 120)
        seconds = time.monotonic() - start
        report.append(f"start of the container to page up: {seconds:.1f} s")
        assert seconds < 60  # on a machine that does other things beside; alone it is 2
        assert pod.ssh("echo", "in") == "in\n"


# --- ssh --------------------------------------------------------------------------------------------------------------


def test_only_the_key_opens_ssh(pod: Pod) -> None:
    assert pod.ssh("whoami").splitlines()[-1] == "root"
    with pytest.raises(RuntimeError, match="Permission denied \\(publickey\\)"):
        pod.ssh("whoami", key="stranger")
    with pytest.raises(RuntimeError, match="Permission denied \\(publickey\\)"):
        pod.ssh("whoami", options=("-o", "PubkeyAuthentication=no"))


def test_a_new_container_has_the_same_host_key(tmp_path: Path) -> None:
    make_keys(tmp_path)
    first = start_pod(tmp_path)
    with first.container:
        wait_for(lambda: "Server listening" in first.container.log, first.container, "ssh", 120)
        first.ssh("true")
    kept = sorted((tmp_path / ".fluxpod" / "ssh").iterdir())
    assert [path.name for path in kept] == ["ssh_host_ecdsa_key", "ssh_host_ed25519_key"]
    for path in kept:
        path.chmod(0o666)  # as on a volume that holds no modes
    second = start_pod(tmp_path)
    with second.container:
        wait_for(lambda: "Server listening" in second.container.log, second.container, "ssh", 120)
        assert second.ssh("stat", "-c", "%a", "/run/fluxpod/ssh/ssh_host_ed25519_key", strict="yes") == "600\n"


def test_a_damaged_host_key_is_made_anew(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / ".fluxpod" / "ssh").mkdir(parents=True)
    damaged = tmp_path / ".fluxpod" / "ssh" / "ssh_host_ed25519_key"
    damaged.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    pod = start_pod(tmp_path)
    with pod.container:
        wait_for(lambda: "Server listening" in pod.container.log, pod.container, "ssh", 120)
        assert "in\n" in pod.ssh("echo", "in")
    assert damaged.read_text().endswith("-----END OPENSSH PRIVATE KEY-----\n")


# --- Shells -----------------------------------------------------------------------------------------------------------


def variables(printed: str) -> dict[str, str]:
    """From the output of ``env -0``."""
    return dict(entry.split("=", 1) for entry in printed.split("\0") if "=" in entry)


@pytest.mark.parametrize("words", [("env", "-0"), ("bash", "-lc", "'env -0'")])
def test_a_shell_over_ssh_finds_what_it_needs(pod: Pod, words: tuple[str, ...]) -> None:
    found = variables(pod.ssh(*words))
    assert found["ODD"] == ODD
    assert found["HF_TOKEN"] == "hf_abc"
    assert found["PATH"].startswith("/opt/fluxpod/venv/bin:")
    for name in ("HF_HOME", "XDG_CACHE_HOME", "TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR"):
        assert found[name].startswith("/workspace/cache/"), name
    for name in ("RUNPOD_API_KEY", "JUPYTER_PASSWORD", "WANDB_API_KEY", "PUBLIC_KEY"):
        assert name not in found
    assert "usage: fluxpod" in pod.ssh("fluxpod", "--help")


def test_an_empty_login_shell_finds_it_too(pod: Pod) -> None:
    found = variables(pod.container.execute("env", "-i", "bash", "-lc", "env -0"))
    assert found["ODD"] == ODD
    assert found["HF_HOME"] == "/workspace/cache/huggingface"
    mode = pod.container.execute("stat", "-c", "%a %U", "/run/fluxpod/login")
    assert mode == "600 root\n"


def test_a_secret_that_does_not_exist_is_explained(pod: Pod) -> None:
    assert "no secret named wandb" in pod.container.log
    assert "no secret named wandb" in pod.get("page", "/", PASSWORD)[1]
    assert "k3y" not in pod.container.log
    assert "hf_abc" not in pod.container.log


def test_modules_on_the_volume_are_searched_last(pod: Pod) -> None:
    program = "import my_optimizer, yaml; print(my_optimizer.ANSWER, yaml.__file__)"
    printed = pod.container.execute("python", "-c", program)
    assert printed.startswith("42 /opt/fluxpod/venv/")


# --- Jupyter and the page ---------------------------------------------------------------------------------------------


def test_jupyter_refuses_without_the_password(pod: Pod) -> None:
    assert pod.get("jupyter", "/api/contents")[0] == 403
    assert pod.get("jupyter", "/api/terminals")[0] == 403
    assert "password" in pod.get("jupyter", "/lab")[1].lower()  # sent to the login


@pytest.mark.parametrize(("password", "opens"), [(PASSWORD, True), ("wrong", False), ("", False)])
def test_jupyter_opens_with_the_password(pod: Pod, password: str, opens: bool) -> None:
    address = f"http://127.0.0.1:{pod.ports['jupyter']}"
    cookies = CookieJar()
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies))
    browser.open(f"{address}/login", timeout=30).read()
    token = next(cookie.value or "" for cookie in cookies if cookie.name == "_xsrf")
    form = urllib.parse.urlencode({"password": password, "_xsrf": token}).encode()
    try:
        browser.open(f"{address}/login", form, timeout=30).read()
        with browser.open(f"{address}/api/contents", timeout=30) as answer:
            listing = json.load(answer)
    except urllib.error.HTTPError:
        assert not opens
        return
    assert opens
    assert "python" in [entry["name"] for entry in listing["content"]]  # the volume is its root
    request = urllib.request.Request(f"{address}/api/terminals", b"", {"X-XSRFToken": token})
    with browser.open(request, timeout=30) as answer:
        assert json.load(answer)["name"]


def test_jupyters_password_is_no_secret_to_leak(pod: Pod) -> None:
    """Not in its processes' environment or arguments, and its settings hold a hash that only root reads."""
    script = (
        "grep -l -a -F -e k3y -e \"$WORD\" $(grep -l -a 'jupyterla[b]' /proc/[0-9]*/cmdline | sed 's/cmdline/environ/')"
    )
    found = pod.container.execute("env", f"WORD={PASSWORD}", "bash", "-c", f"{script} 2> /dev/null || true")
    assert found == ""
    file = "/run/fluxpod/jupyter/settings.json"
    assert pod.container.execute("stat", "-c", "%a", file) == "600\n"
    assert "argon2:" in pod.container.execute("cat", file)


def test_the_page_wants_the_password(pod: Pod) -> None:
    assert pod.get("page", "/health") == (200, "ok\n")
    assert pod.get("page", "/")[0] == 401
    assert pod.get("page", "/", "wrong")[0] == 401
    code, text = pod.get("page", "/", PASSWORD)
    assert code == 200
    assert "nothing is mounted" not in text


# --- What PID 1 does --------------------------------------------------------------------------------------------------


def test_programs_come_back(pod: Pod) -> None:
    assert pod.container.execute("cat", "/proc/1/comm") == "tini\n"
    pod.container.execute("supervisorctl", "signal", "KILL", "page", "jupyter")
    wait_for(lambda: pod.get("page", "/health")[0] == 200, pod.container, "page again", 60)
    wait_for(lambda: pod.get("jupyter", "/login")[0] == 200, pod.container, "Jupyter again", 120)


def test_orphans_are_reaped(pod: Pod) -> None:
    pod.container.execute("bash", "-c", "(sleep 0.1 &) ; (true &) ; true")
    time.sleep(1)
    assert pod.container.execute("bash", "-c", "grep -l '^State:.Z' /proc/[0-9]*/status 2> /dev/null || true") == ""


def test_nothing_large_is_on_the_containers_disk(pod: Pod) -> None:
    found = pod.container.execute(
        "find", "/", "-xdev", "-newer", "/run/fluxpod/temporary", "-type", "f", "-size", "+1000k",
        "-not", "-path", "/proc/*", "-not", "-path", "/sys/*", "-not", "-path", "/workspace/*",
    )  # fmt: skip
    assert found == ""


@pytest.mark.parametrize("kind", ["no volume", "read-only", "a file in its place"])
def test_ssh_and_page_are_up_whatever_the_volume_is(tmp_path: Path, kind: str) -> None:
    """With a warning that nobody can overlook where nothing is kept."""
    make_keys(tmp_path)
    place = {"no volume": "/elsewhere", "read-only": "/workspace", "a file in its place": "/etc/hostname"}[kind]
    ports = free_ports()
    settings = {f"FLUXPOD_{name.upper()}_PORT": str(port) for name, port in ports.items()}
    settings |= {"PUBLIC_KEY": (tmp_path / "client" / "id.pub").read_text(), "FLUXPOD_PASSWORD": "p"}
    mounts = ["--volume", f"{tmp_path}:/workspace:ro"] if kind == "read-only" else []
    options = [*mounts, "--env", f"FLUXPOD_VOLUME={place}", "--volume", f"{tmp_path / 'client'}:/client:ro"]
    pod = Pod(podman.Container(None, "host", settings, options), tmp_path, ports)
    with pod.container:
        wait_for(lambda: pod.get("page", "/health")[0] == 200, pod.container, "page", 120)
        words = ["ssh", "-i", "/client/id", "-o", "StrictHostKeyChecking=no", "-p", str(ports["ssh"]), "root@127.0.0.1"]
        assert "in\n" in pod.container.execute(*words, "echo", "in")
        code, text = pod.get("page", "/", "p")
        assert code == 200
        if kind == "no volume":
            assert "EVERYTHING HERE IS LOST" in text
            program = (
                "import pathlib; from bootstrap.volume_probe import *; print(probe_volume(pathlib.Path('/elsewhere')))"
            )
            assert "persistent=False, writable=True" in pod.container.execute("python", "-c", program)
        else:
            wait_for(lambda: "nothing runs" in pod.container.log, pod.container, "word of the volume", 120)
            assert "cannot be written" in pod.get("page", "/", "p")[1]
        time.sleep(3)
        assert pod.container.is_running
        assert pod.container.log.count("nothing runs") <= 1
        assert "Traceback" not in pod.container.log
        assert pod.get("page", "/health")[0] == 200


def test_ssh_is_up_though_the_environment_cannot_be_prepared(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / "broken.py").write_text("raise RuntimeError('broken')\n")
    module = "/opt/fluxpod/venv/lib/python3.11/site-packages/entrypoint/environment.py"
    settings = {"PUBLIC_KEY": (tmp_path / "client" / "id.pub").read_text()}
    more = ["--volume", f"{tmp_path / 'broken.py'}:{module}:ro"]
    pod = Pod(podman.Container(tmp_path, "none", settings, more), tmp_path, {"ssh": 22})
    with pod.container:
        wait_for(lambda: "Server listening" in pod.container.log, pod.container, "ssh", 120)
        assert "in\n" in pod.ssh("echo", "in")
        assert "could not be prepared" in pod.container.log


def test_restarts_leave_nothing_behind(tmp_path: Path) -> None:
    make_keys(tmp_path)
    pod = start_pod(tmp_path)
    listings = []
    with pod.container:
        for _ in range(3):
            wait_for(lambda: pod.get("page", "/health")[0] == 200, pod.container, "page", 120)
            wait_for(lambda: pod.get("jupyter", "/login")[0] == 200, pod.container, "Jupyter", 240)
            time.sleep(3)
            listings.append(sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")))
            podman.command("podman", "--runtime", "runc", "restart", "--time", "30", pod.container.id)
    assert listings[1] == listings[0]
    assert listings[2] == listings[0]


def test_a_commands_exit_code_is_the_containers() -> None:
    with pytest.raises(RuntimeError, match="ended with 7"):
        podman.output_of("bash", "-c", "exit 7")


# --- What is in the image ---------------------------------------------------------------------------------------------


def test_the_pins_are_what_is_installed() -> None:
    """Every package of the image is in requirements.txt, with its version, but what torch's CUDA build is tied to."""

    def named(lines: list[str]) -> dict[str, str]:
        pairs = [line.split("#")[0].strip().split("==") for line in lines if "==" in line.split("#")[0]]
        return {name.lower().replace("_", "-").replace(".", "-"): version.split("+")[0] for name, version in pairs}

    pinned = named((Path(__file__).parents[2] / "requirements.txt").read_text().splitlines())
    installed = named(podman.output_of("pip", "--disable-pip-version-check", "list", "--format", "freeze").splitlines())
    free = {name for name in installed if name.startswith(("nvidia-", "cuda-", "triton")) or name in ("pip", "fluxpod")}
    assert {name: version for name, version in installed.items() if name not in free} == pinned
    assert "No broken requirements found." in podman.output_of("pip", "--disable-pip-version-check", "check")


def test_a_release_moves_megabytes(tmp_path: Path, report: list[str]) -> None:
    sizes = podman.compressed_layers(tmp_path)
    torch = podman.output_of("python", "-c", "from importlib.metadata import version as v; print(v('torch'))").strip()
    report.append(
        f"compressed: {sum(sizes) / 1e6:.0f} MB with torch {torch}, the layers "
        + " + ".join(f"{size / 1e6:.1f}" for size in sizes)
    )
    application = sizes[-1:]
    assert sum(application) < 5e6, "what every release changes"
    assert sum(sizes[:3]) > 10 * sum(application)
