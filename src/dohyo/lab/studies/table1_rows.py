"""The rows of the paper's table 1: how ours are trained, and the test NLL that others report, by IWAE with 5000 terms."""

from dataclasses import dataclass
from typing import Any, Literal

_PASSES = 3  # through the decoder for each sample of the encoder: forward, and backward by inputs and by weights
_LONG = 8  # leapfrogs of a chain, where there is room; a chain of T takes 2T + 5 passes


@dataclass(frozen=True)
class Row:
    """How a row of the table is trained.

    Attributes:
        max_terms: Bounds a batch's K, without which it may exhaust memory.
        recipe: The recipe of `dohyo train`, if not the paper's.
        chains: When theta turns to annealed chains: "early", after a quarter of the epochs, in one run, or "late", in the last
            quarter, which is a run of its own with a rate of its own that begins with the best parameters.
        each: Whether every image has a K of its own, stratified over the batch, and its own coefficients are clipped.
    """

    label: str
    estimator: str
    encoder: str
    max_terms: int | None = None
    recipe: str | None = None
    chains: Literal["", "early", "late"] = ""
    each: bool = False

    def options(self, cost: int, epochs: int) -> dict[str, Any]:
        """The options of a run at this cost: `chains` of `anneal` leapfrogs take no more passes through the decoder.

        Example:
            >>> {cost: list(ROWS["chains"].options(cost, 400).values())[-3:] for cost in (5, 15, 50)}
            {5: [1, 5, 100], 15: [2, 8, 100], 50: [7, 8, 100]}
            >>> list(ROWS["chains-early"].options(15, 400).values())[-3:]
            [2, 8, 0.25]
            >>> [list(ROWS["chains-unbiased"].options(cost, 400).values())[-3:-1] for cost in (5, 15, 50)]
            [[2, 1], [2, 8], [7, 8]]
        """
        count = max(1 if self.estimator == "iwae" else 2, round(_PASSES * cost / (2 * _LONG + 5)))
        turn: dict[str, Any] = {"early": {"anneal_from": 0.25}, "late": {"chain_epochs": max(1, epochs // 4)}}
        chains = {"chains": count, "anneal": (_PASSES * cost // count - 5) // 2, **turn[self.chains]} if self.chains else {}
        recipe = {"recipe": self.recipe} if self.recipe else {}
        each = {"k_draw": "stratified", "clip_datum": 3.0} if self.each else {}
        return {"encoder": self.encoder, "max_terms": self.max_terms, **recipe, **each, **chains}


ROWS = {
    "elbo": Row("ELBO", "elbo", "same"),
    "iwae": Row("IWAE", "iwae", "same"),
    "iwae-dreg": Row("IWAE, DReG encoder", "iwae", "dreg"),
    "jvi": Row("JVI", "jvi", "same"),
    "sumo-variance": Row("SUMO, the paper's encoder", "sumo", "variance"),
    "sumo": Row("SUMO, DReG encoder", "sumo", "dreg"),
    "symmetric-sumo": Row("SymmetricSUMO, DReG encoder", "symmetric-sumo", "dreg", 128),
    "multilevel-rr": Row("MultilevelRR, DReG encoder", "multilevel-rr", "dreg", 1024),
    "multilevel-each": Row("MultilevelRR, a K for each image, DReG encoder", "multilevel-rr", "dreg", 256, each=True),
    "iwae-ours": Row("IWAE, DReG encoder, our recipe", "iwae", "dreg", recipe="ours"),
    "sumo-ours": Row("SUMO, DReG encoder, our recipe", "sumo", "dreg", recipe="ours"),
    "chains": Row("IWAE, then over chains in the last quarter, our recipe", "iwae", "dreg", recipe="ours", chains="late"),
    "chains-early": Row("IWAE, then over chains from a quarter on, our recipe", "iwae", "dreg", recipe="ours", chains="early"),
    "chains-unbiased": Row(
        "IWAE, then MultilevelRR over chains, our recipe", "multilevel-rr", "dreg", 64, recipe="ours", chains="early"
    ),
}

COSTS = (5, 15, 50)

_BURDA = "Burda et al. 2016"
_PAPER = "Luo et al. 2020 (the paper)"
_SHI = "Shi and Cornish 2021"
_CODE = "nbip/IWAE on GitHub"
SOURCES = {
    _BURDA: "Importance weighted autoencoders (ICLR 2016)",
    _PAPER: "SUMO: unbiased estimation of log marginal probability for latent variable models (ICLR 2020), table 1",
    _SHI: "On multilevel Monte Carlo unbiased gradient estimation for deep latent variable models (AISTATS 2021)",
    _CODE: "Importance weighted autoencoders in TensorFlow 2 (github.com/nbip/IWAE), the README's table for DReG, k = 5 and 50",
}
_Values = tuple[float | None, float | None, float | None]
_NONE: _Values = (None, None, None)


@dataclass(frozen=True)
class Published:
    """One row: a source's objective, and the NLL at `COSTS`.

    Attributes:
        row: The row of our table that is trained in the same way; "" for none.
        mnist, omniglot: NLL at each cost, None where there is none.
        mnist_sd, omniglot_sd: Standard deviations over three runs, where they are given.
    """

    source: str
    objective: str
    row: str
    mnist: _Values
    omniglot: _Values
    mnist_sd: _Values = _NONE
    omniglot_sd: _Values = _NONE

    def at(self, data: str) -> dict[int, tuple[float, float | None]]:
        """NLL and standard deviation by cost, on mnist or omniglot; empty for other data."""
        if data not in ("mnist", "omniglot"):
            return {}
        values, sds = getattr(self, data), getattr(self, f"{data}_sd")
        return {cost: (value, sd) for cost, value, sd in zip(COSTS, values, sds, strict=True) if value is not None}

    @property
    def in_paper(self) -> bool:
        """Whether it is the paper's own run."""
        return self.source == _PAPER


PUBLISHED = (
    Published(_BURDA, "ELBO", "elbo", (86.47, None, 86.35), (107.62, None, 107.80)),
    Published(_BURDA, "IWAE", "iwae", (85.54, None, 84.78), (106.12, None, 104.67)),
    Published(_PAPER, "ELBO", "elbo", (85.97, 85.99, 85.88), (106.79, 106.98, 106.84), (0.01, 0.05, 0.07), (0.08, 0.19, 0.13)),
    Published(_PAPER, "IWAE", "iwae", (85.28, 84.89, 84.50), (104.96, 104.53, 103.99), (0.01, 0.03, 0.02), (0.04, 0.05, 0.12)),
    Published(_PAPER, "JVI", "jvi", (None, None, 84.75), (None, None, 104.08), (None, None, 0.03), (None, None, 0.11)),
    Published(
        _PAPER, "SUMO", "sumo-variance", (85.09, 84.71, 84.40), (104.85, 104.29, 103.79), (0.01, 0.02, 0.03), (0.04, 0.12, 0.14)
    ),
    Published(_SHI, "IWAE", "iwae", (85.11, 84.62, None), (105.40, 104.53, None)),
    Published(_SHI, "SUMO", "", (85.24, 84.78, None), (105.19, 104.51, None)),
    Published(_SHI, "ML-RR", "", (85.06, 84.64, None), (104.98, 104.26, None)),
    Published(_SHI, "ML-TVO-RR", "", (85.04, 84.59, None), (104.95, 104.22, None)),
    Published(_CODE, "IWAE with DReG", "iwae-dreg", (84.90, None, 84.32), _NONE),
)
