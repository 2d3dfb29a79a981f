"""Which driver a host needs for the torch that is installed here, without importing torch, which takes seconds."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

# The least driver for programs built with any CUDA of a major version. Source: NVIDIA, CUDA Compatibility, "Minor
# Version Compatibility", table 1. The driver's branch is the first number of its version.
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}


def torch_cuda() -> str:
    """The CUDA version that torch is built with, such as 13.0; "" where it is built without, or is not there."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+\.\d+)", text, re.MULTILINE)
    return found[1] if found else ""


def least_driver(cuda: str) -> int | None:
    """The oldest driver branch that runs programs built with ``cuda``; None where that is not known."""
    major = re.match(r"\d+", cuda)
    return LEAST_DRIVER.get(int(major[0])) if major else None


def branch(driver: str) -> int | None:
    """580 of 580.95.05; None where a driver does not tell."""
    number = re.match(r"\d+", driver)
    return int(number[0]) if number else None
