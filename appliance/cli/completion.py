"""Completion in the shell: of verbs and flags by shtab, of names that exist by asking the appliance."""

from __future__ import annotations

import argparse

from appliance.core.instance import CHECKS

INSTANCES, MODELS, FIELDS = "_appliance_instances", "_appliance_models", "_appliance_fields"
WORDS = {
    INSTANCES: "$(appliance instances list --names 2>/dev/null)",
    MODELS: "$(appliance models list --names 2>/dev/null)",
    FIELDS: " ".join(f"{name}=" for name in CHECKS if name not in ("name", "model_id")),
}


BY_ARGUMENT = {"name": INSTANCES, "instance": INSTANCES, "model_id": MODELS, "set": FIELDS}
NEW = ("create", "keys")  # verbs whose name is one that there is not yet, or that of a key


def mark(parser: argparse.ArgumentParser, verbs: tuple[str, ...] = ()) -> None:
    """Tell shtab which arguments are completed with names that exist."""
    for action in parser._actions:  # where argparse has them; shtab reads them there, too
        if isinstance(action, argparse._SubParsersAction):
            for verb, below in action.choices.items():
                mark(below, (*verbs, verb))
        elif (words := BY_ARGUMENT.get(action.dest)) and not (action.dest == "name" and set(NEW).intersection(verbs)):
            action.complete = {"bash": words, "zsh": words}  # type: ignore[attr-defined]


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    import shtab  # only now: no other command needs it

    bash = "\n".join(f'{name}() {{ compgen -W "{words}" -- "$1"; }}' for name, words in WORDS.items())
    # In zsh a lone array of words: what follows a `=` is not completed, and no blank comes after it.
    zsh = "\n".join(f"{name}() {{ compadd -S '' -- {words}; }}" for name, words in WORDS.items())
    mark(parser)
    text: str = shtab.complete(parser, shell, preamble={"bash": bash, "zsh": zsh})  # type: ignore[arg-type]
    return text
