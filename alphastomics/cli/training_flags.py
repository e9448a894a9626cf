"""The flags of `train`, and those that it shares with other commands."""

from alphastomics.cli.schema import Flag, on_and_off, path_flag, settings, switch

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
SETTINGS = [CONFIG, SET]
DATA_DIR = Flag("data_dir", "data.processed_data_dir", metavar="PATH")
BATCH_SIZE = Flag("batch_size", "training.batch_size")
TRAINING = [
    *SETTINGS,
    DATA_DIR,
    BATCH_SIZE,
    *settings("model", "d_model", "n_layers", "n_heads", "dropout"),
    Flag("weight_decay", "training.weight_decay"),
    *settings(LOADING, "set_size", "set_draw"),
    Flag("logger", "logging.logger"),
    Flag("epochs", "training.max_epochs"),
    Flag("lr", "training.learning_rate"),
    Flag("training_mode", "training.mode"),
    *on_and_off(
        "use_gated_attention",
        "no_gated_attention",
        f"{LAYER}.use_gated_attention",
        "The linear-attention baseline.",
        "Gated softmax attention.",
    ),
    Flag("gate_type", f"{LAYER}.gate_type"),
    *on_and_off(
        "use_moe", "no_moe", f"{LAYER}.use_moe", "A dense feed-forward instead of experts."
    ),
    *settings(LAYER, "num_experts", "moe_top_k"),
    *on_and_off(
        "enable_masking", "disable_masking", "masking.enable", "Plain diffusion, nothing hidden."
    ),
    *settings("masking", "expression_mask_ratio", "position_mask_ratio"),
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
    *settings("distributed", "strategy", "num_nodes"),
    Flag("num_genes", "model.num_genes", help="Genes that the data must have."),
]
