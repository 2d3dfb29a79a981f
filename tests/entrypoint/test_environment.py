"""The container's environment: what people type into forms is understood, caches are on the volume, shells get what
they need and no more."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.environment import (
    CACHES,
    OLD,
    changes,
    clean,
    exports,
    login_environment,
    make_temporary,
    own_temporary,
    prepare_environment,
    remove_abandoned,
    set_up,
    write_login_environment,
)
from jobs.secret import is_secret

TOKEN = "hf_" + "abcdEFGH" * 4
ODD = {
    "SPACES": "  two  words ",
    "QUOTES": """it's "quoted" `id` $(id) $HOME \\ !x""",
    "LINES": "one\ntwo\n",
    "EMPTY": "",
    "UNICODE": "花 ✿",
    "BYTES": os.fsdecode(b"\xff\xfe"),
}


@pytest.mark.parametrize(
    "typed",
    [
        TOKEN,
        f"{TOKEN}\n",
        f"{TOKEN}\r\n",
        f"  {TOKEN} ",
        f'"{TOKEN}"',
        f"'{TOKEN}'\n",
        f'" {TOKEN} "',
        f"\ufeff{TOKEN}\u200b",
        f"Bearer {TOKEN}",
        f"{TOKEN}'",
        f"\N{NO-BREAK SPACE}{TOKEN}",
    ],
)
def test_a_token_is_taken_as_meant(typed: str) -> None:
    result, notes = prepare_environment({"HF_TOKEN": typed})
    assert result["HF_TOKEN"] == TOKEN
    assert len(notes) == (typed != TOKEN)
    assert TOKEN not in " ".join(notes)


@given(st.text())
def test_cleaning_twice_changes_nothing(text: str) -> None:
    assert clean(clean(text)) == clean(text)


@pytest.mark.parametrize("name", ["HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"])
def test_older_names_of_the_token_count(name: str) -> None:
    assert prepare_environment({name: f"{TOKEN}\n"})[0]["HF_TOKEN"] == TOKEN
    assert prepare_environment({name: "hf_other", "HF_TOKEN": TOKEN})[0]["HF_TOKEN"] == TOKEN


@pytest.mark.parametrize("typed", ["", " ", '""', "\n"])
def test_an_empty_token_is_none(typed: str) -> None:
    assert "HF_TOKEN" not in prepare_environment({"HF_TOKEN": typed})[0]


def test_a_token_that_cannot_be_one_is_told() -> None:
    assert "inside it" in prepare_environment({"HF_TOKEN": "hf_ab cd"})[1][0]
    assert "hf_" in prepare_environment({"HF_TOKEN": "sk-12345"})[1][0]


@pytest.mark.parametrize("name", ["HF_TOKEN", "JUPYTER_PASSWORD", "FLUXPOD_PASSWORD", "PUBLIC_KEY", "ANYTHING"])
@pytest.mark.parametrize("typed", ["{{ RUNPOD_SECRET_hub }}", "{{RUNPOD_SECRET_hub}}\n", '"{{ RUNPOD_SECRET_hub }}"'])
def test_a_secret_that_does_not_exist_is_explained_and_not_used(name: str, typed: str) -> None:
    """As a password it would be one that everyone can read in the documentation."""
    result, notes = prepare_environment({name: typed})
    assert name not in result
    assert len(notes) == 1
    assert "no secret named hub" in notes[0]
    assert name in notes[0]


def test_a_job_may_hold_braces() -> None:
    job = "name: a  # {{ RUNPOD_SECRET_x }}"
    assert prepare_environment({"FLUXPOD_JOB": job})[0]["FLUXPOD_JOB"] == job


def test_a_password_keeps_every_sign_but_its_line_end() -> None:
    assert prepare_environment({"JUPYTER_PASSWORD": " \"a'b \r\n"})[0]["JUPYTER_PASSWORD"] == " \"a'b "
    assert "JUPYTER_PASSWORD" not in prepare_environment({"JUPYTER_PASSWORD": "\n"})[0]


def test_public_keys_are_one_a_line() -> None:
    typed = '"ssh-ed25519 AAAA me@home\r\n\r\n  ssh-rsa BBBB you "\n'
    assert prepare_environment({"PUBLIC_KEY": typed})[0]["PUBLIC_KEY"] == "ssh-ed25519 AAAA me@home\nssh-rsa BBBB you"


def test_a_private_key_is_refused_and_not_repeated() -> None:
    typed = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----"
    result, notes = prepare_environment({"PUBLIC_KEY": typed})
    assert "PUBLIC_KEY" not in result
    assert "PRIVATE" in notes[0]
    assert "b3Bl" not in notes[0]


def test_caches_and_temporary_files_are_on_the_volume() -> None:
    result, notes = prepare_environment({"FLUXPOD_VOLUME": "/mnt/data/"}, "abc")
    for name in (*CACHES, "TMPDIR"):
        assert result[name].startswith("/mnt/data/cache/"), name
    assert result["TMPDIR"] == "/mnt/data/cache/tmp/abc"
    assert notes == ()


def test_a_cache_that_the_user_chose_stands() -> None:
    chosen = {"HF_HOME": "/workspace/hf", "TORCH_HOME": "/root/torch", "TMPDIR": "/tmp"}
    result, notes = prepare_environment(chosen)
    assert {name: result[name] for name in chosen} == chosen
    assert len(notes) == 1
    assert "TORCH_HOME=/root/torch is not on the volume" in notes[0]


def test_the_volume_is_an_absolute_path() -> None:
    result, notes = prepare_environment({"FLUXPOD_VOLUME": "data"})
    assert result["FLUXPOD_VOLUME"] == "/workspace"
    assert len(notes) == 1


def test_ports_are_ports_and_each_is_another() -> None:
    names = ("FLUXPOD_SSH_PORT", "FLUXPOD_PAGE_PORT", "FLUXPOD_JUPYTER_PORT")
    assert [prepare_environment({})[0][name] for name in names] == ["22", "7860", "8888"]
    typed = dict(zip(names, ("7860", "7860", "http"), strict=True))
    result, notes = prepare_environment(typed)
    assert [result[name] for name in names] == ["7860", "7861", "8888"]
    assert len(notes) == 2


@given(st.dictionaries(st.sampled_from(["FLUXPOD_SSH_PORT", "FLUXPOD_PAGE_PORT", "FLUXPOD_JUPYTER_PORT"]), st.text()))
def test_any_ports_end_as_three(typed: dict[str, str]) -> None:
    result, _ = prepare_environment(typed)
    ports = {int(result[name]) for name in ("FLUXPOD_SSH_PORT", "FLUXPOD_PAGE_PORT", "FLUXPOD_JUPYTER_PORT")}
    assert len(ports) == 3
    assert all(0 < port < 65536 for port in ports)


def test_preparing_twice_changes_nothing() -> None:
    first, _ = prepare_environment({"HF_TOKEN": f'"{TOKEN}"', "FLUXPOD_SSH_PORT": "x", "PUBLIC_KEY": "a\r\nb"}, "n")
    assert prepare_environment(first, "n") == (first, ())


# --- Shells -----------------------------------------------------------------------------------------------------------


def shell_sees(code: bytes, names: list[str], before: dict[str, str]) -> dict[str, str | None]:
    """Variables as a child of a shell that ran ``code`` has them."""
    done = subprocess.run(["sh", "-c", code + b"\nexec env -0"], env=before, capture_output=True, check=True)
    found = dict(entry.split(b"=", 1) for entry in done.stdout.split(b"\0") if entry)
    return {name: os.fsdecode(found[name.encode()]) if name.encode() in found else None for name in names}


def test_odd_values_survive() -> None:
    assert shell_sees(exports(ODD), list(ODD), {}) == ODD


@given(
    st.dictionaries(st.sampled_from(["A", "B", "C"]), st.text(st.characters(codec="utf-8", exclude_characters="\0")))
)
def test_any_value_survives(values: dict[str, str]) -> None:
    assert shell_sees(exports(values), list(values), {}) == values


def test_changes_turn_one_environment_into_the_other() -> None:
    before = {"STAYS": "1", "GOES": "2", "CHANGES": "3"}
    after = {"STAYS": "1", "CHANGES": "it's", "NEW": "x y"}
    assert b"STAYS" not in changes(before, after)
    names = ["STAYS", "GOES", "CHANGES", "NEW"]
    assert shell_sees(changes(before, after), names, before) == {**after, "GOES": None}


def test_a_shell_gets_no_secret_that_it_has_no_use_for() -> None:
    secrets = dict.fromkeys(("RUNPOD_API_KEY", "FLUXPOD_RUNPOD_API_KEY", "JUPYTER_PASSWORD"), "s3cret")
    secrets |= dict.fromkeys(("FLUXPOD_PASSWORD", "AWS_SECRET_ACCESS_KEY", "PUBLIC_KEY", "FLUXPOD_JOB"), "s3cret")
    needed = {"HF_TOKEN": TOKEN, "HF_HOME": "/workspace/cache/huggingface", "PATH": "/opt/fluxpod/venv/bin:/bin"}
    others = {"HOME": "/root", "PWD": "/", "BASH_FUNC_x%%": "() { :; }", "not a name": "1"}
    assert login_environment(secrets | needed | others) == needed


@pytest.mark.parametrize("name", ["HF_HOME", "TOKENIZERS_PARALLELISM", "FLUXPOD_SSH_PORT", "KEYBOARD", "RUNPOD_POD_ID"])
def test_plain_names_are_no_secrets(name: str) -> None:
    assert not is_secret(name)


def test_the_login_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "login"
    file.write_text("an older one, open to all")
    file.chmod(0o644)
    for _ in range(2):  # replaced, not appended to
        write_login_environment(file, ODD)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_bytes() == exports(ODD)
    assert list(tmp_path.iterdir()) == [file]


# --- On a volume ------------------------------------------------------------------------------------------------------


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a path as short as on a pod: sockets have room for 107 characters."""
    with tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as folder:
        (Path(folder) / "v").mkdir()
        yield Path(folder)


def test_a_start_makes_what_it_promises(short: Path) -> None:
    run, volume = short / "run", short / "v"
    environ = {"FLUXPOD_VOLUME": str(volume), "HF_TOKEN": f"{TOKEN}\n", "JUPYTER_PASSWORD": "p"}
    result, notes = set_up(environ, run, command=False)
    assert Path(result["TMPDIR"]).is_dir()
    assert Path(result["TMPDIR"]).is_relative_to(volume / "cache" / "tmp")
    assert len(notes) == 1  # the token
    assert (run / "login").stat().st_mode & 0o777 == 0o600
    assert b"JUPYTER_PASSWORD" not in (run / "login").read_bytes()
    assert TOKEN in (run / "login").read_text()


def test_restarts_leave_nothing_behind(short: Path) -> None:
    run, volume = short / "run", short / "v"
    environ = {"FLUXPOD_VOLUME": str(volume)}
    listings = []
    for _ in range(5):
        result, _ = set_up(environ, run, command=False)
        (Path(result["TMPDIR"]) / "left over").write_text("x")
        (Path(result["TMPDIR"]) / "folder" / "deep").mkdir(parents=True)
        listings.append(sorted(str(path) for path in short.rglob("*")))
    assert all(listing == listings[0] for listing in listings)


def test_another_containers_temporary_files_stay_until_they_are_old(short: Path) -> None:
    living, old = short / "v" / "living", short / "v" / "old"
    for folder in (living, old):
        folder.mkdir()
        (folder / "file").touch()
    long_ago = time.time() - 2 * OLD
    os.utime(old, (long_ago, long_ago))
    own = short / "v" / "own"
    assert make_temporary(own) == ""
    remove_abandoned(own)
    assert living.exists()
    assert not old.exists()


def test_names_of_temporary_folders(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    assert own_temporary(tmp_path / "one") == own_temporary(tmp_path / "one")
    assert own_temporary(tmp_path / "one") != own_temporary(tmp_path / "two")
    (tmp_path / "one" / "temporary").write_text("../../etc")
    assert ".." not in own_temporary(tmp_path / "one")


def test_a_volume_that_takes_nothing_stops_nobody(short: Path) -> None:
    (short / "file").touch()
    result, notes = set_up({"FLUXPOD_VOLUME": str(short / "file")}, short / "run", command=False)
    assert "TMPDIR" not in result
    assert "temporary files stay" in " ".join(notes)
    assert (short / "run" / "login").exists()


def test_a_container_disk_that_takes_nothing_stops_nobody(short: Path) -> None:
    (short / "run").touch()
    result, notes = set_up({"FLUXPOD_VOLUME": str(short / "v")}, short / "run", command=False)
    assert result["HF_HOME"] == f"{short / 'v'}/cache/huggingface"
    assert notes


def test_a_single_command_makes_no_volume(short: Path) -> None:
    result, _ = set_up({"FLUXPOD_VOLUME": str(short / "absent")}, short / "run", command=True)
    assert not (short / "absent").exists()
    assert "TMPDIR" not in result
    assert result["HF_HOME"] == f"{short / 'absent'}/cache/huggingface"
