"""With this folder on PYTHONPATH a process ends, with a word, when it is to look up a name that a pickle holds."""

import os
import sys


def refuse(event: str, args: tuple) -> None:
    if event == "pickle.find_class":
        os.write(2, f"unpickled {args}\n".encode())
        os._exit(86)


sys.addaudithook(refuse)
