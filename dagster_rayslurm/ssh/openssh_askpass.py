"""The program that `ssh` runs to ask for a password or passphrase (SSH_ASKPASS, ssh(1)): prints the answer to one prompt.

It is a standalone program and imports nothing of the package. It reads the secrets from `answers.json` in the directory that is
its first argument, and appends a prompt that it cannot answer to the file `unanswered` there. It gives each secret once, because
a second prompt means that the secret was wrong, and repeated wrong answers lock accounts.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence

ANSWERS, UNANSWERED = "answers.json", "unanswered"
"""Names of the two files in the directory: the secrets, and the prompts without an answer."""

_ONE_TIME = re.compile(r"one.?time|\botp\b|token|passcode|verification|\bcode\b", re.IGNORECASE)
"""Matches prompts for a second factor, which may contain the word "password" too."""


def asks_password(prompt: str) -> bool:
    """Whether a prompt asks for the password of the account, and not for a second factor."""
    return "password" in prompt.lower() and not _ONE_TIME.search(prompt)


def choose(answers: Sequence[dict[str, str]], prompt: str) -> int | None:
    """The index in `answers` of the answer to a prompt, or None if no answer fits.

    Args:
        answers: each has the `kind` of secret ("passphrase" or "password"), the key or login it is `for` (path of the key, or
            "user@host"), the `secret`, and whether its server is `alone`, which means without jump hosts.
        prompt: what ssh asks, such as "dev@edge's password: " or "Enter passphrase for key '/k': ".
    """
    if "passphrase for" in prompt.lower():
        return next(
            (i for i, answer in enumerate(answers) if answer["kind"] == "passphrase" and f"'{answer['for']}'" in prompt), None
        )
    if not asks_password(prompt):
        return None
    for index, answer in enumerate(answers):
        login = answer["for"]
        if answer["kind"] == "password" and prompt.startswith((f"{login}'s password", f"({login}) ")):
            return index
    if "@" in prompt:
        return None
    # Before OpenSSH 8.5 a server's own prompt did not name the login. With a single server it is clear all the same.
    return next((i for i, answer in enumerate(answers) if answer["kind"] == "password" and answer.get("alone")), None)


def main(directory: str, prompt: str) -> int:
    """Print the answer to a prompt. Returns the exit code: 0, or 1 if no answer fits."""
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
    print(secret)  # noqa: T201 - ssh reads it from here.
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
