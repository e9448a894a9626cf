"""Every setting and its default, typed: no default is written anywhere else.

Plain values enter, a frozen `Config` leaves. The data path's sections stand in `config/data.py`.
How the documented YAML file and the flags map onto these classes is the task of `config/file.py`.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from alphastomics.config.data import DataConfig, SimulationConfig
from alphastomics.config.run import DistributedConfig, ExtractConfig, LoggingConfig
from alphastomics.config.section import (
    LARGEST_COUNT,
    RATIO_ROUNDING,
    Section,
    count,
    rate,
    setting,
    share,
    weight,
)
from alphastomics.errors import InputError
from alphastomics.tasks import Mode, SampleMode, tasks_of

Precision = Annotated[
    Literal["auto", "bf16", "fp16", "32"],
    # YAML reads a bare 32 as a number.
    BeforeValidator(lambda value: "32" if value == 32 and not isinstance(value, bool) else value),
]
Solver = Literal["ddim", "ddpm", "dpmpp"]
MaskStrategy = Literal["random", "block", "structured"]
# The file says true or false for these two attentions, and another one's name.
ATTENTION_OF = {True: "softmax", False: "linear"}
Attention = Annotated[
    Literal["softmax", "linear"],
    BeforeValidator(lambda value: ATTENTION_OF[value] if isinstance(value, bool) else value),
    PlainSerializer(
        lambda name: {known: flag for flag, known in ATTENTION_OF.items()}.get(name, name),
        when_used="json",
    ),
]


class SeedConfig(Section):
    """Where randomness starts."""

    global_seed: int = setting(42, "Seed of all random numbers of a run.", ge=0, le=2**32 - 1)
    deterministic: bool = setting(
        False, "Refuse kernels whose result changes from run to run (slower on a GPU)."
    )


class ModelConfig(Section):
    """Size of the denoiser."""

    num_genes: int | None = count(None, "Genes of the model; null takes the number from the data.")
    d_model: int = count(256, "Width of the hidden state of a cell.", auto=True)
    n_heads: int = count(8, "Attention heads of a layer; must divide d_model.", auto=True)
    n_layers: int = count(6, "Transformer layers.", auto=True)
    d_ff: int | None = count(None, "Width of the feed-forward part; null is 4 x d_model.")
    dropout: float = rate(0.1, "Share of activations dropped in training.", auto=True)
    input_dropout: float = rate(
        0.0, "Share of given expression values dropped in training.", auto=True
    )
    smoothing_rounds: int = count(
        0,
        "Rounds of averaging given expression over its nearest neighbours in expression; 0: none.",
        minimum=0,
        auto=True,
    )
    smoothing_neighbours: int = count(15, "Nearest neighbours that each round averages.")
    smoothing_components: int = count(30, "Principal components in which neighbours are found.")
    smoothing_dropout: float = rate(
        0.2, "Share of smoothed expression values dropped in training.", auto=True
    )

    @model_validator(mode="after")
    def heads_divide_width(self) -> "ModelConfig":
        """Refuse a width that cannot be shared out among the heads."""
        # A number that is not set follows the width.
        if "n_heads" in self.model_fields_set and self.d_model % self.n_heads:
            raise ValueError(
                f"model.n_heads ({self.n_heads}) must divide model.d_model ({self.d_model})"
            )
        return self

    @property
    def feed_forward_width(self) -> int:
        """Return d_ff, or its documented default of 4 x d_model."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff


class LayerConfig(Section):
    """What a transformer layer is made of: `TransformerLayer_setting` in the file."""

    attention: Attention = setting(
        "softmax",
        "Gated softmax attention (true) or the linear-attention baseline (false).",
        alias="use_gated_attention",
        json_schema_extra={"expected": "true or false, or the name of an attention"},
    )
    gate: Literal["headwise", "elementwise", "none"] = setting(
        "headwise",
        "Gate on each head's output; counts with softmax attention only.",
        alias="gate_type",
    )
    use_qk_norm: bool = setting(True, "RMSNorm on the queries and keys of each head.")
    use_moe: bool = setting(False, "Mixture of experts in place of the feed-forward.")
    num_experts: int = count(4, "Experts of a layer.")
    moe_top_k: int = count(2, "Experts that a cell is assigned to; at most num_experts.")
    moe_expert_size: Literal["split", "full"] = setting(
        "split", "Hidden width of an expert: d_ff / num_experts, or the full d_ff."
    )
    moe_balance: Literal["loss", "bias"] = setting(
        "loss", "Balance experts by a loss, or by a bias on the router's logits."
    )
    moe_load_balance_loss_weight: float = weight(
        0.01, "Weight of the load-balance loss in the total loss."
    )
    moe_z_loss_weight: float = weight(0.0, "Weight of the router's z-loss; 0 leaves it out.")
    time_gate_modulation: bool = setting(
        True, "Let the diffusion time shift the router's logits (no effect at start)."
    )
    activation_checkpointing: bool = setting(
        False, "Recompute activations in the backward pass: less memory, more time."
    )

    @model_validator(mode="after")
    def linear_has_no_gate(self) -> "LayerConfig":
        """Give linear attention the gate it has, none, so that one model has one config."""
        if self.attention == "linear":
            object.__setattr__(self, "gate", "none")
        return self

    @model_validator(mode="after")
    def enough_experts(self) -> "LayerConfig":
        """Refuse a cell assigned to more experts than there are."""
        if self.moe_top_k > self.num_experts:
            raise ValueError(
                f"TransformerLayer_setting.moe_top_k ({self.moe_top_k}) must be at most "
                f"TransformerLayer_setting.num_experts ({self.num_experts})"
            )
        return self


class DiffusionConfig(Section):
    """The forward process."""

    num_timesteps: int = setting(
        1000, "Timesteps T of the schedule; sampling may use fewer.", ge=2, le=1_000_000
    )
    schedule: Literal["cosine"] = setting("cosine", "Noise schedule.")
    prediction_type: Literal["x0"] = setting("x0", "What the network predicts.")
    nu_expression: float = setting(
        1.0, "Exponent of the clock of expression: t becomes t^nu.", gt=0, le=100
    )
    nu_position: float = setting(
        1.0, "Exponent of the clock of position: t becomes t^nu.", gt=0, le=100
    )
    equal_time_share: float = share(
        0.25,
        "Joint training: share of the sets whose two modalities have the same time.",
        auto=True,
    )
    condition_share: float = share(
        0.5,
        "Joint training: share of the sets in which one of the modalities is given.",
        auto=True,
    )
    position_frame: Literal["predicted", "random", "registered"] = setting(
        "predicted",
        "Frame of positions in training: registered rotates slices onto one another "
        "by expression, predicted asks the network, random is any.",
        auto=True,
    )
    full_noise_share: float = share(
        0.5,
        "Share of the training sets with a given modality whose other one is all noise.",
        auto=True,
    )

    @model_validator(mode="after")
    def shares_fit(self) -> "DiffusionConfig":
        """Refuse shares of more than there is."""
        both = {"equal_time_share", "condition_share"} <= self.model_fields_set
        if both and self.equal_time_share + self.condition_share > 1 + RATIO_ROUNDING:
            raise ValueError(
                f"diffusion.equal_time_share ({self.equal_time_share}) and "
                f"diffusion.condition_share ({self.condition_share}) must sum to at most 1"
            )
        return self


class ExpressionConfig(Section):
    """What of expression is diffused."""

    space: Literal["latent", "genes"] = setting(
        "genes",
        "Diffuse latents of a count model, from which counts are drawn, or the genes' values.",
        auto=True,
    )
    latents: int = count(32, "Latents of a cell.")
    updates: int = count(2000, "Updates of the count model.", auto=True)


class TrainingConfig(Section):
    """How a model is trained."""

    mode: Mode = setting("joint", "What is generated: both, positions, or expression.")
    batch_size: int = count(1024, "Cells in a training step, on each rank.", auto=True)
    learning_rate: float = setting(1.0e-4, "Peak learning rate of AdamW.", auto=True, gt=0)
    weight_decay: float = weight(1.0e-5, "Weight decay of AdamW.", auto=True)
    max_epochs: int = count(100, "Passes over the training cells.", auto=True)
    position_head_updates: int = count(
        4000,
        "Updates of the networks that expect a position from expression alone.",
        auto=True,
    )
    precision: Precision = setting(
        "auto", "Number format of the arithmetic; auto is bf16 on a GPU, 32 on a CPU."
    )
    gradient_clip_val: float = weight(
        1.0, "Largest gradient norm; larger ones are scaled down; 0 is no limit."
    )
    accumulate_grad_batches: int = count(1, "Batches whose gradients are added up for one update.")
    early_stopping: bool = setting(True, "Stop when validation no longer improves.", auto=True)
    validate_every_n_epochs: int = count(1, "Epochs between two validations.", auto=True)
    patience: int = count(10, "Validations without improvement before stopping early.")
    warmup_share: float = share(0.05, "Share of the steps over which the learning rate rises.")
    final_lr_share: float = share(0.05, "Share of the peak learning rate left at the end.")
    ema_decay: float = rate(0.999, "Decay of the averaged weights that are used and exported.")
    on_nonfinite: Literal["stop", "skip"] = setting(
        "stop", "A gradient that is not finite stops the run, or is skipped and counted."
    )
    compile: bool = setting(False, "Compile the network with torch.compile.")


class MaskingConfig(Section):
    """Masked diffusion: features hidden from the network, to be reconstructed."""

    enable: bool = setting(False, "Hide a share of the features after noising.")
    expression_mask_ratio: float = share(0.3, "Share of each cell's genes to hide.")
    position_mask_ratio: float = share(0.33, "Share of each cell's coordinates to hide.")
    mask_strategy: MaskStrategy = setting("random", "Which features are hidden together.")
    reconstruction_weight: float = weight(
        0.5, "Weight of the reconstruction loss on hidden entries."
    )
    masking_probability: float = share(1.0, "Share of the training sets that are masked at all.")
    progressive_masking: bool = setting(False, "Grow the ratios from 0 to their values.")
    progressive_steps: int = count(10000, "Steps over which progressive masking grows.")


class LossConfig(Section):
    """Weights of the loss terms."""

    lambda_expression: float = weight(1.0, "Weight of the expression loss.", auto=True)
    lambda_position: float = weight(1.0, "Weight of the position loss.")
    position: Literal["distance", "aligned", "both"] = setting(
        "distance",
        "Error of distances, of positions after rigid alignment, or their sum.",
        auto=True,
    )
    reflection: bool = setting(True, "Allow mirror images when aligning.")


class SamplingConfig(Section):
    """How cells are generated."""

    num_steps: int = count(
        50, "Network calls of a sample; at most diffusion.num_timesteps.", auto=True
    )
    sampler: Solver = setting("ddim", "Solver of the reverse.")
    mode: SampleMode = setting(
        "joint",
        "What is generated: both, positions, or expression; or genes imputed, cells labelled.",
    )
    estimator: Literal["mean", "sample", "assigned"] = setting(
        "mean",
        "The posterior mean, one sample from the posterior, or one position of a section each.",
    )
    num_samples: int = setting(
        4, "Samples; their std is written beside the estimate.", ge=1, le=1000
    )
    radius_level: float = setting(
        0.9,
        "Share of cells that obs['position_radius_…'] and intervals of expression hold.",
        gt=0,
        lt=1,
    )
    max_set_size: int | None = setting(
        None,
        "Cells of a set at most; larger slices go in chunks; null: 65536, samples on a CPU 2048.",
        ge=2,
        le=LARGEST_COUNT,
    )

    @property
    def task(self) -> Mode:
        """The mode, where it is that of a task of the network."""
        if self.mode == "impute" or self.mode == "label":
            raise InputError(f"sampling.mode: {self.mode} is for `alphastomics sample` alone")
        return self.mode


class Config(Section):
    """Everything a user can set."""

    seed: SeedConfig = SeedConfig()
    model: ModelConfig = ModelConfig()
    diffusion: DiffusionConfig = DiffusionConfig()
    expression: ExpressionConfig = ExpressionConfig()
    training: TrainingConfig = TrainingConfig()
    masking: MaskingConfig = MaskingConfig()
    loss: LossConfig = LossConfig()
    data: DataConfig = DataConfig()
    distributed: DistributedConfig = DistributedConfig()
    sampling: SamplingConfig = SamplingConfig()
    extract: ExtractConfig = ExtractConfig()
    simulation: SimulationConfig = SimulationConfig()
    logging: LoggingConfig = LoggingConfig()
    layer: LayerConfig = Field(LayerConfig(), alias="TransformerLayer_setting")

    @property
    def has_position_head(self) -> bool:
        """Whether positions are expected from expression: slices in one frame, smoothed."""
        return (
            self.diffusion.position_frame == "registered"
            and self.model.smoothing_rounds > 0
            and any(task.generates_position for task in tasks_of(self.training.mode))
        )

    @property
    def num_latents(self) -> int:
        """Latents of a cell's expression: 0 where expression is not diffused in them."""
        is_latent = self.generates_expression and self.expression.space == "latent"
        return self.expression.latents if is_latent else 0

    @property
    def generates_expression(self) -> bool:
        """Whether a model of these settings can generate expression."""
        return any(task.generates_expression for task in tasks_of(self.training.mode))

    @model_validator(mode="after")
    def sections_agree(self) -> "Config":
        """Refuse values that are fine alone and impossible together."""
        set_size = self.data.loading.set_size
        sized = "batch_size" in self.training.model_fields_set
        if sized and set_size is not None and self.training.batch_size % set_size:
            raise ValueError(
                f"training.batch_size ({self.training.batch_size}) must be a multiple of "
                f"data.loading.set_size ({set_size})"
            )
        width, experts = self.model.feed_forward_width, self.layer.num_experts
        if self.layer.use_moe and self.layer.moe_expert_size == "split" and width % experts:
            raise ValueError(
                f"TransformerLayer_setting.num_experts ({experts}) must divide the feed-forward "
                f"width model.d_ff ({width}) when moe_expert_size is split"
            )
        return self
