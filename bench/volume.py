"""``make bench-volume``: how fast weights reach a volume and are read from it, against the plainest tools there are.

Fetching: a verified fetch from a hub on the loopback against ``curl`` of the same file, both until the disk has it
(``sync``), and against ``curl`` alone, which stops while the kernel still holds what came. Loading: a transformer read
into its parameters against ``dd``, both with a cold page cache; alone, and as the first of two ranks, which reads
half of it. Each figure is the better of several rounds, taken in turn, as other work on the machine disturbs either.
"""

from __future__ import annotations

import argparse
import http.server
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bootstrap.flux_shape import FluxShape
from bootstrap.layout import bfl_tensors
from bootstrap.tensor_files import BUFFERS, READ, write_tensors

REPO = "bench/flux"
COMMIT = "b" * 40
FETCH = """
import sys, time
from pathlib import Path
from bootstrap.download import fetch_repo
fetch_repo(sys.argv[1], "main", Path(sys.argv[2]), None, print, choose=lambda repo, files: files)
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-volume", description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the volume to measure; a temporary folder by default")
    parser.add_argument("--gb", type=float, default=3.0, help="size of the file, as FLUX.1-dev's shards have up to 10")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fluxpod-bench-", dir=options.folder))
    try:
        file = folder / "repo" / "model.safetensors"
        file.parent.mkdir()
        shape = shape_of(options.gb * 1e9)
        write_weights(file, shape)
        size = file.stat().st_size
        print(f"a file of {size / 1e9:.2f} GB in {folder}; MB/s, the best of {options.rounds}", flush=True)
        measure_fetching(folder, file, options.rounds)
        measure_loading(file, shape, options.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def shape_of(size: float) -> FluxShape:
    """A FLUX as wide as FLUX.1-dev with as few double blocks as make about ``size`` bytes."""
    return shape_with(max(1, round((size - 0.4e9) / 0.68e9)))  # 340 M parameters each


def shape_with(blocks: int) -> FluxShape:
    return FluxShape(double_blocks=blocks, single_blocks=1)


def write_weights(path: Path, shape: FluxShape) -> None:
    """Noise, which no file system compresses; the same bytes in every tensor, as they are not looked at."""
    tensors = bfl_tensors(shape)
    largest = max(torch.Size(size).numel() for size in tensors.values())
    noise = torch.randint(-(2**15), 2**15, (largest,), dtype=torch.int16).view(torch.bfloat16)
    write_tensors(path, {name: noise[: torch.Size(size).numel()].view(size) for name, size in tensors.items()})


def best(rounds: int, *measures: Callable[[], float]) -> list[float]:
    """The shortest time of each, in seconds."""
    times = [[measure() for measure in measures] for _ in range(rounds)]
    return [min(column) for column in zip(*times, strict=True)]


# ---- fetching


def measure_fetching(folder: Path, file: Path, rounds: int) -> None:
    endpoint = serve(file)
    size = file.stat().st_size
    target, models = folder / "curl", folder / "volume" / "models"

    def curl(then_sync: bool) -> float:
        command = f"curl -s -o {target} {endpoint}/cdn" + (f" && sync {target}" if then_sync else "")
        return timed(["bash", "-c", command], target)

    def fetch() -> float:
        environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
        return timed([sys.executable, "-c", FETCH, REPO, str(models)], models, environment)

    alone, synced, fetched = best(rounds, lambda: curl(False), lambda: curl(True), fetch)
    row("curl", size, alone)
    row("curl, then sync", size, synced)
    row("a verified fetch, start to end", size, fetched)
    print(
        f"  fetch / curl: {synced / fetched:.0%} with both flushed, {alone / fetched:.0%} of curl unflushed", flush=True
    )


def timed(command: list[str], made: Path, environment: dict[str, str] | None = None) -> float:
    begun = time.monotonic()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    took = time.monotonic() - begun
    shutil.rmtree(made) if made.is_dir() else made.unlink()
    os.sync()
    return took


def serve(file: Path) -> str:
    """A hub with one repository of one file; the kernel sends its bytes."""
    from hashlib import sha256

    with file.open("rb") as content:
        digest = sha256()
        while block := content.read(READ):
            digest.update(block)
    size, sha = file.stat().st_size, digest.hexdigest()

    class Hub(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path.startswith("/cdn"):  # under another host's name, as the hub's store is
                self.answer(200, size)
                with file.open("rb") as content:
                    self.connection.sendfile(content)
            elif "/resolve/" in self.path:
                known = {"X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(size)}
                self.answer(302, 0, known | {"Location": f"http://localhost:{port}/cdn"})
            else:
                entry = f'{{"rfilename": "{file.name}", "size": {size}, "lfs": {{"sha256": "{sha}", "size": {size}, '
                entry += '"pointerSize": 134}}'
                body = f'{{"id": "{REPO}", "sha": "{COMMIT}", "siblings": [{entry}]}}'.encode()
                self.answer(200, len(body), {"Content-Type": "application/json"})
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def answer(self, status: int, length: int, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.flush()

        def log_message(self, format: str, *arguments: object) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{port}"


# ---- loading


def measure_loading(file: Path, shape: FluxShape, rounds: int) -> None:
    size = file.stat().st_size
    held: dict[int, int] = {}

    def dd() -> float:
        drop_from_cache(file)
        begun = time.monotonic()
        subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=16M"], check=True, stderr=subprocess.DEVNULL)
        return time.monotonic() - begun

    def load(ranks: int) -> float:
        """In a process of its own, whose memory beside the parameters is kept."""
        drop_from_cache(file)
        command = [sys.executable, "-m", "bench.volume_load", str(file), str(shape.double_blocks), str(ranks)]
        took, memory = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-2:]
        held[ranks] = int(memory)
        return float(took)

    plain, whole, half = best(rounds, dd, lambda: load(1), lambda: load(2))
    row("dd bs=16M, cold", size, plain)
    row("into the parameters, cold", size, whole)
    row("  the first of two ranks", size // 2, half)
    print(f"  load / dd: {plain / whole:.0%}", flush=True)
    print(
        f"  host memory beside the parameters: {held[1] / 1e6:.0f} MB alone, {held[2] / 1e6:.0f} MB of two "
        f"(buffers: {BUFFERS * READ / 1e6:.0f} MB; the file: {size / 1e6:.0f} MB)",
        flush=True,
    )


def drop_from_cache(file: Path) -> None:
    with file.open("rb") as content:
        os.fsync(content.fileno())
        os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def row(name: str, size: int, seconds: float) -> None:
    print(f"{name:32} {size / seconds / 1e6:8.0f} MB/s  {seconds:6.2f} s", flush=True)


def peak_memory() -> int:
    """Bytes that this process ever held in RAM."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
