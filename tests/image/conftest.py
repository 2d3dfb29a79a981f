from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.image import podman

_lines: list[str] = []


@pytest.fixture(autouse=True, scope="session")
def home() -> Path:
    """The real home: pip's settings are read from it, and the base image is kept below it."""
    return Path.home()


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> podman.Built:
    missing = podman.missing_tools()
    if missing:
        pytest.fail(f"the image test needs {', '.join(missing)}: apt-get install {' '.join(missing)}", pytrace=False)
    if os.geteuid() != 0:
        pytest.fail("the image test needs root (debootstrap and runc): sudo make test-image", pytrace=False)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fluxpod-image-test"
    podman.ensure_base(cache)
    built = podman.build(Path(__file__).parents[2], tmp_path_factory.mktemp("build"))
    _lines.append(str(built))
    return built


@pytest.fixture
def report() -> list[str]:
    """Lines that stand at the end of the test's output: sizes and times."""
    return _lines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _lines:
        terminalreporter.write_line(line)
