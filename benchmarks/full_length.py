"""One JSON of the cells of `table1 --scale paper` at one place, as `docs/full_length.py` reads it for README's table.

    python -m benchmarks.full_length CELLS/mnist_015_* --annealed FILE... --out results/mnist_cost_15.json

A folder is the `--out` of one cell, named by it. A file of annealed weights holds for each model, NAME.REPLICA, its NLL and that
of every test image (`dohyo.evaluate` of `dohyo.Annealed`, tuned on test images with noise of another seed), and the progress of
the run whose best parameters it was. A cell that was stopped from outside and then tested has `stopped.json` in each replica's
folder. Rows that the file holds already, and that are not given again, stay in it.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dohyo.errors import DohyoError
from dohyo.files import plain
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.folder import CONFIG, WORK, read_records, write_json
from dohyo.lab.studies.table1 import FIRST
from dohyo.lab.studies.verdicts import Contrast

PAIRS = (
    ("sumo-variance", "iwae"), ("sumo", "iwae-dreg"), ("iwae-dreg", "iwae"),
    ("iwae-ours", "iwae-dreg"), ("sumo-ours", "iwae-ours"), ("chains", "iwae-ours"), ("chains-early", "iwae-ours"),
    ("chains-unbiased", "chains-early"),
)  # fmt: skip
EVERY = 100  # epochs from one kept record to the next
INTERVALS = "The intervals of each group hold together (Bonferroni), and leave out what another sequence of K would change."
ANNEALED = (
    "The same parameters and test images, the log-mean of weights of chains (`dohyo.Annealed`), tuned for each model on test "
    "images with noise of another seed: lower bounds on log p(x) on average. `sandwich` is how far apart bounds from both sides "
    "are on images that the model has made. `stderr_over_images` is the error of a difference between these very models, from "
    "paired images; the intervals are over replicas."
)
Values = dict[str, Any]


def cell(folder: Path) -> Values:
    """A cell's config, its result, how each replica ended, and some of its records; of both stages, where there are two."""
    run = DensityRun.open(folder / WORK / folder.name)
    kept = [one.folder / "stopped.json" for one in run.replicas]
    first = DensityRun.open(run.folder / FIRST) if (run.folder / FIRST).exists() else None
    before = first.config.epochs if first else 0
    if run.result is not None:
        result = dict(run.result)
        for one in result["replicas"]:
            limit = one["epochs"] >= run.config.epochs
            one["ended"] = (
                f"{one['epochs'] + before:,} epochs, the study's limit"
                if limit
                else f"no gain for {run.config.stop_patience} epochs"
            )
    elif all(path.exists() for path in kept):
        result = plain(run.joined([json.loads(path.read_text(encoding="utf-8")) for path in kept]))
    else:
        raise DohyoError(f"{folder} is not finished; go on with it, or test its best parameters and keep that as stopped.json")
    curves = []
    for place, (one, found) in enumerate(zip(run.replicas, result["replicas"], strict=True)):
        records = [record for record in read_records(one.folder) if record["epoch"] <= found["epochs"]]
        if first:
            records = [{**record, "epoch": record["epoch"] + before} for record in records]
            records = read_records(first.replicas[place].folder) + records
            found["epochs"] += before
        wanted = [r for r in records if r["epoch"] == 1 or r["epoch"] % EVERY == 0 or r is records[-1]]
        curves.append([{key: value for key, value in r.items() if key not in ("program", "step", "seconds")} for r in wanted])
    config = yaml.safe_load((run.folder / CONFIG).read_text(encoding="utf-8"))
    config["epochs"] += before
    if first:
        config["init_from"] = FIRST  # and not a path of the machine
        result["stages"] = [
            {key: one[key] for key in ("epochs", "decoder_passes", "seconds")}
            for one in (first.result or {}, run.result or result)
        ]
    return {"config": config, "result": result, "curves": curves}


def differences(values: dict[str, list[float]]) -> Values:
    pairs = [pair for pair in PAIRS if pair[0] in values and pair[1] in values]
    found = {}
    for one, other in pairs:
        c = Contrast.of((1, values[one]), (-1, values[other]))
        found[f"{one} less {other}"] = {"mean": c.mean, "half_of_95_percent_interval": c.half(len(pairs)), "p": c.p}
    return found


def read_annealed(paths: Sequence[Path]) -> dict[str, Values]:
    """What files of annealed weights hold, those of as many leapfrogs as one; each model is in one of them."""
    joined: dict[str, Values] = {}
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        options = {key: value for key, value in content["options"].items() if key != "device"}
        own = joined.setdefault(f"{options['steps']}_steps", {"options": options, "models": {}})
        if own["options"] != options or own["models"].keys() & content["models"].keys():
            raise DohyoError(f"{path}: was made with other options than the files before, or holds models that they hold")
        own["models"] |= content["models"]
    return joined


def annealed(content: Values, cells: dict[str, Values], before: Values) -> Values:
    """The values of the cells' models, where all replicas have one, and those of the rows of `before`."""
    models: dict[str, list[Values]] = {}
    for name, one in cells.items():
        replicas = one["result"]["replicas"]
        own = [content["models"].get(f"{name}.{i}") for i in range(len(replicas))]
        if None in own:
            continue
        for model, replica in zip(own, replicas, strict=True):
            if (epoch := model["numbers"]["best_epoch"]) != replica["best_epoch"]:
                raise DohyoError(
                    f"{name} was annealed after epoch {epoch}, and tested after {replica['best_epoch']}; anneal the parameters "
                    "that were tested"
                )
        models[_row(name)] = own
    given = {_row(name) for name in cells}
    replicas = {row: own for row, own in before.get("replicas", {}).items() if row not in given}
    replicas |= {row: [_kept(one) for one in own] for row, own in models.items()}
    nll = {row: [one["nll"] for one in own] for row, own in replicas.items()}
    found = differences(nll)
    images = {row: [statistics.fmean(each) for each in zip(*(one["nll_per_image"] for one in own), strict=True)]
              for row, own in models.items()}  # fmt: skip
    for name, difference in found.items():
        pair = [images.get(row) for row in name.split(" less ")]
        if pair[0] and pair[1]:  # the images of rows that the file held already are not known any more
            paired = [a - b for a, b in zip(*pair, strict=True)]
            difference["stderr_over_images"] = statistics.stdev(paired) / len(paired) ** 0.5
        elif not any(pair):
            difference |= {"stderr_over_images": before["differences"].get(name, {}).get("stderr_over_images")}
    return {
        "options": content["options"],
        "test_nll": {row: statistics.fmean(values) for row, values in nll.items()},
        "replicas": replicas,
        "differences": found,
    }


def _kept(model: Values) -> Values:
    gap = (
        {"sandwich": {key: model["sandwich"][key] for key in ("count", "chains", "gap", "gap_stderr")}}
        if "sandwich" in model
        else {}
    )
    return {key: model[key] for key in ("nll", "stderr", "lost", "khat")} | gap


def _row(name: str) -> str:
    """The row of a cell's name: mnist_015_iwae-dreg is of iwae-dreg."""
    return name.split("_", 2)[2]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path, nargs="+")
    parser.add_argument("--annealed", type=Path, nargs="*", default=[])
    parser.add_argument("--note", help="what to know of the runs; default: what the file says already")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    cells = {folder.name: cell(folder) for folder in options.cells}
    places = {name.rsplit("_", 1)[0] for name in cells}
    if len(places) > 1:
        raise DohyoError(f"these are cells of {', '.join(sorted(places))}; give those of one data set and cost")
    before: Values = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"note": ""}
    runs = before.get("runs", {}) | {_row(name).replace("-", "_"): found for name, found in cells.items()}
    nll = {name.replace("_", "-"): [one["test_nll"] for one in run["result"]["replicas"]] for name, run in runs.items()}
    known = before.get("annealed", {})
    held = {steps: {"options": one["options"], "models": {}} for steps, one in known.items() if steps.endswith("_steps")}
    new = held | read_annealed(options.annealed)
    weights = {steps: annealed(content, cells, known.get(steps, {})) for steps, content in new.items()}
    write_json(options.out, before | {
        "note": before["note"] if options.note is None else options.note,
        "runs": runs,
        "test_nll_at_the_end": {"rows": list(nll), "differences": differences(nll)},
        "annealed": known | weights | {"note": ANNEALED},
        "intervals": INTERVALS,
    })  # fmt: skip
    for row, values in nll.items():
        print(f"{row}: {statistics.fmean(values):.3f} by IWAE-5000, {[round(value, 3) for value in values]}")


if __name__ == "__main__":
    main()
