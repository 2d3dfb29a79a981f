"""``fluxpod``: the same commands in the image and in a checkout."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bootstrap.volume import Volume


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; gives its exit code (0 done, 64 job, 65 pod, 69 access, 75 stopped)."""
    parser = argparse.ArgumentParser(prog="fluxpod", description="Fine-tunes FLUX on rented GPU pods.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    check = commands.add_parser("check", help="validate a job, show its plan; changes nothing")
    check.add_argument("job", type=Path, help="the job's YAML file")
    check.add_argument("--pods", help='plan for pods that are not here: "A40, L40S@0.86, 2xA100 80GB@3.28"')
    _volume_option(check)

    run = commands.add_parser("run", help="run one job to its end")
    run.add_argument("job", type=Path, help="the job's YAML file")
    _volume_option(run)

    pod = commands.add_parser("pod", help="what the image runs: watch jobs/ and run what is dropped there")
    _volume_option(pod)

    states = commands.add_parser("states", help="list a run's states")
    states.add_argument("run", help="the run's name")
    states.add_argument("--verify", action="store_true", help="hash every byte")
    _volume_option(states)

    options = parser.parse_args(arguments)
    volume = Volume(options.volume.absolute())
    # Imported late: a mistyped command should not wait for torch.
    if options.command == "check":
        from entrypoint.check import check as check_job

        return check_job(options.job, volume, options.pods)
    if options.command == "run":
        from entrypoint.run import run_job

        return run_job(options.job, volume.root)
    if options.command == "states":
        from entrypoint.states import show_states

        return show_states(volume, options.run, options.verify)
    from entrypoint.pod import watch

    return watch(volume)


def _volume_option(parser: argparse.ArgumentParser) -> None:
    default = Path(os.environ.get("FLUXPOD_VOLUME", "/workspace"))
    parser.add_argument("--volume", type=Path, default=default, help=f"the volume's mount point ({default})")


if __name__ == "__main__":
    sys.exit(main())
