"""What there is to say of a run, for each command that makes them."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from dohyo.lab.report.grids import Cell, Grid, duration, grid, number, with_error

Values = dict[str, Any]


class Kind(ABC):
    """A run's config and result, in words and tables. The result is empty while there is none.

    Attributes:
        command: The command of dohyo that makes such runs.
        sign: A key that only its config has.
        length: The config's key for how long to train.
        measure: The column that runs are compared by.
    """

    command: ClassVar[str]
    sign: ClassVar[str]
    length: ClassVar[str]
    measure: ClassVar[str]

    def __init__(self, config: Values, result: Values) -> None:
        self.config, self.result = config, result

    @abstractmethod
    def question(self) -> str: ...

    @abstractmethod
    def headline(self) -> list[tuple[str, str]]:
        """The numbers that matter most, with their names; asked for when there is a result."""

    @abstractmethod
    def compared(self) -> Values:
        """The columns of the table of all such runs, but for those where none has anything. The first two say which are alike."""

    @abstractmethod
    def alts(self) -> dict[str, str]:
        """What the pictures show, by their names, in the order of showing."""

    def tables(self) -> list[Grid]:
        return []


def measured(value: float | None, error: float | None, unit: str = "") -> Cell:
    """A number with its error bar in words and on an axis."""
    reach = error or 0.0
    return Cell(with_error(value, error) + (unit if value is not None else ""), value,
                marks=None if value is None else (value - reach, value, value + reach))  # fmt: skip


class Train(Kind):
    command, sign, length, measure = "train", "data", "epochs", "test NLL"

    def question(self) -> str:
        c = self.config
        return (f"What test likelihood does a {c['model']} with {c['hidden']} hidden units and {c['latent']} latent dimensions "
                f"reach on {_short(c['data'])}, if its decoder follows {c['estimator']} at cost {c['cost']:g} and its encoder "
                f"{c['encoder']} for {c['epochs']} epochs?")  # fmt: skip

    def headline(self) -> list[tuple[str, str]]:
        r = self.result
        several = [(f"Spread over {len(r['replicas'])} replicas", self._spread().text)] if "replicas" in r else []
        return [
            (f"Test NLL by IWAE-{r['test_terms']}, nats", with_error(r["test_nll"], r["test_nll_stderr"])),
            *several,
            ("Validation NLL, nats", number(r["valid_nll"])),
            ("Best epoch", f"{number(r['best_epoch'])} of {number(r['epochs'])}"),
        ]

    def compared(self) -> Values:
        c, r = self.config, self.result
        return {
            "data": _short(c["data"]),
            "test by": f"IWAE-{c['test_terms']}",
            "model": c["model"],
            "estimator": c["estimator"],
            "cost": c["cost"],
            "encoder": c["encoder"],
            "test NLL": measured(r.get("test_nll"), r.get("test_nll_stderr")),
            "replicas": len(r["replicas"]) if "replicas" in r else None,
            "their spread": self._spread(),
            "epochs": r.get("epochs"),
        }

    def tables(self) -> list[Grid]:
        replicas = self.result.get("replicas")
        if not replicas:
            return []
        rows = [[one["seed"], measured(one["test_nll"], one["test_nll_stderr"]), one["valid_nll"], one["best_epoch"],
                 duration(one["seconds"])] for one in replicas]  # fmt: skip
        return [grid("Replicas", ["seed", "test NLL", "validation NLL", "best epoch", "time"], on_one_axis(rows, 1))]

    def alts(self) -> dict[str, str]:
        r = self.result
        known = r.get("valid_nll") is not None
        best = f"; the best validation NLL is {number(r['valid_nll'])} in epoch {number(r['best_epoch'])}" if known else ""
        return {
            "learning_curves": f"Training and validation NLL, clipped steps and learning rate against the epoch{best}",
            "samples": "A grid of the means of samples from the trained model",
            "reconstructions": "Test data, each with the model's reconstruction under it",
        }

    def _spread(self) -> Cell:
        spread = self.result.get("test_nll_spread")
        return Cell(number(spread, 3), spread)


class ReverseKL(Kind):
    command, sign, length, measure = "reverse-kl", "target", "steps", "reverse KL"

    def question(self) -> str:
        c = self.config
        return (f"How close in reverse KL does a Gaussian latent-variable model come to {c['target']}, if it follows "
                f"{c['estimator']} at cost {c['cost']:g} and its encoder {c['encoder']} for {c['steps']} steps?")  # fmt: skip

    def headline(self) -> list[tuple[str, str]]:
        r = self.result
        return [
            ("True reverse KL, nats", self._truth().text),
            ("The training's own estimate", with_error(r["training_estimate"], r["training_estimate_stderr"])),
            ("Diverged", "yes" if r["diverged"] else "no"),
            ("k-hat of the importance weights", number(r["khat"], 2)),
        ]

    def compared(self) -> Values:
        c, r = self.config, self.result
        return {
            "target": c["target"],
            "test by": f"{c['test_draws']} draws",
            "estimator": c["estimator"],
            "cost": c["cost"],
            "encoder": c["encoder"],
            "reverse KL": self._truth(),
            "diverged": r.get("diverged"),
            "k-hat": r.get("khat"),
            "steps": r.get("steps"),
        }

    def tables(self) -> list[Grid]:
        columns = ["mean", "stderr", "sd", "raw_mean", "raw_sd", "exact_mean", "exact_sd"]
        shown = ["quantity", "mean", "its error", "sd", "mean of raw draws", "sd of raw draws", "exact mean", "exact sd"]
        rows = [[name, *map(moments.get, columns)] for name, moments in (self.result.get("moments") or {}).items()]
        return [grid("Moments by importance weights", shown, rows)] if rows else []

    def alts(self) -> dict[str, str]:
        return {
            "density": "The target's density beside the trained model's, with draws of each",
            "learning_curves": "The training's estimate and the true reverse KL against the step; the last is "
            + self._truth().text,
        }

    def _truth(self) -> Cell:
        """Where log Z of the target is not known, the divergence is known up to it."""
        known = self.result.get("reverse_kl") is not None
        value = self.result.get("reverse_kl" if known else "objective")
        return measured(value, self.result.get("reverse_kl_stderr"), "" if known else " + log Z")


class QPBO(Kind):
    command, sign, length, measure = "qpbo", "policy", "steps", "best reward"

    def question(self) -> str:
        c = self.config
        by = f" by {c['estimator']} at cost {c['cost']:g}" if c["policy"] == "latent" else ""
        bits = f" of {c['variables']} bits" if c["variables"] else ""
        return (f"What is the largest value of {self._problem()}{bits} that a policy ({c['policy']}{by}) finds in {c['steps']} "
                f"steps of {c['batch_size']} samples?")  # fmt: skip

    def headline(self) -> list[tuple[str, str]]:
        r = self.result
        known = [("Best known", number(r["best_known"])), ("Gap", f"{r['gap']:.2%}")] if r["best_known"] is not None else []
        return [
            ("Best reward", number(r["best_reward"], 8)),
            *known,
            ("Mean reward of the policy", with_error(r["mean_reward"], r["mean_reward_stderr"])),
            ("Best found after", duration(r["seconds_to_best"]).text),
        ]

    def compared(self) -> Values:
        c, r = self.config, self.result
        latent = c["policy"] == "latent"
        return {
            "problem": self._problem().removeprefix("the "),
            "variables": r.get("variables", c["variables"]),
            "policy": c["policy"],
            "estimator": c["estimator"] if latent else None,
            "cost": c["cost"] if latent else None,
            "entropy": c["entropy"],
            "best reward": measured(r.get("best_reward"), None),
            "mean reward": with_error(r.get("mean_reward"), r.get("mean_reward_stderr")),
            "steps": r.get("steps"),
        }

    def alts(self) -> dict[str, str]:
        best = f"; the best is {number(self.result['best_reward'], 8)}" if self.result else ""
        return {"learning_curves": f"Mean and best reward, and entropy, against steps and seconds{best}"}

    def _problem(self) -> str:
        c = self.config
        if c["instance"]:
            return _short(c["instance"]) + (f", problem {c['index']}" if c["index"] else "")
        if c["reward"]:
            return str(c["reward"])
        return f"the random quadratic {c['instance_seed']}"


def on_one_axis(rows: list[list[Any]], column: int) -> list[list[Any]]:
    """Marks as percentages of the axis that holds all of this column's; none where there is nothing to compare with."""
    cells = [row[column] for row in rows]
    ends = [end for cell in cells if cell.marks for end in cell.marks]
    low, width = (min(ends), max(ends) - min(ends) or 1.0) if ends else (0.0, 1.0)
    several = sum(cell.marks is not None for cell in cells) > 1

    def placed(cell: Cell) -> Cell:
        marks = tuple(round(100 * (end - low) / width, 2) for end in cell.marks) if several and cell.marks else None
        return Cell(cell.text, cell.key, cell.link, marks)  # type: ignore[arg-type]

    return [[*row[:column], placed(row[column]), *row[column + 1 :]] for row in rows]


def _short(data: str) -> str:
    """A file by its name alone."""
    return Path(data).name if Path(data).suffix else data


KINDS: dict[str, type[Kind]] = {kind.command: kind for kind in (Train, ReverseKL, QPBO)}
