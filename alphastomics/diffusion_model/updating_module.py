"""How weights move: gradients enter; weights, their average and the experts' balance leave.

Lightning asks for each part by itself. On one GPU of ours the whole of an update is a CUDA graph
instead, where its batch allows (`recorded_update.py`).
"""

import math
from abc import abstractmethod
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from alphastomics.attn_model.prediction import Prediction
from alphastomics.diffusion_model.deepspeed import ZeroStrategy
from alphastomics.diffusion_model.ema import average_decay, update_average
from alphastomics.diffusion_model.gradient_check import CheckedStep, GradientCheck
from alphastomics.diffusion_model.randomness import StepRandomness
from alphastomics.diffusion_model.recorded_update import RecordedUpdates
from alphastomics.diffusion_model.step import Scored
from alphastomics.diffusion_model.trainer_module import TrainerModule
from alphastomics.errors import InputError
from alphastomics.utils.dataholder import DataHolder


class UpdatingModule(TrainerModule):
    """A module whose weights move by AdamW, with their average behind them."""

    skipped_steps: Tensor
    # Set by a run of ours: another Trainer may want to see gradients before they are used.
    may_record = False

    def __init__(self, position_scale: float | None) -> None:
        super().__init__(position_scale)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("skipped_steps", torch.zeros((), dtype=torch.int64))
        self.seen_slices: list[Tensor] = []
        self.expert_counts: Tensor | None = None
        self.gradient_norm = torch.zeros(())
        self.gradient_check = GradientCheck()
        self.recorded_updates: RecordedUpdates | None = None
        self.is_updated = False  # by the last batch, as a recorded update
        # Of held-out batches, by the numbers of their sets' first cells.
        self.expected_positions: dict[tuple[int, ...], Tensor] = {}

    @abstractmethod
    def score(self, batch: DataHolder, randomness: StepRandomness) -> Scored:
        """Noise a batch, denoise it, and compare."""

    def require_count_model(self) -> None:
        """Refuse to train on latents that nobody has fitted."""
        counts = self.model.count_model
        if counts is not None and not bool(counts.is_fitted):
            raise InputError(
                "expression.space latent: the count model is fitted by `alphastomics train` and "
                "AlphaSTomics.train; with a Trainer of your own set expression.space to genes"
            )

    def on_train_start(self) -> None:
        """Record updates where nobody needs to see their parts."""
        super().on_train_start()
        self.require_count_model()
        # A training that failed leaves gradients behind that nobody has looked at.
        self.gradient_check = GradientCheck()
        self.seen_slices.clear()
        strategy, training = self.trainer.strategy, self.config.training
        if (
            self.may_record
            and isinstance(strategy, SingleDeviceStrategy)
            and strategy.root_device.type == "cuda"
            and self.trainer.precision in ("32-true", "bf16-mixed")
            and training.accumulate_grad_batches == 1
            and self.config.diffusion.position_frame == "registered"
        ):
            self.recorded_updates = RecordedUpdates(self, self.trainer.optimizers[0])

    def on_fit_end(self) -> None:
        """Give the memory of graphs back."""
        if self.recorded_updates is not None:
            self.recorded_updates.release()
        self.recorded_updates, self.is_updated = None, False
        self.expected_positions.clear()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, unless a recorded update has done so."""
        if not self.is_updated:
            super().backward(loss, *args, **kwargs)

    def optimizer_zero_grad(self, *args: Any) -> None:
        """Forget gradients, unless a recorded update has done so."""
        if not self.is_updated:
            super().optimizer_zero_grad(*args)

    def count_experts(self, prediction: Prediction) -> None:
        """Add up what each expert was chosen for, over the batches of one update."""
        routing = prediction.aux.routing
        if routing is not None and self.config.layer.moe_balance == "bias":
            counts = routing.counts
            self.expert_counts = (
                counts if self.expert_counts is None else self.expert_counts + counts
            )

    def balance_experts(self) -> None:
        """Move the routers' bias by the use of the experts over all ranks."""
        if self.expert_counts is not None:
            counts = self.trainer.strategy.reduce(self.expert_counts.clone(), reduce_op="sum")
            assert isinstance(counts, Tensor)
            self.model.update_balance_bias(counts)
            self.expert_counts = None

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """Update the weights, then their average and the routers' balance."""
        if self.recorded_updates is not None:
            loss = optimizer_closure()  # only the batch tells whether its update is recorded
        if self.is_updated:
            self.check_gradient()
            self.require_finite()
        else:
            closure = optimizer_closure if self.recorded_updates is None else lambda: loss
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
            self.balance_experts()
            decay = average_decay(self.config.training.ema_decay, self.updates_done)
            update_average(self.average, self.model, decay)
            self.updates += 1
        self.updates_done += 1
        self.seen_slices.clear()

    def check_gradient(self) -> None:
        """Have the norm of the gradient looked at, once the host can read it."""
        step = CheckedStep(self.global_step, self.current_epoch, list(self.seen_slices))
        self.gradient_check.add(self.gradient_norm, step)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradient; one that is not finite never reaches the weights."""
        training = self.config.training
        limit = training.gradient_clip_val or math.inf
        strategy = self.trainer.strategy
        if isinstance(strategy, ZeroStrategy):
            norm = strategy.gradient_norm()
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.gradient_norm = whole_tensor(norm)
        self.check_gradient()
        if is_fused(optimizer):
            bad = (~torch.isfinite(self.gradient_norm)).to(torch.float32)
            # As a loss scaler does: the kernel that updates the weights reads this, and does not.
            optimizer.found_inf, optimizer.grad_scale = bad, None  # type: ignore[attr-defined]
            self.skipped_steps += bad.to(torch.int64)
            self.require_finite()
        elif (step_is_bad := self.gradient_check.first_bad(wait=True)) is not None:
            self.refuse(step_is_bad)
            # In half precision an overflow is the loss scale's business: it skips and adapts.
            optimizer.zero_grad(set_to_none=True)
            self.skipped_steps += 1

    def require_finite(self, *, wait: bool = False) -> None:
        """Refuse to go on after a gradient that is known not to be finite, unless it may be."""
        while (step := self.gradient_check.first_bad(wait=wait)) is not None:
            self.refuse(step)

    def refuse(self, step: CheckedStep) -> None:
        """Say where a gradient is not finite, unless such steps are to be skipped."""
        if self.config.training.on_nonfinite == "skip" or self.trainer.precision == "16-mixed":
            return
        raise InputError(
            f"the gradient is not finite at step {step.step}, epoch {step.epoch}, in a batch of "
            f"{self.describe_slices(step.slices)}; the weights were not changed. Lower --lr, check "
            "these slices, or set training.on_nonfinite: skip"
        )

    def on_train_epoch_end(self) -> None:
        """Hear of every gradient of the epoch."""
        self.require_finite(wait=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Hear of every gradient before: a run must not go on behind one that is refused."""
        self.require_finite(wait=True)
        super().on_save_checkpoint(checkpoint)

    def describe_slices(self, parts: list[Tensor]) -> str:
        """Name the slices whose cells were in the batches of a step."""
        numbers = sorted({n for part in parts for n in part.flatten().tolist()})
        known = self.slice_names
        names = [known[n] if n < len(known) else str(n) for n in numbers if n >= 0]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return f"slices {shown}" if names else "unnamed slices"

    @property
    def is_whole(self) -> bool:
        """Say whether every rank has all weights and their gradients."""
        return not (self.is_sharded or isinstance(self.trainer.strategy, ZeroStrategy))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a linear warm-up and a cosine decay to a share of the peak."""
        training = self.config.training
        optimizer = torch.optim.AdamW(
            self.model.parameters(),
            training.learning_rate,
            weight_decay=training.weight_decay,
            fused=self.is_whole and self.trainer.precision != "16-mixed",
        )
        total = max(self.planned_steps(), 1)
        warmup = max(round(training.warmup_share * total), 1)

        def factor(step: int) -> float:
            return learning_rate_factor(step, total, warmup, training.final_lr_share)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether one kernel updates all weights."""
    return bool(optimizer.param_groups[0].get("fused"))


def whole_tensor(value: Tensor) -> Tensor:
    """Return a number that is sharded over ranks as a plain one."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def learning_rate_factor(step: int, total: int, warmup: int, final: float) -> float:
    """Share of the peak learning rate: rises over `warmup` steps, falls to `final` at `total`."""
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
