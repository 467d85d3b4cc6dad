"""`lqs models`: fetch models, list them, make one up."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from lqs.commands.progress import ProgressBar
from lqs.engine.gguf import read_header
from lqs.engine.store import DEFAULT_MODEL, KNOWN_MODELS, PullRecipe, Store, load_recipe, store_folder
from lqs.engine.synth import ARCHITECTURES, DTYPES, TEMPLATES, Recipe, parse_shape, write
from lqs.errors import ModelFileError, StartError

HELP = "fetch, list and make model files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands pull, list and synth."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="pull|list|synth")
    pull = actions.add_parser("pull", help="fetch a model and verify it")
    pull.add_argument(
        "name", nargs="?", default=DEFAULT_MODEL.name, help="a known model, or a recipe file (default: %(default)s)"
    )
    actions.add_parser("list", help="list the models that are here, and those that can be fetched")
    _add_synth_arguments(actions.add_parser("synth", help="write a model with random weights, for tests and load"))


def _add_synth_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument(
        "--shape",
        default="tiny",
        help="tiny, small, 135m or 1b, or sizes by name: layer=2,embd=64,head=4,head_kv=2,ff=128,ctx=1024,vocab=0 "
        "(default: %(default)s)",
    )
    parser.add_argument("--arch", default="llama", choices=ARCHITECTURES, help="default: %(default)s")
    parser.add_argument(
        "--dtype", default="f16", choices=tuple(DTYPES), help="type of the weights (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same file (default: %(default)s)")
    parser.add_argument(
        "--template",
        default="chatml",
        help=f"chat template: {', '.join(TEMPLATES)}, none, or a file (default: %(default)s)",
    )
    parser.add_argument("--eos", default="<|end_of_text|>", help="end-of-text token (default: %(default)s)")
    parser.add_argument("--eot", default="<|im_end|>", help="end-of-turn token, '' for none (default: %(default)s)")
    parser.add_argument("--add-bos", action="store_true", help="the tokenizer puts the start token before a prompt")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say; the exit code."""
    actions = {"pull": _pull, "list": _list, "synth": _synth}
    try:
        return actions[args.action](args)
    except StartError as error:
        print(f"lqs: {error}", file=sys.stderr)
        return error.exit_code


def _pull(args: argparse.Namespace) -> int:
    store = Store(store_folder(os.environ))
    recipe = _recipe(args.name)
    with ProgressBar(f"Fetching {recipe.name}") as progress:
        path = store.pull(recipe, progress)
    read_header(path)
    print(path)
    return 0


def _recipe(name: str) -> PullRecipe:
    if name.endswith(".toml"):
        return load_recipe(Path(name))
    if name.lower() not in KNOWN_MODELS:
        raise ModelFileError(f"no recipe for {name!r}; known are: {', '.join(KNOWN_MODELS)}, or give a recipe file")
    return KNOWN_MODELS[name.lower()]


def _list(_: argparse.Namespace) -> int:
    store = Store(store_folder(os.environ))
    rows = [(model.name, f"{model.size_bytes / 1e6:,.1f} MB", str(model.path)) for model in store.models()]
    here = {name for name, _, _ in rows}
    rows += [
        (recipe.name, f"{recipe.file_bytes / 1e6:,.1f} MB", f"not here: lqs models pull {recipe.name}")
        for recipe in KNOWN_MODELS.values()
        if recipe.name not in here
    ]
    width = max(len(name) for name, _, _ in rows)
    for name, size, place in rows:
        print(f"{name:{width}}  {size:>12}  {place}")
    return 0


def _synth(args: argparse.Namespace) -> int:
    if args.out.exists() and not args.force:
        print(f"lqs: {args.out} is there already; --force writes over it", file=sys.stderr)
        return 2
    try:
        recipe = Recipe(
            shape=parse_shape(args.shape),
            architecture=args.arch,
            dtype=args.dtype,
            seed=args.seed,
            name=args.out.stem,
            chat_template=_template(args.template),
            eos=args.eos,
            eot=args.eot or None,
            add_bos=args.add_bos,
        )
    except ValueError as error:
        print(f"lqs: {error}", file=sys.stderr)
        return 2
    try:
        with ProgressBar(f"Writing {args.out.name}") as progress:
            print(write(args.out, recipe, progress))
    except OSError as error:
        raise ModelFileError(f"{args.out}: {error.strerror or error}") from None
    return 0


def _template(choice: str) -> str | None:
    if choice == "none":
        return None
    if choice in TEMPLATES:
        return TEMPLATES[choice]
    try:
        return Path(choice).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"the template {choice!r} is not one of {', '.join(TEMPLATES)}, none, nor a file: {reason}"
        ) from None
