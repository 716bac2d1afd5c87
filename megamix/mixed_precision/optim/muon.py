"""Muon: a matrix moves along its momentum made orthogonal, and AdamW moves all other parameters (Jordan et al. 2024,
"Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is scalable for LLM training", for the
width rule). Its relatives are settings: the coefficients of Polar Express (Amsel et al. 2025, arXiv 2505.16932), equal
rows (MuonEq, arXiv 2603.28254), an exact norm (Muon+, arXiv 2602.21545), moments of rows (NorMuon, Li et al. 2025,
arXiv 2510.05491), and cautious weight decay (Chen et al. 2025, arXiv 2510.12402).

Each rank computes the momentum in its shards and sends each matrix to one rank. This rank computes the direction and
sends it back to the owners. The result does not depend on which ranks own the elements of a matrix.
"""

import fnmatch
import glob
import math
import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby, repeat
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from megamix.base.clock import Clock
from megamix.base.machine import native_halves
from megamix.base.names import by_plain_name, matches
from megamix.comm.collectives import Collectives, make_collectives
from megamix.comm.topology import Topology
from megamix.mixed_precision.bucket import Bucket, OwnedRange
from megamix.mixed_precision.flat_layout import FlatLayout, GroupSpan
from megamix.mixed_precision.observer import DIRECTION, SOURCE, StepObserver
from megamix.mixed_precision.optim import matrix_layout
from megamix.mixed_precision.optim.adamw import AdamW
from megamix.mixed_precision.optim.half_states import StateDtype
from megamix.mixed_precision.optim.matrix_layout import BucketMatrices, Matrix, MatrixPiece, Place
from megamix.mixed_precision.optim.optimizer import BucketUpdate
from megamix.mixed_precision.update_slice import (
    GroupValues,
    Kernel,
    States,
    StepScalars,
    Tensors,
    UpdateGroup,
    UpdateScalars,
    UpdateSlice,
)
from megamix.settings.optimizers import MuonSettings, Triple

MOMENTUM = "momentum_buffer"
DIRECTION_SQ = "direction_sq"  # mean squares of a direction's rows, or of its columns
# Usual names of tables, which have a row for each token or position.
TABLES = (
    "*embed*", "emb.*", "*_emb", "*_emb.*", "*wte.*", "*wpe.*", "shared.weight",
    "*lm_head.*", "head.*", "*.head.*", "output.*", "classifier.*", "*.classifier.*", "score.*", "*.score.*",
)  # fmt: skip
# Usual names of parameters that hold several matrices, such as queries, keys and values.
FUSED = ("*qkv*", "*query_key_value*", "*in_proj?weight", "*x_proj.weight", "*c_attn.weight", "*gate_up*")
# Modules whose own parameters are no maps between hidden states, whatever their shapes and names.
_NO_MAPS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.modules.conv._ConvNd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon(MuonSettings, AdamW):
    """Updates matrices by Muon. Updates tables, norms and biases by AdamW, with the settings that this class inherits.

    A parameter of two dims is a matrix. A parameter of three dims, (E, out, in), is E matrices. Excepted are parameters
    whose names match a shell pattern of `tables`, and those of embeddings, norms and convolutions. AdamW updates every
    parameter that matches `adamw`; of the others, Muon updates every parameter that matches `matrix`.
    `fused`: for parameters whose names match a pattern, the numbers of rows of the matrices that lie one below the
    other in them, such as queries, keys and values. Each of these matrices is orthogonalised by itself.
    """

    group_settings: ClassVar[tuple[str, ...]] = (*AdamW.group_settings, "momentum")

    ns_dtype: StateDtype = torch.bfloat16
    tables: Sequence[str] = TABLES
    matrix: Sequence[str] = ()
    adamw: Sequence[str] = ()
    fused: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super(Muon, self).__post_init__()
        for key in ("tables", "matrix", "adamw"):
            if not _is_sequence(patterns := getattr(self, key), str):
                raise TypeError(f"{key} takes a list of patterns, got {patterns!r}; write {key}=['*.router.weight']")
        if not isinstance(self.fused, Mapping) or not all(_is_sequence(rows, int) for rows in self.fused.values()):
            example = {"*.qkv.weight": (512, 128, 128)}
            raise TypeError(f"fused takes each matrix's rows by pattern, got {self.fused!r}; write fused={example}")
        if len(self.ns_table) > self.ns_steps:
            said = f"ns_table has coefficients for {len(self.ns_table)} turns, but ns_steps is {self.ns_steps}"
            raise ValueError(f"{said}; write ns_steps={len(self.ns_table)}")

    def matrices(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        by_adamw = matches(name, self.adamw) or (matches(name, self.tables) and not matches(name, self.matrix))
        if not 2 <= len(shape) <= 3 or 1 in shape[-2:] or by_adamw:
            return ()
        rows, count = shape[-2], math.prod(shape[:-2])
        for pattern, parts in self.fused.items():
            if matches(name, [pattern]):
                if sum(parts) != rows or min(parts) < 1:
                    raise ValueError(f"fused[{pattern!r}] is {[*parts]}, whose sum must be the {rows} rows of {name}")
                return (*parts,) * count
        return (rows,) * count

    def states(self, name: str, shape: tuple[int, ...]) -> Mapping[str, torch.dtype]:
        if self.matrices(name, shape):
            return {MOMENTUM: torch.float32}
        return super(Muon, self).states(name, shape)

    def matrix_states(self, rows: int, columns: int) -> Mapping[str, int]:
        return {} if self.row_beta2 is None else {DIRECTION_SQ: max(rows, columns)}

    def group_of(self, name: str, shape: tuple[int, ...]) -> UpdateGroup:
        group = super(Muon, self).group_of(name, shape)
        if self.matrices(name, shape):
            return group
        return group._replace(lr_factor=tuple(factor * self.adamw_lr_factor for factor in group.lr_factor))

    def for_model(self, model: nn.Module) -> Self:
        no_maps, known = _params_of(model, _NO_MAPS), (*self.tables, *self.matrix, *self.adamw)
        params = by_plain_name(model.named_parameters(remove_duplicate=False))
        found = [name for name, one in params.items() if one in no_maps and one.dim() > 1 and not matches(name, known)]
        return replace(self, tables=(*self.tables, *map(glob.escape, found)))

    def warnings(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        yield from super(Muon, self).warnings(model, shapes)
        # Patterns that a model need not match: the usual tables, its family's tables, and the names that `for_model`
        # adds.
        usual = {*TABLES, *getattr(type(model), "tables", ())}
        usual |= {*map(glob.escape, by_plain_name(model.named_parameters(remove_duplicate=False)))}
        for key in ("tables", "matrix", "adamw", "fused"):
            for pattern in getattr(self, key):
                if not fnmatch.filter(shapes, pattern) and not (key == "tables" and pattern in usual):
                    yield f"{key} of Muon has the pattern {pattern!r}, which matches no parameter of the model"
        # A module of another kind says by `holds_maps` that its weight is a stack of such matrices.
        stacks = [one for one in model.modules() if getattr(one, "holds_maps", False)]
        maps, told = _params_of(model, (nn.Linear, *map(type, stacks))), set[str]()
        for name, param in by_plain_name(model.named_parameters()).items():
            rows = self.matrices(name, shapes[name]) if name in shapes else ()
            alike = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)  # a pattern for this parameter in all layers
            is_clear = param in maps and not matches(name, FUSED)
            if rows and not is_clear and alike not in told and not matches(name, [*self.fused, *self.matrix]):
                told.add(alike)
                yield (
                    f"Muon makes {alike}, {[*shapes[name]]}, orthogonal as {len(rows)} matrix(es). If that is right, "
                    f"set matrix=[{alike!r}]. If it holds several matrices one below the other, such as queries, keys "
                    f"and values, set fused={{{alike!r}: (rows, rows, rows)}}. If they stand beside each other, or it "
                    f"is a table or a norm, let AdamW update it: adamw=[{alike!r}]"
                )

    def dtypes(
        self, states: Sequence[tuple[str, torch.dtype]], half: torch.dtype | None, grad: torch.dtype
    ) -> tuple[torch.dtype | None, torch.dtype]:
        if not states:
            return half, torch.float32  # the update along a direction
        return self.ns_dtype if MOMENTUM in dict(states) else half, grad

    def lr_scale(self, rows: int, columns: int) -> float:
        """Return the factor of a matrix's direction."""
        if self.adjust_lr == "original":
            return math.sqrt(max(1.0, rows / columns))
        if self.adjust_lr == "spectral_norm":
            return math.sqrt(rows / columns)
        return 0.2 * math.sqrt(max(rows, columns))

    @property
    def turns(self) -> list[Triple]:
        """Return the coefficients of each turn of the iteration."""
        table = self.ns_table or (self.ns_coefficients,)
        return [*table, *repeat(table[-1], self.ns_steps - len(table))]

    def direction(self, matrix: Tensor, states: States) -> tuple[Tensor, States]:
        """Return the direction of a matrix, and the new states of `matrix_states`. A skipped step keeps the old ones.

        Shapes: matrix BF16 or FP32 (rows, columns), contiguous -> the same; each state FP32 (length,).
        """
        direction = orthogonalised(matrix, self)
        if self.row_beta2 is None:
            return direction, {}
        direction, moment = with_equal_moments(direction, states[DIRECTION_SQ], self.row_beta2)
        return direction, {DIRECTION_SQ: moment}

    def kernel_groups(self, groups: Sequence[UpdateGroup]) -> list[UpdateGroup]:
        """Return the groups, followed by a copy of each without states, for masters that move along directions. Limits
        are of masters, so a group with the momentum as state has none.
        """
        first = (group._replace(limits=None) if MOMENTUM in dict(group.states) else group for group in groups)
        return [*first, *(group._replace(states=()) for group in groups)]

    def bucket_update(
        self,
        kernel: Kernel,
        buckets: Sequence[Bucket],
        topology: Topology,
        clock: Clock,
        observers: Sequence[StepObserver],
    ) -> BucketUpdate:
        return MuonUpdate(kernel, buckets, topology, clock, observers, self)

    def coefficients(self, update: Tensor, values: GroupValues) -> Tensors:
        of_adamw = super(Muon, self).coefficients(update, values)
        return (*of_adamw, values.momentum.float(), (1 - values.momentum).float())

    def equation(self, grad: Tensor, master: Tensor, states: States, at: UpdateScalars) -> tuple[Tensor, States]:
        """Return the result of AdamW's equation for parameters of AdamW. Matrices have two equations. With the momentum
        as state, the result in place of the master is the matrix to be made orthogonal. Without states, the master
        moves along `grad`, which is the direction times its factor.
        """
        if not states:
            decay = at.lr * at.weight_decay * master
            if self.cautious_weight_decay:
                decay = torch.where(grad * master >= 0, decay, 0.0)
            return master - decay - at.lr * grad, {}
        if MOMENTUM not in states:
            return super(Muon, self).equation(grad, master, states, at)
        *_, ahead, moved = at.coefficients
        momentum = torch.lerp(states[MOMENTUM], grad, moved)
        return torch.lerp(grad, momentum, ahead) if self.nesterov else momentum, {MOMENTUM: momentum}

    def has_torchs_equation(self, states: States) -> bool:
        return "exp_avg" in states and type(self).equation is Muon.equation and not self.takes_chances


def _is_sequence(values: object, kind: type) -> bool:
    """Return whether `values` is a sequence of objects of this kind. A text does not count, although its letters are
    texts: each letter would be a pattern, and * matches all names.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        return False
    return all(isinstance(one, kind) for one in values)


def _params_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[nn.Parameter]:
    own = (module.parameters(recurse=False) for module in model.modules() if isinstance(module, kinds))
    return {*chain.from_iterable(own)}


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows and columns of a matrix, and the places of their elements in the tensor that has arrived."""

    rows: slice
    columns: slice
    places: list[slice]  # in the order of the elements


@dataclass(frozen=True, slots=True)
class _Home:
    """A matrix that this rank computes with."""

    matrix: Matrix
    blocks: list[_Block]
    states: States  # those of `Muon.matrix_states`

    def held(self, muon: Muon) -> Iterator[OwnedRange]:
        """Yield each state, as a range of the states of all matrices of the parameter, one behind the other."""
        spec = self.matrix.spec
        lengths = [muon.matrix_states(rows, self.matrix.columns) for rows in spec.matrices]
        number = [*accumulate(spec.matrices, initial=0)].index(self.matrix.first)
        for name, state in self.states.items():
            first, full = (sum(one[name] for one in some) for some in (lengths[:number], lengths))
            own = replace(spec, shape=(len(state),), full_shape=(full,), offset=(first,), matrices=())
            yield OwnedRange(own, 0, {name: state})


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One bucket's matrices, as this rank sees them."""

    among: Collectives  # the ranks that hold any of them
    pieces: list[MatrixPiece]  # the pieces that this rank owns, in the order in which it sends them: by home
    scales: list[float]  # factor of each piece's direction
    send_sizes: list[int]  # number of elements that this rank sends to each rank
    recv_sizes: list[int]  # number of elements that this rank receives of each rank
    homes: list[_Home]
    needs_all_to_all: bool  # whether any piece travels between any two ranks


class MuonUpdate(BucketUpdate):
    """Updates buckets. A bucket with matrices has three stages: the momentum, the directions, then masters and half
    parameters. Between two stages the ranks exchange values.

    While a bucket's matrices travel, the momentum of the next bucket and the directions of the one before are computed.
    Directions are computed in a skipped step, too, because the host does not know that it is skipped.
    """

    def __init__(
        self,
        kernel: Kernel,
        buckets: Sequence[Bucket],
        topology: Topology,
        clock: Clock,
        observers: Sequence[StepObserver],
        muon: Muon,
    ):
        """Plan the exchanges. `kernel`: takes the groups of `Muon.kernel_groups`. Every rank must call it."""
        super().__init__(kernel, clock, observers)
        self._muon = muon
        specs = [slot.spec for bucket in buckets for slot in bucket.plan.slots]
        self._num_groups = 1 + max(spec.group for spec in specs)
        self._matrix_groups = {spec.group for spec in specs if spec.matrices}
        self._exchanges = _plan(muon, buckets, topology)

    def held_states(self) -> Iterator[OwnedRange]:
        for exchange in self._exchanges.values():
            for home in exchange.homes:
                yield from home.held(self._muon)

    def in_turn(self, buckets: Iterable[Bucket], step: StepScalars) -> Iterator[Bucket]:
        under_way = deque[tuple[Bucket, Iterator[bool]]]()  # buckets, each with its stages that are to come

        def advance() -> Iterator[Bucket]:
            # The newest bucket goes first: its values travel while the older buckets compute.
            ended = [next(stages, True) for _, stages in reversed(under_way)]
            while under_way and ended.pop():
                yield under_way.popleft()[0]

        for bucket in buckets:
            under_way.append((bucket, self._stages(bucket, step)))
            yield from advance()
        while under_way:
            yield from advance()

    def _stages(self, bucket: Bucket, step: StepScalars) -> Iterator[bool]:
        """Run the stages. Yield False while an exchange is under way."""
        self._begin(bucket)
        plain = [span for span in bucket.spans if span.group not in self._matrix_groups]
        of_matrices = [span for span in bucket.spans if span.group in self._matrix_groups]
        with self._clock.span("update"):
            for span in self._cut(bucket, plain):
                self._kernel(bucket.part(span), step)
            exchange = self._exchanges.get(bucket)
            if exchange is None:
                return
            values = self._momentum(exchange, bucket, of_matrices, step)
        values = yield from self._sent(exchange, bucket, values, exchange.send_sizes, exchange.recv_sizes)
        with self._clock.span("update"):
            for home in exchange.homes:
                self._turn(values, home, step.holds(home.matrix.spec.group))
        values = yield from self._sent(exchange, bucket, values, exchange.recv_sizes, exchange.send_sizes)
        with self._clock.span("update"):
            values = self._direction(exchange, bucket, values)
            # A direction is not clipped or unscaled, because its size does not depend on the gradient's.
            step = step._replace(multiplier=torch.ones_like(step.multiplier))
            for span in self._cut(bucket, of_matrices):
                part = bucket.part(span)
                moves = self._num_groups + span.group
                direction = values[span.start : span.end]
                self._kernel(UpdateSlice(moves, direction, part.master, {}, part.half), step)

    def _momentum(self, exchange: _Exchange, bucket: Bucket, spans: Sequence[GroupSpan], step: StepScalars) -> Tensor:
        """Return this rank's elements of the matrices to be made orthogonal, in the order in which they are sent."""
        wide = torch.zeros_like(bucket.master)
        narrow = torch.zeros_like(wide, dtype=self._muon.ns_dtype)
        for span in spans:
            part = bucket.part(span)
            at = slice(span.start, span.end)
            self._kernel(UpdateSlice(span.group, part.grad, wide[at], part.states, narrow[at]), step)
        for observer in self._observers:
            observer.on_use(SOURCE, bucket, narrow)
        return torch.cat([narrow[:0], *(narrow[piece.start : piece.end] for piece in exchange.pieces)])

    def _direction(self, exchange: _Exchange, bucket: Bucket, values: Tensor) -> Tensor:
        """Return the directions of this rank's masters, each times its factor: FP32 (shard_numel,)."""
        direction = torch.zeros_like(bucket.master)
        parts = torch.split(values, [piece.numel for piece in exchange.pieces])
        for piece, part, scale in zip(exchange.pieces, parts, exchange.scales, strict=True):
            torch.mul(part.float(), scale, out=direction[piece.start : piece.end])
        for observer in self._observers:
            observer.on_use(DIRECTION, bucket, direction)
        return direction

    def _sent(
        self, exchange: _Exchange, bucket: Bucket, values: Tensor, to: Sequence[int], of: Sequence[int]
    ) -> Generator[bool, None, Tensor]:
        """Exchange values with the other ranks. Return the values that have arrived; yield while they are under way."""
        if not exchange.needs_all_to_all:
            return values
        with self._clock.span("update"):
            arrived = values.new_empty(sum(of))
            pending = exchange.among.exchange(values, arrived, to, of)
            for observer in self._observers:
                observer.on_transfer("matrices", bucket, pending)
        yield False
        with self._clock.span("exposed_matrices"):
            pending.wait()
        return arrived

    def _turn(self, arrived: Tensor, home: _Home, held: Tensor) -> None:
        """Replace a matrix, which lies in `arrived`, by its direction, and update its states."""
        matrix = arrived.new_empty(home.matrix.rows, home.matrix.columns)
        for block in home.blocks:
            values = matrix[block.rows, block.columns]
            values.copy_(torch.cat([arrived[place] for place in block.places]).view(values.shape))
        direction, after = self._muon.direction(matrix, home.states)
        if home.states.keys() != after.keys():
            told = f"direction of {type(self._muon).__name__} returned the states {[*after]}"
            raise ValueError(f"{told}, but matrix_states names {[*home.states]}; return each of them, and no other")
        for name, state in home.states.items():
            state.copy_(torch.where(held, state, after[name].view(state.shape)))
        for block in home.blocks:
            values = direction[block.rows, block.columns].reshape(-1)
            parts = torch.split(values, [place.stop - place.start for place in block.places])
            for place, part in zip(block.places, parts, strict=True):
                arrived[place].copy_(part)


def _plan(muon: Muon, buckets: Sequence[Bucket], topology: Topology) -> dict[Bucket, _Exchange]:
    """Return the exchange of each bucket with matrices. Every rank must call it."""
    exchanges: dict[Bucket, _Exchange] = {}
    # Each axis is planned by itself, because only its ranks know all of its matrices.
    layout = FlatLayout(tuple(bucket.plan for bucket in buckets))
    for axis, numbers in matrix_layout.buckets_with_matrices(layout).items():
        holders = [bucket for bucket in buckets if bucket.number in numbers]
        among = holders[0].owners
        places = [Place(rank) for rank in range(among.axis.size)]
        if isinstance(axis, str):
            device = holders[0].master.device
            row = torch.tensor([among.axis.rank, topology.along(axis).rank], device=device)
            among = make_collectives(topology.owners_of(None), device)
            places = [Place(*place) for place in among.table(row).tolist()]
        both = zip(holders, matrix_layout.find_homes(layout, numbers, places), strict=True)
        exchanges |= {bucket: _exchange(muon, among, matrices, bucket.master.device) for bucket, matrices in both}
    return exchanges


def _exchange(muon: Muon, among: Collectives, found: BucketMatrices, device: torch.device) -> _Exchange:
    rank = among.axis.rank
    matrices = found.matrices

    def home(part: MatrixPiece) -> int:
        return found.homes[part.matrix]

    def block(part: MatrixPiece) -> tuple[int, int, int]:
        return part.matrix, part.rows.start, part.columns.start

    def states(matrix: Matrix) -> States:
        lengths = muon.matrix_states(matrix.rows, matrix.columns)
        return {name: torch.zeros(length, device=device) for name, length in lengths.items()}

    mine = sorted(found.parts[rank], key=home)  # stable: pieces with one home stay in the order of their matrices
    coming = [part for own in found.parts for part in own if home(part) == rank]
    ends = accumulate(part.numel for part in coming)
    # Each piece with its place in the tensor that has arrived.
    placed = [(part, slice(end - part.numel, end)) for part, end in zip(coming, ends, strict=True)]
    placed.sort(key=lambda one: (*block(one[0]), one[0].first))
    blocks: dict[int, list[_Block]] = {}
    for _, group in groupby(placed, key=lambda one: block(one[0])):
        parts, places = zip(*group, strict=True)
        blocks.setdefault(parts[0].matrix, []).append(_Block(parts[0].rows, parts[0].columns, [*places]))
    return _Exchange(
        among,
        mine,
        scales=[muon.lr_scale(matrices[part.matrix].rows, matrices[part.matrix].columns) for part in mine],
        send_sizes=[sum(part.numel for part in mine if home(part) == other) for other in range(among.axis.size)],
        recv_sizes=[sum(part.numel for part in own if home(part) == rank) for own in found.parts],
        homes=[_Home(matrices[number], of_it, states(matrices[number])) for number, of_it in blocks.items()],
        needs_all_to_all=bool(found.sent),
    )


def orthogonalised(momentum: Tensor, muon: Muon) -> Tensor:
    """Return an approximation of U V^T for each matrix U S V^T. A matrix of zeros stays so; a matrix with a NaN or inf
    becomes NaN everywhere.

    The iteration needs singular values of at most 1, so it begins with the matrix divided by its Frobenius norm. The
    norm's sum is FP32 along a row, and FP64 over the rows.
    Shapes: BF16 or FP32 (..., rows, columns), contiguous -> the same.
    """
    rows, columns = momentum.shape[-2:]
    if muon.equal_rows:
        each = momentum.float().square().sum(-1).sqrt().clamp(min=1e-6)
        momentum = _times(momentum, (_norm(momentum) / math.sqrt(rows))[..., None] / each)
    norm = (_norm(momentum) + muon.ns_eps).clamp(min=1e-7)
    x = iterated(_times(momentum, norm.reciprocal()[..., None]), muon)
    if muon.exact_norm:
        x = _times(x, (math.sqrt(min(rows, columns)) / _norm(x).clamp(min=1e-6))[..., None])
    return x


def _norm(matrix: Tensor) -> Tensor:
    """Return the Frobenius norms. Shapes: (..., rows, columns) -> FP64 (...)."""
    return matrix.float().square().sum(-1).double().sum(-1).sqrt()


def _times(matrix: Tensor, factors: Tensor) -> Tensor:
    """Multiply each row by its factor, and round once. Shapes: (..., rows, columns), factors (..., rows or 1)."""
    return (matrix * factors.float()[..., None]).to(matrix.dtype)


def iterated(x: Tensor, muon: Muon) -> Tensor:
    """Bring all singular values to about 1 by Newton and Schulz's iteration, which consists of matrix products. Shapes:
    (..., rows, columns) -> the same.
    """
    if is_tall := x.shape[-2] > x.shape[-1]:
        x = x.mT.contiguous()
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    # On a CPU without BF16 arithmetic, products are computed in FP32, and each result is rounded once, as with BF16
    # arithmetic. With AVX-512 this is as fast as torch's BF16 products, with AVX2 it is 40 times as fast.
    widens = x.is_cpu and x.dtype == torch.bfloat16 and x.dtype not in native_halves()
    dtype = torch.float32 if widens else x.dtype
    for a, b, c in muon.turns:
        wide = x.to(dtype)
        gram = (wide @ wide.mT).to(x.dtype).to(dtype)
        turned = multiply_add(gram, gram, gram, beta=b, alpha=c).to(x.dtype)
        x = multiply_add(wide, turned.to(dtype), wide, beta=a).to(x.dtype)
    return x.mT.contiguous() if is_tall else x


def with_equal_moments(direction: Tensor, moment: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
    """Divide each row of a direction by the root of its mean square, averaged over the updates, and put the Frobenius
    norm back. A matrix with more columns than rows has its columns divided. Return the new average, too.

    Shapes: direction (..., rows, columns), moment FP32 (..., the longer side) -> the same.
    """
    dim = -1 if direction.shape[-2] >= direction.shape[-1] else -2
    wide = direction.to(torch.promote_types(direction.dtype, torch.float32))
    mean_sq = wide.square().mean(dim)
    moment = torch.lerp(moment, mean_sq, 1 - beta2)
    factor = moment.clamp(min=1e-10).rsqrt()
    norm, scaled = mean_sq.sum(-1).sqrt(), (mean_sq * factor.square()).sum(-1).sqrt()
    factor = factor * (norm / scaled.clamp(min=1e-10))[..., None]
    return (wide * factor.unsqueeze(dim)).to(direction.dtype), moment
