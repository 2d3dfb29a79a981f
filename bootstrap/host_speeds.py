"""What a pod's host gives besides GPUs and volume: hashing on its CPUs, and a download from the hub."""

from __future__ import annotations

import hashlib
import http.client
import threading
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

HASHED = 32 << 20  # bytes for each CPU: 0.1 s of a core
# A public file that FLUX users fetch anyway, so that it is near everywhere; it needs no account.
TRIED_FILE = "comfyanonymous/flux_text_encoders/resolve/main/t5xxl_fp16.safetensors"
STREAMS = 4  # at once, as the real download does
APART = 1 << 30  # bytes between the streams' places in the file
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
    counter = _Counter(seconds)
    streams = [threading.Thread(target=counter.stream, args=(address, n), daemon=True) for n in range(STREAMS)]
    for stream in streams:
        stream.start()
    limit = time.monotonic() + 2 * CONNECT_SECONDS + seconds  # a name server may hang for longer than any socket
    for stream in streams:
        stream.join(max(0.0, limit - time.monotonic()))
    if not counter.bytes:
        raise OSError(counter.errors[0] if counter.errors else "nothing came")
    return counter.bytes / max(counter.last - counter.first, 1e-3)


class _Counter:
    """Bytes of all streams, from the first answer on, for so many seconds."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.lock = threading.Lock()
        self.bytes, self.first, self.last = 0, 0.0, 0.0
        self.errors: list[str] = []

    def stream(self, address: str, number: int) -> None:
        headers = {"Range": f"bytes={number * APART}-", "User-Agent": "fluxpod"}
        try:
            request = urllib.request.Request(address, headers=headers)
            with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as answer:
                with self.lock:
                    self.first = self.first or time.monotonic()
                while time.monotonic() < self.first + self.seconds and (block := answer.read(BLOCK)):
                    with self.lock:
                        self.bytes += len(block)
                        self.last = time.monotonic()
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.errors.append(str(error))
