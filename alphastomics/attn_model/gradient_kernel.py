"""The way back through the experts on a GPU: gradients of mixed cells enter, all others leave.

Tiles and teams are those of `expert_kernel.py`; the router's scores have `score_kernel.py`, weights
`weight_kernel.py`.
"""

from functools import lru_cache
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from alphastomics.attn_model.expert_kernel import (
    HALF,
    Tiling,
    _product,
    _rows,
    most_tiles,
    tiling_options,
)
from alphastomics.attn_model.launch import Key, Layout, Parts, Space, launch, lay_out
from alphastomics.attn_model.mixture import Experts, Mixture, has_descriptors, lanes, parts_of
from alphastomics.attn_model.routing_kernel import _member, _tile
from alphastomics.attn_model.score_kernel import _score_gradient_kernel
from alphastomics.attn_model.weight_kernel import _sum_kernel, _weight_gradient_kernel

# From this width on tiles are fetched by descriptors; making those takes Python time that narrower,
# quicker layers lack.
DESCRIBED_WIDTH = 512
# With fewer programs than this a team's rows are split, or the GPU idles.
PROGRAMS = 264
# A team's rows are split in multiples of this.
SPLIT = 1024
# Tiles added up at a time, and their columns: many of narrow tiles, or few programs had work.
TILES, COLUMNS, NARROW_TILES, NARROW_COLUMNS = 4, 512, 128, 32


@triton.jit(do_not_specialize=["num_weights"])
@no_type_check
def _hidden_gradient_kernel(
    grad_ptr, w_ptr, hidden_ptr, slope_ptr, table_ptr, plan_ptr,
    before_grad_ptr, weight_grad_ptr, partial_ptr, num_weights, width, hidden,
    TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr, MEMBERS: tl.constexpr, VISITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Take some hidden columns of a tile: gradients before GELU, and what they say of weights.

    Of a weight's gradient, times the weight, this is one part; of the bias's the tile's share.
    """
    parts = tl.cdiv(hidden, COLUMNS)
    tile, rest = tl.program_id(0) // (parts * MEMBERS), tl.program_id(0) % (parts * MEMBERS)
    member, part = rest // parts, rest % parts
    team, first, end = _tile(plan_ptr, tile, TEAMS, TEAM_LANES, ROWS)
    if team < TEAMS:
        row, _, visit = _rows(plan_ptr, first, end, TEAM_LANES, ROWS)
        expert = _member(tl.load(table_ptr + team), member)
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        product = _product(
            grad_ptr, w_ptr, visit // VISITS, expert, column, width, width, hidden,
            tl.zeros((ROWS, COLUMNS), tl.float32), MEMBERS=1, TURNED=True, DEPTH=DEPTH, EVEN=EVEN,
        )  # fmt: skip
        at = row.to(tl.int64)[:, None] * (MEMBERS * hidden) + member * hidden + column[None, :]
        fits = (row < end)[:, None] & (column < hidden)[None, :]
        after = tl.load(hidden_ptr + at, mask=fits, other=0.0).to(tl.float32)
        to = weight_grad_ptr + part * num_weights + visit * MEMBERS + member
        tl.store(to, tl.sum(product * after, 1), mask=row < end)
        # Zero where no slope was loaded.
        grad = product * tl.load(slope_ptr + at, mask=fits, other=0.0).to(tl.float32)
        tl.store(before_grad_ptr + at, grad.to(before_grad_ptr.dtype.element_ty), mask=fits)
        partial = partial_ptr + (tile * MEMBERS + member).to(tl.int64) * hidden
        tl.store(partial + column, tl.sum(grad, 0), mask=column < hidden)


@triton.jit
@no_type_check
def _cell_gradient_kernel(
    before_grad_ptr, w_ptr, score_grad_ptr, router_ptr, noise_ptr, table_ptr, plan_ptr, x_grad_ptr,
    width, hidden,
    EXPERTS: tl.constexpr, LANES: tl.constexpr,
    TEAMS: tl.constexpr, TEAM_LANES: tl.constexpr, MEMBERS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Bring some columns of a tile's gradients to its cells, through experts and router."""
    parts = tl.cdiv(width, COLUMNS)
    team, first, end = _tile(plan_ptr, tl.program_id(0) // parts, TEAMS, TEAM_LANES, ROWS)
    if team < TEAMS:
        row, safe, visit = _rows(plan_ptr, first, end, TEAM_LANES, ROWS)
        column = (tl.program_id(0) % parts) * COLUMNS + tl.arange(0, COLUMNS)
        product = _product(
            before_grad_ptr, w_ptr, safe, tl.load(table_ptr + team), column, MEMBERS * hidden,
            hidden, width, tl.zeros((ROWS, COLUMNS), tl.float32),
            MEMBERS=MEMBERS, TURNED=True, DEPTH=DEPTH, EVEN=EVEN,
        )  # fmt: skip
        lane = tl.arange(0, LANES)
        matrices: tl.constexpr = 1 if noise_ptr is None else 2
        inside = column < width
        from_score = score_grad_ptr + safe[:, None] * (matrices * LANES) + lane[None, :]
        at = lane[:, None] * width + column[None, :]
        taken = (lane < EXPERTS)[:, None] & inside[None, :]
        dtype = score_grad_ptr.dtype.element_ty
        router = tl.load(router_ptr + at, mask=taken, other=0.0).to(dtype)
        product = tl.dot(tl.load(from_score), router, product, input_precision="tf32x3")
        if noise_ptr is not None:
            noise = tl.load(noise_ptr + at, mask=taken, other=0.0).to(dtype)
            product = tl.dot(tl.load(from_score + LANES), noise, product, input_precision="tf32x3")
        to = x_grad_ptr + visit.to(tl.int64)[:, None] * width + column[None, :]
        fits = (row < end)[:, None] & inside[None, :]
        tl.store(to, product.to(x_grad_ptr.dtype.element_ty), mask=fits)


class Upstream(NamedTuple):
    """The gradients of mixed cells, (T, D), and of statistics, None where nothing used them."""

    mixed: Tensor
    probability: Tensor | None
    balance_loss: Tensor | None
    z_loss: Tensor | None


class Split(NamedTuple):
    """Rows of a chunk of a team for the matrices' gradients, 0 for one program an expert.

    `programs` side by side, of one for each of `blocks`; tiles by descriptors if `described`.
    """

    rows: int
    programs: int
    blocks: int
    described: bool


def split_rows(mixture: Mixture, tiling: Tiling, *, described: bool) -> Split:
    """Choose how the matrices' gradients are shared out."""
    m = mixture
    blocks = parts_of(m.width, tiling.rows) * parts_of(m.hidden, tiling.columns)
    if 2 * blocks * m.num_experts >= PROGRAMS:
        return Split(0, m.num_experts, blocks, described)
    members = m.teams.members
    rows = SPLIT * max(1, parts_of(m.num_rows * members * blocks, PROGRAMS * SPLIT))
    return Split(rows, most_tiles(m, rows) * members, blocks, described)


def is_describable(mixture: Mixture, device: torch.device) -> bool:
    """Tell whether the copy engine can fetch tiles of rows, and if it pays: whole steps only."""
    sides, depth = (mixture.width, mixture.hidden), HALF["wide weight gradient"].depth
    return (
        has_descriptors(device)
        and mixture.dtype != torch.float32
        and all(side >= DESCRIBED_WIDTH and side % depth == 0 for side in sides)
    )


class Steps(NamedTuple):
    """The shapes of the steps back: tilings and options, parts of a row, and the memory between."""

    hidden: tuple[Tiling, dict[str, Any]]
    scores: tuple[Tiling, dict[str, Any]]
    cells: tuple[Tiling, dict[str, Any]]
    weights: tuple[Tiling, dict[str, Any]]
    split: Split
    num_parts: int
    layout: Layout


@lru_cache(maxsize=256)
def plan_steps(mixture: Mixture, device: torch.device) -> Steps:
    """Shape the steps back, and lay out what they leave to each other."""
    m, single, described = mixture, torch.float32, is_describable(mixture, device)
    kinds = ["hidden gradient", "score gradient", "cell gradient", "weight gradient"]
    if described:
        kinds[3] = "wide weight gradient"
    steps = [tiling_options(kind, m.dtype, device) for kind in kinds]
    hidden, scores, _, weights = (tiling for tiling, _ in steps)
    split = split_rows(m, weights, described=described)
    num_parts, members = parts_of(m.hidden, hidden.columns), m.teams.members
    score_tiles = (most_tiles(m, scores.rows), m.matrices + 1, m.num_experts, m.width)
    parts: Parts = (
        ("before_grad", (m.num_rows, members * m.hidden), m.dtype),
        ("weight_grad", (num_parts, m.num_cells, m.top_k), single),
        ("up_bias_partial", (most_tiles(m, hidden.rows), members, m.hidden), single),
        ("sent_grad", (m.num_rows, m.width), m.dtype),
        ("score_grad", (m.num_rows, m.matrices * lanes(m.num_experts)), m.dtype),
        ("partial", score_tiles, single),
    )
    if split.rows:
        shape = (split.programs, m.width * m.hidden)
        parts = (*parts, ("up_partial", shape, single), ("down_partial", shape, single))
    return Steps(steps[0], steps[1], steps[2], steps[3], split, num_parts, lay_out(parts))


class Way:
    """One way back, step by step; a step leaves in `space` what the next ones need."""

    def __init__(
        self,
        mixture: Mixture,
        saved: Space,
        statistics: Tensor,
        upstream: Upstream,
        weights: Experts,
        draw: Tensor | None,
        key: Key | None,
    ) -> None:
        self.mixture, self.saved, self.statistics = mixture, saved, statistics
        self.upstream, self.weights, self.draw, self.key = upstream, weights, draw, key
        device = upstream.mixed.device
        self.table, self.steps = mixture.table(device), plan_steps(mixture, device)
        memory = torch.empty(self.steps.layout.size, dtype=torch.uint8, device=device)
        self.space = Space(self.steps.layout, memory, by_address=saved.address is not None)

    def to_hidden(self) -> None:
        """Find the gradients before GELU."""
        m, saved, space, (tiling, options) = (
            self.mixture, self.saved, self.space, self.steps.hidden,
        )  # fmt: skip
        programs = most_tiles(m, tiling.rows) * m.teams.members * self.steps.num_parts
        launch(
            self.key, _hidden_gradient_kernel, (programs, 1, 1),
            (self.upstream.mixed, self.weights.down_weight, saved["hidden"], saved["slope"],
             self.table, saved["plan"], space["before_grad"], space["weight_grad"],
             space["up_bias_partial"], m.num_cells * m.top_k, m.width, m.hidden),
            lambda: {
                "EVEN": m.width % tiling.depth == 0,
                **m.told("TEAMS", "TEAM_LANES", "MEMBERS", "VISITS"), **options,
            },
        )  # fmt: skip

    def to_scores(self, logit_grad: Tensor | None) -> None:
        """Find the gradients of the router's scores, and of logits where asked for."""
        m, saved, space, (tiling, _) = self.mixture, self.saved, self.space, self.steps.scores
        names = ("EXPERTS", "LANES", "CELLS", "TEAMS", "TEAM_LANES", "MEMBERS", "VISITS")
        launch(
            self.key, _score_gradient_kernel, (most_tiles(m, tiling.rows), 1, 1),
            (self.upstream.mixed, saved["sent"], self.weights.down_bias, saved["score"], self.draw,
             saved["weight"], space["weight_grad"], saved["spot"], self.statistics,
             *self.upstream[1:], self.table, saved["plan"], space["sent_grad"],
             space["score_grad"], logit_grad, space["partial"], m.num_cells, self.steps.num_parts,
             m.width),
            # Columns are what is read at a time: there is no depth.
            lambda: {
                **m.told(*names), "ROWS": tiling.rows, "COLUMNS": tiling.columns,
                "num_warps": tiling.warps, "num_stages": tiling.stages,
            },
        )  # fmt: skip

    def to_cells(self, cell_grad: Tensor) -> None:
        """Find the gradients of rows, (S, D), at the places of their cells."""
        m, space, weights, (tiling, options) = (
            self.mixture, self.space, self.weights, self.steps.cells,
        )  # fmt: skip
        programs = most_tiles(m, tiling.rows) * parts_of(m.width, tiling.columns)
        launch(
            self.key, _cell_gradient_kernel, (programs, 1, 1),
            (space["before_grad"], weights.up_weight, space["score_grad"], weights.router,
             weights.noise, self.table, self.saved["plan"], cell_grad, m.width, m.hidden),
            lambda: {
                "EVEN": m.hidden % tiling.depth == 0,
                **m.told("EXPERTS", "LANES", "TEAMS", "TEAM_LANES", "MEMBERS"), **options,
            },
        )  # fmt: skip

    def to_weights(self, grads: Experts) -> None:
        """Find the gradients of router, noise and experts."""
        m, saved, space, steps = self.mixture, self.saved, self.space, self.steps
        rows, programs, blocks, described = steps.split
        partials = (
            (space["up_partial"], space["down_partial"])
            if rows
            else (grads.up_weight, grads.down_weight)
        )
        launch(
            self.key, _weight_gradient_kernel, (blocks, programs, 2),
            (*self._operands(), self.table, saved["plan"], *partials, rows, m.width, m.hidden),
            lambda: {
                "DESCRIBED": described, "SPLIT": rows > 0,
                **m.told("TEAMS", "TEAM_LANES", "MEMBERS"), **steps.weights[1],
            },
        )  # fmt: skip
        narrow = parts_of(m.hidden, NARROW_COLUMNS)
        narrow += (1 + m.matrices) * parts_of(m.width, NARROW_COLUMNS)
        large = 2 * parts_of(m.width * m.hidden, COLUMNS) if rows else 0
        launch(
            self.key, _sum_kernel, (narrow + large, m.num_experts, 1),
            (*partials, space["up_bias_partial"], space["partial"], self.table, saved["plan"],
             grads.up_weight, grads.down_weight, grads.up_bias, grads.down_bias, grads.router,
             grads.noise, rows, m.width, m.hidden),
            lambda: {
                **m.told("EXPERTS", "TEAMS", "MEMBERS"), "SPLIT": rows > 0,
                "HIDDEN_ROWS": steps.hidden[0].rows, "SCORE_ROWS": steps.scores[0].rows,
                "TILES": TILES, "COLUMNS": COLUMNS,
                "NARROW_TILES": NARROW_TILES, "NARROW_COLUMNS": NARROW_COLUMNS,
            },
        )  # fmt: skip

    def _operands(self) -> list[Any]:
        """Return the factors of the matrices' gradients: gradients and hidden rows, and so on."""
        of_width, of_hidden, depth = self.steps.weights[0][:3]
        factors = (
            (self.space, "sent_grad", of_width),
            (self.saved, "hidden", of_hidden),
            (self.saved, "sent", of_width),
            (self.space, "before_grad", of_hidden),
        )
        if not self.steps.split.described:
            return [space[name] for space, name, _ in factors]
        return [
            TensorDescriptor.from_tensor(space.tensor(name), [depth, side])
            for space, name, side in factors
        ]
