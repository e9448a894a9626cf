"""What the network costs and whether its fast paths are right: settings enter, a table leaves.

    PYTHONPATH=. python3 benchmarks/network.py --device cuda --json out.json

Each case runs on its own: one that fails is recorded with its error, and the others go on. Times are
medians after warm-up; ratios compare what was measured in the same run. On a CPU each case is a
process of its own, so that its peak memory is its own too.
"""

import argparse
import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alphastomics.attn_model import MixtureOfExperts, Model
from alphastomics.attn_model.gated_attention import GatedMultiHeadAttention, visible_keys
from alphastomics.attn_model.layers import FeedForward
from alphastomics.config import LayerConfig

NUM_GENES = 254
PLAIN_DROPOUT = 0.1
LUNA_MS = {("cuda", 8, 1024): 114.0, ("cpu", 1, 1000): 653.0, ("cpu", 1, 4000): 2428.0}
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


def plain_mix(
    self: GatedMultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, node_mask: Any
) -> Tensor:
    """Attend by the textbook: logits, softmax and dropout are N x N matrices in memory."""
    logits = query @ key.mT / math.sqrt(self.d_head)
    if node_mask is not None:
        logits = logits.masked_fill(~visible_keys(node_mask), -math.inf)
    return F.dropout(logits.softmax(-1), PLAIN_DROPOUT, self.training) @ value


def make_cells(bench: Bench, sets: int, cells: int, *, padded: float = 0.0) -> tuple[Tensor, ...]:
    """Draw expression, positions, times and a mask that pads the given share of each set."""
    generator = torch.Generator(bench.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=bench.device, generator=generator)

    mask = torch.arange(cells, device=bench.device) < round(cells * (1 - padded))
    mask = mask.expand(sets, cells).contiguous()
    times = torch.rand(sets, 2, device=bench.device, generator=generator)
    return draw(sets, cells, NUM_GENES), draw(sets, cells, 3), times, mask


def make_step(
    bench: Bench, settings: LayerConfig, inputs: tuple[Tensor, ...], *, compiled: bool = False
) -> Callable[[], object]:
    """Return a whole training step: forward, loss, backward and AdamW."""
    torch.manual_seed(0)
    model = Model(NUM_GENES, settings=settings).to(bench.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=bench.cuda)
    call = torch.compile(model) if compiled else model
    expression, position, times, mask = inputs
    node_mask = None if bool(mask.all()) else mask

    def step() -> None:
        with bench.autocast():
            prediction = call(expression, position, times, node_mask)
        loss = F.mse_loss(prediction.expression, expression)
        loss = loss + F.mse_loss(prediction.position, position) + prediction.aux.penalty
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def case_step(
    bench: Bench,
    sets: int,
    cells: int,
    *,
    compiled: bool = False,
    plain: bool = False,
    padded: float = 0.0,
    repeats: int = 10,
    warm_up: int = 3,
    **settings: Any,
) -> Result:
    """Time a training step and its memory."""
    result: Result = {}
    if plain:
        GatedMultiHeadAttention.mix = plain_mix  # type: ignore[method-assign]
    inputs = make_cells(bench, sets, cells, padded=padded)
    with bench.peak(result):
        step = make_step(bench, LayerConfig(**settings), inputs, compiled=compiled)
        result["ms"] = bench.milliseconds(step, repeats=repeats, warm_up=warm_up)
    luna = LUNA_MS.get((bench.device.type, sets, cells))
    if luna and not plain:
        result["times_faster_than_luna"] = luna / result["ms"]
    return result


def case_gating(bench: Bench, sets: int, cells: int, *, repeats: int) -> Result:
    """Compare steps with each gate and without, taken in turn so that drift hits all alike."""
    inputs = make_cells(bench, sets, cells)
    gates = ("none", "headwise", "elementwise")
    steps = {
        gate: make_step(bench, LayerConfig(gate=gate), inputs, compiled=bench.cuda)
        for gate in gates
    }
    for step in steps.values():
        bench.milliseconds(step, repeats=1, warm_up=3 if bench.cuda else 1)
    rounds = [
        {gate: bench.milliseconds(step, repeats=1, warm_up=0) for gate, step in steps.items()}
        for _ in range(repeats)
    ]
    best = {gate: statistics.median(times[gate] for times in rounds) for gate in gates}
    costs = {f"{gate}_cost": best[gate] / best["none"] - 1 for gate in gates[1:]}
    return {**{f"{gate}_ms": value for gate, value in best.items()}, **costs}


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
    bench: Bench, d_model: int, d_ff: int, experts: int, top_k: int, size: str, *, tokens: int
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
    return result


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


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return ||got - want|| / ||want||."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


def case_attention_right(bench: Bench, *, padded: bool, half: bool) -> Result:
    """Compare attention and its gradient with the textbook's in float64."""
    torch.manual_seed(0)
    shape = (2, 4, 333, 64)
    inputs = [torch.randn(shape, device=bench.device, requires_grad=True) for _ in range(3)]
    mask = torch.ones(2, 333, dtype=torch.bool, device=bench.device)
    mask[0, 200:] = False
    module = GatedMultiHeadAttention(256, 4).to(bench.device).eval()
    node_mask = mask if padded else None
    dtype = torch.bfloat16 if half else torch.float32
    real = mask[:, None, :, None] if padded else torch.ones_like(mask)[:, None, :, None]
    got = module.mix(*(value.to(dtype) for value in inputs), node_mask) * real
    want = plain_mix(module, *(value.double() for value in inputs), node_mask) * real
    probe = torch.randn_like(got)
    got_grads = torch.autograd.grad((got * probe).sum(), inputs)
    want_grads = torch.autograd.grad((want * probe.double()).sum(), inputs)
    errors = [relative_error(got, want)]
    errors += [relative_error(a, b) for a, b in zip(got_grads, want_grads, strict=True)]
    error, bound = max(errors), 2e-2 if half else 1e-4
    return {"error": error, "bound": bound, "right": error < bound}


def case_compiled_right(bench: Bench, *, half: bool, **settings: Any) -> Result:
    """Compare the compiled model with the eager one: prediction and gradients."""
    torch.manual_seed(0)
    model = Model(NUM_GENES, n_layers=2, settings=LayerConfig(**settings)).to(bench.device).eval()
    with torch.no_grad():
        for parameter in model.time_modulation_parameters().values():
            parameter.normal_(std=0.02)
    expression, position, times, mask = make_cells(bench, 2, 500, padded=0.3)
    outputs = []
    context = bench.autocast() if half else nullcontext()
    for call in (model, torch.compile(model)):
        with context:
            prediction = call(expression, position, times, mask)
        loss = prediction.expression.square().sum() + prediction.position.square().sum()
        model.zero_grad(set_to_none=True)
        (loss + prediction.aux.penalty).backward()
        grads = [value.grad for value in model.parameters() if value.grad is not None]
        flat = torch.cat([grad.flatten().float() for grad in grads])
        outputs.append((prediction.expression.detach(), prediction.position.detach(), flat))
    # Half precision: rounding may send a few cells to another expert, or order sums otherwise.
    error = max(relative_error(a, b) for a, b in zip(*outputs, strict=True))
    bound = 5e-2 if half else 1e-3
    return {"error": error, "bound": bound, "right": error < bound}


def gpu_cases() -> dict[str, Callable[[Bench], Result]]:
    """List what an H200 is asked."""
    return {
        "attention fp32": lambda b: case_attention_right(b, padded=False, half=False),
        "attention fp32 padded": lambda b: case_attention_right(b, padded=True, half=False),
        "attention bf16": lambda b: case_attention_right(b, padded=False, half=True),
        "attention bf16 padded": lambda b: case_attention_right(b, padded=True, half=True),
        "compile = eager fp32": lambda b: case_compiled_right(b, half=False),
        "compile = eager bf16": lambda b: case_compiled_right(b, half=True),
        "compile = eager bf16 moe": lambda b: case_compiled_right(b, half=True, use_moe=True),
        "step 8x1024 eager": lambda b: case_step(b, 8, 1024, repeats=20),
        "step 8x1024 compiled": lambda b: case_step(b, 8, 1024, compiled=True, repeats=20),
        "step 8x1024 moe compiled": lambda b: case_step(
            b, 8, 1024, compiled=True, repeats=20, use_moe=True
        ),
        "step 8x1024 1/4 padded": lambda b: case_step(
            b, 8, 1024, compiled=True, repeats=20, padded=0.25
        ),
        "step 1x16000 compiled": lambda b: case_step(b, 1, 16000, compiled=True, repeats=5),
        "step 1x32768 1/4 padded": lambda b: case_step(b, 1, 32768, repeats=3, padded=0.25),
        "step 1x65536 eager": lambda b: case_step(b, 1, 65536, repeats=3, warm_up=1),
        "step 1x65536 compiled": lambda b: case_step(b, 1, 65536, compiled=True, repeats=3),
        "step 1x65536 checkpointed": lambda b: case_step(
            b, 1, 65536, repeats=3, warm_up=1, activation_checkpointing=True
        ),
        "gating 8x1024": lambda b: case_gating(b, 8, 1024, repeats=20),
        "gating 1x16000": lambda b: case_gating(b, 1, 16000, repeats=5),
        "moe 256/1024 4 top-2 split": lambda b: case_moe(b, 256, 1024, 4, 2, "split", tokens=65536),
        "moe 256/1024 4 top-2 full": lambda b: case_moe(b, 256, 1024, 4, 2, "full", tokens=65536),
        "moe 512/2048 8 top-2 full": lambda b: case_moe(b, 512, 2048, 8, 2, "full", tokens=65536),
    }


def cpu_cases() -> dict[str, Callable[[Bench], Result]]:
    """List what a laptop is asked."""
    return {
        "step 1x1000": lambda b: case_step(b, 1, 1000, repeats=3, warm_up=1),
        "step 1x2000": lambda b: case_step(b, 1, 2000, repeats=2, warm_up=1),
        "step 1x4000": lambda b: case_step(b, 1, 4000, repeats=2, warm_up=1),
        "step 1x4000 linear": lambda b: case_step(
            b, 1, 4000, repeats=2, warm_up=1, attention="linear"
        ),
        "step 1x4000 moe": lambda b: case_step(b, 1, 4000, repeats=2, warm_up=1, use_moe=True),
        "plain 1x1000": lambda b: case_step(
            b, 1, 1000, repeats=2, warm_up=1, plain=True, gate="none"
        ),
        "plain 1x4000": lambda b: case_step(
            b, 1, 4000, repeats=1, warm_up=0, plain=True, gate="none"
        ),
        "gating 1x1000": lambda b: case_gating(b, 1, 1000, repeats=7),
        "moe 256/1024 4 top-2 split": lambda b: case_moe(b, 256, 1024, 4, 2, "split", tokens=4096),
    }


def run_case(name: str, device: str) -> Result:
    """Run one case, and turn its failure into a record."""
    cases = gpu_cases() if device.startswith("cuda") else cpu_cases()
    start = time.perf_counter()
    try:
        result = cases[name](Bench(device))
    except Exception as error:  # noqa: BLE001 - one broken case must not cost the others
        result = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    if device.startswith("cuda"):
        torch.compiler.reset()
        torch.cuda.empty_cache()
    return {**result, "case_s": time.perf_counter() - start}


def run_in_process(name: str, device: str) -> Result:
    """Run one case in a process of its own."""
    command = [sys.executable, __file__, "--device", device, "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:], "trace": done.stderr}
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, Result]) -> str:
    """Write one line a case."""
    lines = []
    for name, result in results.items():
        numbers = {k: v for k, v in result.items() if k not in ("trace", "case_s")}
        shown = [
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in numbers.items()
        ]
        lines.append(f"{name:28s} {'  '.join(shown)[:220]}")
    return "\n".join(lines)


def main() -> None:
    """Run every case of the device, or one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="run this case here and print its record")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(run_case(arguments.only, arguments.device)))
        return
    gpu = arguments.device.startswith("cuda")
    run = run_case if gpu else run_in_process
    results = {}
    for name in gpu_cases() if gpu else cpu_cases():
        results[name] = run(name, arguments.device)
        print(f"{name}: {results[name].get('case_s', 0):.1f} s", file=sys.stderr, flush=True)
        if arguments.json:
            machine = torch.cuda.get_device_name() if gpu else platform.processor()
            about = {"torch": torch.__version__, "python": platform.python_version()}
            record = {**about, "machine": machine, "cases": results}
            arguments.json.write_text(json.dumps(record, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
