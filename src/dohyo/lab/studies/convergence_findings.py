"""What the cells of the study `convergence` show."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dohyo.lab.folder import Conclusion, Table
from dohyo.lab.studies.differences import SERIES
from dohyo.lab.studies.study import Cell, Row
from dohyo.lab.studies.verdicts import CLOSE, Rate, all_hold, cross_rate, rate

_SYMBOLS = {"value": "E[Δ_k²]", "gradient": "E‖Δᵍ_k‖²"}
MOMENTS = tuple(_SYMBOLS)
_FASTER = -2.1  # a slope below this is faster than k^-2
_NOTHING = 0.01  # a cross term this small beside the squares of its factors may be dropped


class Findings:
    """The finished trials, from cells whose names begin with toy, cross or vae, and what follows.

    Slopes are fitted from the k `fit_from` on, those of the cross terms from a quarter of it.
    """

    def __init__(self, cells: dict[str, Cell], fit_from: int) -> None:
        parts = ("toy", "cross", "vae")
        self.trials = {part: [cell for name, cell in cells.items() if name.startswith(f"{part}_")] for part in parts}
        self.fit_from, self.cross_from = fit_from, max(1, fit_from // 4)

    def ks(self, part: str) -> list[int]:
        return list(self.trials[part][0]["k"])

    def curves(self, part: str, series: str) -> Tensor:
        """The second moments of the values and of the gradients, (2, trials, ks)."""
        return torch.tensor([[trial[series][what] for trial in self.trials[part]] for what in MOMENTS], dtype=torch.float64)

    def cross_terms(self, series: str) -> Tensor:
        """(trials, ks, ks); the multilevel ones end a step earlier."""
        return torch.tensor([trial[series] for trial in self.trials["cross"]], dtype=torch.float64)

    def rate(self, part: str, series: str, moment: str, start: int | None = None) -> Rate:
        curves = self.curves(part, series)[MOMENTS.index(moment)]
        return rate(curves, self.ks(part), self.fit_from if start is None else start)

    def cross_rates(self, series: str) -> tuple[Rate, Rate]:
        """Where a step goes from k to k + 1, the index is taken between the two, as in the paper's proof."""
        between = [float(k) if series == "multilevel" else math.sqrt(k * (k + 1)) for k in self.ks("cross")]
        return cross_rate(self.cross_terms(series), between, self.cross_from)

    def conclusions(self) -> list[Conclusion]:
        return [*self._on_the_toy(), *self._across(), *self._beside_the_squares(), *self._on_the_vae()]

    def tables(self) -> list[Table]:
        tables = []
        slopes: list[Row] = [
            [part, SERIES[series], moment, str(self.rate(part, series, moment, 1)), str(self.rate(part, series, moment))]
            for part in ("toy", "vae")
            for series in SERIES
            for moment in MOMENTS
            if self.trials[part]
        ]
        if slopes:
            columns = ["model", "series", "second moment of", "slope from k = 1", f"slope from k = {self.fit_from}"]
            note = (
                "Slopes of log E against log k with 95% intervals, by a jackknife over the trials. The multilevel difference of "
                "index k compares 2k weights with their halves: a slope of -2 in k is 4^-l in the level l."
            )
            tables.append(Table("Slopes of the second moments", columns, slopes, note))
        if self.trials["cross"]:
            title = "Exponents of the cross terms E[d_i d_j]"
            note = f"On the toy, for {self.cross_from} ≤ i < j. i stands for √(i (i + 1)) where the step is from i to i + 1."
            exponents: list[Row] = [[SERIES[s], *map(str, self.cross_rates(s))] for s in SERIES]
            tables.append(Table(title, ["series", "in i", "in j"], exponents, note))
        return tables

    def _slope(self, part: str, series: str, moment: str) -> str:
        tail, whole = self.rate(part, series, moment), self.rate(part, series, moment, 1)
        return f"slope {tail} for k from {self.fit_from} to {self.ks(part)[-1]}, {whole} for all k"

    def _on_the_toy(self) -> Iterator[Conclusion]:
        if not self.trials["toy"]:
            return
        for moment, seen in (("value", "between O(1/k²) and O(1/k³)"), ("gradient", "faster than O(1/k²)")):
            found, symbol = self.rate("toy", "sumo", moment), _SYMBOLS[moment]
            text = f"{self._slope('toy', 'sumo', moment)} ({len(self.trials['toy'])} trials)"
            faster = f"On the toy {symbol} falls faster (slope below {_FASTER})"
            yield Conclusion(f"{symbol} of SUMO's terms falls as k⁻²", "O(1/k²) by its proof", text, found.close_to(-2))
            yield Conclusion(faster, f"{seen} in its figure", text, found.below(_FASTER))
        for series, claim, exponent in (
            ("leave-one-out", "The second moment of leave-one-out differences falls as k⁻⁴", -4),
            ("multilevel", "The second moment of multilevel differences falls as 4⁻ˡ with the level l (k⁻² with k = 2ˡ⁻¹)", -2),
        ):
            text = f"{self._slope('toy', series, 'value')}; of the gradient {self.rate('toy', series, 'gradient')}"
            yield Conclusion(claim, "", text, self.rate("toy", series, "value").close_to(exponent))

    def _across(self) -> Iterator[Conclusion]:
        if not self.trials["cross"]:
            return
        ks = torch.tensor(self.ks("cross"), dtype=torch.float64)
        largest = float((self.cross_terms("sumo").mean(0) * (ks[:, None] * ks) ** 2).max())
        found = self.cross_rates("sumo")
        text = (
            f"exponents {found[0]} in i and {found[1]} in j for {self.cross_from} ≤ i < j ≤ {ks[-1]:.0f}; "
            f"i² j² E[Δ_i Δ_j] is {largest:.2f} at most"
        )
        fast = all_hold(each.below(-2 + CLOSE) for each in found)
        yield Conclusion("The cross terms E[Δ_i Δ_j] are O(i⁻² j⁻²)", "O(i⁻² j⁻²) by its proof", text, fast)

    def _beside_the_squares(self) -> Iterator[Conclusion]:
        if not self.trials["cross"] or not self.trials["toy"]:
            return
        last = len(self.cross_terms("multilevel")[0]) - 1
        i, j = self.ks("cross")[last - 1 : last + 1]
        if last < 1 or j not in self.ks("toy"):
            return
        at = [self.ks("toy").index(i), self.ks("toy").index(j)]
        squares = {series: self.curves("toy", series)[0].mean(0)[at].prod().sqrt() for series in SERIES}
        shares = {series: float(self.cross_terms(series).mean(0)[last - 1, last] / squares[series]) for series in SERIES}
        each = ", ".join(f"{share:.2g} for {SERIES[series]}" for series, share in shares.items())
        text = f"E[d_{i} d_{j}] / √(E[d_{i}²] E[d_{j}²]) is {each}"
        claim, paper = "Beside E[Δ_k²] the cross terms of SUMO may be dropped", "they converge to zero much faster"
        yield Conclusion(claim, paper, text, abs(shares["sumo"]) < _NOTHING)
        claim = "The cross terms of leave-one-out and multilevel differences may not be dropped: their means are positive"
        yield Conclusion(claim, "", text, min(shares["leave-one-out"], shares["multilevel"]) > 10 * _NOTHING)

    def _on_the_vae(self) -> Iterator[Conclusion]:
        if not self.trials["vae"]:
            return
        for moment, symbol in _SYMBOLS.items():
            claim = f"On a trained VAE {symbol} of SUMO's terms falls as k⁻² too"
            text = f"{self._slope('vae', 'sumo', moment)} ({len(self.trials['vae'])} trials)"
            yield Conclusion(claim, "", text, self.rate("vae", "sumo", moment).close_to(-2))
        sumo, other = (self.rate("vae", series, "value") for series in ("sumo", "leave-one-out"))
        difference = Rate(other.slope - sumo.slope, math.hypot(sumo.half, other.half))
        claim, text = "On a trained VAE leave-one-out differences fall faster than SUMO's", f"slope {other} against {sumo}"
        yield Conclusion(claim, "", text, difference.below(0))
