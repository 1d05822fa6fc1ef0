"""The command `dohyo`: one module for each subcommand, imported when it is used."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

import dohyo
from dohyo.errors import DohyoError, check_seed
from dohyo.lab.parsing import Formatter, Parser
from dohyo.lab.training.processes import interruptible

_COMMANDS = {
    "train": "train a latent-variable model by maximum likelihood",
    "evaluate": "log p(x) of a trained model on its test data, with an error bar and a verdict on it",
    "sandwich": "log p(x) from both sides, on data that a trained model makes",
    "compare": "differences of log p(x) between models on the same data",
    "sample": "pictures of a trained model's samples",
    "reverse-kl": "fit a model to an unnormalised density by reverse KL",
    "divergence": "the reverse KL of a fitted model measured again, with annealed weights",
    "qpbo": "optimise a function of bits by training a policy",
    "reproduce": "the paper's tables and figures, one study each",
    "report": "one page of HTML from the folders of studies and runs",
    "estimate": "log p(x) from a file of log-weights",
}
_LONGEST = 900  # characters of an error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status. Errors that the user cannot correct are bugs, and are raised."""
    with interruptible(signal.SIGINT, signal.SIGTERM) as interrupted:
        try:
            return _run(arguments, interrupted)
        except BrokenPipeError:  # whoever read our output has ended, such as `head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still writes as it ends
            return 128 + signal.SIGPIPE
        except (DohyoError, OSError) as error:
            message = " ".join(str(error).split())
        except (MemoryError, RuntimeError, OverflowError) as error:
            if not _of_memory(error):
                raise
            reason = " ".join(str(error).split())[:150] or type(error).__name__
            message = f"not enough memory ({reason}); lower --cost, --batch-size, --hidden or --latent, or give fewer data"
        except KeyboardInterrupt as stop:
            if text := stop.args[0] if stop.args else "interrupted":
                print(f"dohyo: {text}", file=sys.stderr)
            return 128 + (interrupted or [signal.SIGINT])[0]
    if len(message) > _LONGEST:  # a stranger's name of a file may have any length
        message = f"{message[: _LONGEST - 300]} ... {message[-300:]}"
    print(f"dohyo: error: {message}", file=sys.stderr)
    return 2


def _run(arguments: Sequence[str] | None, interrupted: list[int]) -> int:
    arguments = [_underscored(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
    if not arguments:
        raise DohyoError(f"give a command: {', '.join(_COMMANDS)}; dohyo --help says what each does")
    for before, argument in pairwise(["dohyo", *arguments]):
        if "\0" in argument:
            raise DohyoError(f"what follows {before.replace('_', '-')} holds a null character; leave it out")
        if argument == "" or (argument.startswith("--") and argument.endswith(("=", "=--"))):  # argparse takes "--" away
            what = (argument.removesuffix("--").rstrip("=") or before).replace("_", "-")
            raise DohyoError(f"what follows {what} is empty; leave the option out, or give it a value")
    parser, own = _parser(arguments)
    config = parser.parse_args(arguments)
    options = own.without_nulls(config[config.command])
    given = parser.parse_args(arguments, defaults=False)[config.command]
    options.explicit = dict(given.items())  # without the defaults
    options.interrupted = interrupted
    check_seed("--seed", options.get("seed"))
    status: int = _module(config.command).run(options)
    sys.stdout.flush()  # here, where a full disk or a closed pipe is reported
    return status


def _of_memory(error: Exception) -> bool:
    """Whether it says that something does not fit into memory; torch has no type of its own for that on a CPU."""
    words = ("DefaultCPUAllocator", "Storage size calculation", "integer multiplication overflow", "Overflow when unpacking")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in str(error) for word in words)


def _module(command: str) -> Any:
    return importlib.import_module(f"dohyo.lab.cli.{command.replace('-', '_')}")


def _underscored(argument: str) -> str:
    """--k-draw=batch -> --k_draw=batch: options may be written either way."""
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else argument


def _parser(arguments: Sequence[str]) -> tuple[Parser, Parser]:
    """That of everything, and that of the command which is used: only this gets its options, because some are slow to import."""
    about = "Unbiased log p(x) for latent-variable models, with error bars."
    parser = Parser(prog="dohyo", description=about, version=dohyo.__version__, formatter_class=Formatter)
    commands = parser.add_subcommands(dest="command", required=True)
    used = Parser()
    for name, text in _COMMANDS.items():
        if name in arguments[:1]:
            used = _module(name).parser(*([arguments[1:]] if name == "reproduce" else []))  # each study has its own options
        commands.add_subcommand(name, used if name in arguments[:1] else Parser(), help=text)
    return parser, used
