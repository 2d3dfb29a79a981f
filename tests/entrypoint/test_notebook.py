"""JupyterLab's settings: a hashed password, no token, no secret in its terminals."""

from __future__ import annotations

import json
from pathlib import Path

from entrypoint.notebook import main, settings, shell_environment


def test_the_password_goes_in_as_a_hash(tmp_path: Path) -> None:
    environ = {"JUPYTER_PASSWORD": "plain", "FLUXPOD_VOLUME": str(tmp_path), "FLUXPOD_JUPYTER_PORT": "9999"}
    made = settings(environ, "argon2:...")
    assert made["PasswordIdentityProvider"]["hashed_password"] == "argon2:..."
    assert made["IdentityProvider"]["token"] == ""
    assert "plain" not in json.dumps(made)
    assert (made["ServerApp"]["root_dir"], made["ServerApp"]["port"]) == (str(tmp_path), 9999)


def test_without_its_volume_it_still_opens(tmp_path: Path) -> None:
    assert settings({"FLUXPOD_VOLUME": str(tmp_path / "absent")}, "h")["ServerApp"]["root_dir"] == "/"


def test_only_the_pods_own_proxy_may_embed_it() -> None:
    assert "allow_origin" not in settings({}, "h")["ServerApp"]
    origin = settings({"RUNPOD_POD_ID": "abc"}, "h")["ServerApp"]["allow_origin"]
    assert origin == "https://abc-8888.proxy.runpod.net"


def test_terminals_know_no_password() -> None:
    environ = {"JUPYTER_PASSWORD": "a", "RUNPOD_API_KEY": "b", "HF_TOKEN": "hf_c", "HOME": "/root", "PATH": "/bin"}
    assert shell_environment(environ) == {"HF_TOKEN": "hf_c", "HOME": "/root", "PATH": "/bin"}


def test_no_password_no_jupyter(monkeypatch, capsys) -> None:
    monkeypatch.delenv("JUPYTER_PASSWORD", raising=False)
    assert main() == 1
    assert "JUPYTER_PASSWORD" in capsys.readouterr().err
