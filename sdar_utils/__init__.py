"""What a run needs besides its algorithm, one file per concern. Nothing in here changes what is learned."""

import sys
from typing import NoReturn

from tqdm import tqdm

ALGORITHMS = {  # the scripts and what they are called, in the paper's order
    "sac_continuous_action": "SAC",
    "nrep_sac": "N-Rep",
    "temporl_continuous_action": "TempoRL",
    "ute_continuous_action": "UTE",
    "taac_continuous_action": "TAAC",
    "sdar_continuous_action": "SDAR",
}


def fail(message: str) -> NoReturn:
    """Bad input ends the program with one line that says what to do."""
    raise SystemExit(f"error: {message}")


def say(message: str) -> None:
    """A line for the user that leaves the progress bar whole."""
    tqdm.write(message, file=sys.stderr if message.startswith("warning") else sys.stdout)
    sys.stdout.flush()


def one_line(error: BaseException) -> str:
    """Somebody else's error message as a part of ours."""
    return " ".join(str(error).removeprefix("error: ").split())


class NotFinite(Exception):
    """A number that training depends on became infinite or NaN."""

    def __init__(self, what: str, step: int | None = None):
        super().__init__(what)
        self.what, self.step = what, step
