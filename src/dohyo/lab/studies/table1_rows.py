"""The rows of the study `table1`."""

from dataclasses import dataclass
from typing import Any

_PASSES = 3  # through the decoder for each sample of the encoder: forward, and backward by inputs and by weights
_LONG = 8  # leapfrogs of a chain, where there is room; a chain of T takes 2T + 5 passes


@dataclass(frozen=True)
class Row:
    """How a row of the table is trained.

    Attributes:
        max_terms: Bounds a batch's K, without which it may exhaust memory.
        recipe: The recipe of `dohyo train`, if not the paper's.
        chains: Whether theta follows annealed chains in the last quarter of the epochs; from scratch they train worse models.
        each: Whether every image has a K of its own, stratified over the batch, and its own coefficients are clipped.
    """

    label: str
    estimator: str
    encoder: str
    max_terms: int | None = None
    recipe: str | None = None
    chains: bool = False
    each: bool = False

    def options(self, cost: int, epochs: int) -> dict[str, Any]:
        """The options of a run at this cost: `chains` of `anneal` leapfrogs take no more passes through the decoder.

        Example:
            >>> {cost: list(ROWS["chains"].options(cost, 400).values())[-3:] for cost in (5, 15, 50)}
            {5: [1, 5, 100], 15: [2, 8, 100], 50: [7, 8, 100]}
        """
        count = max(1, round(_PASSES * cost / (2 * _LONG + 5)))
        steps, last = (_PASSES * cost // count - 5) // 2, max(1, epochs // 4)
        chains = {"chains": count, "anneal": steps, "chain_epochs": last} if self.chains else {}
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
    "chains": Row("IWAE, then over chains, our recipe", "iwae", "dreg", recipe="ours", chains=True),
}
