"""``make bench``: speed and memory of real-size FLUX on this machine's GPU, through the product's own trainer.

One table. Every figure is of whole steps: data, forward, backward, optimizer, logging. Seconds differ from machine to
machine; the share of the card's own matrix-product ceiling, measured in the same process, can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.cases import CASES
from entrypoint.launch import launcher_command

COLUMNS = f"{'case':24} s/step  img/s  TFLOP/s  ceiling  share  GiB alloc  reserved  planned  1st step  finite  kohya s"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated; all by default")
    parser.add_argument("--save", action="store_true", help="also write a state and the output (a full one is 45 GiB)")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fluxpod-bench-"))
    ok = check_gradients()
    print(COLUMNS, flush=True)
    for name in options.cases.split(","):
        row, log = run_case(name, folder, options.save)
        ok &= row is not None and bool(row["losses_finite"])
        print(render(row) if row else f"{name:24} failed:\n{log[-3000:]}", flush=True)
        shutil.rmtree(folder / "volume", ignore_errors=True)
    return 0 if ok else 1


def check_gradients() -> bool:
    """The self-check of every attention known here; whether the one that training takes is right."""
    command = [sys.executable, "-m", "bench.gradients"]
    return subprocess.run(command, check=False).returncode == 0


def run_case(name: str, folder: Path, save: bool) -> tuple[dict[str, object] | None, str]:
    command = [*launcher_command(1), "-m", "bench.case", name, str(folder), *(["--save"] * save)]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    result = folder / f"{name}.json"
    return (json.loads(result.read_text()) if result.exists() else None), done.stdout + done.stderr


def render(row: dict[str, object]) -> str:
    r = {k: v for k, v in row.items() if isinstance(v, int | float)}
    kohya = f"{r['kohya_seconds']:7.2f}" if "kohya_seconds" in r else "      -"
    return (
        f"{row['case']:24} {r['seconds_per_step']:6.3f} {r['images_per_second']:6.2f} {r['model_tflops']:8.0f} "
        f"{r['ceiling_tflops']:8.0f} {r['share_of_ceiling']:6.1%} {r['peak_allocated_gib']:10.1f} "
        f"{r['peak_reserved_gib']:9.1f} {r['planned_gib']:8.1f} {r['first_step_seconds']:9.1f} "
        f"{row['losses_finite']!s:>7} {kohya}"
    )


if __name__ == "__main__":
    sys.exit(main())
