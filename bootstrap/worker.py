"""A process that works for another one: requests on its standard input, what becomes of them on its standard output.

Both are one JSON object a line. The first line is not a request but holds the token, which an environment would show to
whoever can read it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

TELL_SECONDS = 0.2  # between two lines about bytes

Tell = Callable[..., None]
Answer = Callable[[dict[str, Any], str | None, Tell], dict[str, Any]]


def serve(answer: Answer, get_ready: Callable[[], object]) -> None:
    """Answers one request after another, until whoever asks is gone. ``get_ready`` is the slow part of a start."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # whoever asked is gone: nothing is carried for nobody

    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no event
    token = json.loads(sys.stdin.readline())["token"]
    threading.Thread(target=read, daemon=True).start()
    speaking = threading.Lock()
    told = 0.0

    def tell(**event: Any) -> None:
        nonlocal told
        if "bytes" in event and time.monotonic() - told < TELL_SECONDS:
            return
        with speaking, suppress(BrokenPipeError):
            told = time.monotonic()
            print(json.dumps(event), file=events, flush=True)

    get_ready()
    tell(started=True)
    while True:
        tell(**answer(json.loads(lines.get()), token, tell))
