"""How to time and measure on a device, and what a mixture of experts costs beside its likes.

Imported by `network.py`, which runs these cases with its own.
"""

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alphastomics.attn_model import MixtureOfExperts
from alphastomics.attn_model.dispatch import collect, grouped_product, plan_dispatch, send
from alphastomics.attn_model.layers import FeedForward
from alphastomics.attn_model.routing import route, router_statistics

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
        """Return the median time of an act."""
        for _ in range(warm_up):
            act()
        times = []
        for _ in range(repeats):
            self.wait()
            start = time.perf_counter()
            act()
            self.wait()
            times.append(1000 * (time.perf_counter() - start))
        return statistics.median(times)

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

    def mix_experts(self, cells: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
        """Run the experts one after another."""
        mixed = torch.zeros_like(cells)
        for expert in range(self.num_experts):
            for place in range(self.top_k):
                rows = (choice[:, place] == expert).nonzero().squeeze(-1)
                hidden = F.linear(cells[rows], self.up_weight[expert].mT, self.up_bias[expert])
                result = F.linear(
                    F.gelu(hidden), self.down_weight[expert].mT, self.down_bias[expert]
                )
                update = weight[rows, place, None] * result
                mixed = mixed.index_add(0, rows, update.to(mixed.dtype))
        return mixed


def case_moe(
    bench: Bench, d_model: int, d_ff: int, experts: int, top_k: int, size: str, tokens: int
) -> Result:
    """Compare the mixture with a dense feed-forward of equal active width, and with the loop."""
    torch.manual_seed(0)
    arguments = (d_model, d_ff, experts, top_k)
    fast = MixtureOfExperts(*arguments, expert_size=size).to(bench.device)  # type: ignore[arg-type]
    loop = LoopOfExperts(*arguments, expert_size=size).to(bench.device)  # type: ignore[arg-type]
    loop.load_state_dict(fast.state_dict())
    dense = FeedForward(d_model, top_k * fast.up_weight.shape[2]).to(bench.device)
    cells = torch.randn(1, tokens, d_model, device=bench.device, requires_grad=True)
    result: Result = {"error": moe_error(bench, fast, loop, cells)}

    def timed(name: str, act: Callable[[Tensor], Any], repeats: int = 20) -> None:
        def step() -> None:
            with bench.autocast():
                output = act(cells)
            output = output[0] if isinstance(output, tuple) else output
            output.float().square().mean().backward()

        result[f"{name}_ms"] = bench.milliseconds(step, repeats=repeats, warm_up=5)

    timed("dense", dense)
    timed("moe", fast)
    timed("loop", loop)
    result["over_dense"] = result["moe_ms"] / result["dense_ms"]
    result["loop_over_moe"] = result["loop_ms"] / result["moe_ms"]
    if bench.cuda:
        timed("dense_compiled", torch.compile(dense))
        timed("moe_compiled", torch.compile(fast))
        result["over_dense_compiled"] = result["moe_compiled_ms"] / result["dense_compiled_ms"]
        result["loop_over_moe_compiled"] = result["loop_ms"] / result["moe_compiled_ms"]
    return {**result, **moe_parts(bench, fast, cells)}


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


def moe_parts(bench: Bench, moe: MixtureOfExperts, cells: Tensor) -> Result:
    """Time what a mixture is made of, forward only: where the time goes."""
    flat = cells.detach().squeeze(0)
    half = flat.bfloat16() if bench.cuda else flat
    with torch.no_grad():
        logits = moe.router_logits(cells, None)
        choice, _ = route(logits, moe.balance_bias, moe.top_k)
        plan = plan_dispatch(choice, moe.num_experts)
        visits = send(half, plan, moe.top_k)
        up = moe.up_weight.to(half.dtype)
        parts: dict[str, Callable[[], object]] = {
            "router": lambda: moe.router_logits(cells, None),
            "choose": lambda: route(logits, moe.balance_bias, moe.top_k),
            "statistics": lambda: router_statistics(logits, choice, torch.ones_like(logits[:, 0])),
            "plan": lambda: plan_dispatch(choice, moe.num_experts),
            "send": lambda: send(half, plan, moe.top_k),
            "product": lambda: grouped_product(visits, up, plan.ends),
            "collect": lambda: collect(visits, plan, moe.top_k),
        }
        return {
            f"{name}_ms": bench.milliseconds(act, repeats=20, warm_up=3)
            for name, act in parts.items()
        }


def moe_cases(tokens: int) -> dict[str, Callable[[Bench], Result]]:
    """List the mixtures to be compared."""
    return {
        "moe 256/1024 4 top-2 split": lambda b: case_moe(b, 256, 1024, 4, 2, "split", tokens),
        "moe 256/1024 4 top-2 full": lambda b: case_moe(b, 256, 1024, 4, 2, "full", tokens),
        "moe 512/2048 8 top-2 full": lambda b: case_moe(b, 512, 2048, 8, 2, "full", tokens),
    }
