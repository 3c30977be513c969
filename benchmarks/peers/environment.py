"""Virtual environments of the peers: made on first use in folders that git ignores, then reused.

TRL has one of its own, and so have the tables of aiconfigurator, which need no torch.
Stable-Baselines3 and simulators need no other version of anything that is here: their environments
add them to the packages of this one.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

TRL_VERSION = "1.16.0"
SB3_VERSION = "2.9.2"
AICONFIGURATOR_VERSION = "0.12.0"


def requirements() -> list[str]:
    """TRL, on the versions of torch and transformers that m2flow runs on here."""
    torch_range = f"torch=={version('torch').partition('+')[0]}"
    return [torch_range, f"transformers=={version('transformers')}", f"trl=={TRL_VERSION}"]


def trl_python(folder: Path) -> Path:
    """The interpreter of an environment that has TRL; makes it if it is not there or not whole."""
    return _python(folder, "TRL", requirements())


def aiconfigurator_python(folder: Path) -> Path:
    """The interpreter of an environment that has aiconfigurator and its tables."""
    wanted = [
        f"{name}=={AICONFIGURATOR_VERSION}" for name in ("aiconfigurator", "aiconfigurator-core")
    ]
    return _python(folder, "aiconfigurator", wanted)


def sb3_python(folder: Path) -> Path:
    """The interpreter of an environment that has Stable-Baselines3 and all that is here."""
    wanted = ["--no-deps", f"stable-baselines3=={SB3_VERSION}"]
    return _python(folder, "Stable-Baselines3", wanted, on_top=True)


def simulators_python(folder: Path) -> Path:
    """The interpreter of an environment in which all recipes run that learn on two cores."""
    root = Path(__file__).parents[2]
    wanted = ["-e", f"{root}[metaworld,vla]", "gymnasium[classic-control]"]
    return _python(
        folder, "simulators", [*wanted, "-c", str(root / "constraints.txt")], on_top=True
    )


def _python(folder: Path, name: str, wanted: list[str], *, on_top: bool = False) -> Path:
    """With `on_top` it has all packages of the environment that asks, too."""
    python, done = folder / "bin" / "python", folder / "requirements.txt"
    lines = "\n".join(wanted) + "\n"
    if not done.exists() or done.read_text() != lines:
        print(f"making the environment of {name} in {folder} (once)", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        if on_top:
            (packages,) = folder.glob("lib/python*/site-packages")
            # This environment may itself stand on another one.
            here = [path for path in sys.path if Path(path).name == "site-packages"]
            (packages / "all_that_is_here.pth").write_text("\n".join(here) + "\n")
        subprocess.run(
            [str(python), "-m", "pip", "install", "-qq", *wanted], check=True, stdout=sys.stderr
        )
        done.write_text(lines)
    return python
