"""What a run says before it begins: a network and its data enter, a line and advice are logged."""

import logging

from alphastomics.attn_model.accounting import account
from alphastomics.config import LayerConfig
from alphastomics.diffusion_model.module import AlphaSTomicsModule
from alphastomics.preprocessing.schema import Metadata

logger = logging.getLogger(__name__)
LEAST_BALANCE, MOST_BALANCE = 0.01, 0.1  # of the balance loss's weight, by the rule of thumb


def rule_of_thumb(layer: LayerConfig, cells: int) -> str | None:
    """Say when experts, top-k or balance weight are more than twice, or less than half, the rule.

    The rule goes by the number of cells.
    """
    if not layer.use_moe:
        return None
    experts, top_k = (4, 1) if cells < 10_000 else (8, 2) if cells <= 100_000 else (16, 2)
    weight = layer.moe_load_balance_loss_weight
    far = {
        f"{layer.num_experts} experts": not experts / 2 <= layer.num_experts <= experts * 2,
        f"top-{layer.moe_top_k}": layer.moe_top_k > top_k * 2,
        f"balance weight {weight:g}": layer.moe_balance == "loss"
        and not LEAST_BALANCE / 2 <= weight <= MOST_BALANCE * 2,
    }
    named = [name for name, is_far in far.items() if is_far]
    if not named:
        return None
    return (
        f"{', '.join(named)} for {cells:,} cells: as a rule of thumb use {experts} with "
        f"top-{top_k}, and a balance weight of {LEAST_BALANCE:g} to {MOST_BALANCE:g}"
    )


def describe(module: AlphaSTomicsModule, metadata: Metadata, set_size: int) -> None:
    """Log what will be trained on what."""
    costs = account(module.model, set_size)
    cells = metadata.splits["train"].cells
    logger.info(
        "%s parameters (%s active), %.2g FLOPs a cell and step; %s training cells, %d genes",
        f"{costs['parameters_total']:,}",
        f"{costs['parameters_active']:,}",
        float(costs["flops_per_cell_step"]),
        f"{cells:,}",
        metadata.num_genes,
    )
    advice = rule_of_thumb(module.config.layer, cells)
    if advice:
        logger.warning("%s", advice)
