"""How to time and measure on a device, and what a mixture of experts costs beside its likes.

Imported by `network.py`, which runs these cases with its own.
"""

import math
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alphastomics.attn_model import MixtureOfExperts
from alphastomics.attn_model.layers import FeedForward

Result = dict[str, Any]


class Bench:
    """The device, and how to time and measure on it."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"

    def autocast(self) -> Any:
        """Compute in bf16 on a GPU, in float32 on a CPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.cuda else nullcontext()

    def milliseconds(self, act: Callable[[], object], *, repeats: int, warm_up: int) -> float:
        """Return the median time of an act: on a GPU by its own clock, one act queued on another.

        So a GPU's time holds the waits for Python where Python is slower, as in training, and not
        the waits of Python for the GPU, which training has none of.
        """
        for _ in range(warm_up):
            act()
        if self.cuda:
            return self._queued(act, repeats)
        times = []
        for _ in range(repeats):
            self.wait()
            start = time.perf_counter()
            act()
            self.wait()
            times.append(1000 * (time.perf_counter() - start))
        return statistics.median(times)

    def _queued(self, act: Callable[[], object], repeats: int) -> float:
        """Return the median time between marks that the GPU sets before and after each act."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        self.wait()
        marks[0].record()
        for mark in marks[1:]:
            act()
            mark.record()
        self.wait()
        return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))

    def replayed_milliseconds(self, act: Callable[[], object], *, repeats: int) -> float:
        """Return the time of an act recorded once and replayed by the GPU: Python has no share."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                act()
        self.wait()
        with torch.cuda.graph(graph, stream=stream):
            act()
        return self.milliseconds(graph.replay, repeats=repeats, warm_up=3)

    def wait(self) -> None:
        """Wait until the device has done what it was asked to do."""
        if self.cuda:
            torch.cuda.synchronize()

    @contextmanager
    def peak(self, result: Result) -> Iterator[None]:
        """Write the peak memory of a block into the result."""
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        yield
        if self.cuda:
            result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        else:
            result["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return ||got - want|| / ||want||."""
    got, want = got.detach(), want.detach().double()
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


class LoopOfExperts(MixtureOfExperts):
    """The usual way: a Python loop over experts, each picking its cells by a mask."""

    def is_fused(self, cells: Tensor) -> bool:
        """Keep out of the fused kernels."""
        return False

    def mix_experts(self, cells: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
        """Run the experts one after another."""
        mixed = torch.zeros_like(cells)
        for expert in range(self.num_experts):
            for nth in range(self.top_k):
                rows = (choice[:, nth] == expert).nonzero().squeeze(-1)
                hidden = F.linear(cells[rows], self.up_weight[expert].mT, self.up_bias[expert])
                result = F.linear(
                    F.gelu(hidden), self.down_weight[expert].mT, self.down_bias[expert]
                )
                update = weight[rows, nth, None] * result
                mixed = mixed.index_add(0, rows, update.to(mixed.dtype))
        return mixed


def case_moe(
    bench: Bench, d_model: int, d_ff: int, experts: int, top_k: int, size: str, tokens: int
) -> Result:
    """Compare the mixture with a dense feed-forward of equal active width, and with the loop.

    All have biases, GELU and no dropout, and the same autocast; times are of forward and backward.
    """
    torch.manual_seed(0)
    arguments = (d_model, d_ff, experts, top_k)
    fast = MixtureOfExperts(*arguments, expert_size=size).to(bench.device)  # type: ignore[arg-type]
    loop = LoopOfExperts(*arguments, expert_size=size).to(bench.device)  # type: ignore[arg-type]
    loop.load_state_dict(fast.state_dict())
    dense = FeedForward(d_model, top_k * fast.up_weight.shape[2]).to(bench.device)
    cells = torch.randn(1, tokens, d_model, device=bench.device, requires_grad=True)
    result: Result = {"error": moe_error(bench, fast, loop, cells)}

    def timed(name: str, module: nn.Module, call: Any = None, *, replayed: bool = False) -> None:
        step = make_step(bench, module, module if call is None else call, cells)
        if not replayed:
            result[f"{name}_ms"] = bench.milliseconds(step, repeats=30, warm_up=5)
            return
        try:
            result[f"{name}_ms"] = bench.replayed_milliseconds(step, repeats=20)
        except RuntimeError as error:  # what cannot be recorded has been timed otherwise
            result[f"{name}_ms"] = math.nan
            result[f"{name}_failed"] = str(error)[:200]

    for name, module in (("dense", dense), ("moe", fast), ("loop", loop)):
        timed(name, module)
    if bench.cuda:
        for name, module in (("dense", dense), ("moe", fast)):
            timed(f"{name}_compiled", module, torch.compile(module))
            result[f"{name}_kernels_us"] = kernel_times(make_step(bench, module, module, cells))
        for name, module in (("dense", dense), ("moe", fast)):
            timed(f"{name}_replayed", module, replayed=True)
    for way in ("", "_replayed", "_compiled") if bench.cuda else ("",):
        result[f"over_dense{way}"] = result[f"moe{way}_ms"] / result[f"dense{way}_ms"]
    for way in ("", "_compiled") if bench.cuda else ("",):
        result[f"loop_over_moe{way}"] = result["loop_ms"] / result[f"moe{way}_ms"]
    return result


def make_step(bench: Bench, module: nn.Module, call: Any, cells: Tensor) -> Callable[[], object]:
    """Return forward and backward, to the gradients of cells and weights."""
    inputs = [cells, *module.parameters()]

    def step() -> None:
        with bench.autocast():
            output = call(cells)
        output = output[0] if isinstance(output, tuple) else output
        torch.autograd.grad(output.float().square().mean(), inputs, allow_unused=True)

    return step


def kernel_times(step: Callable[[], object], *, repeats: int = 5) -> dict[str, float]:
    """Return the microseconds that each kernel takes in a step, the longest first."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    spent = {
        event.key[:60]: round(event.self_device_time_total / repeats, 1)
        for event in profile.key_averages()
        if event.self_device_time_total
    }
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def moe_error(bench: Bench, fast: nn.Module, loop: nn.Module, cells: Tensor) -> float:
    """Return the largest relative difference from the loop, in outputs and weight gradients."""
    tensors = []
    for module in (fast, loop):
        module.eval()
        with bench.autocast():
            output, _ = module(cells)
        output.float().square().sum().backward()
        grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        tensors.append([output.detach(), *grads])
        module.zero_grad(set_to_none=True)
        module.train()
    cells.grad = None
    return max(relative_error(a, b) for a, b in zip(*tensors, strict=True))


def moe_cases(tokens: int) -> dict[str, Callable[[Bench], Result]]:
    """List the mixtures to be compared."""
    return {
        "moe 256/1024 4 top-2 split": lambda b: case_moe(b, 256, 1024, 4, 2, "split", tokens),
        "moe 256/1024 4 top-2 full": lambda b: case_moe(b, 256, 1024, 4, 2, "full", tokens),
        "moe 512/2048 8 top-2 full": lambda b: case_moe(b, 512, 2048, 8, 2, "full", tokens),
    }
