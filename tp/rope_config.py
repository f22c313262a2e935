"""Settings of the rotary embedding, as data, read from and written to Hub configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tp.config_checks import check_counts, check_positive
from tp.errors import ConfigError
from tp.json_objects import typed

ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""With the settings that each cannot be without."""
SMALLEST_SETTING = 1e-30
"""Its inverse is finite, also in float32, and so is the logarithm of that."""


@dataclass(frozen=True)
class RopeConfig:
    """Settings of the rotary embedding; those that a rope type does not use are None.

    Attributes:
        rope_type: one of `ROPE_TYPES`.
        rope_theta: base of the wavelengths.
        factor: stretch of the context (linear, dynamic, llama3, yarn).
        original_max_position_embeddings: the context that was trained on (llama3, yarn).
        low_freq_factor, high_freq_factor: the llama3 band that is interpolated.
        attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim, truncate: of YaRN (arXiv:2309.00071).
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    @classmethod
    def from_hf(cls, parameters: Mapping[str, Any]) -> RopeConfig:
        """Reads the standardised `rope_parameters` of a Hub config.

        Raises:
            ConfigError: an unknown rope type or setting, or a setting that the type needs is absent.
        """
        known = {field.name for field in fields(cls)}
        check_rope_type(parameters)
        given = {key: value for key, value in parameters.items() if value is not None and key != "type"}
        rope_type = given.get("rope_type", "default")
        if given.pop("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError("rope_parameters.partial_rotary_factor other than 1.0 is not supported")
        if unknown := sorted(given.keys() - known):
            raise ConfigError(f"rope_parameters has unknown setting {unknown[0]!r} for rope type {rope_type!r}")
        try:
            rope = typed(cls, given, "rope_parameters")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for name in ROPE_TYPES[rope_type]:
            if getattr(rope, name) is None:
                raise ConfigError(f"rope type {rope_type!r} needs rope_parameters.{name}, which is absent")
        rope._check()
        return rope

    def _check(self) -> None:
        positive = {name: value for name, value in asdict(self).items() if name not in ("rope_type", "truncate")}
        check_positive("rope_parameters.", **positive)
        for name, value in positive.items():
            if value is not None and value < SMALLEST_SETTING:
                raise ConfigError(f"rope_parameters.{name} is {value!r}: it must be at least {SMALLEST_SETTING:g}")
        if self.original_max_position_embeddings is not None:
            check_counts("rope_parameters.", original_max_position_embeddings=self.original_max_position_embeddings)
        if self.rope_theta < 1:
            raise ConfigError(f"rope_parameters.rope_theta is {self.rope_theta}: it must be at least 1")
        if self.rope_type == "yarn" and self.rope_theta < 1.01:
            raise ConfigError(
                f"rope_parameters.rope_theta is {self.rope_theta:g}: rope type 'yarn' divides by its logarithm"
            )
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ConfigError(f"rope_parameters.low_freq_factor {low} is not below high_freq_factor {high}")

    def longest_context(self, max_position_embeddings: int) -> int:
        """`max_position_embeddings`, stretched by the factor of rope types whose configs state the length before it."""
        if self.factor is None or self.rope_type not in ("linear", "dynamic", "yarn"):
            return max_position_embeddings
        original = self.original_max_position_embeddings or max_position_embeddings
        return max(max_position_embeddings, int(self.factor * original))

    def to_hf(self) -> dict[str, Any]:
        """The `rope_parameters` of a Hub config, without the settings that the type does not use."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def check_rope_type(parameters: Mapping[str, Any]) -> None:
    """Before transformers sees them: it only logs some types that it does not know."""
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"the rope settings are {parameters!r}: they must be an object with a rope_type")
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise ConfigError(f"rope type {rope_type!r} is not supported: choose from {', '.join(ROPE_TYPES)}")
