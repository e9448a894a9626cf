"""The flags of `train`, and those that it shares with other commands."""

from alphastomics.cli.schema import Flag, path_flag, switch

LOADING = "data.loading"
LAYER = "TransformerLayer_setting"

CONFIG = path_flag(
    "config", "YAML file with settings.", default="config.yaml in the working folder, if any"
)
SET = Flag(
    "set",
    help="Any settings by their path in config.yaml, as in model.d_model=128.",
    default="none",
    kind=str,
    many=True,
    metavar="KEY=VALUE",
)
DATA_DIR = Flag("data_dir", "data.processed_data_dir", metavar="PATH")
BATCH_SIZE = Flag("batch_size", "training.batch_size")
TRAINING = [
    CONFIG,
    SET,
    DATA_DIR,
    BATCH_SIZE,
    Flag("d_model", "model.d_model"),
    Flag("n_layers", "model.n_layers"),
    Flag("n_heads", "model.n_heads"),
    Flag("dropout", "model.dropout"),
    Flag("weight_decay", "training.weight_decay"),
    Flag("set_size", f"{LOADING}.set_size"),
    Flag("set_draw", f"{LOADING}.set_draw"),
    Flag("logger", "logging.logger"),
    Flag("epochs", "training.max_epochs"),
    Flag("lr", "training.learning_rate"),
    Flag("training_mode", "training.mode"),
    Flag(
        "use_gated_attention",
        f"{LAYER}.use_gated_attention",
        value=True,
        excludes="attention",
        help="Gated softmax attention.",
    ),
    Flag(
        "no_gated_attention",
        f"{LAYER}.use_gated_attention",
        value=False,
        excludes="attention",
        help="The linear-attention baseline.",
    ),
    Flag("gate_type", f"{LAYER}.gate_type"),
    Flag("use_moe", f"{LAYER}.use_moe", value=True, excludes="moe"),
    Flag(
        "no_moe",
        f"{LAYER}.use_moe",
        value=False,
        excludes="moe",
        help="A dense feed-forward instead of experts.",
    ),
    Flag("num_experts", f"{LAYER}.num_experts"),
    Flag("moe_top_k", f"{LAYER}.moe_top_k"),
    Flag("enable_masking", "masking.enable", value=True, excludes="masking"),
    Flag(
        "disable_masking",
        "masking.enable",
        value=False,
        excludes="masking",
        help="Plain diffusion, nothing hidden.",
    ),
    Flag("expression_mask_ratio", "masking.expression_mask_ratio"),
    Flag("position_mask_ratio", "masking.position_mask_ratio"),
    Flag(
        "streaming",
        f"{LOADING}.streaming",
        value=True,
        default="off, unless the cells are too many for memory",
    ),
    Flag("buffer_size", f"{LOADING}.buffer_size"),
    Flag(
        "resume",
        help="Checkpoint to go on from, or 'last' for the run's own.",
        kind=str,
        default="none",
        metavar="PATH",
        second_names=("resume_from",),
    ),
    switch("test_after_train", "Run the test command on the best checkpoint at the end."),
    Flag("output_dir", "logging.save_dir", metavar="PATH"),
    Flag("exp_name", "logging.exp_name"),
    Flag(
        "gpus",
        "distributed.devices",
        default="1",
        help="GPUs on each machine; 0, or none on the machine, means CPU.",
    ),
    Flag("num_workers", f"{LOADING}.num_workers"),
    Flag(
        "fp16",
        "training.precision",
        value="fp16",
        excludes="precision",
        help="Train in half precision: the same as --precision fp16.",
    ),
    Flag("precision", "training.precision", excludes="precision"),
    Flag("strategy", "distributed.strategy"),
    Flag("num_nodes", "distributed.num_nodes"),
    Flag("num_genes", "model.num_genes", help="Genes that the data must have."),
]
