"""What a pod's host gives besides GPUs and volume: hashing on its CPUs, and a download from the hub."""

from __future__ import annotations

import hashlib
import threading
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

HASHED = 32 << 20  # bytes for each CPU: 0.1 s of a core
# A public file that FLUX users fetch anyway, so that it is near everywhere; it needs no account.
TRIED_FILE = "comfyanonymous/flux_text_encoders/resolve/main/t5xxl_fp16.safetensors"
STREAMS = 4  # at once, as the real download does
BLOCK = 1 << 20
DOWNLOAD_SECONDS = 4.0  # that bytes are counted for
CONNECT_SECONDS = 5.0  # for an answer


def hashing_rate(cpus: int) -> float:
    """Bytes/s of sha256 on all CPUs together: what checking weights goes by. Far less than one CPU's times their number
    means that the container is throttled."""
    block = bytes(HASHED)
    begun = time.monotonic()
    with ThreadPoolExecutor(cpus) as pool:
        list(pool.map(lambda _: hashlib.sha256(block).digest(), range(cpus)))
    return cpus * HASHED / (time.monotonic() - begun)


def download_rate(environment: Mapping[str, str], seconds: float = DOWNLOAD_SECONDS) -> float:
    """Bytes/s from the hub, several streams at once, for a few seconds.

    Raises OSError with the reason where nothing comes.
    """
    address = f"{environment.get('HF_ENDPOINT') or 'https://huggingface.co'}/{TRIED_FILE}"
    counted, lock, first = [0, 0.0], threading.Lock(), threading.Event()  # bytes, when the last of them came
    begun = time.monotonic()
    end = begun + CONNECT_SECONDS + seconds

    def stream(number: int) -> None:
        request = urllib.request.Request(address, headers={"Range": f"bytes={number * (1 << 30)}-"})
        with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as answer:
            nonlocal begun
            if not first.is_set():
                begun = time.monotonic()
                first.set()
            while time.monotonic() < min(end, begun + seconds) and (block := answer.read(BLOCK)):
                with lock:
                    counted[0] += len(block)
                    counted[1] = time.monotonic()

    with ThreadPoolExecutor(STREAMS) as pool:
        tries = [pool.submit(stream, number) for number in range(STREAMS)]
    errors = [error for each in tries if (error := each.exception()) is not None]
    if not counted[0]:
        raise OSError(str(errors[0]) if errors else "no bytes came")
    return counted[0] / max(counted[1] - begun, 1e-3)
