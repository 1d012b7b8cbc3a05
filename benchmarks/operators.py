"""Liger-Kernel's benchmark of single operators, its plain torch side: what each script keeps and what it runs.

Source: linkedin/Liger-Kernel, benchmark/scripts/benchmark_*.py and utils.py (`_test_memory`): the peak is reset,
the function is called, and the median of ten such peaks is published. Gradients stay from call to call, so from
the second call on the peak is the same. Liger's own module is made beside torch's in most scripts: it is resident.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Config = dict[str, Any]


class Operator(nn.Module):
    """An operator as its script runs it.

    Args:
        config: The script's settings with the row's own one among them.
        mode: ``full``, ``forward`` or ``backward``.
    """

    modes: ClassVar[tuple[str, ...]] = ("full",)
    retain = True
    """The script passes ``retain_graph=True``."""

    def __init__(self, config: Config, mode: str) -> None:
        super().__init__()
        if mode not in self.modes:
            raise ValueError(f"the script measures no memory in mode {mode!r}")
        self.mode, self.config = mode, config
        self.dtype = {"torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16}.get(
            str(config.get("dtype")), torch.float32
        )
        self.ready = False
        self.make()

    def make(self) -> None:
        """Parameters and buffers: what the script has before it runs anything."""
        raise NotImplementedError

    def prepare(self) -> None:
        """What the script computes once, before it measures."""

    def result(self) -> Tensor:
        """The operator's forward."""
        raise NotImplementedError

    def gradient(self, out: Tensor) -> Tensor | None:
        """What backward starts with; ``None`` where the result is a scalar."""
        return None

    def run(self) -> Any:
        """One call of the measured function: something whose ``backward()`` is its rest."""
        if not self.ready:
            self.ready = True
            self.prepare()
            if self.mode == "backward":
                self.kept = self.result()
            elif self.mode == "forward":
                _take_workspaces()
        if self.mode == "forward":
            self.result()
            return _Rest(None)
        out = self.kept if self.mode == "backward" else self.result()
        return _Rest(lambda: out.backward(self.gradient(out), retain_graph=self.retain))

    def beside(self, *sizes: int, dtype: torch.dtype = torch.float32) -> None:
        """Weights of the candidate that is not run."""
        for number, size in enumerate(sizes):
            self.register_buffer(f"beside_{number}", torch.empty(size, dtype=dtype))


class _Rest:
    def __init__(self, backward: Callable[[], Any] | None) -> None:
        self._backward = backward

    def backward(self) -> None:
        if self._backward is not None:
            self._backward()


def _take_workspaces() -> None:
    """The speed runs of the same script came first: both threads have their cuBLAS workspace."""
    weight = torch.empty(1, 1, requires_grad=True)
    (weight @ weight).sum().backward()


class _Keeps(Operator):
    """``x`` and the gradient of the result are made once: ``x`` [rows, columns]."""

    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def module(self) -> nn.Module:
        raise NotImplementedError

    def make(self) -> None:
        self.x = nn.Parameter(torch.empty(self.shape(), dtype=self.dtype))
        self.register_buffer("dy", torch.empty(self.shape(), dtype=self.dtype))
        self.layer = self.module()

    def result(self) -> Tensor:
        return self.layer(self.x)  # type: ignore[no-any-return]

    def gradient(self, out: Tensor) -> Tensor:
        return self.dy  # type: ignore[no-any-return]


class LayerNorm(_Keeps):
    def shape(self) -> tuple[int, ...]:
        return self.config["M"], self.config["N"]

    def module(self) -> nn.Module:
        self.beside(self.config["N"], self.config["N"])
        return nn.LayerNorm(self.config["N"], self.config["eps"])


class RMSNorm(_Keeps):
    def shape(self) -> tuple[int, ...]:
        return self.config["M"], self.config["H"]

    def module(self) -> nn.Module:
        self.beside(self.config["H"])
        return _LlamaNorm(self.config["H"], self.config["eps"])


class GroupNorm(_Keeps):
    """All three modes: the script passes them on to the file, and runs the whole each time."""

    modes = ("full", "forward", "backward")

    def shape(self) -> tuple[int, ...]:
        return self.config["M"], self.config["C"], self.config["H"]

    def module(self) -> nn.Module:
        self.mode, channels = "full", self.config["C"]
        self.beside(channels, channels)
        return nn.GroupNorm(channels // self.config["channels_per_group"], channels, self.config["eps"])


class DyT(_Keeps):
    def shape(self) -> tuple[int, ...]:
        return self.config["BT"], self.config["hidden_size"]

    def module(self) -> nn.Module:
        width, beta = self.config["hidden_size"], self.config.get("beta", True)
        self.beside(*(2 * [1, width, *([width] if beta else [])]))  # a compiled one and Liger's
        return _DynamicTanh(width, beta)


class Sparsemax(_Keeps):
    def shape(self) -> tuple[int, ...]:
        return self.config["B"] * self.config["T"], self.config["V"]

    def module(self) -> nn.Module:
        return _Sparsemax()


class Softmax(Operator):
    modes = ("full", "forward", "backward")

    def make(self) -> None:
        rows = self.config["M"] if "M" in self.config else self.config["B"] * self.config["T"]
        columns = next(self.config[key] for key in ("N", "V", "H") if key in self.config)
        self.x = nn.Parameter(torch.empty(rows, columns, dtype=self.dtype))

    def result(self) -> Tensor:
        return F.softmax(self.x, dim=-1)

    def prepare(self) -> None:
        if self.mode == "backward":
            self.ones = torch.ones_like(self.x)

    def gradient(self, out: Tensor) -> Tensor:
        return self.ones if self.mode == "backward" else torch.ones_like(out)


class GatedMLP(Operator):
    """SwiGLU and GeGLU: LlamaMLP, with the gradient of the result drawn in each call."""

    modes = ("full", "forward", "backward")

    def make(self) -> None:
        config = self.config
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.x = nn.Parameter(torch.empty(config.get("bsz", config.get("B")), config["T"], width, dtype=self.dtype))
        self.gate, self.up = (nn.Linear(width, inner, bias=False, dtype=self.dtype) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False, dtype=self.dtype)

    def result(self) -> Tensor:
        gate = self.gate(self.x)
        act = F.silu(gate) if self.config["hidden_act"] == "silu" else F.gelu(gate, approximate="tanh")
        del gate
        return self.down(act * self.up(self.x))  # type: ignore[no-any-return]

    def prepare(self) -> None:
        if self.mode == "backward":
            self.drawn = torch.randn_like(self.x)

    def gradient(self, out: Tensor) -> Tensor:
        return self.drawn if self.mode == "backward" else torch.randn_like(out)


class CrossEntropy(Operator):
    retain = False

    def make(self) -> None:
        rows = self.config["B"] * self.config["T"]
        self.x = nn.Parameter(torch.empty(rows, self.config["V"], dtype=self.dtype))
        self.register_buffer("target", torch.zeros(rows, dtype=torch.int64))

    def result(self) -> Tensor:
        return F.cross_entropy(self.x, self.target)


class FusedLinearCrossEntropy(Operator):
    retain = False

    def make(self) -> None:
        rows, width, words = self.config["BT"], self.config["H"], self.config["V"]
        self.x = nn.Parameter(torch.empty(rows, width, dtype=self.dtype))
        self.register_buffer("target", torch.zeros(rows, dtype=torch.int64))
        self.head = nn.Linear(width, words, bias=False, dtype=self.dtype)
        self.beside(width * words, dtype=self.dtype)

    def result(self) -> Tensor:
        return F.cross_entropy(self.head(self.x), self.target)


class FusedLinearJSD(Operator):
    """Both candidates share the weights of student and teacher; the teacher's have a gradient too."""

    retain = False

    def make(self) -> None:
        rows, width, words = self.config["BT"], self.config["H"], self.config["V"]
        self.x = nn.Parameter(torch.empty(rows, width, dtype=self.dtype))
        self.register_buffer("teacher_x", torch.empty(rows, width, dtype=self.dtype))
        self.student, self.teacher = (nn.Linear(width, words, bias=False, dtype=self.dtype) for _ in range(2))

    def result(self) -> Tensor:
        student, teacher = self.student(self.x), self.teacher(self.teacher_x)
        log_student = torch.log_softmax(student / 1.0, dim=-1)
        log_teacher = torch.log_softmax(teacher / 1.0, dim=-1)
        return _jensen_shannon(log_student, log_teacher).to(self.dtype)


class _Probabilities(Operator):
    """Two distributions of B * T rows; the tensor that the first was made of stays, for its gradient adds up."""

    def make(self) -> None:
        self.x = nn.Parameter(torch.empty(self.config["B"] * self.config["T"], self.config["V"]))

    def prepare(self) -> None:
        self.input, self.target = self.first(self.x), self.second(torch.randn_like(self.x))

    def first(self, x: Tensor) -> Tensor:
        return x.log_softmax(dim=-1)

    def second(self, x: Tensor) -> Tensor:
        return x.softmax(dim=-1)


class KLDiv(_Probabilities):
    def result(self) -> Tensor:
        return F.kl_div(self.input, self.target, reduction="batchmean")


class JSD(_Probabilities):
    def second(self, x: Tensor) -> Tensor:
        return x.log_softmax(dim=-1)

    def result(self) -> Tensor:
        return _jensen_shannon(self.input, self.target)


class TVD(_Probabilities):
    def first(self, x: Tensor) -> Tensor:
        return x.softmax(dim=-1)

    def result(self) -> Tensor:
        distance = torch.abs(self.input - self.target) / 2.0
        return torch.sum(distance) / self.input.size(0)


class Embedding(Operator):
    """The script runs for speed first, compiled modules among the rest, and these are not released.

    What is left when memory is measured is, to the byte, the last setting's (tables 4,096 wide, float32, of 2^10 to
    2^17 rows): once from its forward runs, and once with gradients from its full runs. That these stay and the first
    setting's do not was read off two published rows, not derived; so only the first setting (BERT's) is rebuilt.
    """

    retain = False

    def make(self) -> None:
        config = self.config
        if config["D"] != 768 or self.dtype is not torch.float32:
            raise ValueError("what compiled modules of the runs before have left behind has no rule for this width")
        self.table = nn.Embedding(config["V"], config["D"])
        self.beside(config["V"] * config["D"])
        self.register_buffer("ids", torch.zeros(config["B"], config["T"], dtype=torch.int64))
        left = [torch.empty(2**power, 4096) for power in range(10, 18) for _ in ("forward", "full", "gradient of full")]
        for number, tensor in enumerate(left):
            self.register_buffer(f"left_{number}", tensor)

    def result(self) -> Tensor:
        return self.table(self.ids)  # type: ignore[no-any-return]

    def gradient(self, out: Tensor) -> Tensor:
        return torch.randn_like(out)


class Rope(Operator):
    """Rotary embedding of queries and keys, laid out [batch, time, heads, width] and seen transposed."""

    axes = 1

    def make(self) -> None:
        config = self.config
        width, time = config.get("hidden_size", config.get("H")), config.get("seq_len", config.get("T"))
        self.width = width // config["num_q_heads"]
        self.q, self.k = (
            nn.Parameter(torch.empty(1, time, config[heads], self.width, dtype=self.dtype))
            for heads in ("num_q_heads", "num_kv_heads")
        )
        self.register_buffer("frequencies", torch.empty(self.width // 2))
        self.register_buffer("positions", torch.zeros(self.axes, time, dtype=torch.int64))

    def prepare(self) -> None:
        self.seen = self.q.transpose(1, 2), self.k.transpose(1, 2)
        self.dy = tuple(torch.randn_like(tensor) for tensor in self.seen)
        angles = (self.frequencies[None, :, None].expand(self.axes, -1, 1) @ self.positions[:, None, :].float()).transpose(1, 2)
        if self.axes > 1:
            angles = angles[:, None]
        both = torch.cat((angles, angles), dim=-1)
        self.cos, self.sin = both.cos().to(self.dtype), both.sin().to(self.dtype)

    def rotation(self) -> tuple[Tensor, Tensor]:
        return self.cos.unsqueeze(1), self.sin.unsqueeze(1)

    def run(self) -> Any:
        if not self.ready:
            self.ready = True
            self.prepare()
        cos, sin = self.rotation()
        out = [tensor * cos + _half_turned(tensor) * sin for tensor in self.seen]
        del cos, sin
        return _Rest(lambda: torch.autograd.grad(out, self.seen, self.dy, allow_unused=True, retain_graph=True))


class MultimodalRope(Rope):
    """Qwen2-VL's: positions of time, height and width, each for its section of the channels."""

    axes = 3

    def rotation(self) -> tuple[Tensor, Tensor]:
        side = self.width * 3 // 16
        sections = [self.width // 2 - 2 * side, side, side] * 2
        cos, sin = (
            torch.cat([part[number % 3] for number, part in enumerate(whole.split(sections, dim=-1))], dim=-1).unsqueeze(1)
            for whole in (self.cos, self.sin)
        )
        return cos, sin


OPERATORS: dict[str, type[Operator]] = {
    "cross_entropy": CrossEntropy, "layer_norm": LayerNorm, "rms_norm": RMSNorm, "group_norm": GroupNorm, "dyt": DyT,
    "dyt_beta=True": DyT, "dyt_beta=False": DyT, "sparsemax": Sparsemax, "softmax": Softmax, "geglu": GatedMLP,
    "swiglu": GatedMLP, "fused_linear_cross_entropy": FusedLinearCrossEntropy, "fused_linear_jsd": FusedLinearJSD,
    "kl_div": KLDiv, "jsd": JSD, "tvd": TVD, "embedding": Embedding, "rope": Rope, "qwen2vl_mrope": MultimodalRope,
}  # fmt: skip


class NoStep(torch.optim.Optimizer):
    """The scripts have no optimizer, and gradients stay."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing."""


def _jensen_shannon(log_q: Tensor, log_p: Tensor, beta: float = 0.5) -> Tensor:
    log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
    middle = torch.lerp(torch.exp(log_q), torch.exp(log_p), beta)
    to_p = F.kl_div(torch.log(middle), log_p, reduction="none", log_target=True).sum(dim=-1)
    to_q = F.kl_div(torch.log(middle), log_q, reduction="none", log_target=True).sum(dim=-1)
    return ((beta * to_p + (1 - beta) * to_q) / log_q.shape[0]).sum()


def _half_turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class _LlamaNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps  # float32 in the script: so is the result

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class _DynamicTanh(nn.Module):
    def __init__(self, width: int, beta: bool) -> None:
        super().__init__()
        self.alpha, self.gamma = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(width))
        self.beta = nn.Parameter(torch.zeros(width)) if beta else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.gamma * torch.tanh(x * self.alpha)
        return out if self.beta is None else out + self.beta


class _Sparsemax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        ordered, _ = torch.sort(x, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        ranks = torch.arange(1, x.size(-1) + 1, dtype=x.dtype).view(1, -1)
        bound = 1 + ranks * ordered
        support = bound > sums
        number = support.sum(dim=-1, keepdim=True).clamp(min=1)
        threshold = ((ordered * support).sum(dim=-1, keepdim=True) - 1) / number
        return torch.clamp(x - threshold, min=0)
