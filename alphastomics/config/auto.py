"""Settings that follow from the data: settings, metadata and a device enter, a plan leaves.

Whatever the user did not set gets a value here, with a reason in a few words. A pure function of
the settings, the metadata and the kind of device. How they were found: docs/benchmarks.md.
"""

import math
from collections.abc import Iterator
from typing import Any

from alphastomics.config import Config, Section
from alphastomics.config.file import put
from alphastomics.config.plan import Choice, Device, TrainingPlan
from alphastomics.preprocessing.batch_loader import resolve_set_draw
from alphastomics.preprocessing.holdout import choose_holdout
from alphastomics.preprocessing.schema import Metadata

# Cells that attend to one another. Larger sets cost more and predict positions no better.
SET_SIZE = {"cpu": 512, "gpu": 1024}
SETS_IN_A_BATCH = {"cpu": 2, "gpu": 4}
# Values of a batch on a CPU: of many genes fewer cells are taken, so that updates stay as frequent.
CPU_VALUES, LEAST_SET_SIZE = 3_000_000, 128
# Smaller batches bear a larger one.
LEARNING_RATE = {"cpu": 2.0e-3, "gpu": 1.0e-3}
# (cells up to, width, heads, layers): larger networks overfit few cells sooner than they help.
NETWORKS = {
    "cpu": ((math.inf, 96, 3, 2),),
    "gpu": ((100_000, 128, 4, 3), (1_000_000, 256, 4, 4), (math.inf, 256, 8, 6)),
}
UPDATES, CELLS_OF_UPDATES = 500, 15_000
LEAST_UPDATES, MOST_UPDATES, LEAST_UPDATES_CPU = 200, 20_000, 150
# Beyond so many cells, those held out are no loss, and nothing is fitted again.
REFIT_CELLS = 200_000
VALIDATIONS = 10
# Of training; a validation calls the network four times, without a backward pass.
VALIDATION_SHARE, VALIDATION_COST = 0.05, 4 / 3
# Beyond so many cells in one frame there is enough to learn from: a GPU gets the schema's values.
LARGE_CELLS = 1_000_000
DOCUMENTED = (
    "model.dropout",
    "training.learning_rate",
    "training.weight_decay",
    "training.batch_size",
    "training.max_epochs",
    "training.early_stopping",
    "sampling.num_steps",
)
# Of the count model: one of the autoencoder, with weights beside those of genes, and two of each of
# the denoisers of latents and of positions, which see more cells and have fewer weights.
COUNT_UPDATES, LEAST_COUNT_UPDATES = {"cpu": 600, "gpu": 1_500}, 50
COUNT_WEIGHTS, COUNT_WIDTH, COUNT_CELLS = 700_000, 256, 256
CPU_COUNT_SECONDS = 90  # of one of two fits
# Beyond it each round of smoothing costs more than it says.
MANY_GENES = 2_000
# Cells that take more memory than this are read as they are needed.
STREAMED_BYTES = 32e9
# Seconds of one update: a share that does not depend on the network, and FLOPs in a second.
SPEED = {"cpu": (0.02, 1.2e10), "gpu": (0.008, 2.0e13)}
# Of the position head: updates grow with the cells up to those of a slice, then with their root.
HEAD_UPDATES, HEAD_UPDATES_PER_CELL, CELLS_OF_HEAD_UPDATES = 4_000, 4, 10_000
LEAST_HEAD_UPDATES, MOST_HEAD_UPDATES = 100, 20_000
# Networks that see a cell's own expression (plain, normalised) or smoothed expression too; their
# weights but for those of genes; cells of each in an update.
HEAD_PLAIN, HEAD_OWN, HEAD_SMOOTHED, HEAD_CELLS, HEAD_WIDTH = 2, 2, 4, 256, 128
HEAD_INNER = {"plain": HEAD_WIDTH**2, "normalized": 8 * HEAD_WIDTH**2}
# Of one update of small networks, beside its arithmetic; FLOPs in a second of the position head,
# whose matrices are too small for more than one core.
SMALL_SECONDS = {"cpu": 0.015, "gpu": 0.001}
HEAD_SPEED = {"cpu": 5.0e10, "gpu": SPEED["gpu"][1]}
# Of one of two fits on a CPU: few cells and genes are not worth as long as many.
CPU_HEAD_SECONDS, CPU_HEAD_SECONDS_PER_CELL, CPU_HEAD_SECONDS_PER_GENE = 30, 0.004, 0.15
MOST_CPU_HEAD_SECONDS = 200
FLOPS_PER_WEIGHT = 6  # of a cell in a training step: two forwards, four backwards
CPU_SECONDS = 120  # of one of the two trainings, where that is enough to learn
# Of a run on a CPU of so many cells, in proportion beyond: parts get a share of their time.
CPU_RUN_SECONDS, CPU_RUN_CELLS, SHARES = 560, 10_000, 50


def resolve_config(config: Config, metadata: Metadata, device: Device) -> TrainingPlan:
    """Give every setting that is not set the value that suits the data and the device."""
    sizes = [record.cells_per_split["train"] for record in metadata.slices]
    given = dict(set_values(config))
    # Who sets how long to train has judged that: no second training to find it out.
    timed = "training.max_epochs" in given
    alone = device.number == 1 and config.distributed.num_nodes == 1
    holdout = None
    if not timed and alone:
        holdout = choose_holdout(metadata, config.seed.global_seed)
    cells = sum(sizes)
    refit = holdout is not None and cells <= REFIT_CELLS
    documented = _documented(cells, metadata, device).items()
    reason = f"{cells:,} cells in one frame"
    chosen = {key: Choice(key, value, reason) for key, value in documented if key not in given}
    given |= {key: choice.value for key, choice in chosen.items()}
    config = _filled({}, given)

    def choose(key: str, value: Any, reason: str) -> Any:
        if key in given:
            return given[key]
        chosen[key] = Choice(key, value, reason)
        return value

    for choice in _fixed_choices(config, metadata, device):
        choose(*choice)
    streamed = 4.0 * cells * metadata.num_genes > STREAMED_BYTES and (
        metadata.layout == "slice" or metadata.shares_frame
    )
    if choose("data.loading.streaming", streamed, f"{cells:,} cells of {metadata.num_genes} genes"):
        holdout, refit = None, False
    batch = _batch(config, sizes, metadata, device, choose)
    width, layers = _network(config, cells, device, choose)
    seconds = _seconds_of_update(width, layers, metadata.num_genes, batch, device)
    resolved = with_settings(config, {key: choice.value for key, choice in chosen.items()})
    share = _share_of_time(resolved, cells, metadata, seconds, device, given, trainings=1 + refit)
    updates = _updates(cells, seconds, device, share)
    mixed = _mixes_slices(config, metadata)
    per_epoch = _batches([sum(sizes)] if mixed else sizes, batch)
    epochs = choose(
        "training.max_epochs", -(-updates // per_epoch), f"{updates:,} updates for {cells:,} cells"
    )
    updates = epochs * per_epoch
    resolved = with_settings(config, {key: choice.value for key, choice in chosen.items()})
    before = _seconds_before(resolved, cells, metadata, device, share, choose)
    held = metadata.splits["validation"].cells if timed else cells
    between = _epochs_between_validations(epochs, cells, held)
    choose(
        "training.validate_every_n_epochs", between, "ten in a run, more if they take little time"
    )
    choose("training.early_stopping", timed, "held-out cells choose the length of the training")
    resolved = with_settings(config, {key: choice.value for key, choice in chosen.items()})
    whole = (updates * seconds + before) * (1 + refit)
    if holdout is not None:
        whole += _seconds_of_verdict(cells, metadata.num_genes, device)
    return TrainingPlan(
        *(resolved, tuple(chosen.values()), holdout, refit, metadata.reference_cells),
        *(updates, whole, device),
    )


def _documented(cells: int, metadata: Metadata, device: Device) -> dict[str, Any]:
    """Return the values of the schema that hold for a large data set in one frame on a GPU."""
    if device.kind != "gpu" or not metadata.shares_frame or cells <= LARGE_CELLS:
        return {}
    values = Config()
    return {
        key: getattr(getattr(values, section), name)
        for key in DOCUMENTED
        for section, _, name in [key.partition(".")]
    }


def _fixed_choices(config: Config, metadata: Metadata, device: Device) -> list[Choice]:
    """List what suits all tissue that was looked at, or follows from the frame alone."""
    rounds = 3 if metadata.num_genes <= MANY_GENES else 1
    diffusion = config.diffusion
    fixed = diffusion.model_fields_set
    # Shares that are set leave the others what is left.
    condition = min(0.75, 1 - diffusion.equal_time_share) if "equal_time_share" in fixed else 0.75
    equal = min(0.15, 1 - diffusion.condition_share) if "condition_share" in fixed else 0.15
    steps = min(20, diffusion.num_timesteps)
    frame = "slices share a frame"
    if not metadata.shares_frame:
        frame = "slices share no frame: found by expression"
    return [
        Choice("model.dropout", 0.3, "against overfitting to few animals"),
        Choice("model.input_dropout", 0.8, "counts of one cell are noisy"),
        Choice("model.smoothing_rounds", rounds, "averages over neighbours in expression space"),
        Choice("model.smoothing_dropout", 0.5, "against overfitting to few animals"),
        Choice("diffusion.position_frame", "registered", frame),
        Choice("diffusion.condition_share", condition, "one checkpoint for all tasks"),
        Choice("diffusion.equal_time_share", equal, "the remaining sets learn new tissue"),
        Choice("diffusion.full_noise_share", 0.3, "where sampling begins"),
        Choice("loss.position", "aligned", "neighbours are kept better than by distances"),
        Choice("training.learning_rate", LEARNING_RATE[device.kind], "for short trainings"),
        Choice("training.weight_decay", 0.01, "against overfitting to few animals"),
        Choice("sampling.num_steps", steps, "more steps changed no score"),
    ]


def _batch(
    config: Config, sizes: list[int], metadata: Metadata, device: Device, choose: Any
) -> tuple[int, int]:
    """Choose cells of a set and of a batch."""
    mixed = _mixes_slices(config, metadata)
    sizes = [sum(sizes)] if mixed else sizes
    largest = max(sizes)
    most = SET_SIZE[device.kind]
    if device.kind == "cpu":
        fitting = CPU_VALUES // (SETS_IN_A_BATCH["cpu"] * metadata.num_genes)
        most = max(min(most, fitting), LEAST_SET_SIZE)
    # Sets of one slice are as equal as can be: this many fit without padding.
    fitting = -(-largest // max(-(-largest // most), 1))
    batch_size = dict(set_values(config)).get("training.batch_size")
    if batch_size is not None:
        fitting = _divisor(batch_size, fitting)
    set_size = choose(
        "data.loading.set_size",
        max(fitting, 1),
        f"of {largest:,} cells {'in one frame' if mixed else 'in the largest slice'}",
    )
    if set_size is None:
        return batch_size or sum(sizes), batch_size or sum(sizes)
    # Small sets come in greater numbers: a step sees as many cells.
    target = max(SETS_IN_A_BATCH[device.kind], most * SETS_IN_A_BATCH[device.kind] // set_size)
    # No more sets than the cells would fill: a batch is not to be padding.
    number = max(min(target, _num_sets(sizes, set_size), -(-sum(sizes) // set_size)), 1)
    batch = choose("training.batch_size", number * set_size, f"{number} sets in a step")
    return set_size, batch


def _mixes_slices(config: Config, metadata: Metadata) -> bool:
    loading = config.data.loading
    where = config.data.processed_data_dir
    draw = resolve_set_draw(loading.set_draw, metadata, where, streaming=loading.streaming)
    return draw == "random"


def _divisor(batch_size: int, most: int) -> int:
    """Return the largest size of a set that divides a batch."""
    return next(size for size in range(min(most, batch_size), 0, -1) if batch_size % size == 0)


def _num_sets(sizes: list[int], set_size: int) -> int:
    return sum(-(-size // set_size) for size in sizes if size)


def _batches(sizes: list[int], batch: tuple[int, int]) -> int:
    """Count the updates of an epoch."""
    set_size, cells = batch
    return max(-(-_num_sets(sizes, set_size) // max(cells // set_size, 1)), 1)


def _network(config: Config, cells: int, device: Device, choose: Any) -> tuple[int, int]:
    """Choose width, heads and layers."""
    _, width, heads, layers = next(row for row in NETWORKS[device.kind] if cells <= row[0])
    reason = f"for {cells:,} cells" if device.kind == "gpu" else "small enough for a CPU"
    given = dict(set_values(config))
    divisor = given.get("model.n_heads", 1)
    width = choose("model.d_model", -(-width // divisor) * divisor, reason)
    fitting = next(n for n in range(min(heads, width), 0, -1) if width % n == 0)
    choose("model.n_heads", fitting, "heads of 32 or more")
    return width, choose("model.n_layers", layers, reason)


def _seconds_of_update(
    width: int, layers: int, genes: int, batch: tuple[int, int], device: Device
) -> float:
    """Estimate the time of an update from the network's arithmetic."""
    set_size, cells = batch
    network = layers * (12 * width**2 + 2 * width * set_size) + 6 * genes * width
    # Two networks of the head are called in each step.
    weights = network + 2 * (4 * genes * HEAD_WIDTH + HEAD_INNER["normalized"]) / 3
    fixed, rate = SPEED[device.kind]
    cores = device.cores if device.kind == "cpu" else 1
    return fixed + FLOPS_PER_WEIGHT * weights * cells / (rate * cores)


def _share_of_time(
    config: Config,
    cells: int,
    metadata: Metadata,
    seconds: float,
    device: Device,
    given: dict[str, Any],
    *,
    trainings: int,
) -> float:
    """Return the share of its time that each part of a run gets, so that a CPU takes minutes."""
    if device.kind == "gpu":
        return 1.0
    has_counts = config.generates_expression and given.get("expression.space") != "genes"
    of_count = _seconds_of_count_update(metadata, device) if has_counts else 0.0
    of_head = _seconds_of_head_update(config, metadata, device) if config.has_position_head else 0.0

    def needed(share: float) -> float:
        total = _updates(cells, seconds, device, share) * seconds
        if of_count:
            count = _count_updates(cells, of_count, device, share)
            total += given.get("expression.updates", count) * of_count
        if of_head:
            head = _head_updates(cells, metadata.num_genes, of_head, device, share).value
            total += given.get("training.position_head_updates", head) * of_head
        return trainings * total

    allowed = CPU_RUN_SECONDS * max(cells / CPU_RUN_CELLS, 1)
    allowed -= _seconds_of_verdict(cells, metadata.num_genes, device)
    shares = (1 - step / SHARES for step in range(SHARES))
    return next((share for share in shares if needed(share) <= allowed), 1 / SHARES)


def _count_updates(cells: int, seconds: float, device: Device, share: float = 1.0) -> int:
    """Choose how long the count model is fitted."""
    updates = min(COUNT_UPDATES[device.kind], cells)
    if device.kind == "cpu":
        updates = min(updates, round(share * CPU_COUNT_SECONDS / seconds))
    return max(updates, LEAST_COUNT_UPDATES)


def _head_updates(
    cells: int, genes: int, seconds: float, device: Device, share: float = 1.0
) -> Choice:
    """Choose how long the position head is fitted."""
    target = HEAD_UPDATES * math.sqrt(max(cells / CELLS_OF_HEAD_UPDATES, 1))
    updates = round(max(min(HEAD_UPDATES_PER_CELL * cells, target), LEAST_HEAD_UPDATES))
    most, reason = MOST_HEAD_UPDATES, f"for {cells:,} cells"
    if device.kind == "cpu":
        time = CPU_HEAD_SECONDS + CPU_HEAD_SECONDS_PER_CELL * cells
        time += CPU_HEAD_SECONDS_PER_GENE * genes
        time = share * min(time, MOST_CPU_HEAD_SECONDS)
        most = max(round(time / seconds), LEAST_HEAD_UPDATES)
    if updates > most:
        updates, reason = most, "as many as there is time for"
    return Choice("training.position_head_updates", updates, reason)


def _seconds_before(
    config: Config, cells: int, metadata: Metadata, device: Device, share: float, choose: Any
) -> float:
    """Choose what is fitted before the network is trained, and estimate its time."""
    seconds = 0.0
    if config.generates_expression:
        of_update = _seconds_of_count_update(metadata, device)
        updates = _count_updates(cells, of_update, device, share)
        space = choose("expression.space", "latent", _likelihood(metadata))
        updates = choose("expression.updates", updates, "of the count model")
        seconds += updates * of_update if space == "latent" else 0
    if config.has_position_head:
        of_update = _seconds_of_head_update(config, metadata, device)
        head = _head_updates(cells, metadata.num_genes, of_update, device, share)
        seconds += of_update * choose(*head)
    return seconds


def _likelihood(metadata: Metadata) -> str:
    """Say what generated values are drawn from: the fit looks at the cells, and may correct it."""
    if metadata.normalization.fractions:
        return "values are no counts: drawn as zero by chance, else Gaussian"
    if not metadata.normalization.log_normalize:
        return "drawn as counts if values stand for some, else Gaussian"
    return "generated cells are drawn as counts"


def _seconds_of_count_update(metadata: Metadata, device: Device) -> float:
    """Estimate the time of an update of the count model."""
    weights = COUNT_WEIGHTS + 3 * COUNT_WIDTH * metadata.num_genes
    cores = device.cores if device.kind == "cpu" else 1
    arithmetic = FLOPS_PER_WEIGHT * weights * COUNT_CELLS / (SPEED[device.kind][1] * cores)
    return SMALL_SECONDS[device.kind] + arithmetic


def _seconds_of_head_update(config: Config, metadata: Metadata, device: Device) -> float:
    """Estimate the time of an update of both kinds of networks of the position head."""
    genes = metadata.num_genes
    rounds = config.model.smoothing_rounds
    inputs = (HEAD_PLAIN + HEAD_OWN + HEAD_SMOOTHED * (1 + rounds)) * genes
    inner = (HEAD_OWN + HEAD_SMOOTHED) * HEAD_INNER["normalized"] + HEAD_PLAIN * HEAD_INNER["plain"]
    weights = HEAD_WIDTH * inputs + inner
    arithmetic = FLOPS_PER_WEIGHT * weights * HEAD_CELLS / HEAD_SPEED[device.kind]
    return SMALL_SECONDS[device.kind] + arithmetic


def _seconds_of_verdict(cells: int, genes: int, device: Device) -> float:
    """Estimate the time of sampling, scoring, and fitting the baselines, mostly trees."""
    return 20 + 0.002 * cells + 1.3e-4 * min(cells, 3_000) * min(genes, 500) / device.cores


def _updates(cells: int, seconds: float, device: Device, share: float = 1.0) -> int:
    """Choose the number of updates: more cells deserve more, and a CPU has minutes, not hours."""
    target = UPDATES * math.sqrt(cells / CELLS_OF_UPDATES)
    updates = round(min(max(target, LEAST_UPDATES), MOST_UPDATES))
    if device.kind == "cpu":
        updates = min(updates, max(round(share * CPU_SECONDS / seconds), LEAST_UPDATES_CPU))
    return updates


def _epochs_between_validations(epochs: int, cells: int, held: int) -> int:
    """Choose how often to validate: ten times, more often as long as that takes a twentieth."""
    affordable = math.ceil(VALIDATION_COST * held / (VALIDATION_SHARE * max(cells, 1)))
    return max(min(affordable, epochs // VALIDATIONS), 1)


def set_values(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and value of everything that was set."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from set_values(value, f"{prefix}{name}.")
        elif name in section.model_fields_set:
            yield f"{prefix}{name}", value


def with_settings(config: Config, values: dict[str, Any]) -> Config:
    """Return the settings with some values, by key."""
    return _filled(config.model_dump(), values)


def _filled(document: dict[str, Any], values: dict[str, Any]) -> Config:
    for key, value in values.items():
        put(document, key, value)
    return Config.model_validate(document)
