"""The errors a user may see. Each is one line: what is wrong, where, and what to do; the command line prints it and exits with `exit_code`."""


class CalibrateError(Exception):
    """Base of every expected failure. Anything else that escapes is a bug and keeps its traceback."""

    exit_code = 2


class UsageError(CalibrateError):
    """Wrong usage or unusable input: nothing was written."""

    exit_code = 2


class CheckFailed(CalibrateError):
    """A verification or a gate looked and said no."""

    exit_code = 1


class HostError(CalibrateError):
    """This host cannot do what was asked; the message says which host can."""

    exit_code = 3
