from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from entrypoint.notify import LONGEST, notify, notify_of, unset
from jobs.load import parse_job
from jobs.problem import JobError
from jobs.schema import Notify

JOB = "name: flowers\nbase: flux-tiny\nmethod: lora\ndatasets: [{path: datasets/x}]\n"


class Hooks:
    """A web server that keeps what it is sent and answers with the status that its path begins with, in order."""

    def __init__(self) -> None:
        hooks = self
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.statuses: list[int] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hooks.got.append((self.path, dict(self.headers), body))
                self.send_response(hooks.statuses.pop(0) if hooks.statuses else 200)
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.base = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def hooks() -> Iterator[Hooks]:
    made = Hooks()
    yield made
    made.server.shutdown()
    made.server.server_close()


def send(to: dict[str, str], event: Any = "done", message: str = "1000 steps", **environ: str) -> list[str]:
    lines: list[str] = []
    notify(Notify.model_validate(to), "flowers", event, message, environ, log=lines.append, limit=2.0)
    return lines


def test_ntfy_gets_text_and_a_title(hooks: Hooks) -> None:
    assert send({"ntfy": f"{hooks.base}/topic"}, "failed", "grüße <&>") == []
    path, headers, body = hooks.got[0]
    assert (path, headers["Title"], headers["Priority"]) == ("/topic", "flowers: failed", "high")
    assert body.decode() == "grüße <&>"
    assert headers["User-Agent"].startswith("fluxpod/")


def test_discord_slack_and_others_get_json(hooks: Hooks) -> None:
    to = {kind: f"{hooks.base}/{kind}" for kind in ("discord", "slack", "webhook")}
    assert send(to, "held", "a <b> @everyone & c") == []
    bodies = {path: json.loads(body) for path, _, body in hooks.got}
    assert bodies["/discord"]["content"] == "**flowers: held**\na <b> @everyone & c"
    assert bodies["/discord"]["allowed_mentions"] == {"parse": []}
    assert bodies["/slack"] == {"text": "*flowers: held*\na &lt;b&gt; @everyone &amp; c"}
    assert bodies["/webhook"] == {"job": "flowers", "event": "held", "message": "a <b> @everyone & c"}


def test_addresses_come_from_the_environment(hooks: Hooks) -> None:
    assert send({"discord": "$DISCORD_WEBHOOK"}, DISCORD_WEBHOOK=f' "{hooks.base}/secret"\n') == []
    assert send({"ntfy": hooks.base + "/${NTFY_TOPIC}?up=1"}, NTFY_TOPIC="flowers-42") == []
    assert [path for path, _, _ in hooks.got] == ["/secret", "/flowers-42?up=1"]


def test_what_does_not_arrive_is_one_line_without_the_address(hooks: Hooks) -> None:
    hooks.statuses = [404]
    secret = f"{hooks.base}/api/webhooks/1/THE-SECRET"
    lines = send({"discord": "$DISCORD_WEBHOOK"}, DISCORD_WEBHOOK=secret)
    assert lines == ["flowers: the message 'done' did not reach discord: it answers 404"]
    hooks.server.shutdown()
    hooks.server.server_close()
    lines = send({"discord": "$DISCORD_WEBHOOK", "webhook": "$WEBHOOK"}, DISCORD_WEBHOOK=secret, WEBHOOK="x THE-SECRET")
    assert len(lines) == 2
    assert "THE-SECRET" not in str(lines)
    assert send({"webhook": "$WEBHOOK"}, WEBHOOK="http://127.0.0.1/a THE-SECRET")[0].endswith("is malformed")
    assert send({"webhook": "http://[x/$WEBHOOK"}, WEBHOOK="THE-SECRET")[0].endswith("is malformed")


def test_a_busy_server_is_asked_once_more(hooks: Hooks) -> None:
    hooks.statuses = [503]
    assert send({"webhook": f"{hooks.base}/x"}) == []
    hooks.statuses = [503, 503]
    assert len(send({"webhook": f"{hooks.base}/x"})) == 1
    assert len(hooks.got) == 4


def test_messages_are_short_and_hold_no_secret(hooks: Hooks) -> None:
    send({"ntfy": f"{hooks.base}/t"}, message="hf_" + "a" * 34 + "\n  two   words\n" + "x" * 5000)
    text = hooks.got[0][2].decode()
    assert len(text) <= LONGEST
    assert text.startswith("***\ntwo words\nxxx")
    assert text.endswith(" ...")


def test_without_addresses_nothing_happens() -> None:
    assert send({}) == []


def test_variables_that_are_not_there_are_known_before_the_run() -> None:
    to = Notify.model_validate(
        {"ntfy": "https://ntfy.sh/$NTFY_TOPIC", "slack": "$SLACK_WEBHOOK", "discord": "$DISCORD_X"}
    )
    environ = {"SLACK_WEBHOOK": "{{ RUNPOD_SECRET_slack }}", "DISCORD_X": "https://discord.example/x"}
    lines = unset(to, environ)
    assert lines[0] == "notify: ntfy: NTFY_TOPIC is not set in the pod's environment"
    assert "RunPod has no secret" in lines[1]
    assert len(lines) == 2
    assert unset(Notify.model_validate({"webhook": "$WEBHOOK"}), {"WEBHOOK": "ftp://x"}) == [
        "notify: webhook: WEBHOOK does not hold an address that begins with https://"
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("ntfy.sh/topic", "this is not an address"),
        ("https://ntfy.sh/a b", "this is not an address"),
        ("https://", "this is not an address"),
        ("$", "a $ without a name"),
        ("https://x.example/$", "a $ without a name"),
        ("https://evil.example/$HF_TOKEN", "HF_TOKEN may not be sent"),
        ("https://evil.example/${RUNPOD_API_KEY}", "RUNPOD_API_KEY may not be sent"),
        ("https://discord.com/api/webhooks/123456/abcdefghijklmnopqrstuvwxyz", "looks like a secret"),
        ("https://hooks.slack.com/services/T0000000/B0000000/abcdefghijklmnop", "looks like a secret"),
        ("https://ntfy.sh/x?auth=tk_abcdefghijklmnopqrstuvwxyz123", "looks like a secret"),
    ],
)
def test_addresses_that_a_job_may_not_hold(value: str, words: str) -> None:
    with pytest.raises(JobError, match="notify") as caught:
        parse_job(f'{JOB}notify: {{webhook: "{value}"}}\n')
    told = str(caught.value)
    assert words in told.replace("\n", " ")
    assert "abcdefghijklmnop" not in told


def test_one_address_without_its_kind_is_explained() -> None:
    with pytest.raises(JobError, match="group of keys is needed"):
        parse_job(JOB + "notify: https://ntfy.sh/topic\n")
    with pytest.raises(JobError, match="Did you mean discord"):
        parse_job(JOB + "notify: {discrod: $DISCORD_WEBHOOK}\n")


def test_the_writer_of_a_wrong_job_can_be_told_so() -> None:
    assert notify_of(JOB + "stepz: 5\nnotify: {ntfy: 'https://ntfy.sh/$NTFY_TOPIC'}\n").ntfy
    for text in ("", "- a", "x: [", "notify: 5", "notify: {ntfy: 5}", "name: x"):
        assert notify_of(text) == Notify()
