"""Starting must be quick: what reads a job or parses the command line loads no torch. (`make check` holds the layers.)

Each import is tried in a fresh interpreter, since this one may have torch already.
"""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["jobs.schema", "jobs.load", "bootstrap.plan", "bootstrap.pod", "entrypoint.cli", "entrypoint.convert"]
)
def test_imports_without_torch(module: str) -> None:
    heavy = "torch", "transformers", "diffusers", "accelerate"
    program = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
