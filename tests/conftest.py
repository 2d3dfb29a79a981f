"""What every test stands on: a home and caches of its own, no account, one compute thread for each test process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["tests.bases", "tests.loopback_hub", "tests.loopback_runpod"]

# Before any test module imports torch or huggingface_hub, which read these once.
_CACHES = tempfile.mkdtemp(prefix="fluxpod-test-")
os.environ["HF_HOME"] = _CACHES
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"  # several test processes share few cores; and sums keep one order
for _name in [name for name in os.environ if name.startswith(("RUNPOD_", "FLUXPOD_", "HF_TOKEN", "HUGGING"))]:
    del os.environ[_name]  # what a developer's machine or a pod has set
for _name in ("PUBLIC_KEY", "JUPYTER_PASSWORD"):
    os.environ.pop(_name, None)


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHES, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home folder that holds nobody's settings."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True, scope="session")
def processor() -> None:
    """Tests form products of bfloat16 as the product's own processes do."""
    from trainer.processor import use_processor  # late: it imports torch

    use_processor(1)
