"""The command `dohyo`. What a command alone needs is imported when it runs."""

import sys
from collections.abc import Callable, Sequence

from jsonargparse import Namespace

import dohyo
from dohyo.errors import DohyoError
from dohyo.lab.cli import density, estimate, qpbo, report, reproduce, reverse_kl
from dohyo.lab.cli.parsing import Formatter, Parser

_COMMANDS: dict[str, tuple[Callable[..., Parser], Callable[[Namespace], int], str]] = {
    "train": (density.train_parser, density.train, "train a latent-variable model by maximum likelihood"),
    "evaluate": (
        density.evaluate_parser,
        density.evaluate,
        "log p(x) of a trained model on its test data, with an error bar",
    ),
    "sample": (density.sample_parser, density.sample, "pictures of a trained model's samples"),
    "reverse-kl": (reverse_kl.reverse_kl_parser, reverse_kl.reverse_kl, "fit a model to an unnormalised density by reverse KL"),
    "qpbo": (qpbo.qpbo_parser, qpbo.qpbo, "optimise a function of bits by training a policy"),
    "reproduce": (reproduce.reproduce_parser, reproduce.reproduce, "the paper's tables and figures, one study each"),
    "report": (report.report_parser, report.report, "one page of HTML from the folders of studies and runs"),
    "estimate": (estimate.parser, estimate.run, "log p(x) from a file of log-weights"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        arguments = [_underscored(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
        if not arguments:
            raise DohyoError(f"give a command: {', '.join(_COMMANDS)}; dohyo --help says what each does")
        parser = _parser(arguments)
        config = parser.parse_args(arguments)
        command, options = config.command, config[config.command]
        options.explicit = dict(parser.parse_args(arguments, defaults=False)[command].items())  # said, not by default
        return _COMMANDS[command][1](options)
    except (ValueError, OSError) as error:
        print(f"dohyo: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dohyo: interrupted", file=sys.stderr)
        return 130


def _underscored(argument: str) -> str:
    """--k-draw=batch -> --k_draw=batch: options may be written either way."""
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else argument


def _parser(arguments: Sequence[str]) -> Parser:
    """Only the command that is meant gets its options: some of them are slow to import."""
    parser = Parser(
        prog="dohyo",
        description="Unbiased log p(x) for latent-variable models, with error bars.",
        version=dohyo.__version__,
        formatter_class=Formatter,
    )
    commands = parser.add_subcommands(dest="command", required=True)
    for name, (make, _, text) in _COMMANDS.items():
        known = (arguments[1:],) if name == "reproduce" else ()  # each study has options of its own
        commands.add_subcommand(name, make(*known) if name in arguments[:1] else Parser(), help=text)
    return parser
