"""Make the tables of results in README.md and the docs anew from results/NAME/study.json, and from the files named below.

`full_length`, `full_length_verdicts` and `full_length_conclusions` are the paper's table 1 from all that was trained at full
length, `unbiased` its differences, with those of shorter runs, `leads_late` those of rows that begin where IWAE
ended. `answer`, `pooled`, `encoder`, `missing` and `chains` are made by docs/better_model.py.

    python docs/tables.py            # writes them
    python docs/tables.py --check    # says which are not as the results are, and writes nothing

A table stands between `<!-- results:NAME -->` (the conclusions; `<!-- results:NAME TITLE -->` is the table of that title) and
`<!-- end -->`, each on a line of its own.
"""

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import better_model
from blocks import conclusions, filled, table

import full_length
from dohyo.files import replacing
from dohyo.lab.report.grids import Grid, grid

ROOT = Path(__file__).resolve().parents[1]


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]


def gpu_step(content: dict[str, Any]) -> Grid:
    """Microseconds of a step, a row for each number of replicas and cost."""
    times = {
        (row["replicas"], row["cost"], row["estimator"]): row["microseconds"]
        for row in content["steps"]
        if row["program"] == "captured"
    }
    rows = []
    for replicas, cost in sorted({key[:2] for key in times}):
        found = [times.get((replicas, cost, name)) for name in ("iwae", "iwae+dreg", "sumo")]
        ratio = f"{found[2] / found[0]:.2f}" if found[0] and found[2] else None
        rows.append([replicas, cost, *(f"{time:.0f}" if time else None for time in found), ratio])
    columns = ["replicas", "cost", "IWAE", "IWAE, encoder dreg", "SUMO, encoder dreg", "SUMO / IWAE"]
    return grid("", columns, rows, "Microseconds a step.")


def gpu_chains(content: dict[str, Any]) -> Grid:
    """Microseconds of a step through chains beside IWAE with as many passes, in the least disturbed epochs."""
    rows = []
    for row in content["rows"]:
        if "equal" in row:
            key = row["equal"], row["replicas"]
            other = next(one for one in content["rows"] if (one["cost"], one["replicas"]) == key and "anneal" not in one)
            times = [one["least"] for one in (row, other)]
            counts = [f"{one['kernels']:.0f}" for one in (row, other)]
            name, equal = f"chains, {row['cost']} of {row['anneal']}", f"IWAE-{row['equal']}"
            rows.append([name, row["replicas"], equal, *(f"{time:.0f}" for time in times), f"{times[0] / times[1]:.2f}", *counts])
    columns = ["theta follows", "replicas", "with as many passes", "µs", "µs of IWAE", "ratio", "kernels", "kernels of IWAE"]
    return grid("", columns, rows)


def chain_encoders(content: dict[str, Any]) -> Grid:
    """What phi may follow where theta follows chains; the last row changes what theta follows."""
    names = {
        "dreg": "IWAE on fresh samples, by DReG (the default)",
        "iwae": "IWAE on fresh samples, as it is",
        "annealed": "the annealed bound, through the leapfrogs",
        "wake": "the chains' ends (wake phase)",
        "multilevel-rr": "by DReG, while theta follows MultilevelRR over chains",
    }
    rows = []
    for name, row in content["rows"].items():
        less = "{:+.2f} ± {:.2f}".format(*row["less_dreg"]) if "less_dreg" in row else None
        numbers = [f"{row[key]:.2f}" for key in ("nll_annealed", "nll_iwae_500")]
        rows.append([names[name], *numbers, less, f"{row['khat_above_0.7']:.0%}", f"{row['seconds']:.0f}"])
    return grid("", ["phi follows", "NLL, annealed", "by IWAE-500", "less the default's", "k-hat above 0.7", "seconds"], rows)


def chain_start(results: Path, ending: str) -> Grid:
    """From which share of the training on theta follows chains, beside samples throughout."""
    names = {"1.0": "never", "0.0": "the beginning"}
    rows = []
    for data, title in (("mnist", "MNIST"), ("omniglot", "OMNIGLOT")):
        content = json.loads((results / f"chain_start_{data}{ending}.json").read_text(encoding="utf-8"))
        unbiased = results / f"chain_start_{data}{ending}_unbiased.json"
        if unbiased.exists():
            more = json.loads(unbiased.read_text(encoding="utf-8"))
            beside = {run["seed"]: run["nll_annealed"] for run in content["runs"] if run["row"] == "1.0"}
            differences = [run["nll_annealed"] - beside[run["seed"]] for run in more["runs"]]
            error = statistics.stdev(differences) / len(differences) ** 0.5
            own = {"less_samples": [statistics.fmean(differences), error]}
            content["rows"]["50%, MultilevelRR over chains"] = more["rows"]["0.5"] | own
        for name, row in content["rows"].items():
            less, *errors = row.get("less_samples", (None, 0.0))
            shown = None if less is None else f"{less:+.2f} ± {max(errors):.2f}"
            begin = names.get(name) or (f"{float(name):.0%}" if name[0] == "0" else name)
            epochs = row.get("epochs", content["config"].get("epochs"))
            nll = [f"{row['nll_annealed']:.2f}", shown, f"{row['nll_iwae']:.2f}", f"{row['khat_above_0.7']:.0%}"]
            rows.append([title, begin, f"{epochs:.0f}", *nll])
    columns = ["data", "chains from", "epochs", "NLL, annealed", "less samples throughout", "by IWAE-500", "k-hat above 0.7"]
    return grid("", columns, rows)


def noise_and_bias(content: dict[str, Any]) -> Grid:
    """From how many data on an unbiased gradient is nearer the truth, after each number of epochs."""
    names = ("SymmetricSUMO", "MultilevelRR", "tuned")
    rows = []
    for epochs, found in content["epochs"].items():
        size = found["images_seen"] / int(epochs)
        for cost, own in found["costs"].items():
            bias = f"{own['squared_bias']:.2g} ± {own['squared_bias_stderr']:.1g}"
            noise = own["unbiased"]["MultilevelRR"]["variance"] / own["iwae_variance"]
            least = [own["unbiased"][name]["ahead_from"] for name in names]
            shown = [f"{float(f'{n:.2g}'):,.0f}" if n else None for n in least]
            rows.append([epochs, cost, bias, f"{noise:.1f}", *shown, f"{least[1] / size:.0f}" if least[1] else None])
    columns = ["epochs", "cost", "squared bias", "variance, MultilevelRR / IWAE", *names, "MultilevelRR, in epochs"]
    return grid("", columns, rows)


def leads_late(results: Path) -> Grid:
    """The differences from IWAE of rows that begin with models that IWAE has trained."""
    rows = []
    for file, how in (("leads_digits_late", "low rate"), ("leads_digits_late_whole", "all images in each step")):
        content = json.loads((results / f"{file}.json").read_text(encoding="utf-8"))
        for cost, found in content["costs"].items():
            for name, own in found.items():
                if name != "IWAE":
                    less = (f"{own[f'less_iwae{s}']:+.3f} ± {own[f'stderr{s}']:.3f}" for s in ("", "_train"))
                    rows.append([how, cost, name, len(own["runs"]), *less])
    return grid("", ["how", "cost", "row", "seeds", "test NLL less IWAE's", "training NLL less IWAE's"], rows)


def mnist_20(content: dict[str, Any]) -> Grid:
    rows = [
        [_options(run["options"]), f"{run['test_nll']:.2f}", f"{run['clipped_steps_decoder']:.0%}", f"{run['clipped_data']:.0%}"]
        for run in content["runs"]
    ]
    return grid("", ["options", "test NLL", "decoder steps clipped", "data clipped"], rows)


def mnist_300(content: dict[str, Any]) -> Grid:
    rows = []
    for run in content["runs"].values():
        found, last = run["result"], [curve[-1] for curve in run["curves"]]
        shown = {key: run["config"][key] for key in ("estimator", "encoder", "max_terms", "clip_datum") if run["config"][key]}
        shares = [sum(epoch[key] for epoch in last) / len(last) for key in ("clipped_decoder", "clipped_data")]
        each = ", ".join(f"{one['test_nll']:.2f}" for one in found["replicas"])
        rows.append([_options(shown), f"{found['test_nll']:.2f}", each, *(f"{share:.0%}" for share in shares)])
    return grid("", ["options", "test NLL", "of each replica", "decoder steps clipped", "data clipped"], rows)


def mnist_cost_5(content: dict[str, Any]) -> Grid:
    rows = []
    for name, run in content["runs"].items():
        found, config = run["result"], run["config"]
        shown = _options({key: config[key] for key in ("estimator", "encoder")})
        epochs = f"{found['epochs']:,}" + ("" if found["epochs"] == config["epochs"] else ", stopped")
        each = ", ".join(f"{one['test_nll']:.2f}" for one in found["replicas"])
        annealed = content["annealed"]["48_steps"]["test_nll"][name.replace("_", "-")]
        rows.append([shown, epochs, f"{found['test_nll']:.2f}", each, f"{annealed:.2f}"])
    return grid("", ["options", "epochs", "test NLL by IWAE-5000", "of each replica", "by annealed weights"], rows)


def _options(options: dict[str, Any]) -> str:
    texts = {key.replace("_", "-"): f"{value:g}" if isinstance(value, float) else str(value) for key, value in options.items()}
    return ", ".join(text if key == "estimator" else f"{key} {text}" for key, text in texts.items())


TABLES = {
    "gpu_step": gpu_step,
    "gpu_chains": gpu_chains,
    "chain_encoders": chain_encoders,
    "noise_and_bias_digits": noise_and_bias,
    "mnist_20_epochs": mnist_20,
    "mnist_300_epochs": mnist_300,
    "mnist_cost_5": mnist_cost_5,
}


def made_table(name: str) -> str:
    return table(TABLES[name](json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))))


def made_at_full_length() -> dict[str, Callable[[], str]]:
    """Blocks that are made of several files, which are read once they are needed."""
    results = ROOT / "results"
    return {
        "answer": lambda: better_model.answer(full_length.read(results)),
        "pooled": lambda: table(better_model.table(full_length.read(results))),
        "encoder": lambda: better_model.encoder(full_length.read(results)),
        "missing": lambda: better_model.missing(full_length.read(results)),
        "chains": lambda: better_model.chains(results),
        "chain_start_passes": lambda: table(chain_start(results, "")),
        "chain_start_time": lambda: table(chain_start(results, "_300s")),
        "leads_late": lambda: table(leads_late(results)),
        "unbiased": lambda: table(full_length.unbiased(results)),
        "full_length": lambda: table(full_length.table(full_length.read(results))),
        "full_length_verdicts": lambda: table(full_length.verdicts(full_length.read(results))),
        "full_length_conclusions": lambda: conclusions(full_length.conclusions(full_length.read(results))),
    }


def stale(write: bool = False) -> list[Path]:
    """The pages whose tables are not as the results are."""
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        more = {name: partial(made_table, name) for name in TABLES} | made_at_full_length()
        made = filled(text, ROOT / "results", page.parent, more)
        if made != text:
            found.append(page)
            if write:
                with replacing(page) as temporary:
                    temporary.write_text(made, encoding="utf-8")
    return found


if __name__ == "__main__":
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit("usage: python docs/tables.py [--check]")
    try:
        changed = stale(write=not check)
    except ValueError as error:
        sys.exit(f"tables: {error}")
    for page in changed:
        print(f"{page.relative_to(ROOT)}: {'is not as results/ is; run python docs/tables.py' if check else 'written'}")
    sys.exit(1 if check and changed else 0)
