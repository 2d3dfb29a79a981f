"""What a job is: the keys a user may write, what each does, and its default.

A job is plain, frozen data. Defaults that depend on other keys are filled in before validation (``complete``), so a
``Job`` never has to ask twice what a value means. Nothing here touches a disk or knows a pod. ``reference.yaml`` and
``job.schema.json`` are made from this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jobs.learning_rates import rates_of
from jobs.prompts import Drawing, Prompt, parse_prompt
from jobs.values import (
    CROP_POINTS,
    MOST_SEED,
    Address,
    AnyText,
    AverageType,
    BadImages,
    BasePrecision,
    BestState,
    BucketStep,
    Count,
    CropFocus,
    FilePath,
    HubRepo,
    Interval,
    KeptWeights,
    LoraLayout,
    MethodName,
    Name,
    Number,
    OnError,
    Optimizer,
    Options,
    Products,
    Resolution,
    SaveInterval,
    Schedule,
    Sharding,
    Side,
    StatesPlace,
    Switch,
    Targets,
    Text,
    TimestepSampling,
    WhenDone,
    interval_of,
)

SINGLE_FILE_ENDINGS = (".safetensors", ".sft")
_PLANNED = "the plan decides"


@dataclass(frozen=True)
class ByMethod:
    """A default that differs between the methods; shown side by side in reference.yaml."""

    full: Any
    lora: Any


def key(default: Any = ..., *, doc: str, why: str = "", example: Any = None, left_out: str = "", **limits: Any) -> Any:
    """A field with its documentation: what it does (``doc``), the reason of its default (``why``), an ``example`` for
    the reference where the default alone shows too little, and what happens when it is ``left_out`` where the default
    is no plain value."""
    extra: dict[str, Any] = {"doc": doc, "why": why, "example": example, "left_out": left_out}
    if isinstance(default, ByMethod):
        extra["by_method"] = {"full": default.full, "lora": default.lora}
        default = ...
    return Field(default, description=f"{doc} {why}".strip(), json_schema_extra=extra, **limits)


class Section(BaseModel):
    """A group of keys: frozen, and an unknown key in it is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TextEncoders(Section):
    """The two text encoders beside a single-file base."""

    clip: FilePath = key(
        doc="The CLIP text encoder: a file such as clip_l.safetensors, or a folder with tokenizer/ beside it.",
        example="models/clip_l.safetensors",
    )
    t5: FilePath = key(
        doc="The T5 text encoder: a file such as t5xxl_fp16.safetensors, or a folder with tokenizer_2/ beside it.",
        example="models/t5xxl_fp16.safetensors",
    )


class LoraLayers(Section):
    """Some of an adapter's layers, and what is different there."""

    match: Targets = key(doc="Which layers, as in lora.targets.", example=["transformer_blocks.*.attn.*"])
    rank: Count | None = key(None, doc="Their rank.", left_out="that of the adapter", example=32, ge=1, le=1024)
    alpha: Number | None = key(
        None,
        doc="Their alpha.",
        left_out="the alpha that has the adapter's strength (alpha / rank) with this rank",
        example=32.0,
        ge=0,
        le=4096,
    )
    learning_rate: Number | None = key(
        None,
        doc="Their learning rate, with the run's schedule. May be changed on resume.",
        left_out="that of the run",
        example=5e-5,
        gt=0,
    )


class Lora(Section):
    """The adapter that method lora trains."""

    rank: Count = key(
        16,
        doc="Size of the adapter: more can hold more detail, takes a larger file and overfits sooner.",
        why="16 holds a style or a person.",
        ge=1,
        le=1024,
    )
    alpha: Number = key(
        doc="Strength: the adapter is multiplied by alpha / rank.",
        why="Then the factor is 1, and another rank needs no other learning rate.",
        example=16.0,
        left_out="equal to the rank",
        ge=0,
        le=4096,
    )
    targets: Targets = key(
        "attention+feed-forward",
        doc="Which layers get an adapter: attention, feed-forward, modulation, embedders (the layers outside of the "
        "blocks), some of them joined by +, all-linear (all of them), or a list of such names and of patterns of "
        "diffusers module names ('*' stands for anything).",
        why="These hold most of the weights; the modulation makes training touchy.",
        example=["transformer_blocks.*.attn.*", "single_transformer_blocks.*.proj_out"],
    )
    layers: tuple[LoraLayers, ...] = key(
        (),
        doc="Layers whose rank, alpha or learning rate is another. Where several entries mean a layer, the last one "
        "that says something of a key counts.",
        left_out="all layers alike",
    )
    dora: Switch = key(
        False,
        doc="DoRA: the length of each row of a weight is trained by itself, and the adapter turns it. Takes more "
        "memory and time.",
        why="It learns a little more at the same rank, and tools differ in how they read its files: draw with yours "
        "before a long run.",
    )
    rslora: Switch = key(
        False,
        doc="Rank-stabilised: the adapter is multiplied by alpha / sqrt(rank) in place of alpha / rank.",
        why="Made for ranks of 64 and more with a small alpha; with alpha = rank it makes a strong adapter.",
    )
    dropout: Number = key(
        0.0,
        doc="Share of the adapter's inner values that are left out, others for each image, from 0 to below 1.",
        why="Fewer steps, or a lower rank, keep an adapter from learning by heart at no cost. 0.1 is much.",
        ge=0,
        lt=1,
    )
    layout: LoraLayout = key(
        "kohya",
        doc="How the file names its weights: kohya (also ComfyUI, Forge) or diffusers (also PEFT). `fluxpod export` "
        "writes the other one.",
        why="Most tools load it; diffusers too, but for layers outside of the blocks and for DoRA.",
    )
    start: FilePath | None = key(
        None,
        doc="An adapter to start from: a finished LoRA of this rank and these targets, of any trainer, in any layout.",
        example="runs/my-lora/output/my-lora.safetensors",
        left_out="an adapter that changes nothing yet",
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, written: Any) -> Any:
        if not isinstance(written, Mapping):
            return written
        return {"alpha": written.get("rank", cls.model_fields["rank"].default)} | dict(written)


class DatasetEntry(Section):
    """One folder of pictures."""

    path: FilePath = key(
        doc="A folder or zip of pictures on the volume, relative to it or absolute; https://... to a zip; or "
        "hf://datasets/owner/name. Captions lie beside the pictures (name.txt); folders named 5_something are repeated "
        "5 times.",
        example="datasets/paper-flowers",
    )
    repeats: Count = key(
        1,
        doc="How often an epoch shows each picture.",
        why="Raise it to balance a small folder against a large one.",
        ge=1,
        le=10000,
    )
    trigger: Text | None = key(
        None,
        doc="A word that takes the place of [trigger] in captions, prefix and suffix, and is put before captions that "
        "lack it. Prompts with it call up what was learned.",
        why="A word that means nothing yet is best.",
        example="pprflwr",
        left_out="nothing is put before captions",
    )
    caption: AnyText | None = key(
        None,
        doc="The caption of pictures that have none.",
        example="a photo of a paper flower",
        left_out="the trigger, or the name of a folder such as 5_name",
    )
    prefix: AnyText | None = key(
        None, doc="Text before every caption.", example="a photo of [trigger],", left_out="nothing"
    )
    suffix: AnyText | None = key(None, doc="Text behind every caption.", example="film grain", left_out="nothing")
    multiline: Switch = key(
        False,
        doc="Whether a caption of several lines is one line of it, drawn anew each time its image is seen.",
        why="Captions are taken as they stand.",
    )
    wildcards: Switch = key(
        False,
        doc="Whether {red|green|blue} in a caption is one of these words, drawn anew each time. A choice may be empty "
        "({|bright }red) or hold others; {{ and }}, or \\{ and \\}, are plain braces.",
        why="Captions are taken as they stand.",
    )
    shuffle_tags: Switch = key(
        False,
        doc="Whether what stands between the commas of a caption is put in another order each time.",
        why="Only for captions that are lists of tags; sentences lose their sense.",
    )
    keep_tags: Count = key(
        0, doc="How many tags stay in front; only with shuffle_tags.", why="The trigger is in front anyway.", ge=0
    )
    caption_dropout: Number | None = key(
        None,
        doc="Share of the images of this folder that are trained with an empty caption, from 0 to 1.",
        example=0.1,
        left_out="the caption_dropout of the job",
        ge=0,
        le=1,
    )
    crop: CropFocus = key(
        "center",
        doc="Which part of a picture is kept where its proportions are not those of its training size: center, top, "
        "bottom, left, right, or the point to keep in the middle, [x, y] from 0 to 1.",
        why="Little is cropped unless a picture is very long.",
        example=[0.5, 0.3],
    )
    random_crops: Count = key(
        0,
        doc="Crop each picture at so many places, drawn by chance, and train on one of them each time. Each is cached.",
        why="Little is cropped, so little is gained.",
        ge=0,
        le=16,
    )
    flip: Switch = key(
        False,
        doc="Whether a picture is mirrored every other time. Cached both ways.",
        why="It mirrors writing, partings and left hands, too.",
    )
    weight: Number = key(
        1.0,
        doc="How much a picture of this folder counts in the loss. Pictures that shall only keep the model from "
        "forgetting (regularisation images) are a folder of their own, with a weight such as 0.5.",
        why="All pictures are alike.",
        ge=0,
        le=100,
    )
    mask: FilePath | None = key(
        None,
        doc="What of each picture is learned: alpha for what is not transparent, or a folder (or zip) of black and "
        "white pictures with the names of these, white for what is learned.",
        example="datasets/flower-masks",
        left_out="all of it",
    )
    mask_floor: Number = key(
        0.0,
        doc="How much counts, from 0 to 1, what a mask hides; only with mask.",
        why="What is masked is not to be learned. 0.1 keeps the surroundings sound.",
        ge=0,
        le=1,
    )
    mask_normalize: Switch = key(
        False,
        doc="Whether a picture counts the same however much of it is masked; only with mask.",
        why="Every place that is not masked counts the same.",
    )
    resolution: Resolution | None = key(
        None,
        doc="Another resolution for this folder only.",
        example=512,
        left_out="the resolution of the job",
    )

    @property
    def resolutions(self) -> tuple[int, ...] | None:
        return None if self.resolution is None else _sizes(self.resolution)

    @property
    def focus(self) -> tuple[float, float]:
        """``crop`` as a point: shares of the width and the height, from the left and the top."""
        return CROP_POINTS[self.crop] if isinstance(self.crop, str) else self.crop


class Save(Section):
    """When states are saved and how many stay. A state holds everything to go on from; its weights are a checkpoint."""

    every: SaveInterval = key(
        ByMethod(full=500, lora=250),
        doc="From one save to the next: a number of steps, or a time (30m, 2h), or epochs (5 epochs). The end of the "
        "run is always saved.",
        why="A full checkpoint with its optimizer is 48 GB; an adapter is small.",
    )
    states: Count = key(
        1,
        doc="How many of the newest states stay complete, to go on from.",
        why="An older one loses its optimizer, its larger part, and stays a checkpoint.",
        ge=1,
    )
    weights: KeptWeights = key(
        ByMethod(full=2, lora="all"),
        doc="Of how many of the newest states the weights stay; all keeps every one.",
        why="A full checkpoint is 24 GB. Adapters are small, and the best one is rarely the last.",
    )
    keep_every: Count | None = key(
        None,
        doc="Weights of steps that are multiples of this stay, beside those of the newest.",
        example=1000,
        left_out="only the newest stay",
        ge=1,
    )
    on_error: OnError = key(
        "go-on",
        doc="What happens when the volume does not take a state: go-on trains on and tries again at the next save, "
        "stop ends the run. The older states stay in either case, and the last state of a run must succeed.",
        why="A full volume can be cleaned up while training goes on.",
    )

    @property
    def interval(self) -> Interval:
        return interval_of(self.every)


class Sample(Section):
    """Pictures drawn during training, the way people will draw them."""

    every: Count = key(
        250,
        doc="Steps between two rounds of samples. One is drawn before the first step, for comparison.",
        why="One picture of 1024 px and 24 steps takes as long as training on about 20 images at 512 px.",
        ge=1,
    )
    prompts: tuple[Prompt, ...] = key(
        (),
        doc="What to draw. Without prompts nothing is drawn. A prompt may end in settings of its own: --seed 7 "
        "--width 832 --height 1216 --steps 30 --guidance 4.",
        why="Only you know what you train.",
        example=["pprflwr in the rain", "a bowl of pprflwr on a wooden table --seed 7"],
    )
    prompts_file: FilePath | None = key(
        None,
        doc="A text file with the prompts, one a line, settings included, in place of prompts. It is read again before "
        "each round of samples: edit it while the run trains. What is wrong in it then is a warning, and the last good "
        "list stays.",
        example="prompts.txt",
        left_out="the prompts above",
    )
    width: Side = key(1024, doc="Width of a sample in pixels, a multiple of 16.", why="As people will use it.")
    height: Side = key(1024, doc="Height of a sample in pixels, a multiple of 16.", why="As people will use it.")
    steps: Count = key(
        24,
        doc="Denoising steps of a sample.",
        why="Enough for FLUX.1-dev; schnell needs 4.",
        ge=1,
        le=1000,
    )
    guidance: Number = key(
        3.5,
        doc="Guidance when drawing. Not the guidance of training.",
        why="What FLUX.1-dev is used with; 1 draws washed-out pictures. A base without guidance ignores it.",
        ge=0,
        le=100,
    )
    seed: Count = key(
        42,
        doc="Seed of the samples.",
        why="The same at every step, so that only the training changes the picture.",
        ge=0,
        le=MOST_SEED,
    )

    @property
    def drawings(self) -> tuple[Drawing, ...]:
        """One for each prompt."""
        return tuple(self.drawing(prompt) for prompt in self.prompts)

    def drawing(self, prompt: str) -> Drawing:
        """A prompt with the settings that it has itself, and these for the others."""
        shared = {name: getattr(self, name) for name in ("seed", "width", "height", "steps", "guidance")}
        text, own = parse_prompt(prompt)
        return Drawing(text, **shared | own)


class Validation(Section):
    """Pictures that are never trained on, and how the model is tried on them: whether it learns or learns by heart."""

    fraction: Number | None = key(
        doc="Share of the pictures that is held out of training, above 0 to 0.5. Each picture's own bytes decide, so "
        "added ones change nothing for the others; one picture is held out at least.",
        why="Enough to tell, and little is lost; with fewer than 30 pictures give a path to others.",
        example=0.1,
        left_out="0.1, or none where path is given",
        gt=0,
        le=0.5,
    )
    path: FilePath | None = key(
        None,
        doc="In place of fraction: a folder or zip on the volume with pictures of the same kind that are not trained "
        "on. Its captions and crops are made as those of the first dataset.",
        example="datasets/paper-flowers-held-out",
        left_out="a fraction of the pictures is held out",
    )
    every: Count = key(
        250,
        doc="Steps between two rounds. One comes before the first step, and one at the end.",
        why="With the defaults a round takes as long as training on about 20 images.",
        ge=1,
    )
    images: Count = key(
        16,
        doc="How many images a round tries at most, of all training sizes.",
        why="Noise is the same in every round, so few images tell small changes.",
        ge=1,
        le=10_000,
    )
    levels: Count = key(
        4,
        doc="Noise levels at which each image is tried, spread evenly from clean to pure noise.",
        why="One for each band that the log tells.",
        ge=1,
        le=100,
    )
    best: BestState = key(
        "tell",
        doc="What becomes of the saved state with the lowest validation loss: tell only names it, keep keeps its "
        "weights whatever save.weights says, output makes it the finished file, too. Except with tell, a round comes "
        "before every save.",
        why="The lowest loss is not always the picture one likes best: look at the samples.",
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, written: Any) -> Any:
        if not isinstance(written, Mapping):
            return written
        held = {} if written.get("path") is not None or written.get("fraction") is not None else {"fraction": 0.1}
        return {"fraction": None} | dict(written) | held

    @property
    def keeps_best(self) -> bool:
        return self.best != "tell"


class Output(Section):
    """Where the result goes, beside output/ on the volume."""

    hub: HubRepo | None = key(
        None,
        doc="A repository of the Hugging Face hub that gets the finished file with a model card and the last samples; "
        "made if it is not there. Needs a token with the right to write: HF_UPLOAD_TOKEN, or HF_TOKEN.",
        why="A browser does not bring 24 GB from a pod.",
        example="me/paper-flowers",
        left_out="nothing leaves the pod",
    )
    private: Switch = key(
        True,
        doc="Whether only you can see that repository. With true a public one that is there is refused; with false a "
        "new one is made public.",
        why="Nothing is published by surprise.",
    )
    states: Switch = key(
        False,
        doc="Whether each state's weights are uploaded, too, while training goes on: states/NAME-000500.safetensors.",
        why="Of a full model each takes 24 GB of what your account may store.",
    )


class Ema(Section):
    """An average of the weights."""

    decay: Number = key(
        0.99,
        doc="How much of the average stays from one step to the next: 0.99 averages about the last 100 steps, 0.999 "
        "the last 1000. Less in the beginning, so that short runs have one, too.",
        why="Runs of 500 to 4000 steps change more in 1000 steps than an average should blur.",
        ge=0,
        lt=1,
    )
    every: Count = key(
        ByMethod(full=10, lora=1),
        doc="Steps from one time that the average follows the weights to the next; the decay is still that of a step.",
        why="Following a full model moves 44 GiB or more, which at every step would cost a tenth of the time.",
        ge=1,
        le=1000,
    )
    dtype: AverageType = key(
        "fp32",
        doc="Number format of the average: fp32, or bf16 with stochastic rounding, which takes half the memory. An "
        "adapter's is always fp32.",
        why="Small changes arrive exactly. Of FLUX.1-dev it takes 44.3 GiB, on the host where the GPU is short.",
    )
    samples: Switch = key(
        True,
        doc="Whether samples are drawn with the average; false draws with the live weights.",
        why="They show what the output will be.",
    )


class Notify(Section):
    """Addresses that hear how a run ended."""

    ntfy: Address | None = key(
        None,
        doc="A topic of ntfy, to be read in its app. Who knows the topic can read it: choose a long one.",
        example="https://ntfy.sh/$NTFY_TOPIC",
        left_out="no message there",
    )
    discord: Address | None = key(
        None, doc="A web hook of a Discord channel.", example="$DISCORD_WEBHOOK", left_out="no message there"
    )
    slack: Address | None = key(
        None, doc="An incoming web hook of Slack.", example="$SLACK_WEBHOOK", left_out="no message there"
    )
    webhook: Address | None = key(
        None,
        doc='Any other address: it is sent the JSON {"job": ..., "event": ..., "message": ...}.',
        example="$WEBHOOK",
        left_out="no message there",
    )


class PlanOverrides(Section):
    """Choices that the plan makes by itself, told with their reasons by `fluxpod check`."""

    processes: Count | None = key(
        None, doc="Training processes, one per GPU.", example=2, left_out=_PLANNED, ge=1, le=64
    )
    sharding: Sharding | None = key(
        None,
        doc="Whether the model is spread over the GPUs (fsdp) or whole on each (none).",
        example="fsdp",
        left_out=_PLANNED,
    )
    checkpointing: Switch | None = key(
        None,
        doc="Gradient checkpointing: far less memory for about a third more time.",
        example=True,
        left_out=_PLANNED,
    )
    compile: Switch | None = key(
        None,
        doc="torch.compile: faster steps after a slow start.",
        example=False,
        left_out=_PLANNED,
    )
    images_per_pass: Count | None = key(
        None,
        doc="Most images one GPU takes at once. A step that is larger takes several passes and comes out the same.",
        example=2,
        ge=1,
        left_out=_PLANNED,
    )
    base_precision: BasePrecision | None = key(
        None,
        doc="Number format of the frozen base under a LoRA: bf16, int8, fp8 or nf4, less memory from one to the next "
        "(FLUX.1-dev 22.2, 11.2, 11.2, 6.0 GiB) and less faithful (off by 0, 0.9, 2.6, 9 %). Any card can take any; "
        "the adapter's file does not depend on it.",
        why="bf16 where it fits, else int8, else nf4.",
        example="int8",
        left_out=_PLANNED,
    )
    optimizer_in_backward: Switch | None = key(
        None,
        doc="Update each block as soon as its gradient is there: saves the memory of the gradients. The gradient "
        "cannot be clipped then (max_grad_norm).",
        example=True,
        left_out=_PLANNED,
    )
    optimizer_states: StatesPlace | None = key(
        None,
        doc="Where the optimizer keeps its states: on the device, or streamed from the host's memory.",
        example="host",
        left_out=_PLANNED,
    )
    products: Products | None = key(
        None,
        doc="Number format in which the blocks' large matrices are multiplied: bf16, or fp8 with a scale for each row "
        "of a matrix (fp8-rowwise) or one for all of it (fp8-tensorwise). fp8 needs an Ada, Hopper or Blackwell card "
        "and one process for method full; weights stay bf16. Its gradients are off by 4 to 8 % of their length.",
        why="Numbers stay as they are unless you say so.",
        example="fp8-rowwise",
        left_out="bf16",
    )
    retry: Switch | None = key(
        None,
        doc="Whether a run whose GPU runs out of memory goes on by itself from its newest state, by a plan that needs "
        "less and gives the same numbers; at most 3 times.",
        example=False,
        left_out="it goes on by itself: a night should not be lost to an estimate that is off by a little",
    )


class Job(Section):
    """A fine-tuning job: what to train, on what, and how."""

    name: Name = key(
        doc="Name of the run, of its folder runs/<name>/ and of the finished file. Letters, digits, '.', '_' and '-'.",
        example="paper-flowers",
    )
    base: Text = key(
        doc="The model to start from: an id on the Hugging Face hub (with @revision if you like), a diffusers folder "
        "on the volume, or a single .safetensors file in BFL layout (then also vae and text_encoders). flux-tiny is "
        "a toy that trains without a GPU.",
        example="black-forest-labs/FLUX.1-dev",
    )
    vae: FilePath | None = key(
        None,
        doc="The VAE, where base is a single file: a file such as ae.safetensors, or a folder as diffusers saves it.",
        why="The other kinds of base bring their own.",
        example="models/ae.safetensors",
        left_out="the one of the base",
    )
    text_encoders: TextEncoders | None = key(
        None,
        doc="The text encoders, where base is a single file.",
        why="The other kinds of base bring their own.",
        left_out="those of the base",
    )
    method: MethodName = key(
        doc="lora trains a small adapter: right for a style, a person, a thing. full trains all weights into a new "
        "checkpoint: right for many concepts or a big change.",
        example="lora",
    )
    lora: Lora | None = key(
        None, doc="The adapter; only with method lora.", left_out="with method lora, an adapter of the defaults below"
    )
    assistant_lora: FilePath | None = key(
        None,
        doc="A LoRA that is on while training, and off in samples and in what is saved: a training adapter, without "
        "which FLUX.1-schnell unlearns to draw in four steps. A file on the volume, or one of the hub as owner/name or "
        "hf://owner/name/FILE. Only with method lora.",
        example="ostris/FLUX.1-schnell-training-adapter",
        left_out="none",
    )
    datasets: tuple[DatasetEntry, ...] = key(doc="The folders of pictures to learn from.", min_length=1)
    steps: Count | None = key(
        None,
        doc="Length of the run in steps, in all. Or write epochs.",
        why="The field uses 500 to 4000.",
        example=1000,
        left_out="1000 steps for lora; 100 epochs for full, but no less than 1000 and no more than 4000 steps",
        ge=1,
    )
    epochs: Count | None = key(
        None,
        doc="Length of the run in epochs: how often every picture is seen, whatever the number of GPUs.",
        example=80,
        left_out="see steps",
        ge=1,
    )
    images_per_step: Count = key(
        4,
        doc="Images per step over all GPUs together. More GPUs make a step faster, not larger.",
        why="Splits on 1, 2 and 4 GPUs.",
        ge=1,
        le=4096,
    )
    resolution: Resolution = key(
        ByMethod(full=512, lora=(512, 768, 1024)),
        doc="Training resolution: pictures are scaled to about this many pixels squared, in their own proportions. "
        "A list trains every picture at each. Multiples of 16 from 64 to 2048.",
        why="512 is fast and teaches what things look like (finish at 1024 for texture); an adapter for several sizes "
        "works at all of them.",
    )
    bucket_step: BucketStep = key(
        64,
        doc="Sides of the training sizes are multiples of this, itself a multiple of 16.",
        why="Few different sizes, and little is cropped.",
    )
    bad_images: BadImages = key(
        "fail",
        doc="What to do when a picture cannot be used (damaged, disguised, absurdly small): fail names them all and "
        "stops, skip trains without them and names them.",
        why="A picture that is missing without a word is missed too late.",
    )
    upscale: Switch = key(
        False,
        doc="Whether pictures smaller than the resolution are enlarged.",
        why="Enlarged pictures teach blur.",
    )
    learning_rate: Number = key(
        ByMethod(full=1e-5, lora=1e-4),
        doc="Size of the updates, after warm-up. May be changed on resume.",
        why="With stochastic rounding small rates arrive; the field's 2e-5 for full was found with plain bf16. "
        "Lion takes a fifth of it, Adafactor 100 (lora) or 50 times (full), Prodigy 1.",
        gt=0,
    )
    schedule: Schedule = key(
        "constant",
        doc="How the learning rate goes on after warm-up: constant, linear, cosine, cosine_with_restarts, polynomial, "
        "or the import path of a function of the progress (0 to 1) that gives the factor.",
        why="With constant, resuming and changing the length stay simple.",
    )
    schedule_args: Options = key(
        {},
        doc="Options of the schedule, by name.",
        why="linear and cosine take end (the factor at the end, 0), cosine_with_restarts also cycles (3), polynomial "
        "also power (2).",
        example={"end": 0.1},
    )
    warmup: Count = key(
        ByMethod(full=100, lora=50),
        doc="Steps over which the learning rate rises from 0.",
        why="The optimizer's averages need some steps to mean something. Counted in steps on any number of GPUs.",
        ge=0,
    )
    optimizer: Optimizer = key(
        ByMethod(full="AdamW8bit", lora="AdamW"),
        doc="AdamW, AdamW8bit, PagedAdamW8bit, PagedAdamW32bit, Lion8bit, PagedLion8bit, Adafactor, Prodigy, or an "
        "import path such as package.module.Class.",
        why="8 bits instead of 32 save 71 GB on a full model, and little on an adapter.",
    )
    optimizer_args: Options = key(
        {},
        doc="Further options of the optimizer, by name.",
        why="The optimizer's own defaults are good.",
        example={"betas": [0.9, 0.99]},
    )
    weight_decay: Number = key(
        0.01,
        doc="Pull of the weights towards 0.",
        why="The common value.",
        ge=0,
        le=10,
    )
    max_grad_norm: Number | None = key(
        ByMethod(full=None, lora=1.0),
        doc="Gradients longer than this are shortened to it; null for no limit.",
        why="A full model is updated during the backward pass, before the whole gradient's length is known.",
        example=1.0,
        gt=0,
    )
    timestep_sampling: TimestepSampling = key(
        "flux_shift",
        doc="How noisy the training images are: flux_shift (by image size), shift (by discrete_flow_shift), sigmoid, "
        "uniform.",
        why="flux_shift is how FLUX draws: more noise for larger images.",
    )
    discrete_flow_shift: Number = key(
        3.0,
        doc="The shift towards noise; only with timestep_sampling shift. About flux_shift at 1024 px.",
        why="flux_shift is 1.88 at 512, 2.33 at 768 and 3.16 at 1024 px.",
        gt=0,
        le=100,
    )
    sigmoid_scale: Number = key(
        1.0,
        doc="Spread of the noise levels: above 1 more of the extremes, below 1 more of the middle. Without effect "
        "with uniform.",
        why="The common value.",
        gt=0,
        le=100,
    )
    guidance: Number = key(
        1.0,
        doc="The guidance the model is told in training. Not the guidance of drawing, which is sample.guidance.",
        why="1 trains the model as it is; 3.5 in training ruins it. A base without guidance ignores it.",
        ge=0,
        le=100,
    )
    t5_mask: Switch = key(
        False,
        doc="Whether the padding after a caption is hidden from the model.",
        why="FLUX was trained with it in sight, and the tools that draw with it show it.",
    )
    caption_dropout: Number = key(
        ByMethod(full=0.0, lora=0.05),
        doc="Share of the images that are trained with an empty caption, from 0 to 1.",
        why="A little keeps an adapter from hanging on its exact captions.",
        ge=0,
        le=1,
    )
    non_finite_steps: Count = key(
        3,
        doc="The run stops after this many steps in a row whose loss or gradient is no number (NaN, infinity). Such a "
        "step leaves the weights as they are, and no state is saved after it.",
        why="One may be an accident; three mean that something is wrong, and the newest state is good.",
        ge=1,
    )
    seed: Count = key(
        42,
        doc="Seed of everything drawn by chance: order, noise, noise level. The same on any number of GPUs.",
        why="Any number will do.",
        ge=0,
        le=MOST_SEED,
    )
    resume_from: Count | None = key(
        None,
        doc="Go back to the whole state of this step. What the run has made beyond it is set aside, not overwritten. "
        "States saved since then are gone on from as usual, so the line may stay in the job.",
        example=500,
        left_out="a run goes on from its newest whole state",
        ge=1,
    )
    save: Save = key(
        doc="When states are saved and how many stay. A state is all it takes to go on, a checkpoint included.",
        left_out="the defaults below",
    )
    sample: Sample = key(Sample(), doc="Pictures drawn during training.", left_out="no samples")
    validation: Validation | None = key(
        None,
        doc="Pictures that are held out of training, and tried now and then: their loss tells when the model begins to "
        "learn the others by heart. Write validation: {} for the defaults.",
        why="Few have pictures to spare.",
        left_out="no validation",
    )
    output: Output = key(
        Output(), doc="Where the result goes, beside output/ on the volume.", left_out="nothing leaves the pod"
    )
    ema: Ema | None = key(
        None,
        doc="Keep an average of the weights over the steps (EMA), which is steadier than the last step's. States and "
        "output hold the average then; the live weights go on in the newest state, from where fluxpod export --live "
        "writes them. ema: {} takes the defaults.",
        left_out="the output is the weights of the last step",
    )
    gpus: Count | None = key(
        None,
        doc="How many GPUs to use.",
        left_out="all that help",
        example=2,
        ge=1,
        le=64,
    )
    least_speed: Number | None = key(
        0.5,
        doc="Least share of the normal speed of its model that each GPU must reach in the probe at the start; a slower "
        "pod holds the job before anything is fetched. null runs anywhere.",
        why="Pods of one name and price were seen to differ by a factor of four; healthy ones reach 0.8 and more.",
        example=0.5,
        left_out="no pod is too slow",
        ge=0,
        le=1,
    )
    when_done: WhenDone = key(
        "idle",
        doc="What happens to the pod when the run is done: idle keeps it, stop stops it, terminate deletes it.",
        why="Nothing is lost by surprise.",
    )
    notify: Notify = key(
        Notify(),
        doc="Where a short message goes when the run is done, held or failed, and when the pod could not be stopped "
        "and is still billed. Addresses are secrets: $NAME stands for a variable of the pod's environment whose name "
        "has NTFY, DISCORD, SLACK, WEBHOOK or NOTIFY in it.",
        left_out="no messages",
    )
    plan: PlanOverrides = key(
        PlanOverrides(),
        doc="What the plan chooses by itself, with its reasons in `fluxpod check`. Write one only to override it.",
        left_out="the plan decides",
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, written: Any) -> Any:
        return complete(written) if isinstance(written, Mapping) else written

    @property
    def mixes_buckets(self) -> bool:
        """Whether what is left over in the buckets shares steps; else each bucket's rest is a smaller step of its own.

        A mixed step takes a pass for every bucket and keeps the gradients in between: nothing for an adapter, 22 GiB
        for a full model. It hangs on the job alone, so that the steps are the same on any number of GPUs.
        """
        return self.method == "lora"

    @property
    def resolutions(self) -> tuple[int, ...]:
        """The resolutions of the job; a dataset with its own overrides them."""
        return _sizes(self.resolution)


def _sizes(resolution: int | tuple[int, ...]) -> tuple[int, ...]:
    return resolution if isinstance(resolution, tuple) else (resolution,)


def is_single_file(base: str) -> bool:
    """Whether ``base`` is one weight file in BFL layout, which brings neither VAE nor text encoders."""
    return base.lower().endswith(SINGLE_FILE_ENDINGS)


def by_method(section: type[Section], method: str) -> dict[str, Any]:
    """The defaults of a section that depend on the method."""
    extras = {name: field.json_schema_extra for name, field in section.model_fields.items()}
    return {
        name: extra["by_method"][method]  # type: ignore[index, call-overload]
        for name, extra in extras.items()
        if isinstance(extra, dict) and "by_method" in extra
    }


def complete(written: Mapping[str, Any]) -> dict[str, Any]:
    """The job with the defaults that depend on other keys filled in; everything written stays as it is.

    A method that is missing or wrong is reported by validation; until then the job is completed as a full one.
    """
    method = "lora" if written.get("method") == "lora" else "full"
    filled: dict[str, Any] = by_method(Job, method)
    if rates := rates_of(written.get("optimizer"), method):
        filled["learning_rate"] = rates.usual
    plan = written.get("plan")
    if isinstance(plan, Mapping) and plan.get("optimizer_in_backward") is True:
        filled["max_grad_norm"] = None
    filled |= written
    save = filled.get("save", {})
    if isinstance(save, Mapping):
        defaults = by_method(Save, method)
        if method == "full" and isinstance(save.get("states"), int):
            defaults["weights"] = max(defaults["weights"], save["states"])  # a state needs its weights
        filled["save"] = defaults | dict(save)
    if isinstance(filled.get("ema"), Mapping):
        filled["ema"] = by_method(Ema, method) | dict(filled["ema"])
    if method == "lora" and filled.get("lora") is None:
        filled["lora"] = {}
    return filled
