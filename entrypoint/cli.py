"""``fluxpod``: the same commands in the image and in a checkout."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bootstrap.volume import Volume
from entrypoint.grid import add_options as add_grid_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; gives its exit code (0 done, 64 job, 65 pod, 69 access, 75 stopped)."""
    parser = argparse.ArgumentParser(prog="fluxpod", description="Fine-tunes FLUX on rented GPU pods.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    check = commands.add_parser("check", help="validate a job, show its plan; changes nothing")
    check.add_argument("job", type=Path, help="the job's YAML file")
    check.add_argument("--pods", help='plan for pods that are not here: "A40, L40S@0.86, 2xA100 80GB@3.28"')
    check.add_argument(
        "--preview",
        nargs="?",
        type=Path,
        const=Path(),
        metavar="FILE",
        help="write a sheet of pictures as the trainer will see them (JOB.preview.jpg)",
    )
    _volume_option(check)

    run = commands.add_parser("run", help="run one job to its end")
    run.add_argument("job", type=Path, help="the job's YAML file")
    _volume_option(run)

    pod = commands.add_parser("pod", help="what the image runs: watch jobs/ and run what is dropped there")
    _volume_option(pod)

    probe = commands.add_parser("probe", help="measure this pod against what its GPUs should reach, in under a minute")
    _volume_option(probe)

    states = commands.add_parser("states", help="list a run's states")
    states.add_argument("run", help="the run's name")
    states.add_argument("--verify", action="store_true", help="hash every byte")
    _volume_option(states)

    _model_commands(commands)

    upload = commands.add_parser("upload", help="bring a run's finished file, or a state's weights, to the hub")
    upload.add_argument("run", help="RUN for its finished file (or newest state), RUN/STEP, or a state's folder")
    upload.add_argument("--repo", metavar="OWNER/NAME", help="where to; by default the job's output.hub")
    upload.add_argument("--public", action="store_true", help="if it is not there yet, make it public")
    _volume_option(upload)

    sample = commands.add_parser("sample", help="draw the same prompts with several states, as one picture")
    add_grid_options(sample)
    _volume_option(sample)

    clean = commands.add_parser("clean", help="list what may go from the volume: old models, caches, thinned states")
    clean.add_argument("--yes", action="store_true", help="remove it")
    clean.add_argument("--older-than", type=float, default=7.0, metavar="DAYS", help="only what is older (7)")
    kinds = ("models", "datasets", "caches", "states")
    clean.add_argument("--only", action="append", choices=kinds, help="may be repeated")
    _volume_option(clean)

    convert = commands.add_parser(
        "convert", help="make a job of a kohya_ss JSON, an sd-scripts TOML, an ai-toolkit YAML"
    )
    convert.add_argument("file", type=Path, help="the other tool's file; the job goes to standard output")
    convert.add_argument("--output", type=Path, metavar="JOB", help="write the job here; nothing is overwritten")
    convert.add_argument(
        "--dataset", type=Path, metavar="TOML", help="sd-scripts' dataset file, if the other names none"
    )
    convert.add_argument("--gpus", type=_gpu_count, metavar="N", help="how many GPUs the other tool used")
    _volume_option(convert)

    template = commands.add_parser("template", help="print RunPod's template of the image; with an API key, save it")
    template.add_argument("--public", action="store_true", help="show it to all users of RunPod")
    _deployment_options(template)

    create_pod = commands.add_parser(
        "create-pod",
        help="print the request for a RunPod pod with a job inside; with an "
        "API key, create it: it is billed from then on",
    )
    create_pod.add_argument("job", type=Path, help="the job's YAML file")
    create_pod.add_argument("--gpu", required=True, help='such as A40, "2xA100 80GB", or RunPod\'s own name')
    create_pod.add_argument("--network-volume", default="", metavar="ID", help="mount it in place of a volume disk")
    create_pod.add_argument("--data-center", default="", metavar="ID", help="such as EU-RO-1")
    create_pod.add_argument("--cloud", choices=("SECURE", "COMMUNITY"), default="SECURE")
    _deployment_options(create_pod)

    options = parser.parse_args(arguments)
    if options.command in ("template", "create-pod"):
        return _deploy(options)
    volume = Volume(options.volume.absolute())
    # Imported late: a mistyped command should not wait for torch.
    if options.command == "check":
        from entrypoint.check import check as check_job

        return check_job(options.job, volume, options.pods, options.preview)
    if options.command == "run":
        from entrypoint.run import run_job

        return run_job(options.job, volume.root)
    if options.command == "convert":
        from entrypoint.convert import convert as convert_file

        return convert_file(options.file, options.output, options.dataset, options.gpus, volume)
    if options.command == "probe":
        from entrypoint.probe import show_probe

        return show_probe(volume)
    if options.command in ("export", "merge", "extract"):
        from entrypoint.model_files import run as run_on_models

        return run_on_models(volume, options)
    if options.command == "upload":
        from entrypoint.uploads import upload as upload_run

        return upload_run(volume, options.run, options.repo, options.public, os.environ)
    if options.command == "sample":
        from entrypoint.grid import run as draw_grid

        return draw_grid(volume, options)
    if options.command == "states":
        from entrypoint.states import show_states

        return show_states(volume, options.run, options.verify)
    if options.command == "clean":
        from entrypoint.clean import KINDS
        from entrypoint.clean import clean as clean_volume

        return clean_volume(volume, yes=options.yes, days=options.older_than, kinds=options.only or KINDS)
    from entrypoint.pod import watch

    return watch(volume)


def _model_commands(commands: Any) -> None:
    """Those that make a model's file of others: export, merge, extract."""
    dtypes = ("bf16", "fp16", "fp8", "fp32")
    saturate = "numbers beyond the format's range become its largest"
    named = "a file or folder, RUN/STEP, or RUN for its newest state"

    export = commands.add_parser("export", help="write weights in another layout or number format")
    export.add_argument("what", help=f"a state or a LoRA: {named}")
    export.add_argument("--layout", choices=("bfl", "diffusers", "kohya"), help="bfl, or kohya for a LoRA, by default")
    export.add_argument("--dtype", choices=dtypes, help="bf16, or fp32 for a LoRA, by default")
    export.add_argument("--to", type=Path, metavar="PATH", help="a file, or a folder for a full model of diffusers")

    live = "the live weights of a state that holds their average (ema)"
    export.add_argument("--live", action="store_true", help=live)

    merge = commands.add_parser("merge", help="put LoRAs of any tool into a full checkpoint")
    merge.add_argument("loras", nargs="+", metavar="LORA[@STRENGTH]", help=f"{named}; strength 1 unless told")
    merge.add_argument("--base", required=True, help=f"{named}, or a fetched hub id")
    merge.add_argument(
        "--to", type=Path, required=True, metavar="PATH", help="a file; a folder with --layout diffusers"
    )
    merge.add_argument("--layout", choices=("bfl", "diffusers"), default="bfl", help="bfl, one file, by default")
    merge.add_argument("--dtype", choices=dtypes, help="that of the base by default")
    merge.add_argument("--any-base", action="store_true", help="also where the LoRA says that it is of another base")

    extract = commands.add_parser("extract", help="make a LoRA of what a full fine-tune changed")
    extract.add_argument("tuned", help=f"the fine-tune: {named}")
    extract.add_argument("--base", required=True, help=f"what it was made from: {named}, or a fetched hub id")
    extract.add_argument("--rank", type=int, default=64, help="more holds more of the change (64)")
    extract.add_argument("--targets", default="all-linear", help="names and patterns of lora.targets, with + between")
    extract.add_argument("--to", type=Path, required=True, metavar="FILE")
    extract.add_argument("--layout", choices=("kohya", "diffusers"), default="kohya")
    extract.add_argument("--dtype", choices=dtypes, default="fp32")
    for command in (export, merge, extract):
        command.add_argument("--saturate", action="store_true", help=saturate)
        _volume_option(command)


def _deployment_options(parser: argparse.ArgumentParser) -> None:
    image = os.environ.get("FLUXPOD_IMAGE", "")
    parser.add_argument("--image", default=image, required=not image, help="where it was pushed to: you/fluxpod:0.1.0")
    parser.add_argument("--name", default="fluxpod", help="of the template (fluxpod)")
    parser.add_argument("--volume-gb", type=int, default=300, help="300 for checkpoints, 200 for LoRA")
    parser.add_argument("--cuda", type=_cuda_version, default="13.0", help="least CUDA version of the host (13.0)")
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="a RunPod secret to hand on, beside HF_TOKEN; may be repeated",
    )


def _gpu_count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,2}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs; write for example 2")
    return int(text)


def _cuda_version(text: str) -> str:
    if not re.fullmatch(r"\d{1,2}\.\d", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no CUDA version; write for example 12.8")
    return text


def _deploy(options: argparse.Namespace) -> int:
    from entrypoint.deploy import SECRETS, Deployment, create_pod, create_template

    chosen = {"image": options.image, "name": options.name, "volume_gb": options.volume_gb, "cuda": options.cuda}
    secrets = tuple(dict.fromkeys((*SECRETS, *options.secret)))
    if options.command == "template":
        return create_template(Deployment(**chosen, secrets=secrets, public=options.public), os.environ)
    places = {"network_volume": options.network_volume, "data_center": options.data_center, "cloud": options.cloud}
    return create_pod(options.job, Deployment(**chosen, **places, secrets=secrets, gpu=options.gpu), os.environ)


def _volume_option(parser: argparse.ArgumentParser) -> None:
    default = Path(os.environ.get("FLUXPOD_VOLUME", "/workspace"))
    parser.add_argument("--volume", type=Path, default=default, help=f"the volume's mount point ({default})")


if __name__ == "__main__":
    sys.exit(main())
