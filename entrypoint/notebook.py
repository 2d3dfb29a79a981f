"""JupyterLab on the volume, for uploads and a terminal: settings made from the environment, then Jupyter in this
process's place.

Its port is public to anyone who guesses the address, so there is no Jupyter without JUPYTER_PASSWORD. The password goes
in as a hash, in a file that only root reads, and is not in the environment of its terminals.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoint.environment import PORTS, RUN, SHELL_SECRETS
from jobs.secret import is_secret


def settings(environ: Mapping[str, str], hashed_password: str) -> dict[str, dict[str, Any]]:
    """Jupyter's configuration."""
    volume = environ.get("FLUXPOD_VOLUME", "/workspace")
    port = environ.get("FLUXPOD_JUPYTER_PORT") or str(PORTS["FLUXPOD_JUPYTER_PORT"])
    server: dict[str, Any] = {
        "ip": "0.0.0.0",
        "port": int(port),
        "port_retries": 0,  # another port would be one that nobody looks at
        "root_dir": volume if Path(volume).is_dir() else "/",  # without its volume a pod needs a terminal most
        "open_browser": False,
        "allow_root": True,  # there is no other user in the container
        "quit_button": False,
        "terminado_settings": {"shell_command": ["/bin/bash", "--login"]},
    }
    pod = environ.get("RUNPOD_POD_ID", "")
    if pod:  # the proxy passes another host name on than the browser sees; any origin ("*") would be too many
        server["allow_origin"] = f"https://{pod}-{port}.proxy.runpod.net"
    return {
        "ServerApp": server,
        "IdentityProvider": {"token": ""},
        "PasswordIdentityProvider": {"hashed_password": hashed_password, "allow_password_change": False},
        "FileContentsManager": {"delete_to_trash": False},  # a trash on a volume that is full frees nothing
        "LabApp": {
            "check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
            "news_url": None,
            "extension_manager": "readonly",
        },
    }


def shell_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of Jupyter, and so of its terminals: without the secrets that a shell has no use for."""
    return {name: value for name, value in environ.items() if name in SHELL_SECRETS or not is_secret(name)}


def main() -> int:
    password = os.environ.get("JUPYTER_PASSWORD", "")
    if not password:
        print("jupyter: off, because JUPYTER_PASSWORD is not set", file=sys.stderr)
        return 1
    from jupyter_server.auth.security import passwd

    file = RUN / "jupyter" / "settings.json"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        json.dump(settings(os.environ, passwd(password)), out)
    words = [sys.executable, "-m", "jupyterlab", "--config", str(file), "--log-level", "WARN"]
    os.execve(sys.executable, words, shell_environment(os.environ))
    raise AssertionError("execve does not come back")


if __name__ == "__main__":
    sys.exit(main())
