"""What there is to say about a run, for each command that makes them."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from dohyo.errors import DohyoError
from dohyo.lab.folder import (
    CONFIG,
    DENSITY,
    LEARNING_CURVES,
    LOG_LIKELIHOOD,
    MARGINALS,
    PAIRS,
    RECONSTRUCTIONS,
    RESULT,
    SAMPLES,
    Values,
    check_values,
    replica_folder,
)
from dohyo.lab.report.entries import judged
from dohyo.lab.report.grids import Cell, Grid, duration, grid, measured, number, on_one_axis, with_error

_NUMBER, _TEXT, _WHOLE = float | int | None, str | None, int | None
_CONFIG = {
    "seed": int, "estimator": str, "cost": float | int, "encoder": _TEXT, "hidden": int, "latent": int, "batch_size": int,
    "data": _TEXT, "model": _TEXT, "test_terms": _WHOLE, "replicas": _WHOLE, "target": _TEXT, "test_draws": _WHOLE,
    "policy": _TEXT, "variables": _WHOLE, "instance": _TEXT, "index": _WHOLE, "reward": _TEXT, "entropy": _NUMBER,
}  # fmt: skip
_RESULT = {"epochs": float | int, "steps": float | int, "warnings": list | None, "versions": dict | None, "diverged": bool | None,
           "verdict": dict | None, "verdict_annealed": dict | None, "replicas": list | None, "moments": dict | None,
           "decoder_passes": dict | None}  # fmt: skip
_NUMBERS = (
    "test_nll_annealed", "test_nll_annealed_stderr", "test_chains", "test_nll_average", "test_nll_average_stderr",
    "seconds", "expected_cost", "test_nll", "test_nll_stderr", "test_nll_spread", "test_terms", "valid_nll", "best_epoch",
    "reverse_kl", "reverse_kl_stderr", "objective", "training_estimate", "training_estimate_stderr", "khat",
    "log_z", "log_z_stderr", "ess", "log_normaliser",
    "best_reward", "best_known", "gap", "mean_reward", "mean_reward_stderr", "seconds_to_best", "variables",
)  # fmt: skip
_MOST_REPLICAS = 1000  # that the commands allow
_OTHER = "it was written by another version of dohyo, or damaged: run it again, or leave this folder out"


class Kind(ABC):
    """A run's config and result, in words and tables. The result is empty while there is none.

    Attributes:
        command: The command of dohyo that makes such runs.
        sign: A key that only its config has.
        length: The config's key for how long to train.
        measure: The column that runs are compared by.
        own: What else its config and its result may have, and of which type.
    """

    command: ClassVar[str]
    sign: ClassVar[str]
    length: ClassVar[str]
    measure: ClassVar[str]
    own: ClassVar[Values] = {}

    def __init__(self, folder: Path, config: Values, result: Values) -> None:
        self.config = check_values(config, _CONFIG | self.own | {self.sign: str, self.length: int}, folder / CONFIG, _OTHER)
        known = _RESULT | self.own | dict.fromkeys(_NUMBERS, _NUMBER)
        self.result = check_values(result, known, folder / RESULT, _OTHER) if result else {}
        self.folder = folder

    @abstractmethod
    def question(self) -> str: ...

    @abstractmethod
    def headline(self) -> list[tuple[str, str]]:
        """The numbers that matter most, with their names; asked for when there is a result."""

    @abstractmethod
    def compared(self) -> Values:
        """The columns of the table of all such runs; those where no run has anything are left out. Runs that agree in the first
        two are comparable."""

    @abstractmethod
    def alts(self) -> dict[str, str]:
        """What the pictures show, by their file names, in the order they are shown."""

    def tables(self) -> list[Grid]:
        return []

    def replicas(self) -> list["Kind"]:
        """The runs that this one is made of, if there are several; without a result, as many as the config asks for."""
        results = [one for one in self.result.get("replicas") or () if isinstance(one, dict)]
        count = self.config.get("replicas") or 1
        if count > _MOST_REPLICAS:
            raise DohyoError(f"{self.folder / CONFIG}: replicas is {count}; {_OTHER}")
        own = results or ([{}] * count if count > 1 else [])
        return [type(self)(replica_folder(self.folder, i), {**self.config, "replicas": 1}, one) for i, one in enumerate(own)]

    def at_cost(self) -> str:
        """The estimator with the cost that was asked for and the one that resulted."""
        expected = self.result.get("expected_cost")
        beside = "" if expected is None else f" (expected {expected:.4g})"
        return f"{self.config['estimator']} at cost {self.config['cost']:g}{beside}"

    def estimator_columns(self) -> Values:
        c = self.config
        return {"estimator": c["estimator"], "cost": c["cost"], "expected cost": self.result.get("expected_cost"),
                "encoder": c.get("encoder")}  # fmt: skip


class Train(Kind):
    command, sign, length, measure = "train", "data", "epochs", "test NLL"
    own: ClassVar[Values] = {"anneal": _WHOLE}

    def question(self) -> str:
        c = self.config
        model = f"{c.get('model')} with {c['hidden']} hidden units and {c['latent']} latent dimensions"
        chains = f" in chains of {c['anneal']} leapfrogs" if c.get("anneal") else ""
        return (f"What test likelihood does a {model} reach on {_short(c['data'])}, if its decoder follows {self.at_cost()}"
                f"{chains} and its encoder {c.get('encoder')} for {c['epochs']} epochs?")  # fmt: skip

    def headline(self) -> list[tuple[str, str]]:
        r, replicas = self.result, self.replicas()
        return [
            (f"Test NLL by IWAE-{r.get('test_terms')}, nats", judged(with_error(r.get("test_nll"), r.get("test_nll_stderr")), r)),
            *self._by_chains(),
            *([(f"Spread over {len(replicas)} replicas", self._spread().text)] if replicas else []),
            ("Validation NLL, nats", number(r.get("valid_nll"))),
            ("Best epoch", f"{number(r.get('best_epoch'))} of {number(r['epochs'])}"),
        ]

    def compared(self) -> Values:
        c, r = self.config, self.result
        chains = r.get("test_nll_annealed")
        return {
            "data": _short(c["data"]),
            "test by": f"IWAE-{c.get('test_terms')}",
            "model": c.get("model"),
            **self.estimator_columns(),
            "leapfrogs": c.get("anneal") or None,
            "decoder passes": self._passes(),
            "test NLL": measured(r.get("test_nll"), r.get("test_nll_stderr")),
            "by chains": Cell(with_error(chains, r.get("test_nll_annealed_stderr")), chains),
            "replicas": len(r["replicas"]) if r.get("replicas") else None,
            "their spread": self._spread(),
            "epochs": r.get("epochs"),
        }

    def tables(self) -> list[Grid]:
        done = [one for one in self.replicas() if one.result]
        nll = on_one_axis([one.compared()["test NLL"] for one in done])
        rows = [[r.get("seed"), cell, r.get("valid_nll"), r.get("best_epoch"), duration(r.get("seconds"))]
                for r, cell in zip((one.result for one in done), nll, strict=True)]  # fmt: skip
        return [grid("Replicas", ["seed", "test NLL", "validation NLL", "best epoch", "time"], rows)] if rows else []

    def alts(self) -> dict[str, str]:
        r = self.result
        known = r.get("valid_nll") is not None
        best = f"; the best validation NLL is {number(r['valid_nll'])} in epoch {number(r.get('best_epoch'))}" if known else ""
        return {
            LOG_LIKELIHOOD: "Mean log p(x) against evaluations for each datum: IWAE by the encoder's weights and by chains",
            LEARNING_CURVES: f"Training and validation NLL, clipped steps and learning rate against the epoch{best}",
            SAMPLES: "A grid of the means of samples from the trained model",
            RECONSTRUCTIONS: "Test data, each with the model's reconstruction under it",
            MARGINALS: "Histograms of each column, of the test data and of samples from the trained model",
            PAIRS: "The first columns in pairs, test data and samples from the trained model as dots",
        }

    def _by_chains(self) -> list[tuple[str, str]]:
        """The test by chains, of a run that was trained through them."""
        r = self.result
        if r.get("test_nll_annealed") is None:
            return []
        value = with_error(r["test_nll_annealed"], r.get("test_nll_annealed_stderr"))
        name = f"Test NLL by {number(r.get('test_chains'))} chains of {number(r.get('anneal'))} leapfrogs, nats"
        return [(name, judged(value, {"verdict": r.get("verdict_annealed")}))]

    def _passes(self) -> Cell | None:
        """Those that a training step takes for each datum, forward and backward."""
        passes = [(self.result.get("decoder_passes") or {}).get(way) for way in ("forward", "backward")]
        numbers = [each for each in passes if isinstance(each, float | int)]
        return Cell(" + ".join(f"{each:.4g}" for each in numbers), sum(numbers)) if len(numbers) == 2 else None

    def _spread(self) -> Cell:
        spread = self.result.get("test_nll_spread")
        return Cell(number(spread, 3), spread)


class ReverseKL(Kind):
    command, sign, length, measure = "reverse-kl", "target", "steps", "reverse KL"

    def question(self) -> str:
        c = self.config
        return (f"How close in reverse KL does a Gaussian latent-variable model come to {c['target']}, if it follows "
                f"{self.at_cost()} and its encoder {c.get('encoder')} for {c['steps']} steps?")  # fmt: skip

    def headline(self) -> list[tuple[str, str]]:
        r = self.result
        known = r.get("log_normaliser") is not None
        log_z = (
            f"log Z, exactly {number(r['log_normaliser'])}" if known else "log Z",
            with_error(r.get("log_z"), r.get("log_z_stderr")),
        )
        training = r.get("training_estimate")
        if not known and None not in (training, r.get("log_z")):
            training += r["log_z"]
        kl = ("True reverse KL, nats" if known else "Reverse KL with it, nats", self._truth().text)
        return [
            *([kl, log_z] if known or r.get("log_z") is None else [log_z, kl]),
            ("The training's own estimate", with_error(training, r.get("training_estimate_stderr"))),
            ("Diverged", "yes" if r.get("diverged") else "no"),
            ("k-hat of the importance weights", self._khat()),
            ("Effective samples", number(r.get("ess"), 3)),
        ]

    def compared(self) -> Values:
        c, r = self.config, self.result
        return {
            "target": c["target"],
            "test by": f"{c.get('test_draws')} draws",
            **self.estimator_columns(),
            "reverse KL": self._truth(),
            "diverged": r.get("diverged"),
            "k-hat": r.get("khat"),
            "steps": r.get("steps"),
        }

    def tables(self) -> list[Grid]:
        columns = ["mean", "stderr", "sd", "q2.5", "q50", "q97.5", "raw_mean", "raw_sd", "exact_mean", "exact_sd"]
        shown = ["quantity", "mean", "its error", "sd", "2.5%", "median", "97.5%", "mean of raw draws", "sd of raw draws",
                 "exact mean", "exact sd"]  # fmt: skip
        moments = {name: one for name, one in (self.result.get("moments") or {}).items() if isinstance(one, dict)}
        rows = [[name, *map(one.get, columns)] for name, one in moments.items()]
        return [grid("Moments and quantiles by importance weights", shown, rows)] if rows else []

    def alts(self) -> dict[str, str]:
        return {
            DENSITY: "The target's density beside the trained model's, with draws of each",
            MARGINALS: "Histograms of the target's quantities by the model, with importance weights and, if known, exactly",
            LEARNING_CURVES: f"The training's estimate and the true reverse KL against the step, at last {self._truth().text}",
        }

    def _khat(self) -> str:
        khat = self.result.get("khat")
        return number(khat, 2) + (": do not trust log Z and the moments" if khat is not None and khat > 0.7 else "")

    def _truth(self) -> Cell:
        """Runs of earlier versions with an unknown log Z know the divergence up to that constant."""
        known = self.result.get("reverse_kl") is not None
        value = self.result.get("reverse_kl" if known else "objective")
        return measured(value, self.result.get("reverse_kl_stderr"), "" if known else " + log Z")


class QPBO(Kind):
    command, sign, length, measure = "qpbo", "policy", "steps", "best reward"

    def question(self) -> str:
        c = self.config
        by = f" by {self.at_cost()}" if c["policy"] == "latent" else ""
        bits = f" of {c['variables']} bits" if c.get("variables") else ""
        return (f"What is the largest value of {self._problem()}{bits} that a policy ({c['policy']}{by}) finds in {c['steps']} "
                f"steps of {c['batch_size']} samples?")  # fmt: skip

    def headline(self) -> list[tuple[str, str]]:
        r, gap = self.result, self.result.get("gap")
        known = [("Best known", number(r.get("best_known"))), ("Gap", f"{gap:.2%}")] if gap is not None else []
        return [
            ("Best reward", number(r.get("best_reward"), 8)),
            *known,
            ("Mean reward of the policy", with_error(r.get("mean_reward"), r.get("mean_reward_stderr"))),
            ("Best found after", duration(r.get("seconds_to_best")).text),
        ]

    def compared(self) -> Values:
        c, r = self.config, self.result
        by = self.estimator_columns() if c["policy"] == "latent" else dict.fromkeys(self.estimator_columns())
        return {
            "problem": self._problem().removeprefix("the "),
            "variables": r.get("variables", c.get("variables")),
            "policy": c["policy"],
            **by,
            "entropy": c.get("entropy"),
            "best reward": measured(r.get("best_reward"), None),
            "mean reward": with_error(r.get("mean_reward"), r.get("mean_reward_stderr")),
            "steps": r.get("steps"),
        }

    def alts(self) -> dict[str, str]:
        best = f"; the best is {number(self.result.get('best_reward'), 8)}" if self.result else ""
        return {LEARNING_CURVES: f"Mean and best reward, and entropy, against steps and seconds{best}"}

    def _problem(self) -> str:
        c = self.config
        if c.get("instance"):
            return _short(c["instance"]) + (f", problem {c['index']}" if c.get("index") else "")
        return c.get("reward") or f"the random quadratic {c.get('instance_seed')}"


def _short(data: str) -> str:
    """A file by its name alone."""
    return Path(data).name if Path(data).suffix else data


KINDS: dict[str, type[Kind]] = {kind.command: kind for kind in (Train, ReverseKL, QPBO)}
