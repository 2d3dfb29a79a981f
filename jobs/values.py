"""The kinds of values a job holds, and how strictly each is read.

Every kind answers a wrong value with one message and one remedy; the loader adds file, line and key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

OPTIMIZERS = (
    "AdamW",
    "AdamW8bit",
    "PagedAdamW8bit",
    "PagedAdamW32bit",
    "Lion8bit",
    "PagedLion8bit",
    "Adafactor",
    "Prodigy",
)
BLOCKWISE_OPTIMIZERS = ("AdamW8bit", "PagedAdamW8bit", "PagedAdamW32bit", "Lion8bit", "PagedLion8bit")
BLOCKWISE_ARGS = ("betas", "eps")
SCHEDULE_ARGS = {
    "constant": (),
    "linear": ("end",),
    "cosine": ("end",),
    "cosine_with_restarts": ("cycles", "end"),
    "polynomial": ("power", "end"),
}
SCHEDULES = tuple(SCHEDULE_ARGS)
LORA_TARGETS = ("attention", "feed-forward", "modulation", "embedders", "all-linear")  # may be joined by +
LORA_LAYOUTS = ("kohya", "diffusers")
METHODS = ("lora", "full")
CROP_POINTS = {
    "center": (0.5, 0.5),
    "top": (0.5, 0.0),
    "bottom": (0.5, 1.0),
    "left": (0.0, 0.5),
    "right": (1.0, 0.5),
}
MOST_SEED = 2**63 - 1
BASE_PRECISIONS = ("bf16", "int8", "fp8", "nf4")
PRODUCTS = ("bf16", "fp8-rowwise", "fp8-tensorwise")
TIMESTEP_SAMPLINGS = ("flux_shift", "shift", "sigmoid", "uniform")


def shown(value: Any, most: int = 60) -> str:
    """A value as a message shows it: text in quotes, everything short."""
    names = {None: "nothing", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return names[value]
    if isinstance(value, Mapping):
        return "a group of keys"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to print the longest ones
        return "a very long number"
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}...{text[0]}"


def wrong(message: str, remedy: str = "") -> PydanticCustomError:
    """The error of a value; the loader adds file, line and key."""
    return PydanticCustomError("job", "{message}", {"message": message, "remedy": remedy})


IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_INFINITE = (float("inf"), float("-inf"))


def _number(value: Any) -> float:
    """1e-4, 0.0001 and "1e-4" are the same number; 1,000, nan, inf and true are none."""
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value.strip()):
            bare = value.strip().replace(",", "").replace("_", "").replace(" ", "")
            example = bare if _NUMBER.fullmatch(bare) else "1e-4 or 0.0001"
            raise wrong(f"{shown(value)} is not a number", f"Write a plain number, such as {example}")
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong(f"{shown(value)} is not a number", "Write a plain number, such as 1e-4 or 0.0001")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if number != number or number in _INFINITE:
        raise wrong(f"{shown(value)} is not a finite number", "Write a plain number, such as 1e-4 or 0.0001")
    return number


def _count(value: Any) -> int:
    """A whole number of 63 bits: 1000, 1e3 and "1000", not 2.5."""
    number = _number(value)
    if number != int(number):
        raise wrong(f"{shown(value)} is not a whole number", f"Write {round(number)}, for example")
    digits = isinstance(value, str) and value.strip().lstrip("+-").isdigit()
    whole = int(value) if digits or isinstance(value, int) else int(number)  # a float holds only 53 bits of it
    if abs(whole) >= 2**63:
        raise wrong(f"{shown(value)} is too large", "Write a smaller number")
    return whole


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, (Mapping, list, tuple)):
        raise wrong(
            f"{shown(value)} stands where text is needed", "Put it in quotes if a colon, - or [ is part of the text"
        )
    raise wrong(f"{shown(value)} is read as {_kind(value)}, not as text", f'Put it in quotes: "{shown(value)}"')


def _kind(value: Any) -> str:
    return "yes or no" if isinstance(value, bool) else "a number"


def _some_text(value: Any) -> str:
    if not _text(value).strip():
        raise wrong("is empty", "Write something, or leave the key out if it can be left out")
    return str(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(f"{shown(value)} is neither true nor false", "Write true or false")
    return value


def _name(value: Any) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", _some_text(value)):
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-.") or "my-lora"
        raise wrong(
            f"{shown(value)} cannot name a folder and a file",
            f"Use letters, digits, '.', '_' and '-' only, at most 100, such as {slug[:100]}",
        )
    return str(value)


def _path(value: Any) -> str:
    text = _some_text(value)
    if re.match(r"[A-Za-z]:[\\/]", text):
        raise wrong(
            f"{shown(value)} is a path of a Windows computer, which the pod cannot see",
            "Copy the folder to the volume and write its path there, such as datasets/my-pictures",
        )
    if any(ord(letter) < 32 for letter in text):
        raise wrong(f"{shown(value)} holds a line break or another control character", "Use / between folders")
    return text


# What stands for the value of a variable of the pod's environment: $NAME or ${NAME}.
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))", re.ASCII)
# Only variables that say what they are for: else a job from a stranger could have HF_TOKEN sent to them.
ADDRESS_WORDS = ("NTFY", "DISCORD", "SLACK", "WEBHOOK", "NOTIFY")


def _address(value: Any) -> str:
    """Where a message goes: http(s)://..., where $NAME stands for a variable. Never shown, since it may be a secret."""
    text = _some_text(value).strip()
    if not re.match(r"https?://[^/\s]|\$", text) or any(letter.isspace() for letter in text):
        remedy = "Write https://..., or $DISCORD_WEBHOOK and set that variable in the pod's environment"
        raise wrong("this is not an address", remedy)
    if re.search(r"\$(?![{\w])", text) or (text.startswith("$") and not VARIABLE.match(text)):
        raise wrong("there is a $ without a name", "Write the name of a variable after it, such as $DISCORD_WEBHOOK")
    for match in VARIABLE.finditer(text):
        name = match[1] or match[2]
        if not any(word in name.upper() for word in ADDRESS_WORDS):
            remedy = f"Give the variable a name with one of {', '.join(ADDRESS_WORDS)} in it, such as NOTIFY_{name}"
            raise wrong(f"{name} may not be sent to an address", remedy)
    return text


# As the hub takes them: letters, digits, '-', '_' and '.', no two of '-' or '.' together, none at an end.
REPO_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_]|[.-](?![.-]))*(?<![.-])"
_REPO = re.compile(rf"{REPO_PART}/{REPO_PART}")
_HUB_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/")


def _hub_repo(value: Any) -> str:
    """owner/name, as in the address of a repository's page."""
    text = _HUB_PAGE.sub("", _some_text(value).strip()).removesuffix("/")
    if _REPO.fullmatch(text) and len(text) <= 96:
        return text
    if "/" not in text:
        raise wrong(f"{shown(value)} names no owner", f"Write your-account/{text}: whose account, then a name")
    remedy = "Write owner/name of letters, digits, '.', '_' and '-', at most 96, such as me/paper-flowers"
    raise wrong(f"{shown(value)} is no name of a hub repository", remedy)


def _choose(value: Any, known: tuple[str, ...], otherwise: str = "") -> str:
    """``value`` where it is one of ``known`` or, with ``otherwise`` (what to call that), an import path."""
    if isinstance(value, str) and (value in known or (otherwise and re.fullmatch(IMPORT_PATH, value))):
        return value
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(value).lower(), by_lower, n=1) if isinstance(value, str) else []
    guess = f"Did you mean {by_lower[near[0]]}? " if near else ""
    also = f", or {otherwise}" if otherwise else ""
    raise wrong(f"{shown(value)} is not known here", f"{guess}Write one of {', '.join(known)}{also}")


def one_of(*known: str, otherwise: str = "") -> BeforeValidator:
    return BeforeValidator(lambda value: _choose(value, known, otherwise))


def _in_steps_of_16(value: int, least: int, most: int) -> int:
    if not least <= value <= most or value % 16:
        near = min(max(round(value / 16) * 16, least), most)
        raise wrong(f"{value} is not a multiple of 16 from {least} to {most}", f"Write {near}, for example")
    return value


def _resolution(value: Any) -> int | tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        return _in_steps_of_16(_count(value), 64, 2048)
    sizes = tuple(_in_steps_of_16(_count(each), 64, 2048) for each in value)
    if not sizes or len(set(sizes)) < len(sizes):
        raise wrong("the list is empty or names a size twice", "Write each size once, such as [512, 768, 1024]")
    return sizes


def _side(value: Any) -> int:
    return _in_steps_of_16(_count(value), 64, 4096)


def _bucket_step(value: Any) -> int:
    return _in_steps_of_16(_count(value), 16, 512)


def _crop_focus(value: Any) -> str | tuple[float, float]:
    if not isinstance(value, (list, tuple)):
        return _choose(value, tuple(CROP_POINTS), otherwise="")
    point = tuple(_number(each) for each in value)
    if len(point) != 2 or not all(0 <= share <= 1 for share in point):
        raise wrong("the list is no point of a picture", "Write [x, y], both from 0 to 1, such as [0.5, 0.3]")
    return point[0], point[1]


def _targets(value: Any) -> str | tuple[str, ...]:
    """Names of groups of layers joined by +, or a list of such names and of patterns of module names."""
    if isinstance(value, (list, tuple)):
        if not value:
            raise wrong("the list is empty, so no layer is meant", f"Write one of {', '.join(LORA_TARGETS)}")
        return tuple(_some_text(each) for each in value)
    if isinstance(value, str) and all(part in LORA_TARGETS for part in value.split("+")):
        return value
    remedy = f"Write one of {', '.join(LORA_TARGETS)}, some of them joined by +, or a list of patterns of module names"
    raise wrong(f"{shown(value)} is not known here", remedy)


def _kept_weights(value: Any) -> int | str:
    if isinstance(value, str) and value == "all":
        return value
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        raise wrong(f"{shown(value)} is neither a number nor all", "Write a number from 1, or all")
    number = _count(value)
    if number < 1:
        raise wrong(f"{number} is too few", "Write a number from 1, or all")
    return number


_INTERVAL = re.compile(r"(\d+)\s*(epochs?|m|min|minutes?|h|hours?)")


def _interval(value: Any) -> int | str:
    """Steps as a number, or text: "30m", "2h", "1 epoch", "5 epochs"."""
    match = _INTERVAL.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        if isinstance(value, str) and not _NUMBER.fullmatch(value.strip()):
            raise wrong(f"{shown(value)} is no interval", "Write steps (500), minutes (30m), hours (2h) or 5 epochs")
        number, text = _count(value), None
    else:
        number, unit = int(match[1]), match[2]
        text = f"{number} epoch{'s' if number > 1 else ''}" if unit.startswith("epoch") else f"{number}{unit[0]}"
    if not 1 <= number <= 10**9:
        raise wrong(f"{number} is out of range", "Write a number from 1")
    return number if text is None else text


class Interval(NamedTuple):
    """How far apart two saves are."""

    kind: Literal["steps", "epochs", "minutes"]
    number: int


def interval_of(value: int | str) -> Interval:
    """What a value that ``_interval`` has let pass means."""
    if isinstance(value, int):
        return Interval("steps", value)
    match = _INTERVAL.fullmatch(value)
    assert match is not None
    if match[2].startswith("epoch"):
        return Interval("epochs", int(match[1]))
    return Interval("minutes", int(match[1]) * (60 if match[2] == "h" else 1))


def _options(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise wrong(f"{shown(value)} is not a group of options", "Write {name: value, name: value}")
    return dict(value)


def json_schema(**schema: Any) -> WithJsonSchema:
    return WithJsonSchema(schema)


_SIZE = {"type": "integer", "minimum": 64, "maximum": 2048, "multipleOf": 16}


def _known_or_path(known: tuple[str, ...]) -> WithJsonSchema:
    return json_schema(anyOf=[{"enum": list(known)}, {"type": "string", "pattern": f"^{IMPORT_PATH}$"}])


Number = Annotated[float, BeforeValidator(_number)]
Count = Annotated[int, BeforeValidator(_count)]
Text = Annotated[str, BeforeValidator(_some_text)]
AnyText = Annotated[str, BeforeValidator(_text)]
Switch = Annotated[bool, BeforeValidator(_switch)]
FilePath = Annotated[str, BeforeValidator(_path), json_schema(type="string", minLength=1)]
Address = Annotated[str, BeforeValidator(_address), json_schema(type="string", pattern=r"^(https?://|\$)\S+$")]
Name = Annotated[str, BeforeValidator(_name), json_schema(type="string", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")]
HubRepo = Annotated[
    str,
    BeforeValidator(_hub_repo),
    json_schema(type="string", pattern=rf"^(https?://[^/]+/)?{REPO_PART}/{REPO_PART}/?$"),
]
Resolution = Annotated[
    int | tuple[int, ...],
    BeforeValidator(_resolution),
    json_schema(anyOf=[_SIZE, {"type": "array", "items": _SIZE, "minItems": 1, "uniqueItems": True}]),
]
Side = Annotated[int, BeforeValidator(_side), json_schema(**(_SIZE | {"maximum": 4096}))]
BucketStep = Annotated[int, BeforeValidator(_bucket_step), json_schema(**(_SIZE | {"minimum": 16, "maximum": 512}))]
_TARGET = f"({'|'.join(LORA_TARGETS)})"
Targets = Annotated[
    str | tuple[str, ...],
    BeforeValidator(_targets),
    json_schema(
        anyOf=[
            {"enum": ["attention+feed-forward", *LORA_TARGETS]},
            {"type": "string", "pattern": rf"^{_TARGET}(\+{_TARGET})*$"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
        ]
    ),
]
_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
CropFocus = Annotated[
    str | tuple[float, float],
    BeforeValidator(_crop_focus),
    json_schema(anyOf=[{"enum": list(CROP_POINTS)}, {"type": "array", "items": _SHARE, "minItems": 2, "maxItems": 2}]),
]
KeptWeights = Annotated[
    int | Literal["all"],
    BeforeValidator(_kept_weights),
    json_schema(anyOf=[{"type": "integer", "minimum": 1}, {"const": "all"}]),
]
SaveInterval = Annotated[
    int | str,
    BeforeValidator(_interval),
    json_schema(
        anyOf=[
            {"type": "integer", "minimum": 1},
            {"type": "string", "pattern": r"^\d+\s*(epochs?|m|min|minutes?|h|hours?)$"},
        ]
    ),
]
Options = Annotated[dict[str, Any], BeforeValidator(_options), json_schema(type="object")]
MethodName = Annotated[Literal["lora", "full"], one_of(*METHODS)]
TimestepSampling = Annotated[
    Literal["flux_shift", "shift", "sigmoid", "uniform"],
    one_of(*TIMESTEP_SAMPLINGS),
]
WhenDone = Annotated[Literal["idle", "stop", "terminate"], one_of("idle", "stop", "terminate")]
BadImages = Annotated[Literal["fail", "skip"], one_of("fail", "skip")]
BestState = Annotated[Literal["tell", "keep", "output"], one_of("tell", "keep", "output")]
OnError = Annotated[Literal["go-on", "stop"], one_of("go-on", "stop")]
Sharding = Annotated[Literal["none", "fsdp"], one_of("none", "fsdp")]
LoraLayout = Annotated[Literal["kohya", "diffusers"], one_of(*LORA_LAYOUTS)]
BasePrecision = Annotated[Literal["bf16", "int8", "fp8", "nf4"], one_of(*BASE_PRECISIONS)]
AverageType = Annotated[Literal["fp32", "bf16"], one_of("fp32", "bf16")]
Products = Annotated[Literal["bf16", "fp8-rowwise", "fp8-tensorwise"], one_of(*PRODUCTS)]
StatesPlace = Annotated[Literal["device", "host"], one_of("device", "host")]
Optimizer = Annotated[
    str, one_of(*OPTIMIZERS, otherwise="an import path such as package.module.Class"), _known_or_path(OPTIMIZERS)
]
Schedule = Annotated[
    str, one_of(*SCHEDULES, otherwise="an import path such as package.module.function"), _known_or_path(SCHEDULES)
]
