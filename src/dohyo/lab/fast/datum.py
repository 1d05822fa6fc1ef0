"""One program for runs in which every datum has its own number of log-weights.

A step reads its layout, its data and its noise. The noise has its exact number, so that the numbers are those of the
plain loop; what follows it belongs to rows that nobody reads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dohyo.lab.fast.captured import Layout, PaddedTables, Shape, layouts
from dohyo.lab.fast.graphs import FilledGraphs
from dohyo.lab.fast.noise import FromGenerator
from dohyo.lab.fast.programs import Program
from dohyo.lab.fast.stacked import Stacked


class DatumProgram(Program):
    """`Program` for a K for each datum."""

    def _prepare(self, generators: list[torch.Generator]) -> None:
        self.tables = PaddedTables(self.captured)
        self.places: dict[Shape, list[Tensor]] = {}
        if self.captured and self.device.type == "cuda":
            self.graphs = FilledGraphs(self._step, self.device)

    def _stacked(self, models: Any, generators: list[torch.Generator], **options: Any) -> Any:
        device = generators[0].device
        with FromGenerator(torch.Generator(device)):  # the runs' own are left alone
            self.datum = self.tasks[0].batch(torch.zeros(1, dtype=torch.long, device=device)).to("meta")
        return Stacked(models, generators, padded=True, **options)

    def _plans(self, sizes: Sequence[int]) -> Sequence[Any]:
        stratified = self.objective.k_draw == "stratified"
        return self._laid(self.objective.estimator.plans(sizes, self.states[0].depth, stratified))

    def _laid(self, counts: Sequence[Tensor], numbers: Tensor | None = None) -> list[tuple[Tensor, Shape, list[int]]]:
        """What each step reads, on the device: its layout, then its numbers in the same type. Also its shape, and the number of
        log-weights in each set of `batch` estimates."""
        table = pad_sequence(list(counts), batch_first=True)
        totals = torch.stack([part.sum(1) for part in table.split(self.batch, 1)], 1).tolist()
        sizes = zip(counts, totals, table.amax(1).tolist(), strict=True)
        shapes = [Shape.of(len(own), sum(total), most, self.varying) for own, total, most in sizes]
        rows: dict[int, Tensor] = {}
        for shape in set(shapes):
            steps = [step for step, own in enumerate(shapes) if own == shape]
            made = layouts(table[steps, : shape.data].to(self.device), shape, self.batch)
            if numbers is not None:
                made = torch.cat([made, numbers[steps].to(self.device).view(torch.int64)], 1)
            rows |= dict(zip(steps, made, strict=True))
        return [(rows[step], *each) for step, each in enumerate(zip(shapes, totals, strict=True))]

    def _take(self, index: Any, laid: Any) -> None:
        row, shape, totals = laid

        def fill(views: list[Tensor]) -> None:
            views[0].copy_(row)
            self._fill(views[1:], totals, index)

        def like() -> list[Tensor]:
            return [row.to("meta"), *self._like(shape)]

        if self.graphs is not None:
            self.graphs(shape, like, fill)
            return
        if shape not in self.places:
            self.places[shape] = [torch.zeros_like(one, device=self.device) for one in like()]
        fill(self.places[shape])
        self._step(self.places[shape], shape)

    def _like(self, shape: Shape) -> list[Tensor]:
        """Tensors on meta with the shapes of a step's data and noise."""
        x = self.datum.expand(shape.data, *self.datum.shape[1:])
        return [x.repeat(len(self.states), *(1,) * (x.ndim - 1)), *self.models.like(self.models.pieces(x), shape.rows)]

    def _fill(self, views: list[Tensor], totals: Sequence[int], index: Any) -> None:
        """Draw a step's data and noise; rows beyond the noise keep what they hold."""
        x = self._data(index)
        views[0].copy_(x)
        self.models.fill(views[1:], self.models.pieces(x[: index.shape[1]]), totals)

    def _step(self, drawn: Sequence[Tensor], shape: Any) -> None:
        row, *rest = drawn
        super()._step(rest, Layout.read(row, shape))
