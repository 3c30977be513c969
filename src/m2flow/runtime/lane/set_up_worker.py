"""What Ray runs to set up each of its workers, in place of a script of its own.

    python set_up_worker.py [FLAG ...] SCRIPT [ARGUMENT ...] --language=NAME
        --serialized-runtime-env-context=JSON

Ray's own script imports all of Ray, a third of a second of a core, to become another command. Where
no more is asked for than another Python, as for lanes that are forks (`ask_template.py`), this one
becomes it at once. Everything else it leaves to Ray's own. It imports nothing of m2flow.
"""

import json
import os
import shlex
import sys
from pathlib import Path

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main() -> None:
    """Become the worker, or Ray's own script."""
    context, rest = {}, []
    for argument in sys.argv[1:]:
        if argument.startswith(CONTEXT):
            context = json.loads(argument.removeprefix(CONTEXT))
        elif not argument.startswith(LANGUAGE):
            rest.append(argument)
    asked = {name for name, value in context.items() if value}
    if asked == {"py_executable"} and f"{LANGUAGE}PYTHON" in sys.argv:
        command = [*shlex.split(context["py_executable"]), *rest]
    else:
        script = Path(next(word for word in rest if word.endswith(".py")))
        command = [sys.executable, str(script.with_name("setup_worker.py")), *sys.argv[1:]]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
