"""What a model costs: a `Model` enters, counts of parameters and arithmetic leave.

A multiply-add is two FLOPs. Matrix products are counted, element-wise work is not. A training step
is three forward passes: one forward, one backward for inputs, one for weights.
"""

from torch import nn

from alphastomics.attn_model.gated_attention import GatedMultiHeadAttention
from alphastomics.attn_model.model import Model
from alphastomics.attn_model.moe import MixtureOfExperts

FLOPS_PER_MULTIPLY_ADD = 2
PASSES_PER_STEP = 3


def total_parameters(module: nn.Module) -> int:
    """Count every trainable number of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def active_parameters(module: nn.Module) -> int:
    """Count the parameters that one cell meets: k of the E experts, and everything else."""
    mixtures = [part for part in module.modules() if isinstance(part, MixtureOfExperts)]
    idle = sum(_expert_parameters(part) * (part.num_experts - part.top_k) for part in mixtures)
    return total_parameters(module) - idle


def feed_forward_share(model: Model) -> float:
    """Return the share of the feed-forward parameters that one cell meets: 1 without experts."""
    parts = [layer.get_submodule("feed_forward") for layer in model.trunk.layers]
    return sum(map(active_parameters, parts)) / sum(map(total_parameters, parts))


def parameters_by_part(model: Model) -> dict[str, int]:
    """Count parameters by what they are for; the counts add up to the total."""
    layers = list(model.trunk.layers)
    parts = {
        "attention": sum(total_parameters(layer.get_submodule("attention")) for layer in layers),
        "feed_forward": sum(
            total_parameters(layer.get_submodule("feed_forward")) for layer in layers
        ),
        "time": total_parameters(model.trunk.time_in)
        + sum(parameter.numel() for parameter in model.time_modulation_parameters().values()),
        "position": total_parameters(model.trunk.position_in)
        + total_parameters(model.trunk.position_out),
    }
    return {**parts, "expression": total_parameters(model) - sum(parts.values())}


def attention_flops(attention: GatedMultiHeadAttention, set_size: int) -> int:
    """Count the FLOPs of one cell in one attention, projections included."""
    projections = _matrix_size(attention.in_projection) + _matrix_size(attention.out_projection)
    return FLOPS_PER_MULTIPLY_ADD * (projections + attention.multiply_adds(set_size))


def flops_per_cell(model: Model, set_size: int) -> int:
    """Count the FLOPs of one cell in one forward pass, in a set of `set_size` cells.

    What is done once a set (the embedding of time, the modulations) is left out: its share falls as
    one over the size of the set.
    """
    trunk = model.trunk
    readers = [trunk.expression_in, trunk.position_in, trunk.expression_out, trunk.position_out]
    readers += [] if model.smoothed_in is None else [model.smoothed_in]
    total = FLOPS_PER_MULTIPLY_ADD * (
        sum(_matrix_size(part) for part in readers) + _matrix_size(model.unseen_share)
    )
    for layer in trunk.layers:
        attention = layer.get_submodule("attention")
        assert isinstance(attention, GatedMultiHeadAttention)
        total += attention_flops(attention, set_size)
        total += FLOPS_PER_MULTIPLY_ADD * _feed_forward_size(layer.get_submodule("feed_forward"))
    return total


def account(model: Model, set_size: int) -> dict[str, int]:
    """Sum up what a model costs in sets of `set_size` cells, as plain numbers.

    Works on a model of the `meta` device too, which takes no memory at any size.
    """
    flops = flops_per_cell(model, set_size)
    return {
        "parameters_total": total_parameters(model),
        "parameters_active": active_parameters(model),
        **{f"parameters_{part}": count for part, count in parameters_by_part(model).items()},
        "flops_per_cell_forward": flops,
        "flops_per_cell_step": PASSES_PER_STEP * flops,
        "flops_per_set_step": PASSES_PER_STEP * flops * set_size,
    }


def _matrix_size(module: nn.Module) -> int:
    """Count the weights of the linear maps inside a module."""
    linears = (part for part in module.modules() if isinstance(part, nn.Linear))
    return sum(part.weight.numel() for part in linears)


def _feed_forward_size(feed_forward: nn.Module) -> int:
    """Count the weights that one cell is multiplied by, with the router and its noise."""
    size = _matrix_size(feed_forward)
    if isinstance(feed_forward, MixtureOfExperts):
        expert = feed_forward.up_weight[0].numel() + feed_forward.down_weight[0].numel()
        size += feed_forward.top_k * expert
    return size


def _expert_parameters(moe: MixtureOfExperts) -> int:
    """Count the parameters of one expert."""
    parts = (moe.up_weight, moe.up_bias, moe.down_weight, moe.down_bias)
    return sum(part[0].numel() for part in parts)
