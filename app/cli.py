"""The `askimage` command."""

import sys

import typer

from app.commands.ask import ask
from app.commands.check import check
from app.commands.keys import keys
from app.commands.serve import serve
from app.commands.top import top

app = typer.Typer(
    name="askimage",
    help="Ask questions about images: a service with vLLM's engine in-process, and its client.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)
app.command()(serve)
app.command()(ask)
app.command()(top)
app.command()(check)
app.add_typer(keys)


def main() -> None:
    """Entry point of the console script."""
    sys.exit(app())


if __name__ == "__main__":
    main()
