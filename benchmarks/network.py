"""What the network costs and whether its fast paths are right: settings enter, a table leaves.

    PYTHONPATH=. python3 benchmarks/network.py --device cuda --json out.json

Each case runs on its own: one that fails is recorded with its error, and the others go on. Times
are medians after warm-up, on a GPU by its own clock with one step queued on another; ratios compare
what was measured in the same run. On a CPU each case is a process of its own, so that its peak
memory is its own too.
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from moe import Bench, Result, moe_cases, relative_error
from torch import Tensor
from torch.nn import functional as F

from alphastomics.attn_model import Model
from alphastomics.attn_model.gated_attention import GatedMultiHeadAttention, visible_keys
from alphastomics.config import LayerConfig

NUM_GENES = 254
PLAIN_DROPOUT = 0.1
LUNA_MS = {("cuda", 8, 1024): 114.0, ("cpu", 1, 1000): 653.0, ("cpu", 1, 4000): 2428.0}


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


def case_gating(
    bench: Bench, sets: int, cells: int, *, repeats: int, compiled: bool = False
) -> Result:
    """Compare the fastest step with each gate and without, in turn: drift hits them equally."""
    inputs = make_cells(bench, sets, cells)
    gates = ("none", "headwise", "elementwise")
    steps = {
        gate: make_step(bench, LayerConfig(gate=gate), inputs, compiled=compiled) for gate in gates
    }
    for step in steps.values():
        bench.milliseconds(step, repeats=1, warm_up=3 if bench.cuda else 1)
    # Several steps queued on a GPU: the first one's launch is no share of the others' time.
    queued = {"repeats": 5, "warm_up": 1} if bench.cuda else {"repeats": 1, "warm_up": 0}
    rounds = [
        {gate: bench.milliseconds(step, **queued) for gate, step in steps.items()}
        for _ in range(repeats)
    ]
    best = {gate: min(times[gate] for times in rounds) for gate in gates}
    costs = {f"{gate}_cost": best[gate] / best["none"] - 1 for gate in gates[1:]}
    return {**{f"{gate}_ms": value for gate, value in best.items()}, **costs}


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
    query, key, value = inputs
    got = module.mix(query.to(dtype), key.to(dtype), value.to(dtype), node_mask) * real
    want = plain_mix(module, query.double(), key.double(), value.double(), node_mask) * real
    probe = torch.randn_like(got)
    got_grads = torch.autograd.grad((got * probe).sum(), inputs)
    want_grads = torch.autograd.grad((want * probe.double()).sum(), inputs)
    errors = [relative_error(got, want)]
    errors += [relative_error(a, b) for a, b in zip(got_grads, want_grads, strict=True)]
    error, bound = max(errors), 2e-2 if half else 1e-3
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


def case_growing(bench: Bench, cells: int) -> Result:
    """Time a step of one set: exact attention, layers computed twice to save memory."""
    return case_step(bench, 1, cells, repeats=3, warm_up=1, activation_checkpointing=True)


def gpu_cases() -> dict[str, Callable[[Bench], Result]]:
    """List what an H200 is asked, the cheap and the weighty first."""
    return {
        "attention fp32": lambda b: case_attention_right(b, padded=False, half=False),
        "attention fp32 padded": lambda b: case_attention_right(b, padded=True, half=False),
        "attention bf16": lambda b: case_attention_right(b, padded=False, half=True),
        "attention bf16 padded": lambda b: case_attention_right(b, padded=True, half=True),
        "step 8x1024 eager": lambda b: case_step(b, 8, 1024, repeats=20),
        "step 8x1024 moe eager": lambda b: case_step(b, 8, 1024, repeats=20, use_moe=True),
        "step 8x1024 eager 1/4 padded": lambda b: case_step(b, 8, 1024, repeats=20, padded=0.25),
        "step 1x65536 eager": lambda b: case_step(b, 1, 65536, repeats=3, warm_up=1),
        "step 1x32768 1/4 padded": lambda b: case_step(b, 1, 32768, repeats=3, padded=0.25),
        "step 1x65536 linear": lambda b: case_step(
            b, 1, 65536, repeats=3, warm_up=1, attention="linear"
        ),
        **{
            f"step 1x{cells} growing": partial(case_growing, cells=cells)
            for cells in (4096, 16384, 65536, 131072, 262144)
        },
        "gating 1x16000 eager": lambda b: case_gating(b, 1, 16000, repeats=10),
        "gating 1x16000 compiled": lambda b: case_gating(b, 1, 16000, repeats=10, compiled=True),
        **moe_cases(65536),
        "step 8x1024 compiled": lambda b: case_step(b, 8, 1024, compiled=True, repeats=20),
        "compile = eager fp32": lambda b: case_compiled_right(b, half=False),
        "compile = eager bf16": lambda b: case_compiled_right(b, half=True),
        "compile = eager bf16 moe": lambda b: case_compiled_right(b, half=True, use_moe=True),
        "step 8x1024 moe compiled": lambda b: case_step(
            b, 8, 1024, compiled=True, repeats=20, use_moe=True
        ),
        "gating 8x1024 compiled": lambda b: case_gating(b, 8, 1024, repeats=20, compiled=True),
        "step 1x65536 compiled": lambda b: case_step(b, 1, 65536, compiled=True, repeats=3),
    }


def cpu_cases() -> dict[str, Callable[[Bench], Result]]:
    """List what a laptop is asked."""
    few = {"repeats": 2, "warm_up": 1}
    return {
        "step 1x1000": lambda b: case_step(b, 1, 1000, repeats=3, warm_up=1),
        "step 1x2000": lambda b: case_step(b, 1, 2000, **few),
        "step 1x4000": lambda b: case_step(b, 1, 4000, **few),
        "step 1x4000 linear": lambda b: case_step(b, 1, 4000, **few, attention="linear"),
        "step 1x4000 moe": lambda b: case_step(b, 1, 4000, **few, use_moe=True),
        "plain 1x1000": lambda b: case_step(b, 1, 1000, **few, plain=True, gate="none"),
        "plain 1x4000": lambda b: case_step(
            b, 1, 4000, repeats=1, warm_up=0, plain=True, gate="none"
        ),
        "gating 1x1000": lambda b: case_gating(b, 1, 1000, repeats=11),
        **dict(list(moe_cases(4096).items())[:1]),
    }


def run_case(name: str, device: str) -> Result:
    """Run one case, and turn its failure into a record."""
    cases = gpu_cases() if device.startswith("cuda") else cpu_cases()
    start = time.perf_counter()
    try:
        result = cases[name](Bench(device))
        if device.startswith("cuda"):
            torch.compiler.reset()
            torch.cuda.empty_cache()
    except Exception as error:  # noqa: BLE001 - one broken case must not cost the others
        result = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
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
        numbers = {
            k: v
            for k, v in result.items()
            if not isinstance(v, dict) and k not in ("trace", "case_s")
        }
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
    parser.add_argument("--budget_s", type=float, default=200, help="start no case after this")
    parser.add_argument("--only", help="run this case here and print its record")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(run_case(arguments.only, arguments.device)))
        return
    gpu = arguments.device.startswith("cuda")
    run = run_case if gpu else run_in_process
    about = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name() if gpu else platform.processor(),
    }
    results: dict[str, Result] = {}
    start = time.perf_counter()
    for name in gpu_cases() if gpu else cpu_cases():
        late = time.perf_counter() - start > arguments.budget_s
        results[name] = {"skipped": "out of time"} if late else run(name, arguments.device)
        if "CUDA error" in str(results[name].get("failed")):
            run = run_in_process  # this process can no longer use the GPU
        print(f"{name}: {results[name].get('case_s', 0):.1f} s", file=sys.stderr, flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({**about, "cases": results}, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
