"""What a policy is given and must return."""

from typing import Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from calibrate.scales.error import Population
from calibrate.scales.formats import NumberFormat


class PolicyOptions(BaseModel):
    """How scales are solved. Every field is recorded with the scales."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["amax", "mse", "percentile", "pow2"] = "mse"
    granularity: Literal["tensor", "head"] = "tensor"
    number_format: Literal["e4m3", "e4m3fnuz", "e5m2"] = "e4m3"
    margin: float = Field(2.0, ge=1.0, le=1024.0, description="headroom: values up to margin·amax must not saturate")
    percentile: float = Field(99.99, gt=50.0, le=100.0, description="of |x|, for the percentile policy")
    search_octaves: int = Field(2, ge=1, le=8, description="mse searches from margin·amax/max to 2^search_octaves times that")

    @property
    def strategy(self) -> str:
        """The compressed-tensors name of the granularity."""
        return {"tensor": "tensor", "head": "attn_head"}[self.granularity]


class Policy(Protocol):
    """A scale policy."""

    def __call__(self, population: Population, fmt: NumberFormat, options: PolicyOptions) -> np.ndarray:
        """Scales for rows whose amax is positive: float64 [rows], positive and finite."""
        ...


def floor_scale(population: Population, fmt: NumberFormat, options: PolicyOptions) -> np.ndarray:
    """The smallest fp32 scale at which nothing up to margin·amax saturates: float64 [rows]."""
    return float32_at_least(options.margin * population.amax / fmt.max)


def float32_at_least(values: np.ndarray) -> np.ndarray:
    """The smallest fp32 numbers that are at least `values`: float64, same shape. The nearest may lie below, where amax / scale exceeds max."""
    nearest = values.astype(np.float32)
    return np.where(nearest < values, np.nextafter(nearest, np.float32(np.inf)), nearest).astype(np.float64)
