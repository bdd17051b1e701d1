"""Recipes: how to calibrate a model family, as data. One YAML a family in `recipes/`; a user's own file takes its place."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from calibrate.errors import UsageError
from calibrate.resources import resource
from calibrate.scales import PolicyOptions

FALLBACK = "default"


class CorpusChoice(BaseModel):
    """What to calibrate on, unless the command line says otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str | None = Field(None, description="as --data; null is the built-in mix")
    samples: int = Field(64, ge=1)
    sequence_length: int = Field(1024, ge=1)


class Trap(BaseModel):
    """Something that went wrong in the field, and where that is told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: str
    source: str


class Recipe(BaseModel):
    """A recipe file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    description: str
    model_types: tuple[str, ...] = Field(description="`model_type` values of config.json that this recipe is for")
    support: Literal["vllm", "collect-only"] = "vllm"
    corpus: CorpusChoice = CorpusChoice()
    scales: PolicyOptions = PolicyOptions()
    engine_notes: tuple[str, ...] = ()
    traps: tuple[Trap, ...] = ()


def load_recipe(path: Path) -> Recipe:
    """Read a recipe file. Raises UsageError with the file, the field and the reason."""
    try:
        value: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Recipe.model_validate(value)
    except OSError as error:
        raise UsageError(f"cannot read recipe {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(f"recipe {path}: {where}: {first['msg']}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: wrong encoding, or a date that is none
        raise UsageError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from error


def all_recipes() -> dict[str, Recipe]:
    """The shipped recipes by family name, sorted."""
    return {path.stem: load_recipe(path) for path in sorted(resource("recipes").glob("*.yaml"))}


def choose_recipe(model_type: str, asked: str | None) -> Recipe:
    """The recipe asked for (a file or a family), else the one for this model type, else the fallback."""
    recipes = all_recipes()
    if asked is not None:
        if asked in recipes:
            return recipes[asked]
        if Path(asked).suffix in (".yaml", ".yml") or Path(asked).exists():
            return load_recipe(Path(asked))
        raise UsageError(f"no recipe {asked}: give a file, or one of {', '.join(recipes)}")
    return next((recipe for recipe in recipes.values() if model_type in recipe.model_types), recipes[FALLBACK])
