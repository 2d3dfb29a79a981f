"""``make bench-gpus``: what several GPUs give over one, in images per second, measured on them in one go.

First every GPU trains alone, all at the same time; then all together, talking directly, and once more through the
host's memory (NCCL_P2P_DISABLE=1), as on pods without NVLink. A ratio is the images per second of all together over the
mean of one alone, with as many images on each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu import start_cases


@dataclass(frozen=True)
class Row:
    case: str  # of bench/cases.py, for each GPU
    direct: bool  # whether the GPUs may talk past the host's memory
    at_least: float  # for two GPUs
    aim: float

    @property
    def link(self) -> str:
        return "direct" if self.direct else "host"


ROWS = (
    Row("full-1024", True, 1.85, 1.95),
    Row("full-512x4", True, 1.9, 1.97),
    Row("full-1024x4", False, 1.7, 1.9),
    Row("lora-1024", True, 1.92, 1.96),
    Row("lora-1024", False, 1.92, 1.96),
)
COLUMNS = "case          link    alone img/s  together  ratio  at least   aim   GiB alone  together  planned  finite"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-gpus", description=__doc__)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="how many; all by default")
    parser.add_argument("--rows", default="", help="CASE:direct or CASE:host, comma-separated; all by default")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args()
    if options.gpus < 2:
        print("bench-gpus needs two GPUs or more", file=sys.stderr)
        return 2
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fluxpod-bench-"))
    wanted = options.rows.split(",") if options.rows else []
    rows = [row for row in ROWS if not wanted or f"{row.case}:{row.link}" in wanted]
    alone = measure_alone(dict.fromkeys(row.case for row in rows), options.gpus, folder)
    together = {link: measure_together(rows, link, options.gpus, folder) for link in ("direct", "host")}
    print(COLUMNS, flush=True)
    ok = True
    for row in rows:
        found = together[row.link].get(row.case)
        one = [each[row.case] for each in alone if row.case in each]
        print(render(row, one, found), flush=True)
        ok &= found is not None and bool(found["losses_finite"]) and len(one) == options.gpus
    return 0 if ok else 1


def measure_alone(cases: Iterable[str], gpus: int, folder: Path) -> list[dict[str, Any]]:
    """By GPU, by case: what each of them reaches while the others do the same."""
    names = list(cases)
    folders = [folder / f"alone-{gpu}" for gpu in range(gpus)]
    running = [start_cases(1, names, place, CUDA_VISIBLE_DEVICES=str(gpu)) for gpu, place in enumerate(folders)]
    for process in running:
        process.wait()
    return [results(place, names) for place in folders]


def measure_together(rows: Iterable[Row], link: str, gpus: int, folder: Path) -> dict[str, Any]:
    """By case: what all of them reach as one run."""
    names = {f"{row.case}-x{gpus}": row.case for row in rows if row.link == link}
    if not names:
        return {}
    start_cases(gpus, [*names], folder / link, NCCL_P2P_DISABLE="0" if link == "direct" else "1").wait()
    return {names[name]: found for name, found in results(folder / link, names).items()}


def results(folder: Path, cases: Iterable[str]) -> dict[str, Any]:
    """What was measured; the end of the log is shown where something was not."""
    found = {name: json.loads(path.read_text()) for name in cases if (path := folder / f"{name}.json").exists()}
    if missing := [name for name in cases if name not in found]:
        print(f"{', '.join(missing)} failed:\n{(folder / 'log').read_text()[-3000:]}", file=sys.stderr, flush=True)
    shutil.rmtree(folder / "volume", ignore_errors=True)
    return found


def render(row: Row, alone: list[dict[str, Any]], together: dict[str, Any] | None) -> str:
    name = f"{row.case:13} {row.link:6}"
    if not alone or not together:
        return f"{name} failed"
    one = statistics.mean(each["images_per_second"] for each in alone)
    both = together["images_per_second"]
    return (
        f"{name} {one:12.2f} {both:9.2f} {both / one:6.2f} {row.at_least:9.2f} {row.aim:5.2f} "
        f"{alone[0]['peak_allocated_gib']:11.1f} {together['peak_allocated_gib']:9.1f} {together['planned_gib']:8.1f} "
        f"{together['losses_finite']!s:>7}"
    )


if __name__ == "__main__":
    sys.exit(main())
