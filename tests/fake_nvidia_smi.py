"""Stand-ins for nvidia-smi: shell scripts that answer as the real one was seen to."""

from __future__ import annotations

from pathlib import Path

A40 = "0, NVIDIA A40, 46068, 45634, 580.95.05, 8.6, GPU-aaaa1111, [N/A]"
A40_2 = "1, NVIDIA A40, 46068, 45634, 580.95.05, 8.6, GPU-bbbb2222, [N/A]"


def smi(folder: Path, script: str) -> str:
    """A stand-in for nvidia-smi that runs a shell script."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def printing(text: str, code: int = 0) -> str:
    return f"cat <<'END'\n{text}\nEND\nexit {code}"
