"""GPU models that people rent, and what their maker says of them: the ground of estimates for pods not yet rented.

Sources: NVIDIA's data sheets of the data-centre cards (H200, H100, B200, A100, A40, A30, A10, L40S, L40, L4, V100, T4),
the RTX professional cards, and the architecture white papers of GeForce (GA102, Ada, RTX Blackwell). ``tflops`` is the
*dense* bf16 rate with 32-bit accumulation: data sheets print twice that ("with sparsity") for the newer ones, and
GeForce cards of the 30, 40 and 50 series reach only half of their 16-bit-accumulation figure. ``memory`` is what
nvidia-smi shows, in GiB, a little under the round number on the box (ECC and the driver take their part).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

GIB = 1 << 30
MOST_GPUS = 64  # of one pod
NVLINK_4 = 300.0  # GB/s that one GPU sends and receives in a collective, of 450 on paper (H100, H200)
NVLINK_3 = 200.0  # of 300 on paper (A100)
NVLINK_5 = 600.0  # of 900 on paper (Blackwell)
# Without NVLink traffic goes over PCIe, often through host memory: 2 GPUs of one H200 host without peer-to-peer moved
# 22 to 24 GB/s (3 x 11.9 GB in 1.52 s, 2 x 11.9 GB in 1.07 s); PCIe 4 hosts have about that on paper.
PCIE = 22.0


# What a large bf16 matrix product reaches. Measured by the mamf-finder of ml-engineering (S. Bekman's book, its
# accelerator chapter): A100 SXM 268 and PCIe 256 of 312, H100 and H200 SXM 794 and GH200 821 of 989, B200 1745 of 2250,
# each with its best shape; here, with 8192^3, one H200 784 to 789. The others are not measured: 0.75 is a rule of
# thumb, and cards whose power is small for their arithmetic (72 W for the L4's 121 TFLOP/s) hold less.
LOW_POWER = 0.5


@dataclass(frozen=True)
class GpuModel:
    name: str  # as people say it
    pattern: str  # matches nvidia-smi's name and people's, in lower case with blanks for - and _
    memory: float  # GiB
    tflops: float  # dense bf16, 32-bit accumulation; of cards without bf16 the fp16 rate
    bandwidth: float  # of its memory, GB/s
    capability: tuple[int, int]
    link: float = PCIE  # GB/s to the other GPUs of its host, each direction
    reached: float = 0.75  # share of ``tflops`` that a large matrix product reaches on a healthy card, see below

    @property
    def normal_tflops(self) -> float:
        return self.reached * self.tflops

    @property
    def normal_attention(self) -> float | None:
        """TFLOP/s of FlashAttention-2, forward and backward together, at 4608 tokens; None where nobody has told.

        A100: 190 at 4k tokens and head size 128, in the FlashAttention-2 paper. H200: 325 forward and 270 backward
        (2026-11-30), which is 284 together; the other Hopper cards by their rate.
        """
        if self.capability == (8, 0):
            return 0.60 * self.tflops
        return 284 / 989 * self.tflops if self.capability == (9, 0) else None

    @property
    def normal_bandwidth(self) -> float:
        """GB/s of a large copy, read and written: 4300 of 4800 on an H200 (2026-11-28), that is 0.9 of paper."""
        return 0.88 * self.bandwidth

    @property
    def normal_host_link(self) -> float:
        """GB/s between the card and pinned memory. PCIe 5 x16 (Hopper, Blackwell of the data centre) gives 50 to 55 of
        63 on paper, PCIe 4 x16 gives 24 to 26 of 31.5; GeForce 50 can do 5 but often sits in a host of 4."""
        if self.capability < (8, 0):
            return 12.0
        return 50.0 if (9, 0) <= self.capability < (12, 0) else 24.0

    @property
    def bf16(self) -> bool:
        return has_bf16(self.capability)

    @property
    def bytes(self) -> int:
        return int(self.memory * GIB)


def has_bf16(capability: tuple[int, int]) -> bool:
    """bf16 arithmetic came with compute capability 8.0 (Ampere); older cards emulate it, slower than fp32."""
    return capability >= (8, 0)


# The first pattern that is found in a name wins: the special before the general.
MODELS: tuple[GpuModel, ...] = (
    # Blackwell
    GpuModel("B300", r"\bg?b300\b", 268.6, 2250, 8000, (10, 3), NVLINK_5, reached=0.77),
    GpuModel("GB200", r"\bgb200\b", 184.3, 2500, 8000, (10, 0), NVLINK_5, reached=0.77),
    GpuModel("B200", r"\bb200\b", 179.1, 2250, 8000, (10, 0), NVLINK_5, reached=0.77),
    GpuModel("RTX PRO 6000 Max-Q", r"\bpro 6000\b.*max q", 95.6, 438.9, 1792, (12, 0)),
    GpuModel("RTX PRO 6000 Server", r"\bpro 6000\b.*server", 95.6, 503.8, 1597, (12, 0)),
    GpuModel("RTX PRO 6000", r"\bpro 6000\b|\b6000 (pro )?blackwell", 95.6, 503.8, 1792, (12, 0)),
    GpuModel("RTX 5090", r"\b(rtx ?)?5090\b", 31.8, 209.5, 1792, (12, 0)),
    GpuModel("RTX 5080", r"\b(rtx ?)?5080\b", 15.9, 112.6, 960, (12, 0)),
    GpuModel("RTX 5070 Ti", r"\b(rtx ?)?5070 ?ti\b", 15.9, 87.9, 896, (12, 0)),
    # Hopper
    GpuModel("H200 NVL", r"\bh200 nvl", 140.4, 835, 4800, (9, 0), reached=0.7),
    GpuModel("GH200", r"\bgh200\b", 95.6, 989, 4000, (9, 0), reached=0.8),
    GpuModel("H200", r"\bh200\b", 140.4, 989, 4800, (9, 0), NVLINK_4, reached=0.79),
    GpuModel("H100 NVL", r"\bh100 nvl", 93.6, 835, 3900, (9, 0), reached=0.7),
    GpuModel("H100 PCIe", r"\bh100\b.*pcie", 79.6, 756, 2000, (9, 0), reached=0.65),
    GpuModel("H100 SXM", r"\bh[18]00\b", 79.6, 989, 3350, (9, 0), NVLINK_4, reached=0.79),
    # Ada
    GpuModel("L40S", r"\bl40s\b", 45.0, 362, 864, (8, 9)),
    GpuModel("L40", r"\bl40g?\b", 45.0, 181, 864, (8, 9)),
    GpuModel("L4", r"\bl4\b", 22.5, 121, 300, (8, 9), reached=LOW_POWER),
    GpuModel("RTX 6000 Ada", r"\b6000 ada\b", 48.0, 364, 960, (8, 9)),
    GpuModel("RTX 5000 Ada", r"\b5000 ada\b", 32.0, 261, 576, (8, 9)),
    GpuModel("RTX 4500 Ada", r"\b4500 ada\b", 24.0, 158, 432, (8, 9)),
    GpuModel("RTX 4000 Ada", r"\b4000 (sff )?ada\b", 20.0, 82, 360, (8, 9), reached=LOW_POWER),
    GpuModel("RTX 2000 Ada", r"\b2000 ada\b", 16.0, 48, 224, (8, 9), reached=LOW_POWER),
    GpuModel("RTX 4090", r"\b(rtx ?)?4090\b", 24.0, 165.2, 1008, (8, 9)),
    GpuModel("RTX 4080 SUPER", r"\b(rtx ?)?4080 super\b", 16.0, 104.4, 736, (8, 9)),
    GpuModel("RTX 4080", r"\b(rtx ?)?4080\b", 16.0, 97.5, 717, (8, 9)),
    GpuModel("RTX 4070 Ti", r"\b(rtx ?)?4070 ?ti\b", 12.0, 80.2, 504, (8, 9)),
    # Ampere
    GpuModel("A100 40GB PCIe", r"\ba100\b.*pcie.*40 ?gb|\ba100\b.*40 ?gb.*pcie", 40.0, 312, 1555, (8, 0), reached=0.8),
    GpuModel("A100 40GB", r"\ba[18]00\b.*\b40 ?gb", 40.0, 312, 1555, (8, 0), NVLINK_3, reached=0.84),
    GpuModel("A100 80GB PCIe", r"\ba[18]00\b.*pcie", 80.0, 312, 1935, (8, 0), reached=0.8),
    GpuModel("A100 80GB", r"\ba[18]00\b", 80.0, 312, 2039, (8, 0), NVLINK_3, reached=0.84),
    GpuModel("A40", r"\ba40\b", 45.0, 149.7, 696, (8, 6)),
    GpuModel("A30", r"\ba30\b", 24.0, 165, 933, (8, 0), reached=0.7),
    GpuModel("A10G", r"\ba10g\b", 22.5, 70, 600, (8, 6)),
    GpuModel("A10", r"\ba10\b", 22.5, 125, 600, (8, 6), reached=LOW_POWER),
    GpuModel("RTX A6000", r"\ba6000\b", 48.0, 154.8, 768, (8, 6)),
    GpuModel("RTX A5000", r"\ba5000\b", 24.0, 111.1, 768, (8, 6)),
    GpuModel("RTX A4500", r"\ba4500\b", 20.0, 94.6, 640, (8, 6)),
    GpuModel("RTX A4000", r"\ba4000\b", 16.0, 76.7, 448, (8, 6)),
    GpuModel("RTX 3090 Ti", r"\b(rtx ?)?3090 ?ti\b", 24.0, 80, 1008, (8, 6)),
    GpuModel("RTX 3090", r"\b(rtx ?)?3090\b", 24.0, 71, 936, (8, 6)),
    GpuModel("RTX 3080 Ti", r"\b(rtx ?)?3080 ?ti\b", 12.0, 68, 912, (8, 6)),
    GpuModel("RTX 3080", r"\b(rtx ?)?3080\b", 10.0, 59.5, 760, (8, 6)),
    # Older ones are named so that the refusal can say what they are.
    GpuModel("Quadro RTX 8000", r"\brtx 8000\b", 45.0, 130.5, 672, (7, 5)),
    GpuModel("Quadro RTX 6000", r"\b(quadro )?rtx 6000\b", 22.5, 130.5, 672, (7, 5)),
    GpuModel("RTX 2080 Ti", r"\b(rtx ?)?2080 ?ti\b", 11.0, 53.8, 616, (7, 5)),
    GpuModel("T4", r"\bt4\b", 15.0, 65, 320, (7, 5)),
    GpuModel("V100 32GB", r"\bv100\b.*\b32 ?gb", 32.0, 125, 900, (7, 0)),
    GpuModel("V100", r"\bv100\b", 16.0, 125, 900, (7, 0)),
    GpuModel("P100", r"\bp100\b", 16.0, 18.7, 732, (6, 0)),
    GpuModel("P40", r"\bp40\b", 24.0, 0.2, 346, (6, 1)),
)


def _plain(name: str) -> str:
    return " ".join(re.sub(r"[-_/]", " ", name.lower()).split())


def counted(text: str) -> tuple[int | None, str]:
    """ "2xA100 80GB" as (2, "A100 80GB"); None for the number where none is written."""
    match = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?(.*)", text.strip(), re.IGNORECASE | re.DOTALL)
    assert match is not None
    return (int(match[1]) if match[1] else None), match[2]


def find_gpu(name: str) -> GpuModel | None:
    """The model that ``name`` means ("NVIDIA A100-SXM4-80GB", "2x" left out: "a100 80gb"), or None if unknown."""
    plain = _plain(name)
    return next((model for model in MODELS if re.search(model.pattern, plain)), None)


def nearest_names(name: str, most: int = 3) -> list[str]:
    """Known models whose names look like ``name``."""
    by_plain = {_plain(model.name): model.name for model in MODELS}
    return [by_plain[match] for match in difflib.get_close_matches(_plain(name), by_plain, n=most, cutoff=0.5)]
