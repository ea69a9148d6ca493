"""Errors as the command tells them: one line, exit code 2."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from events.schema import EventError
from indexer.errors import IndexerError
from router.errors import RouterError
from simulator.errors import SimulatorError

ERRORS = (EventError, IndexerError, RouterError, SimulatorError)
"""What the packages raise for people to read."""


class StartError(click.ClickException):
    """A command that cannot start: one line, exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.format_message()}", err=True, file=file)


def told(error: click.UsageError, main: click.Command) -> str:
    """A usage error in one line, which names the variable when the value is from the environment. ``main`` is
    the command that all others are below of.
    """
    command = error.ctx.command_path if error.ctx is not None else "warmroute"
    message = error.format_message()
    parameter = error.param if isinstance(error, click.BadParameter) else None
    if parameter is not None and parameter.name and error.ctx is not None:
        source = error.ctx.get_parameter_source(parameter.name)
        if source is ParameterSource.ENVIRONMENT:
            message = f"{error.ctx.auto_envvar_prefix}_{parameter.name.upper()}: {error.message}"
    if isinstance(error, click.NoSuchOption):
        of_all = {flag for each in main.params for flag in each.opts}
        if error.option_name in of_all and error.ctx is not None:
            message += (
                f" It goes in front of the command: warmroute {error.option_name} ... {error.ctx.info_name}."
            )
    return f"{message} See `{command} --help`."
