"""Watching a run: what the layers did and the gradients enter; named values and warnings leave.

The names, healthy ranges and thresholds are those of docs/monitoring.md. A warning is said in words
once when its condition begins, not at every step, and its flag is logged as 1.0 while it lasts.
"""

import logging
import math
from collections import deque
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from alphastomics.attn_model.inspection import gate_moments, record
from alphastomics.attn_model.routing import balance_loss, expert_use, normalized_use_entropy
from alphastomics.diffusion_model.deepspeed import gradient_of
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.diffusion_model.step import named_terms
from alphastomics.diffusion_model.updating_module import whole_tensor
from alphastomics.utils.dataholder import DataHolder

logger = logging.getLogger(__name__)

GRADIENT_EVERY = 100  # steps between two looks at gradients and modulation weights
ENTROPY_FLOOR, GATE_CEILING = 0.5, 0.95
GRADIENT_CEILING, GRADIENT_FLOOR = 10.0, 0.01
# One small gradient is chance, three in a row are not; and a run of 300 steps has three looks.
LOOKS_BEFORE_WARNING = 3
UNCHANGED = 1e-4  # relative: a norm that moves less over three looks is flat
PROBE_TIMES = (0.1, 0.5, 0.9)
PROBE_EVERY = 500  # updates between two probes, but for the last validation of a run

ADVICE = {
    "moe/expert_collapse_warning": "few experts do all the work: raise "
    "TransformerLayer_setting.moe_load_balance_loss_weight (0.01 to 0.1), or set moe_balance: bias",
    "gate/no_filtering_warning": "the gates are nearly all open and filter nothing: check that "
    "they started near 0.5, lower the learning rate, or use gate_type: none",
    "grad/moe_gate_grad_overflow": "the router's gradient is very large: lower the learning rate "
    "or training.gradient_clip_val, or set moe_z_loss_weight (0.001)",
    "grad/moe_gate_grad_vanishing": "the router hardly learns any more: raise the learning rate "
    "or the balance weight, or use fewer experts",
    "time_cond/frozen_warning": "the routers' time modulation does not change: check that it is "
    "trained (learning rate, frozen parameters) and that several times are drawn",
}


class Episodes:
    """Says a warning when its condition begins, and is silent until it has ended."""

    def __init__(self) -> None:
        self.active: set[str] = set()

    def update(self, name: str, *, happening: bool, detail: str) -> dict[str, float]:
        """Take the condition's state; return the flag to log, under its name."""
        if happening and name not in self.active:
            self.active.add(name)
            logger.warning("%s (%s): %s", name, detail, ADVICE[name])
        elif not happening:
            self.active.discard(name)
        return {name: float(happening)}


def norm_of(tensors: list[Tensor]) -> float:
    """L2 norm of all the numbers of some tensors together."""
    if not tensors:
        return 0.0
    norms = [torch.linalg.vector_norm(tensor.detach().float()) for tensor in tensors]
    total = torch.linalg.vector_norm(torch.stack([whole_tensor(norm) for norm in norms]))
    return float(total)


def mean_of(values: list[float]) -> float:
    """Mean of some numbers."""
    return sum(values) / len(values)


def router_modulation_norm(module: AlphaSTomicsModule) -> float | None:
    """L2 norm of a router's time modulation, mean over layers; None where there is none."""
    modulations = module.model.router_time_modulations()
    return (
        mean_of([norm_of(list(part.parameters())) for part in modulations]) if modulations else None
    )


def adaln_norm(module: AlphaSTomicsModule) -> float:
    """L2 norm of all AdaLN weights together."""
    return norm_of(list(module.model.adaln_parameters().values()))


def gradients_of(weights: dict[str, nn.Parameter]) -> list[Tensor]:
    """Return the gradients of those weights that have one."""
    gradients = [gradient_of(weight) for weight in weights.values()]
    return [gradient for gradient in gradients if gradient is not None]


class Monitor(pl.Callback):
    """Logs the state of experts, gates, gradients and time modulation."""

    def __init__(self, every_n_steps: int) -> None:
        self.every = every_n_steps
        self.episodes = Episodes()
        self.small_gradients = 0
        self.norms: deque[float] = deque(maxlen=LOOKS_BEFORE_WARNING)
        self.step = -1
        self.probed_step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to warn as an uninterrupted one would."""
        return {
            "active": sorted(self.episodes.active),
            "small_gradients": self.small_gradients,
            "norms": list(self.norms),
            "step": self.step,
            "probed_step": self.probed_step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.episodes.active = set(state_dict["active"])
        self.small_gradients = state_dict["small_gradients"]
        self.norms = deque(state_dict["norms"], maxlen=LOOKS_BEFORE_WARNING)
        self.step = state_dict.get("step", -1)
        self.probed_step = state_dict.get("probed_step", 0)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        """Look at gradients before they are clipped."""
        assert isinstance(pl_module, AlphaSTomicsModule)
        if trainer.global_step % GRADIENT_EVERY == 0:
            self.look(trainer, pl_module, 1.0)

    def look(self, trainer: pl.Trainer, module: AlphaSTomicsModule, length: float) -> None:
        """Publish norms of gradients, `length` times what they hold, and of modulations."""
        values = self.gradient_values(module, length) | self.modulation_values(module)
        publish(trainer, values)

    def gradient_values(self, module: AlphaSTomicsModule, length: float = 1.0) -> dict[str, float]:
        """Gradient norms of the routers and of the time modulation."""
        model = module.model
        values = {"grad/adaln_grad_norm": length * norm_of(gradients_of(model.adaln_parameters()))}
        modulations = model.router_time_modulations()
        if modulations:
            by_layer = [norm_of(gradients_of(dict(m.named_parameters()))) for m in modulations]
            values["grad/time_modulation_grad_norm"] = length * mean_of(by_layer)
        router = gradients_of(model.router_parameters())
        if router:
            norm = length * norm_of(router)
            self.small_gradients = self.small_gradients + 1 if norm < GRADIENT_FLOOR else 0
            detail = f"norm {norm:.3g}"
            values["grad/moe_gate_grad_norm"] = norm
            happening = {
                "grad/moe_gate_grad_overflow": norm > GRADIENT_CEILING,
                "grad/moe_gate_grad_vanishing": self.small_gradients >= LOOKS_BEFORE_WARNING,
            }
            for name, happens in happening.items():
                values |= self.episodes.update(name, happening=happens, detail=detail)
        return values

    def modulation_values(self, module: AlphaSTomicsModule) -> dict[str, float]:
        """L2 norm of the routers' time modulation: it grows while they learn from time."""
        values = {"adaln/modulation_l2_norm": adaln_norm(module)}
        norm = router_modulation_norm(module)
        if norm is None:
            return values
        self.norms.append(norm)
        change = max(self.norms) - min(self.norms)
        frozen = len(self.norms) == LOOKS_BEFORE_WARNING and change <= UNCHANGED * norm
        values["time_cond/modulation_l2_norm"] = norm
        return values | self.episodes.update(
            "time_cond/frozen_warning", happening=frozen, detail=f"norm {norm:.3g}"
        )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_args: Any
    ) -> None:
        """Log the losses, experts and gates of the step just done."""
        assert isinstance(pl_module, AlphaSTomicsModule)
        if pl_module.is_updated and (trainer.global_step - 1) % GRADIENT_EVERY == 0:
            # A recorded update leaves its gradients clipped.
            limit = pl_module.config.training.gradient_clip_val or math.inf
            self.look(trainer, pl_module, max(float(pl_module.gradient_norm) / limit, 1.0))
        due = trainer.global_step % self.every == 0 and trainer.global_step != self.step
        if not due or pl_module.last is None:
            return
        self.step = trainer.global_step
        values = self.loss_values(trainer, pl_module)
        values |= self.expert_values(trainer, pl_module)
        values |= self.gate_values(trainer, pl_module)
        publish(trainer, values)

    def loss_values(self, trainer: pl.Trainer, module: AlphaSTomicsModule) -> dict[str, float]:
        """Terms of the loss, gradient norm, learning rate, and steps that were skipped."""
        assert module.last is not None
        return mean_over_ranks(trainer, named_terms("train", module.last.terms)) | {
            "train/grad_norm": float(module.gradient_norm),
            "train/learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "train/skipped_steps": float(module.skipped_steps),
        }

    def expert_values(self, trainer: pl.Trainer, module: AlphaSTomicsModule) -> dict[str, float]:
        """Expert use and balance loss of the cells of all ranks, mean over layers."""
        assert module.last is not None
        routing = module.last.prediction.aux.routing
        if routing is None:
            return {}
        counts, probability, num_cells = (
            sum_over_ranks(trainer, value)
            for value in (routing.counts, routing.probability, routing.num_cells)
        )
        balance = map(balance_loss, counts, probability, num_cells)
        entropy = float(normalized_use_entropy(counts).mean())
        return {
            "moe/expert_entropy_normalized": entropy,
            "moe/expert_usage_std": float(expert_use(counts).std(-1, correction=0).mean()),
            "moe/avg_aux_loss": float(torch.stack(list(balance)).mean()),
        } | self.episodes.update(
            "moe/expert_collapse_warning",
            happening=entropy < ENTROPY_FLOOR,
            detail=f"normalized entropy {entropy:.2f}",
        )

    def gate_values(self, trainer: pl.Trainer, module: AlphaSTomicsModule) -> dict[str, float]:
        """Mean and std of the gates, over real cells, mean over layers and ranks."""
        assert module.last is not None
        gates = module.last.prediction.aux.gates
        if not gates:
            return {}
        by_layer = [gate_moments(gate, module.last.batch.node_mask) for gate in gates]
        mean, std = (torch.stack(each).mean() for each in zip(*by_layer, strict=True))
        moments = {"gate/activation_mean": mean, "gate/activation_std": std}
        values = mean_over_ranks(trainer, moments)
        overall = values["gate/activation_mean"]
        return values | self.episodes.update(
            "gate/no_filtering_warning",
            happening=overall > GATE_CEILING,
            detail=f"mean {overall:.2f}",
        )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the modulation's norm once an epoch, of short epochs once in many updates."""
        assert isinstance(pl_module, AlphaSTomicsModule)
        if not passes_multiple(trainer, self.every):
            return
        values = {"adaln_epoch/modulation_l2_norm": adaln_norm(pl_module)}
        norm = router_modulation_norm(pl_module)
        if norm is not None:
            values["time_cond_epoch/modulation_l2_norm"] = norm
        publish(trainer, values)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: DataHolder,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Probe experts and gates by diffusion time and modality, on the first batch.

        Six calls of the network: not in every validation of a short run.
        """
        assert isinstance(pl_module, AlphaSTomicsModule)
        if batch_idx > 0 or trainer.sanity_checking:
            return
        is_last = trainer.current_epoch + 1 == trainer.max_epochs
        if is_last or trainer.global_step >= self.probed_step + PROBE_EVERY:
            self.probed_step = trainer.global_step
            publish(trainer, probe(pl_module, batch))


@torch.no_grad()
def probe(module: AlphaSTomicsModule, batch: DataHolder) -> dict[str, float]:
    """Expert choice and gate by layer, with one modality noised to t = 0.1, 0.5 and 0.9."""
    values = {}
    for modality, name in enumerate(("expression", "position")):
        for time in PROBE_TIMES:
            randomness = module.draw(batch, "probe", name, int(time * 10))
            times = torch.zeros_like(randomness.times)
            times[:, modality] = round(time * module.noise_model.num_timesteps)
            with record(module.denoiser) as recording:
                module.score(batch, randomness._replace(times=times))
            where = f"{name}/t{time}"
            for layer, seen in enumerate(recording.layers):
                if seen.expert_use is not None:
                    for expert, use in enumerate(seen.expert_use.tolist()):
                        values[f"moe_by_time/{where}/layer{layer}/expert{expert}"] = use
            for layer, (mean, _) in enumerate(recording.gate_statistics()):
                values[f"gate_by_layer/{where}/layer{layer}"] = mean
    return values


def passes_multiple(trainer: pl.Trainer, updates: int) -> bool:
    """Say whether the updates of the epoch that ends reach or pass a multiple of a number."""
    done, batches = (
        trainer.global_step,
        trainer.fit_loop.epoch_loop.batch_progress.current.completed,
    )
    before = done - -(-batches // trainer.accumulate_grad_batches)
    is_last = trainer.current_epoch + 1 == trainer.max_epochs
    return is_last or done // updates > before // updates


def mean_over_ranks(trainer: pl.Trainer, values: dict[str, Tensor]) -> dict[str, float]:
    """Return the mean of each value over the ranks, in one exchange."""
    stacked = torch.stack([value.detach().float() for value in values.values()])
    reduced = trainer.strategy.reduce(stacked, reduce_op="mean")
    assert isinstance(reduced, Tensor)
    return dict(zip(values, reduced.tolist(), strict=True))


def sum_over_ranks(trainer: pl.Trainer, value: Tensor) -> Tensor:
    """Return the sum of a tensor over the ranks, which keep their own."""
    reduced = trainer.strategy.reduce(value.clone(), reduce_op="sum")
    assert isinstance(reduced, Tensor)
    return reduced


def publish(trainer: pl.Trainer, values: dict[str, float]) -> None:
    """Send values to every logger of the run."""
    if trainer.is_global_zero and values:
        for each in trainer.loggers:
            each.log_metrics({**values, "epoch": trainer.current_epoch}, trainer.global_step)
