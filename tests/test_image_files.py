"""What the image's files promise each other; that they work is `make test-image`'s to show."""

from __future__ import annotations

import configparser
import re
from importlib.metadata import requires
from pathlib import Path

from bootstrap import clocks

ROOT = Path(__file__).parents[1]


def programs() -> dict[str, configparser.SectionProxy]:
    parser = configparser.RawConfigParser()
    parser.read(ROOT / "entrypoint" / "supervisord.conf")
    assert "inet_http_server" not in parser, "a control port would be open to everyone"
    return {name.partition(":")[2]: parser[name] for name in parser.sections() if name.startswith("program:")}


def test_supervisord_waits_as_long_as_the_clocks_say() -> None:
    assert float(programs()["pod"]["stopwaitsecs"]) == clocks.SUPERVISOR


def test_ssh_is_started_first_and_the_jobs_are_stopped_first() -> None:
    order = sorted(programs(), key=lambda name: int(programs()[name]["priority"]))
    assert order == ["sshd", "page", "jupyter", "pod"]  # stopped the other way round
    assert all(program["autorestart"] == "true" for program in programs().values())


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_torchs_layer_has_the_pins_of_all_that_torch_needs() -> None:
    """Else the layer of gigabytes would hold whatever version is the newest that day."""
    found = re.search(r"grep -E '\^\(([^)]*)\)=='", (ROOT / "Dockerfile").read_text())
    assert found
    named = {normal(name) for name in found[1].split("|")}
    needed, new = set[str](), {"torch"}
    while new:
        needed |= new
        lines = [line for name in new for line in requires(name) or [] if "extra ==" not in line]
        names = {normal(re.match(r"[\w.-]+", line)[0]) for line in lines}  # type: ignore[index]
        new = {name for name in names if not name.startswith(("nvidia-", "cuda-", "triton"))} - needed
    assert named == needed
    pinned = {normal(line.partition("==")[0]) for line in (ROOT / "requirements.txt").read_text().splitlines()}
    assert named <= pinned


def test_the_version_is_one() -> None:
    """`make push` takes the tag from it."""
    assert len(re.findall(r'^version = "\d+\.\d+\.\d+"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)) == 1
