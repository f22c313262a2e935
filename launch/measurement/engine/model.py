"""The model that is measured: a checkpoint's, or one of random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launch.measurement.model_facts import config_of, is_config_alone

if TYPE_CHECKING:
    from tp.generation import LanguageModel
    from tp.parallel.group import TensorParallelGroup

SEED = 0
"""Of random weights."""


def load_model(source: str, dtype: str, group: TensorParallelGroup) -> LanguageModel:
    """As `tp.load`; of a configuration alone, with random weights that are the same model at every degree."""
    import tp

    return _random_model(source, dtype, group) if is_config_alone(source) else tp.load(source, group, dtype)


def _random_model(text: str, dtype: str, group: TensorParallelGroup) -> LanguageModel:
    from tp.checkpoint import check_fits, weight_bytes
    from tp.generation import LanguageModel
    from tp.generation.loading import as_dtype
    from tp.huge_pages import materialise
    from tp.models import initialise_parameters

    config = config_of(text)
    model = LanguageModel(config, group, dtype=as_dtype(dtype), device="meta")
    check_fits(config, group, weight_bytes=weight_bytes(model), num_slots=1, capacity=1, dtype=model.dtype)
    materialise(model, group.device)
    initialise_parameters(model, SEED, config.initializer_range)
    return model.eval()
