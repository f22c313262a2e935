"""One generic decoder, described by a config; a family is data, not a copy of the code."""

from tp.models.causal_lm import CausalLM
from tp.models.decoder import Decoder, DecoderLayer
from tp.models.initialisation import initialise_parameters
from tp.models.prepare import prepare_for_inference

__all__ = ["CausalLM", "Decoder", "DecoderLayer", "initialise_parameters", "prepare_for_inference"]
