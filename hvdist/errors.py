"""Mistakes a user can mend."""


class UserError(ValueError):
    """The message names what was got, what is needed and the cure; it is shown without a traceback."""
