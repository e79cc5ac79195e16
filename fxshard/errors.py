"""The errors fxshard raises. Each says what happened, where, what was expected, and what to do."""


class FxshardError(Exception):
    """Base of the errors below; wrong arguments and misuse are TypeError, ValueError and RuntimeError."""


class CaptureError(FxshardError, RuntimeError):
    """A model's forward could not be captured whole; says the user's file and line where there is one."""


class ScheduleError(FxshardError, RuntimeError):
    """A schedule breaks a rule: raised by the verifier and by illegal moves."""


class PassError(FxshardError, RuntimeError):
    """A pass failed or was put where its contract does not hold."""


class AgreementError(FxshardError, RuntimeError):
    """Ranks disagree on the model, the options or the communication skeleton; `absent` did not come to compare."""

    absent: tuple[int, ...] = ()
