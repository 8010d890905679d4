"""Calls the behaviour that a test names, on the ranks that it names."""

from parallel import behaviours


def call(context, inputs, arguments):
    return getattr(behaviours, arguments["name"])(context, inputs, **arguments.get("options", {}))
