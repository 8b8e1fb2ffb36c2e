"""One step of several processes: each runs the model on its own samples, and U is that of all of them.

The rows of process r are those of its curvature samples, S2_r, and of its other samples. All processes need K on
the factor rows of all, (m, r): process r gets the factor rows of the others, layer by layer, and computes the
columns of its own rows; the columns are then exchanged. The small system is solved by each process, and p is
summed in one reduction of the size of the parameters:

    K[:, own rows] = U_all Z_own^T,      p = sum over processes of -Z_own^T c_own

The rows of samples outside S2 all have the same coefficient, so that those of a process count as one row, their
sum.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from woodbury._vector import Vector
from woodbury.layers.forms import Dtype, RowForm, Scales, concatenate_forms
from woodbury.linalg import Solution, full_precision
from woodbury.parallel.group import Group
from woodbury.row_matrix import Rows, SmallSolver


class Shard(NamedTuple):
    """What one process has of the rows: how many, and the forms of its factor rows without their numbers."""

    factor_rows: int
    others: int  # the rows of other samples
    has_gradient: bool  # whether part of its gradient is in no row
    skeletons: dict[str, tuple[bytes, list[tuple[torch.Size, torch.dtype]]]]  # by layer

    @property
    def row_count(self) -> int:
        """Of those that are exchanged: the rows of other samples are one."""
        return self.factor_rows + min(1, self.others)


class Head(NamedTuple):
    """The factor rows of this process in one layer, and taken apart."""

    form: RowForm
    skeleton: bytes
    tensors: list[Tensor]


class _Dismantler(pickle.Pickler):
    """Pickles an object without its tensors, which are collected, and without modules, which are named."""

    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file)
        self._names = names
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return "tensor", len(self.tensors) - 1
        if isinstance(value, nn.Module) and id(value) in self._names:
            return "module", self._names[id(value)]
        return None


class Assembler(pickle.Unpickler):
    """Gives a form again, from its skeleton and its tensors, by `load`."""

    def __init__(self, data: bytes, tensors: Sequence[Tensor], model: nn.Module) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors, self._model = tensors, model

    def persistent_load(self, key: Any) -> Any:
        kind, value = key
        return self._tensors[value] if kind == "tensor" else self._model.get_submodule(value)


def take_apart(model: nn.Module, forms: Mapping[str, RowForm]) -> dict[str, Head]:
    """The factor rows of this process by layer: their forms as a few bytes, and tensors."""
    names, heads = {id(module): name for name, module in model.named_modules()}, {}
    for name, form in forms.items():
        file = io.BytesIO()
        pickler = _Dismantler(file, names)
        pickler.dump(form)
        heads[name] = Head(form, file.getvalue(), pickler.tensors)
    return heads


class JointRows(Rows):
    """Z of all processes: the factor rows of each in turn, then the sum of the others of each that has some."""

    joint = True

    def __init__(
        self, local: Rows, head: Mapping[str, Head], factor_rows: int, has_gradient: bool, group: Group
    ) -> None:
        """local are the rows of this process; the first factor_rows of them are those of head."""
        super().__init__(local.plan, {}, 0)
        self._local, self._head, self._group = local, head, group
        skeletons = {
            name: (part.skeleton, [(tensor.shape, tensor.dtype) for tensor in part.tensors])
            for name, part in head.items()
        }
        shard = Shard(factor_rows, local.row_count - factor_rows, has_gradient, skeletons)
        self._shards: list[Shard] = group.gather_objects(shard)
        self.factor_rows = [other.factor_rows for other in self._shards]
        self.row_count = sum(other.row_count for other in self._shards)
        self.has_gradient = any(other.has_gradient for other in self._shards)

    def _local_part(self, values: Tensor) -> Tensor:
        """The entries of the rows of this process along the last axis."""
        rank = self._group.rank
        shard, before = self._shards[rank], self._shards[:rank]
        start = sum(other.factor_rows for other in before)
        inside = values[..., start : start + shard.factor_rows]
        if not shard.others:
            return inside
        place = sum(self.factor_rows) + sum(min(1, other.others) for other in before)
        outside = values[..., place : place + 1]
        return torch.cat([inside, outside.expand(*outside.shape[:-1], shard.others)], dim=-1)

    def head_forms(self, row_count: int) -> Mapping[str, RowForm]:
        return {name: head.form for name, head in self._head.items()}

    def joined(self, columns: Tensor) -> Tensor:
        shard = self._shards[self._group.rank]
        if shard.others:
            outside = columns[..., shard.factor_rows :].sum(-1, keepdim=True)
            columns = torch.cat([columns[..., : shard.factor_rows], outside], dim=-1)
        parts = self._group.gather(columns.contiguous(), [other.row_count for other in self._shards])
        factor = [part[..., :count] for part, count in zip(parts, self.factor_rows, strict=True)]
        others = [part[..., count:] for part, count in zip(parts, self.factor_rows, strict=True)]
        return torch.cat([*factor, *others], dim=-1)

    # -- the Gram matrix on the factor rows ----------------------------------------------------------------

    def _columns(self, scales: Scales, dtype: Dtype) -> list[Tensor]:
        """K[:, own rows] of each layer, (m, own rows)."""
        columns = []
        used = dict.fromkeys(name for shard in self._shards for name in shard.skeletons)
        with full_precision():
            for name in [name for name in self.plan.owned if name in used]:
                pieces = [{name: form} for form in self._factor_forms(name)]
                local = self._local.forms.get(name)
                kinds = {form.signature for piece in pieces for form in piece.values()}
                if local is None or len(pieces) < len(self._shards) or kinds != {local.signature}:
                    raise ValueError(
                        f"layer {name!r} is used in another way, or not at all, by some of the processes: their "
                        "rows cannot be put together. Let the model do the same on every process"
                    )
                everyone = concatenate_forms(pieces)[name]
                scale = None if scales is None else self._scales_of(name, scales)
                columns.append(everyone.gram(local, scale, dtype))
        return columns

    def _factor_forms(self, name: str) -> list[RowForm]:
        """The factor rows of each process in one layer; their tensors are exchanged as bytes."""
        sent = [torch.empty(0, dtype=torch.uint8, device=self.plan.device)]
        for tensor in self._head[name].tensors if name in self._head else []:
            whole = tensor.detach().clone(memory_format=torch.contiguous_format)
            sent.append(whole.view(-1).view(torch.uint8))
        entries = [shard.skeletons.get(name) for shard in self._shards]
        sizes = [
            [shape.numel() * dtype.itemsize for shape, dtype in entry[1]] if entry else [] for entry in entries
        ]
        received = self._group.gather(torch.cat(sent), list(map(sum, sizes)))
        forms: list[RowForm] = []
        for rank, entry in enumerate(entries):
            if rank == self._group.rank and entry is not None:
                forms.append(self._head[name].form)
            elif entry is not None:
                pieces = zip(received[rank].split(sizes[rank]), entry[1], strict=True)
                # each in memory of its own, where numbers of its type may lie
                tensors = [piece.clone().view(dtype).view(shape) for piece, (shape, dtype) in pieces]
                forms.append(Assembler(entry[0], tensors, self.plan.model).load())
        return forms

    def gram(self, other: Rows | None = None, scales: Scales = None, dtype: Dtype = None) -> Tensor:
        """The first rows of K, those of the factor rows."""
        return self.joined(torch.stack(self._columns(scales, dtype)).sum(0))

    def layer_grams(self, scales: Scales = None, dtype: Dtype = None) -> list[Tensor]:
        return list(self.joined(torch.stack(self._columns(scales, dtype))))

    def gram_head(self, row_count: int, dtype: Dtype = None) -> list[Tensor]:
        return self._columns(None, dtype)

    def forming_pays(self, head: int) -> bool:
        return True  # p is a sum over processes

    # -- products ------------------------------------------------------------------------------------------

    def layer_matvec(self, vector: Mapping[str, Tensor]) -> list[Tensor]:
        return list(self.joined(torch.stack(self._local.layer_matvec(vector))))

    def rmatvec(self, coefficients: Tensor) -> Vector:
        local = self._local.rmatvec(self._local_part(coefficients))
        return self._group.sum_vector(local.of(local.flat.detach()))

    def curvature(self, row_count: int, blocks: Sequence[Sequence[str]], dtype: Dtype = None) -> list[Tensor]:
        matrices = self._local.curvature(self.factor_rows[self._group.rank], blocks, dtype)
        return [self._group.sum(matrix) for matrix in matrices]

    def shared_out(self, solve: SmallSolver) -> SmallSolver:
        group = self._group

        def solve_own_blocks(matrix: Tensor, rhs: Tensor) -> Solution:
            if matrix.dim() == 2:
                return solve(matrix, rhs)
            x, ok = torch.zeros_like(rhs), True
            if group.rank < len(matrix):
                solution = solve(matrix[group.rank :: group.size], rhs[group.rank :: group.size])
                x[group.rank :: group.size] = solution.x
                ok = bool(solution.ok)
            (failures,) = group.sums(0.0 if ok else 1.0)
            return Solution(group.sum(x), not failures)

        return solve_own_blocks

    def dense(self) -> Tensor:
        raise NotImplementedError("the rows of several processes are not written out")
