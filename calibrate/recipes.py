"""Recipes: how to calibrate a model family, as data. One YAML a family in `recipes/`; a user's own file takes its place."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

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
    support: Literal["vllm", "collect-only", "refused"] = Field(
        "vllm", description="collect-only: statistics are collected, vLLM loads no scales; refused: nothing that could be observed would be right"
    )
    reason: str | None = Field(None, min_length=1, description="why vLLM cannot serve it with scales; needed unless support is vllm")
    corpus: CorpusChoice = CorpusChoice()
    scales: PolicyOptions = PolicyOptions()
    skip_layers: tuple[StrictInt | Literal["sliding_window"], ...] = Field((), description="layers that are proposed for a cache in 16 bits")
    engine_notes: tuple[str, ...] = ()
    traps: tuple[Trap, ...] = ()
    needs: dict[str, str] = Field({}, description="model type → Python module without which vLLM cannot import its class")
    tiny: dict[str, dict[str, Any]] = Field({}, description="model type → config fields of a tiny random model, for `recipes check`")

    @model_validator(mode="after")
    def _complete(self) -> "Recipe":
        if (self.support == "vllm") != (self.reason is None):
            raise ValueError("`reason` goes with support: collect-only or refused, and only with those")
        if odd := [module for module in self.needs.values() if not module.isidentifier()]:
            raise ValueError(f"needs has {odd[0]!r}, which is no name of a Python module")
        for field in ("needs", "tiny"):
            if unknown := getattr(self, field).keys() - set(self.model_types):
                raise ValueError(f"{field} has {min(unknown)}, which is not among model_types")
        return self


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


def find_recipe(asked: str) -> Recipe:
    """The recipe asked for: a family that ships, or a user's own file. Raises UsageError: there is neither."""
    recipes = all_recipes()
    if asked in recipes:
        return recipes[asked]
    if Path(asked).suffix in (".yaml", ".yml") or Path(asked).exists():
        return load_recipe(Path(asked))
    raise UsageError(f"no recipe {asked}: give a file, or one of {', '.join(recipes)}")


def choose_recipe(model_type: str, asked: str | None, text_model_type: str = "") -> Recipe:
    """The recipe asked for (a file or a family), else the one for this model type, else for its language model's, else the fallback."""
    if asked is not None:
        return find_recipe(asked)
    recipes = all_recipes()
    fitting = (recipe for kind in (model_type, text_model_type) for recipe in recipes.values() if kind in recipe.model_types)
    return next(fitting, recipes[FALLBACK])
