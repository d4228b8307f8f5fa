"""Answers the prompts of ssh(1) in place of a person: run as its SSH_ASKPASS program, by itself, with the prompt.

Reads `answers.json` in the directory that it is told, and notes there which prompt it had no answer for. Each secret is
given once: a prompt that comes again means that it was wrong, and more tries only lock accounts.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence

ANSWERS, UNANSWERED = "answers.json", "unanswered"

_ONE_TIME = re.compile(r"one.?time|\botp\b|token|passcode|verification|\bcode\b", re.IGNORECASE)


def asks_password(prompt: str) -> bool:
    """Whether a server's prompt is for the password that stays the same, and not for a second factor."""
    return "password" in prompt.lower() and not _ONE_TIME.search(prompt)


def choose(answers: Sequence[dict[str, str]], prompt: str) -> int | None:
    """Which answer a prompt asks for. Pure.

    Args:
        answers: each with the `kind` of secret ("passphrase" or "password"), what it is `for` (the key's path, or
            "user@host"), the `secret`, and whether its server is `alone`, without jump hosts.
        prompt: what ssh asks, such as "dev@edge's password: " or "Enter passphrase for key '/k': ".
    """
    if "passphrase for" in prompt.lower():
        return next(
            (i for i, answer in enumerate(answers) if answer["kind"] == "passphrase" and f"'{answer['for']}'" in prompt), None
        )
    if not asks_password(prompt):
        return None
    for index, answer in enumerate(answers):
        who = answer["for"]
        if answer["kind"] == "password" and prompt.startswith((f"{who}'s password", f"({who}) ")):
            return index
    # Before OpenSSH 8.5 a server's own prompt came without a name; with one server there is no doubt whose it is.
    names_nobody = "@" not in prompt
    return next(
        (i for i, answer in enumerate(answers) if names_nobody and answer["kind"] == "password" and answer.get("alone")), None
    )


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
