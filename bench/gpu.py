"""``make bench``: speed and memory of real-size FLUX on this machine's GPU, through the product's own trainer.

One Markdown table. Every figure is of whole steps: data, forward, backward, optimizer, logging. Seconds differ from
machine to machine; the share of the card's own matrix-product ceiling, measured in the same process, can be compared.
The exit status is 1 where a case failed, is slower than it is to be at least, has a loss that is no number, or fills
the card by more than 5 % more or less than its plan said.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cases import APART, CASES, Case
from entrypoint.launch import launcher_command

WITHIN = 0.05  # of the measured peak, which the plan's estimate is to be


@dataclass(frozen=True)
class Column:
    head: str
    cell: Callable[[Case, Mapping[str, Any]], str]


def _speed(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _held(case: Case, found: Mapping[str, Any]) -> str:
    holds = case.holds(found["seconds_per_step"])
    if holds and case.aim and found["seconds_per_step"] <= case.aim:
        return "yes, the aim too"
    return "-" if holds is None else "yes" if holds else "NO"


def peak(found: Mapping[str, Any]) -> float:
    """GiB in use on the card at most, what lies outside torch included: what the plan estimates."""
    return float(found["peak_allocated_gib"] + found["outside_torch_gib"])


def off(found: Mapping[str, Any]) -> float:
    """By how much of the peak the plan's estimate was too high."""
    return float(found["planned_gib"]) / peak(found) - 1


COLUMNS = (
    Column("case", lambda case, found: f"`{case.name}`"),
    Column("s/step", lambda case, found: _speed(found["seconds_per_step"])),
    Column("at least", lambda case, found: _speed(case.at_least)),
    Column("aim", lambda case, found: _speed(case.aim)),
    Column("holds", _held),
    Column("kohya", lambda case, found: "-" if case.kohya is None else f"{case.kohya:.2f}"),
    Column("img/s", lambda case, found: f"{found['images_per_second']:.2f}"),
    Column("TFLOP/s", lambda case, found: f"{found['model_tflops']:.0f} of {found['ceiling_tflops']:.0f}"),
    Column("share", lambda case, found: f"{found['share_of_ceiling']:.1%}"),
    Column("GiB allocated", lambda case, found: f"{found['peak_allocated_gib']:.1f}"),
    Column("reserved", lambda case, found: f"{found['peak_reserved_gib']:.1f}"),
    Column("with context", lambda case, found: f"{peak(found):.1f}"),
    Column(
        "planned", lambda case, found: f"{found['planned_gib']:.1f} ({found['planned_gib'] / peak(found) - 1:+.1%})"
    ),
    Column("first step, s", lambda case, found: f"{found['first_step_seconds']:.0f}"),
    Column("loss", lambda case, found: "finite" if found["losses_finite"] else "NOT FINITE"),
    Column("gradients right with", lambda case, found: found["attention"]),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated; all by default")
    parser.add_argument("--save", action="store_true", help="also write a state and the output (a full one is 45 GiB)")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument(
        "--no-gradients",
        action="store_true",
        help="without the check of every attention's gradients at four sizes; each case checks its own at its own",
    )
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fluxpod-bench-"))
    names = options.cases.split(",")
    known = CASES | APART
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(known)}")
    ok = options.no_gradients or check_gradients()
    print("\n".join(head()), flush=True)
    for name in names:
        found, log = run_case(name, folder, options.save)
        ok &= found is not None and good(known[name], found)
        print(row(known[name], found) if found else f"{name} failed:\n{log[-3000:]}", flush=True)
        if found and found["validation_seconds"]:
            print(f"rounds of validation, the first of which compiles: {found['validation_seconds']} s", flush=True)
        shutil.rmtree(folder / "volume", ignore_errors=True)
    return 0 if ok else 1


def good(case: Case, found: Mapping[str, Any]) -> bool:
    """Finite losses, a plan that knew the peak, and a speed that was asked for."""
    return (
        bool(found["losses_finite"])
        and abs(off(found)) <= WITHIN
        and case.holds(found["seconds_per_step"]) is not False
    )


def check_gradients() -> bool:
    """The self-check of every attention known here; whether the one that training takes is right."""
    command = [sys.executable, "-m", "bench.gradients"]
    return subprocess.run(command, check=False).returncode == 0


def run_case(name: str, folder: Path, save: bool) -> tuple[dict[str, Any] | None, str]:
    start_cases(1, [name], folder, ["--save"] * save).wait()
    result = folder / f"{name}.json"
    return (json.loads(result.read_text()) if result.exists() else None), (folder / "log").read_text()


def start_cases(
    processes: int, cases: Sequence[str], folder: Path, options: Sequence[str] = (), **environment: str
) -> subprocess.Popen[bytes]:
    """``bench.case`` by the product's launcher; what it says goes to ``folder/log``."""
    command = [*launcher_command(processes), "-m", "bench.case", ",".join(cases), str(folder), *options]
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1"} | environment
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT)


def head() -> tuple[str, str]:
    """The first two lines of a Markdown table."""
    return "| " + " | ".join(column.head for column in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)


def row(case: Case, found: Mapping[str, Any]) -> str:
    return "| " + " | ".join(column.cell(case, found) for column in COLUMNS) + " |"


if __name__ == "__main__":
    sys.exit(main())
