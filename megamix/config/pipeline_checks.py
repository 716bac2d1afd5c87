"""Checks of a pipeline: what its schedule, layers and micro-batches must be to each other."""

from collections.abc import Callable, Iterator

from megamix.config.sections import Config, ParallelismConfig

# Each schedule's fewest and most stages per rank, and what it takes where the key is not set.
_STAGES = {
    "1f1b": (1, 1, 1),
    "interleaved_1f1b": (2, None, 2),
    "interleaved_zero_bubble": (1, None, 2),
    "zbv_zero_bubble": (2, 2, 2),
}


def stages_per_rank(section: ParallelismConfig) -> int:
    """Runs of neighbouring layers on each rank."""
    return section.pp_stages_per_rank or _STAGES[section.pp_schedule][2]


def micro_batch_problems(config: Config, dp_size: int) -> Iterator[str]:
    """Why the schedule cannot run the micro-batches into which the global batch divides."""
    section, training = config.parallelism, config.training
    schedule, pp_size = section.pp_schedule, section.pp_size
    if pp_size == 1:
        return
    share = training.micro_batch_size * dp_size
    count = training.global_batch_size // share
    rounds = max(1, count // pp_size)
    got = f"training.global_batch_size: got {training.global_batch_size}, which is {count} micro-batches a step, but "
    if schedule == "1f1b" and count < pp_size:
        yield f'{got}pp_schedule = "1f1b" needs at least pp_size {pp_size}; write global_batch_size = {pp_size * share}'
    if schedule.startswith("interleaved") and count % rounds:
        yield (
            f'{got}pp_schedule = "{schedule}" runs them in {rounds} equal rounds (count / pp_size, rounded down); '
            f"write global_batch_size = {rounds * pp_size * share}"
        )


def _stages_suit_schedule(config: Config) -> Iterator[str]:
    section = config.parallelism
    if section.pp_size == 1 or section.pp_stages_per_rank is None:
        return
    fewest, most, usual = _STAGES[section.pp_schedule]
    if section.pp_stages_per_rank < fewest or section.pp_stages_per_rank > (most or section.pp_stages_per_rank):
        yield (
            f'parallelism.pp_stages_per_rank: got {section.pp_stages_per_rank}, pp_schedule = "{section.pp_schedule}" '
            f"takes {fewest if most else f'{fewest} or more'}; write pp_stages_per_rank = {usual}"
        )


def _stages_have_layers(config: Config) -> Iterator[str]:
    section, num_layers = config.parallelism, config.model.num_layers
    per_rank = stages_per_rank(section)
    if section.pp_size > 1 and section.pp_size * per_rank > num_layers:
        fits = max(1, num_layers // per_rank)
        yield (
            f"parallelism.pp_size: got {section.pp_size}, times {per_rank} stages per rank this is "
            f"{section.pp_size * per_rank} stages, but model.num_layers is {num_layers}, and each needs one; "
            f"write pp_size = {fits}, or num_layers = {section.pp_size * per_rank}"
        )


def _split_backward_is_not_compiled(config: Config) -> Iterator[str]:
    schedule = config.parallelism.pp_schedule
    if config.parallelism.pp_size > 1 and config.model.compile and schedule.endswith("zero_bubble"):
        yield (
            f'parallelism.pp_schedule: got "{schedule}", which splits backward in two, and that of compiled blocks '
            '(model.compile = true) cannot be; write pp_schedule = "interleaved_1f1b", or compile = false'
        )


PIPELINE_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _stages_suit_schedule,
    _stages_have_layers,
    _split_backward_is_not_compiled,
)
