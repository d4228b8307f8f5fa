"""Answers the prompts of ssh(1) in place of a person: run as its SSH_ASKPASS program, by itself, with the prompt.

Reads `answers.json` in the directory that it is told, and notes there which prompt it had no answer for. Each secret is
given once: a prompt that comes again means that it was wrong, and more tries only lock accounts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

ANSWERS, UNANSWERED = "answers.json", "unanswered"


def choose(answers: Sequence[dict[str, str]], prompt: str) -> int | None:
    """Which answer a prompt asks for. Pure.

    Args:
        answers: each with the `kind` of secret ("passphrase" or "password"), what it is `for` (the key's path, or
            "user@host"), and the `secret`.
        prompt: what ssh asks, such as "dev@edge's password: " or "Enter passphrase for key '/k': ".
    """
    kind = "passphrase" if "passphrase for" in prompt.lower() else "password" if "password" in prompt.lower() else None
    fitting = [index for index, answer in enumerate(answers) if answer["kind"] == kind]
    # A server's own "Password:" names nobody before OpenSSH 8.5; hops are asked in order.
    named = [index for index in fitting if answers[index]["for"] in prompt]
    chosen = named or (fitting if kind == "password" else [])
    return chosen[0] if chosen else None


def main(directory: str, prompt: str) -> int:
    """Print the answer; 1 if there is none."""
    path = os.path.join(directory, ANSWERS)
    with open(path) as file:
        answers = json.load(file)
    index = choose(answers, prompt)
    if index is None:
        with open(os.path.join(directory, UNANSWERED), "a") as file:
            file.write(prompt + "\n")
        return 1
    secret = answers.pop(index)["secret"]
    with open(path, "w") as file:
        json.dump(answers, file)
    print(secret)  # noqa: T201 - that is how ssh reads it.
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
