"""TRL's own virtual environment: made on first use in a folder that git ignores, then reused."""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

TRL_VERSION = "1.16.0"


def requirements() -> list[str]:
    """TRL, on the versions of torch and transformers that m2flow runs on here."""
    torch_range = f"torch=={version('torch').partition('+')[0]}"
    return [torch_range, f"transformers=={version('transformers')}", f"trl=={TRL_VERSION}"]


def trl_python(folder: Path) -> Path:
    """The interpreter of an environment that has TRL; makes it if it is not there or not whole."""
    python, done = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join(requirements()) + "\n"
    if not done.exists() or done.read_text() != wanted:
        print(f"making TRL's environment in {folder} (once)", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "-qq", *requirements()],
            check=True,
            stdout=sys.stderr,
        )
        done.write_text(wanted)
    return python
