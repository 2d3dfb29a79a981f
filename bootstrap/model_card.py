"""README.md of a repository on the hub: what the model is, under which licence, and how to draw with it.

The part between the lines of three dashes is read by the hub (https://huggingface.co/docs/hub/model-cards): the base
makes the model appear below its page, ``widget`` shows samples with their prompts. Nothing of the pictures that were
learned is told but their trigger words, and no path of the pod.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from PIL import Image, UnidentifiedImageError

from jobs.schema import Job

DEV_LICENCE = {
    "license": "other",
    "license_name": "flux-1-dev-non-commercial-license",
    "license_link": "https://huggingface.co/black-forest-labs/FLUX.1-dev/blob/main/LICENSE.md",
}
SCHNELL_LICENCE = {"license": "apache-2.0"}
# What made the model. Named one by one: a key that comes to be may hold a path, or somebody's address.
SETTINGS = (
    *("method", "lora", "steps", "epochs", "images_per_step", "resolution", "bucket_step", "upscale", "learning_rate"),
    *("schedule", "schedule_args", "warmup", "optimizer", "optimizer_args", "weight_decay", "max_grad_norm"),
    *("timestep_sampling", "discrete_flow_shift", "sigmoid_scale", "guidance", "t5_mask", "caption_dropout", "seed"),
)


@dataclass(frozen=True)
class Picture:
    """A sample on the volume."""

    step: int
    file: Path
    prompt: str
    settings: str = ""  # of drawing

    @property
    def path(self) -> str:
        return f"samples/{self.file.name}"

    @classmethod
    def of(cls, step: int, file: Path) -> Picture:
        try:
            with Image.open(file) as image:
                settings = str(image.info.get("settings", "")).removeprefix(f"step {step}, ")
                return cls(step, file, str(image.info.get("prompt", "")), settings)
        except (OSError, UnidentifiedImageError):
            return cls(step, file, "")


@dataclass(frozen=True)
class Facts:
    """What a card is made of. ``base_repo``: the base on the hub, "" where it was a file or a folder; ``licence``: what
    the hub says of that one's; ``guidance``: whether the base takes it, as FLUX.1-dev and all made from it do."""

    job: Job
    repo: str
    file: str  # of the weights, in the repository
    step: int
    digest: str  # of the job
    base_repo: str
    guidance: bool
    licence: dict[str, str]
    pictures: tuple[Picture, ...]
    toy: bool = False  # flux-tiny: no model of Black Forest Labs, nothing to be licensed


def licence_of(facts: Facts) -> dict[str, str]:
    """That of the base: a model made from FLUX.1-dev may not be used commercially, whoever made it."""
    if facts.toy:
        return {}
    if facts.licence.get("license"):
        link = facts.licence.get("license_link", "")
        if not link or "://" in link:
            return facts.licence
        return facts.licence | {"license_link": f"https://huggingface.co/{facts.base_repo}/blob/main/{link}"}
    return DEV_LICENCE if facts.guidance else SCHNELL_LICENCE if "schnell" in facts.base_repo.lower() else {}


def model_card(facts: Facts) -> str:
    """The text. With the same facts it is the same to the byte."""
    job = facts.job
    head = yaml.safe_dump(_metadata(facts), sort_keys=False, allow_unicode=True, width=1000)
    parts = [
        f"---\n{head}---\n",
        f"# {job.name}\n",
        _what_it_is(facts),
        _licence_in_words(facts),
        *_samples(facts),
        *(() if facts.toy else ("## How to use\n", *_use(facts))),
        "## How it was made\n",
        _settings(facts),
    ]
    return "\n".join(part for part in parts if part)


def _metadata(facts: Facts) -> dict[str, Any]:
    job, found = facts.job, dict[str, Any](licence_of(facts))
    if facts.base_repo:
        found["base_model"] = facts.base_repo
        found["base_model_relation"] = "adapter" if job.lora else "finetune"
    found |= {"pipeline_tag": "text-to-image", "library_name": "diffusers"}
    found["tags"] = ["flux", "text-to-image", "diffusers", *["lora"] * bool(job.lora), "fluxpod"]
    if triggers := _triggers(job):
        found["instance_prompt"] = ", ".join(triggers)
    newest = [picture for picture in facts.pictures if picture.step and picture.prompt]
    if newest:
        found["widget"] = [{"text": picture.prompt, "output": {"url": picture.path}} for picture in newest]
    return found


def _triggers(job: Job) -> list[str]:
    return list(dict.fromkeys(entry.trigger for entry in job.datasets if entry.trigger))


def _base_in_words(facts: Facts) -> str:
    if facts.base_repo:
        return f"[{facts.base_repo}](https://huggingface.co/{facts.base_repo})"
    return "a toy" if facts.toy else f"`{Path(facts.job.base).name}`, a file"


def _what_it_is(facts: Facts) -> str:
    job = facts.job
    kind = f"A LoRA of rank {job.lora.rank} for" if job.lora else "A checkpoint (all weights), fine-tuned from"
    text = f"{kind} {_base_in_words(facts)}, after {facts.step} steps.\n"
    triggers = [f"`{trigger}`" for trigger in _triggers(job)]
    if triggers:
        text += f"\nTrigger word{'s' * (len(triggers) > 1)}: {', '.join(triggers)}\n"
    return text


def _licence_in_words(facts: Facts) -> str:
    licence = licence_of(facts)
    if not licence:
        return "" if facts.toy else "**Licence:** that of its base.\n"
    name = licence.get("license_name") or licence["license"]
    link = licence.get("license_link", "")
    shown = f"[{name}]({link})" if link.startswith("https://") else name
    told = f"**Licence:** {shown}, that of its base."
    if "non-commercial" in name:
        told += " This model is a derivative and may be used for non-commercial purposes only, as that licence says."
    return told + "\n"


def _samples(facts: Facts) -> list[str]:
    newest = [picture for picture in facts.pictures if picture.step]
    first = {(each.prompt, each.settings): each for each in facts.pictures if not each.step}
    if not newest:
        return []
    columns = ["prompt", f"step {newest[0].step}", *["before training"] * bool(first)]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for picture in newest:
        before = first.get((picture.prompt, picture.settings))  # of an edited file of prompts it may be another's
        cells = [_cell(picture.prompt), f"![sample]({picture.path})"]
        cells += [f"![the same before training]({before.path})" if before else ""] * bool(first)
        lines.append(f"| {' | '.join(cells)} |")
    return ["## Samples\n", "\n".join(lines) + "\n"]


def _cell(text: str) -> str:
    """Text that stays inside its cell of a table, and is no markup."""
    text = " ".join(text.split())
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|" else letter for letter in text)


def _use(facts: Facts) -> list[str]:
    job, file = facts.job, facts.file
    base = facts.base_repo or f"black-forest-labs/FLUX.1-{'dev' if facts.guidance else 'schnell'}"
    trigger = next(iter(_triggers(job)), "")
    prompt = next((p.prompt for p in facts.pictures if p.step and p.prompt), f"a photo of {trigger}".strip())
    steps, guidance = job.sample.steps, job.sample.guidance if facts.guidance else 0.0
    draw = (
        f"image = pipe({prompt!r}, width={job.sample.width}, height={job.sample.height}, "
        f'num_inference_steps={steps}, guidance_scale={guidance}).images[0]\nimage.save("sample.png")'
    )
    if job.lora:
        code = (
            "import torch\nfrom diffusers import FluxPipeline\n\n"
            f'pipe = FluxPipeline.from_pretrained("{base}", torch_dtype=torch.bfloat16).to("cuda")\n'
            f'pipe.load_lora_weights("{facts.repo}", weight_name="{file}")\n{draw}'
        )
        comfy = f"put `{file}` into `models/loras/`, and place the node *Load LoRA* behind the model, strength 1."
    else:
        code = (
            "import torch\nfrom diffusers import FluxPipeline, FluxTransformer2DModel\n"
            "from huggingface_hub import hf_hub_download\n\n"
            f'file = hf_hub_download("{facts.repo}", "{file}")\n'
            "transformer = FluxTransformer2DModel.from_single_file(\n"
            f'    file, config="{base}", subfolder="transformer", torch_dtype=torch.bfloat16\n)\n'
            f'pipe = FluxPipeline.from_pretrained("{base}", transformer=transformer, torch_dtype=torch.bfloat16)'
            f'.to("cuda")\n{draw}'
        )
        comfy = (
            f"put `{file}` into `models/diffusion_models/` and take it in *Load Diffusion Model*, with `clip_l` and "
            "`t5xxl` in *DualCLIPLoader* (type flux) and `ae` in *Load VAE*."
        )
    guided = f" Guidance {guidance:g}, {steps} steps." if facts.guidance else f" {steps} steps."
    return [f"With diffusers:\n\n```python\n{code}\n```\n", f"In ComfyUI: {comfy}{guided}\n"]


def _settings(facts: Facts) -> str:
    job = facts.job
    values = job.model_dump(mode="json", include=set(SETTINGS), exclude={"lora": {"start"}})
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inside = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        flat |= {key: each for key, each in inside.items() if each not in (None, {}, [])}
    rows = [f"| {name} | {_cell(_spelled(value))} |" for name, value in flat.items()]
    digest = f"\nJob: sha256 `{facts.digest}`. " if facts.digest else "\n"
    made = f"{digest}Trained with fluxpod.\n"
    return "| setting | |\n|---|---|\n" + "\n".join(rows) + "\n" + made


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else f"{value}"
    )
