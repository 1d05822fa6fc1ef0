"""Test NLL that others report for the network of the paper's table 1, by IWAE with 5000 terms."""

from dataclasses import dataclass

COSTS = (5, 15, 50)

_BURDA = "Burda et al. 2016"
_PAPER = "Luo et al. 2020 (the paper)"
_SHI = "Shi and Cornish 2021"
_CODE = "public IWAE+DReG code"
SOURCES = {
    _BURDA: "Importance weighted autoencoders (ICLR 2016)",
    _PAPER: "SUMO: unbiased estimation of log marginal probability for latent variable models (ICLR 2020), table 1",
    _SHI: "On multilevel Monte Carlo unbiased gradient estimation for deep latent variable models (AISTATS 2021)",
    _CODE: "as collected in the project's findings, section 6",
}
_Values = tuple[float | None, float | None, float | None]
_NONE: _Values = (None, None, None)


@dataclass(frozen=True)
class Published:
    """One row: a source's objective, and the NLL at `COSTS`.

    Attributes:
        row: The row of our table that is trained in the same way; "" for none.
        mnist: NLL on MNIST at each cost, None where there is none.
        omniglot: The same on OMNIGLOT.
        mnist_sd: Standard deviations over three runs, where they are given.
        omniglot_sd: The same on OMNIGLOT.
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
