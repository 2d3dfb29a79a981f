"""What an edited job means for a run that goes on: a row for every key.

This table decides what ``bootstrap.resume`` refuses, is what the log says of a changed key, and is printed in
docs/on-resume.md. A key of the schema without a row fails a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Options of optimizers that change how a state is used, not what is kept in it.
HARMLESS_OPTIONS = (
    *("betas", "beta1", "beta2", "beta3", "eps", "beta2_decay", "d", "d_coef", "growth_rate", "momentum_decay", "rho"),
    *("use_bias_correction", "safeguard_warmup", "decouple", "maximize", "foreach", "fused", "alpha", "lambd", "etas"),
)


@dataclass(frozen=True)
class Row:
    """``effect``: how a change takes effect, or why it is refused. ``same``: refused where it is false of the value a
    state was trained with and the job's; None where the key may change."""

    effect: str
    same: Callable[[Any, Any], bool] | None = None

    @property
    def may_change(self) -> bool:
        return self.same is None


def _equal(before: Any, now: Any) -> bool:
    return bool(before == now)


def _same_optimizer(before: str, now: str) -> bool:
    """A Paged one keeps the same states elsewhere."""
    return before.removeprefix("Paged") == now.removeprefix("Paged")


def _same_options(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    """Beside those that may change. A state of an older version does not tell."""
    if before is None:
        return True
    return {k: v for k, v in before.items() if k not in HARMLESS_OPTIONS} == {
        k: v for k, v in now.items() if k not in HARMLESS_OPTIONS
    }


_NEXT = "from the next step on"
_DRAWN = "from the next step on; pictures and noise of later steps are drawn anew"
_ENCODED = "what the cache lacks is encoded before training goes on; the order of pictures is drawn anew"
_CURVE = "the rate of a step is that of the new curve, as if it had always been so"
_PLAN = "the next start plans anew; numbers stay the same but for the order of sums"
_SAMPLES = "from the next samples on"
_ROUNDS = "from the next round on; rounds of other pictures or levels are not compared"
_SAVES = "from the next save on"

# Of datasets: what pictures look like, what captions say, and what only weighs them.
_LOOKS = ("flip", "crop", "random_crops", "mask")
_CAPTIONS = ("prefix", "suffix", "shuffle_tags", "keep_tags", "multiline", "wildcards")
_WEIGHTS = ("weight", "caption_dropout", "mask_floor", "mask_normalize")

ROWS: dict[str, Row] = {
    "name": Row("another name is another run: this one stays as it is"),
    "base": Row("the trained weights are those of the base", _equal),
    "vae": Row(_ENCODED),
    "text_encoders.clip": Row(_ENCODED),
    "text_encoders.t5": Row(_ENCODED),
    "method": Row("an adapter's state is no checkpoint's", _equal),
    "lora.rank": Row("the adapter has this size", _equal),
    "lora.alpha": Row("the adapter's weights mean something else under another strength", _equal),
    "lora.targets": Row("the adapter has these layers", _equal),
    "lora.layout": Row(_SAVES),
    "lora.layers.learning_rate": Row(_NEXT),
    "lora.layers.match": Row("the adapter has these layers", _equal),
    "lora.layers.rank": Row("the adapter has this size there", _equal),
    "lora.layers.alpha": Row("the adapter's weights mean something else under another strength", _equal),
    "lora.dora": Row("the adapter has lengths of rows, or it has none", _equal),
    "lora.rslora": Row("the adapter's weights mean something else under another strength", _equal),
    "lora.dropout": Row(_NEXT),
    "lora.start": Row("without effect: the adapter goes on from its state"),
    "assistant_lora": Row("the adapter was trained beside this one", _equal),
    "datasets.path": Row("pictures may come and go: " + _ENCODED),
    "datasets.repeats": Row(_DRAWN),
    "datasets.trigger": Row(_ENCODED),
    "datasets.caption": Row(_ENCODED),
    "datasets.resolution": Row(_ENCODED),
    **{f"datasets.{name}": Row(_ENCODED) for name in (*_LOOKS, *_CAPTIONS)},
    **{f"datasets.{name}": Row(_NEXT) for name in _WEIGHTS},
    "bad_images": Row("at the next start, which looks through the pictures"),
    "steps": Row("counted from the run's first step; a curve that depends on the length is that of the new one"),
    "epochs": Row("counted from the run's first step; a curve that depends on the length is that of the new one"),
    "images_per_step": Row(_DRAWN),
    "resolution": Row(_ENCODED),
    "bucket_step": Row(_ENCODED),
    "upscale": Row(_ENCODED),
    "learning_rate": Row(_NEXT),
    "schedule": Row(_CURVE),
    "schedule_args": Row(_CURVE),
    "warmup": Row(_CURVE),
    "optimizer": Row("each optimizer keeps states of its own; one and its Paged twin keep the same", _same_optimizer),
    "optimizer_args": Row(
        "options such as betas and eps may change, not those that decide what is kept", _same_options
    ),
    "weight_decay": Row(_NEXT),
    "max_grad_norm": Row(_NEXT),
    "timestep_sampling": Row(_NEXT),
    "discrete_flow_shift": Row(_NEXT),
    "sigmoid_scale": Row(_NEXT),
    "guidance": Row(_NEXT),
    "t5_mask": Row(_NEXT),
    "caption_dropout": Row(_NEXT),
    "non_finite_steps": Row(_NEXT),
    "seed": Row(_DRAWN),
    "resume_from": Row("goes back to that state; what was made beyond it is set aside"),
    "save.every": Row(_SAVES),
    "save.states": Row(_SAVES + "; what is gone does not come back"),
    "save.weights": Row(_SAVES + "; what is gone does not come back"),
    "save.keep_every": Row(_SAVES + "; what is gone does not come back"),
    "save.on_error": Row(_SAVES),
    "sample.every": Row(_SAMPLES),
    "sample.prompts": Row(_SAMPLES),
    "sample.prompts_file": Row(_SAMPLES + "; the file itself may be edited at any time"),
    "sample.width": Row(_SAMPLES),
    "sample.height": Row(_SAMPLES),
    "sample.steps": Row(_SAMPLES),
    "sample.guidance": Row(_SAMPLES),
    "sample.seed": Row(_SAMPLES),
    "validation.fraction": Row("at the next start; what was trained on before and is held out now tells less"),
    "validation.path": Row(_ROUNDS),
    "validation.every": Row(_ROUNDS),
    "validation.images": Row(_ROUNDS),
    "validation.levels": Row(_ROUNDS),
    "validation.best": Row(_SAVES + "; what is gone does not come back"),
    "output.hub": Row("from the next start on; another repository is given everything anew"),
    "output.private": Row("where the repository is made; one that is there stays as it is"),
    "output.states": Row("from the next start on, with the states that are there by then"),
    "ema.decay": Row(
        _NEXT + "; an average that is new begins with the weights it finds, one that goes leaves the live ones"
    ),
    "ema.every": Row(_NEXT),
    "ema.dtype": Row("the average is taken over into the other format"),
    "ema.samples": Row(_SAMPLES),
    "gpus": Row(_PLAN),
    "least_speed": Row("at the next start, which measures the pod"),
    "when_done": Row("at the end of the run"),
    "notify.ntfy": Row("from the next message on"),
    "notify.discord": Row("from the next message on"),
    "notify.slack": Row("from the next message on"),
    "notify.webhook": Row("from the next message on"),
    "plan.processes": Row(_PLAN),
    "plan.sharding": Row(_PLAN),
    "plan.checkpointing": Row(_PLAN),
    "plan.base_precision": Row("the next start keeps the frozen base that way, which rounds it otherwise"),
    "plan.compile": Row(_PLAN),
    "plan.images_per_pass": Row(_PLAN),
    "plan.optimizer_in_backward": Row(_PLAN),
    "plan.optimizer_states": Row(_PLAN),
    "plan.products": Row("the next start multiplies that way, which rounds otherwise"),
    "plan.retry": Row("at the next time memory runs out"),
}


def as_markdown() -> str:
    """The table for people: what is refused first."""
    lines = [
        "# What may change when a run goes on",
        "",
        "A job that is edited and started again goes on with its new values. Each change stands in the log.",
        "Made by `python -m jobs.reference` from jobs/on_resume.py.",
        "",
        "| key | may change | how it takes effect, or why not |",
        "|---|---|---|",
    ]
    rows = sorted(ROWS.items(), key=lambda item: item[1].may_change)
    lines += [f"| `{key}` | {'yes' if row.may_change else 'no'} | {row.effect} |" for key, row in rows]
    lines += [
        "",
        "What may not change is refused with code 64, and with what to write to start a new run from these weights.",
    ]
    return "\n".join(lines) + "\n"
