"""Compares pinned versions with the known advisories, by pip-audit; exit code 1 if there is any.

    python .ci/audit.py constraints.txt [NAME==VERSION ...]

Where the advisories cannot be had it says so in a line, with exit code 2: nothing was compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = (sys.executable, "-m", "pip_audit")


def main(requirements: str, *more: str, program: tuple[str, ...] = PROGRAM) -> int:
    """Print what is known of the versions in a file of requirements, and of more; the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        found, wanted = Path(folder) / "found.json", Path(folder) / "requirements.txt"
        wanted.write_text("\n".join((Path(requirements).read_text(), *more)))
        words = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        command = [*program, *words, "--output", str(found), "--requirement", str(wanted)]
        ran = subprocess.run(command, check=False, capture_output=True, text=True)
        try:
            dependencies = json.loads(found.read_text())["dependencies"]
        except (OSError, ValueError, KeyError):
            return _nothing(
                (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
            )
    skipped = [one["name"] for one in dependencies if "skip_reason" in one]
    hits = [(one, hit) for one in dependencies for hit in one.get("vulns", ())]
    for one, hit in hits:
        mended = " or ".join(hit["fix_versions"]) or "nothing yet"
        print(f"{one['name']} {one['version']}: {hit['id']}; mended in {mended}")
    note = f"; not known to the service: {', '.join(skipped)}" if skipped else ""
    compared = len(dependencies) - len(skipped)
    if not compared:  # as from a mirror that has packages and no advisories
        return _nothing(f"the service knows none of {len(skipped)} packages")
    print(f"audit: {compared} packages compared, {len(hits)} advisories{note}")
    return 1 if hits else 0


def _nothing(why: str) -> int:
    """Say that nothing was compared; the exit code."""
    print(f"audit: nothing was compared, the advisories cannot be had: {why}"[:300])
    return 2


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
