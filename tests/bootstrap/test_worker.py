"""The process that answers, spoken to as ``bootstrap.transfers`` does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bootstrap.transfers import _Process

ROOT = Path(__file__).parents[2]
TALKATIVE = """
import os
from bootstrap.worker import serve

def answer(request, token, tell):
    print("a library speaks")
    os.write(1, b"and one in another language")
    tell(bytes=1)
    tell(bytes=2)  # too soon
    return {"done": request["number"], "token": token}

serve(answer, lambda: print("warming up"))
"""


def test_only_events_are_told_whatever_libraries_print() -> None:
    lines = json.dumps({"token": "hf_x"}) + "\n" + json.dumps({"number": 1}) + "\n" + json.dumps({"number": 2}) + "\n"
    process = subprocess.Popen(
        [sys.executable, "-c", TALKATIVE],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(lines.encode())
    process.stdin.flush()
    told: list[dict[str, object]] = []
    while sum("done" in event for event in told) < 2:
        told.append(json.loads(process.stdout.readline()))
    assert told[0] == {"started": True}
    assert [event for event in told if "done" in event] == [{"done": n, "token": "hf_x"} for n in (1, 2)]
    assert {"bytes": 2} not in told
    process.stdin.close()  # whoever asked is gone
    assert process.wait(30) == 0


def test_the_last_words_of_a_process_hold_no_signature() -> None:
    process = _Process.__new__(_Process)
    process.said = ["Traceback\n", "error for https://user:pw@store.example/x?sig=SECRET, ended\n"]
    assert process.last_words() == "Traceback error for https://store.example/x?... ended"
    process.said = []
    assert process.last_words() == "it said nothing"
