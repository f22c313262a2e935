"""What a decoder is, as data: sizes, family traits and rope settings, read from and written to Hub configs.

A family is a row of `tp.families.FAMILIES`, not code of its own. A field that would change the result and is not
understood is an error; no field is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from tp.errors import ConfigError
from tp.families import FAMILIES, FIXED_FIELDS, INERT_FIELDS, READ_FIELDS, Family
from tp.json_objects import typed

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
LARGEST_COUNT = 2**31
"""Above any size of a model; what is larger is damage, and would overflow in torch."""
LARGEST: Mapping[str, int] = {
    "num_layers": 4096,
    "num_attention_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
}
"""Of what is gone through one by one, or takes memory before it is known what fits."""
LARGEST_MATRIX = 2**48
"""Elements; their bytes can be counted in 64 bits, with room to add matrices up."""
SMALLEST_ROPE_SETTING = 1e-30
"""Its inverse is finite, also in float32, and so is the logarithm of that."""
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
NORMS = ("rms_norm", "layer_norm")
NORM_PLACEMENTS = ("pre", "post", "sandwich")
LOOPED_FIELDS: Mapping[str, str] = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_kv_heads",
}
"""Fields of a Hub config by which transformers makes lists, with our names of them."""
OWN_FIELDS = {name for family in FAMILIES.values() for name in family.own_fields}
"""Attributes of `ModelConfig` that only some family's config can say."""


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
        _check_rope_type(parameters)
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
        needed = {
            "linear": ("factor",),
            "dynamic": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": ("factor", "original_max_position_embeddings"),
        }.get(rope_type, ())
        for name in needed:
            if getattr(rope, name) is None:
                raise ConfigError(f"rope type {rope_type!r} needs rope_parameters.{name}, which is absent")
        rope._check()
        return rope

    def _check(self) -> None:
        positive = {name: value for name, value in asdict(self).items() if name not in ("rope_type", "truncate")}
        _check_positive("rope_parameters.", **positive)
        for name, value in positive.items():
            if value is not None and value < SMALLEST_ROPE_SETTING:
                raise ConfigError(f"rope_parameters.{name} is {value!r}: it must be at least {SMALLEST_ROPE_SETTING:g}")
        if self.original_max_position_embeddings is not None:
            _check_counts("rope_parameters.", original_max_position_embeddings=self.original_max_position_embeddings)
        if self.rope_theta < 1:
            raise ConfigError(f"rope_parameters.rope_theta is {self.rope_theta}: it must be at least 1")
        if self.rope_type == "yarn" and self.rope_theta < 1.01:
            raise ConfigError(
                f"rope_parameters.rope_theta is {self.rope_theta:g}: rope type 'yarn' divides by its logarithm"
            )
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ConfigError(f"rope_parameters.low_freq_factor {low} is not below high_freq_factor {high}")

    def to_hf(self) -> dict[str, Any]:
        """The `rope_parameters` of a Hub config, without the settings that the type does not use."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides the shape and the arithmetic of a decoder. Counts are global, never a rank's own.

    Attributes:
        model_type: the family, a key of `FAMILIES`.
        num_layers: decoder layers ("num_hidden_layers" on the Hub).
        num_kv_heads: KV heads; divides num_attention_heads.
        head_dim: width of a head; num_attention_heads · head_dim need not be hidden_size.
        norm_eps: epsilon of every norm.
        norm: one of `NORMS`.
        norm_placement: where each layer's norms stand, one of `NORM_PLACEMENTS`; see `tp.models.norm_placement`.
        gated_mlp: whether the MLP has a gate, or two matrices only.
        activation: of the MLP, one of `ACTIVATIONS`.
        qkv_bias, attention_output_bias, mlp_bias: which linears have a bias.
        qk_norm: RMSNorm over head_dim on every query and key head, before the rotary embedding.
        sliding_windows: for each layer, how many last positions (the own included) a token sees; None = all.
        attention_dropout, initializer_range: of training and of random initialisation.
        dtype: the dtype that the config names ("bfloat16"), None where it names none.
        eos_token_ids: end-of-sequence ids, possibly none.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope: RopeConfig
    norm_eps: float = 1e-6
    norm: str = "rms_norm"
    norm_placement: str = "pre"
    gated_mlp: bool = True
    activation: str = "silu"
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        self._check()

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def architecture(self) -> str:
        return self.family.architecture

    @property
    def longest_context(self) -> int:
        """Most tokens of a sequence that the model was made for.

        That is max_position_embeddings, stretched by the factor of rope types whose configs state the length before it.
        """
        rope, longest = self.rope, self.max_position_embeddings
        if rope.factor is None or rope.rope_type not in ("linear", "dynamic", "yarn"):
            return longest
        return max(longest, int(rope.factor * (rope.original_max_position_embeddings or longest)))

    def check_degree(self, tp_size: int) -> None:
        """Refuses a tensor-parallel degree that would leave a rank without a query head.

        Raises:
            ConfigError: t < 1, or t above num_attention_heads.
        """
        if not 1 <= tp_size <= self.num_attention_heads:
            raise ConfigError(
                f"tensor-parallel degree {tp_size} is outside 1..{self.num_attention_heads}: "
                f"num_attention_heads is {self.num_attention_heads} and every rank needs a whole query head"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | PretrainedConfig) -> ModelConfig:
        """Reads a Hub config: the content of a config.json, or a transformers config object.

        Fields that are absent get the defaults of transformers' own config class of that family.

        Raises:
            ConfigError: an unknown family, rope type, activation or field, or sizes that do not fit together.
        """
        given = dict(config) if isinstance(config, Mapping) else config.to_dict()
        model_type = str(given.get("model_type"))
        architectures = given.get("architectures") or [None]
        if not isinstance(architectures, (list, tuple)):
            raise ConfigError(f"architectures is {architectures!r}: it must be a list")
        if model_type not in FAMILIES:
            raise ConfigError(f"model_type {model_type!r} is not supported: choose from {', '.join(FAMILIES)}")
        family = FAMILIES[model_type]
        if architectures[0] not in (None, family.architecture):
            raise ConfigError(f"architecture {architectures[0]!r} is not supported for {model_type}: "
                              f"only {family.architecture}")  # fmt: skip
        _check_counts(**{ours: given[name] for name, ours in LOOPED_FIELDS.items() if given.get(name) is not None})
        hub = _complete(given, model_type)

        def trait(value: bool | str) -> Any:
            return value if isinstance(value, bool) else hub[value]

        head_dim = hub.get("head_dim") or hub["hidden_size"] // max(1, hub["num_attention_heads"])
        return cls(
            model_type=model_type,
            hidden_size=hub["hidden_size"],
            num_layers=hub["num_hidden_layers"],
            num_attention_heads=hub["num_attention_heads"],
            num_kv_heads=hub["num_key_value_heads"],
            head_dim=head_dim,
            intermediate_size=hub["intermediate_size"],
            vocab_size=hub["vocab_size"],
            max_position_embeddings=hub["max_position_embeddings"],
            rope=RopeConfig.from_hf(hub["rope_parameters"]),
            norm_eps=hub["rms_norm_eps"],
            activation=hub["hidden_act"],
            qkv_bias=trait(family.qkv_bias),
            attention_output_bias=trait(family.attention_output_bias),
            mlp_bias=trait(family.mlp_bias),
            qk_norm=family.qk_norm,
            tie_word_embeddings=hub["tie_word_embeddings"],
            sliding_windows=_sliding_windows(hub),
            attention_dropout=hub["attention_dropout"],
            initializer_range=hub["initializer_range"],
            dtype=_dtype_name(given),
            bos_token_id=hub["bos_token_id"],
            eos_token_ids=as_token_ids(hub["eos_token_id"]),
            pad_token_id=hub["pad_token_id"],
            **{name: given.get(name, default) for name, default in family.own_fields.items()},
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that transformers and `from_hf` read back to this same config."""
        hub: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": self.rope.to_hf(),
            "rms_norm_eps": self.norm_eps,
            "hidden_act": self.activation,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_dropout": self.attention_dropout,
            "initializer_range": self.initializer_range,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
            "pad_token_id": self.pad_token_id,
            "dtype": self.dtype,
        }
        for field_name in ("qkv_bias", "attention_output_bias", "mlp_bias"):
            source = getattr(self.family, field_name)
            if isinstance(source, str):
                hub[source] = getattr(self, field_name)
        hub |= {name: getattr(self, name) for name in self.family.own_fields}
        return hub | self._sliding_windows_to_hf()

    def _sliding_windows_to_hf(self) -> dict[str, Any]:
        window = next((w for w in self.sliding_windows if w is not None), None)
        if self.model_type == "mistral":
            return {"sliding_window": window}
        if self.model_type in ("qwen2", "qwen3"):
            types = ["full_attention" if w is None else "sliding_attention" for w in self.sliding_windows]
            return {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": types}
        return {}

    def _check(self) -> None:
        if self.model_type not in FAMILIES:
            raise ConfigError(f"model_type {self.model_type!r} is not supported: choose from {', '.join(FAMILIES)}")
        _check_counts(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_attention_heads=self.num_attention_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
        )
        self._check_matrices()
        _check_positive(norm_eps=self.norm_eps)
        if self.num_attention_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd: the rotary embedding turns pairs of channels")
        if self.head_dim == 2 and self.rope.rope_type == "dynamic":
            raise ConfigError("head_dim is 2: rope type 'dynamic' divides by head_dim - 2")
        _check_choice("activation", self.activation, ACTIVATIONS)
        _check_choice("norm", self.norm, NORMS)
        _check_choice("norm_placement", self.norm_placement, NORM_PLACEMENTS)
        self._check_own_fields()
        self._check_switches()
        self._check_token_ids()
        if len(self.sliding_windows) != self.num_layers:
            raise ConfigError(f"{len(self.sliding_windows)} sliding windows for {self.num_layers} layers")
        for window in set(self.sliding_windows) - {None}:
            _check_counts(sliding_window=window)

    def _check_matrices(self) -> None:
        widths = {
            "vocab_size": self.vocab_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads * head_dim": self.num_attention_heads * self.head_dim,
        }
        for name, width in widths.items():
            if width * self.hidden_size > LARGEST_MATRIX:
                raise ConfigError(
                    f"a matrix of {name} ({width}) by hidden_size ({self.hidden_size}) would have more than 2^48 "
                    "elements"
                )

    def _check_switches(self) -> None:
        switches = ("gated_mlp", "qkv_bias", "attention_output_bias", "mlp_bias", "qk_norm", "tie_word_embeddings")
        for name in switches:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: it must be true or false")
        for name, highest in (("attention_dropout", 1.0), ("initializer_range", float("inf"))):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < highest:
                raise ConfigError(f"{name} is {value!r}: it must be a number from 0, below {highest:g}")
        if self.dtype is not None and not isinstance(self.dtype, str):
            raise ConfigError(f"dtype is {self.dtype!r}: it must be a name")

    def _check_token_ids(self) -> None:
        named = {"bos_token_id": self.bos_token_id, "pad_token_id": self.pad_token_id}
        ends = {f"eos_token_id {place}": token for place, token in enumerate(self.eos_token_ids)}
        for name, token in {**named, **ends}.items():
            known = isinstance(token, int) and not isinstance(token, bool) and -1 <= token < LARGEST_COUNT
            if not known and not (token is None and name in named):
                raise ConfigError(f"{name} is {token!r}: it must be a token id")

    def _check_own_fields(self) -> None:
        """Only the family that writes these fields to its config may have another value than all others have."""
        for field in fields(self):
            if field.name in OWN_FIELDS - self.family.own_fields.keys():
                value = getattr(self, field.name)
                if value != field.default:
                    raise ConfigError(
                        f"{field.name} is {value!r}: {self.model_type} models have {field.default!r}; "
                        "model_type 'tp_decoder' takes either"
                    )


def as_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """End-of-sequence ids as Hub configs write them: one, a list, or nothing."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _complete(given: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Passes the fields through transformers' config class, which adds its defaults and unifies rope spellings."""
    from transformers import AutoConfig

    family = FAMILIES[model_type]
    config_class = family.config_class or model_type
    given = {name: value for name, value in given.items() if name not in family.own_fields}
    defaults = AutoConfig.for_model(config_class).to_dict()
    for name, value in given.items():
        if name in FIXED_FIELDS:
            if value != FIXED_FIELDS[name]:
                raise ConfigError(f"{name}={value!r} is not supported: only {FIXED_FIELDS[name]!r}")
        elif name not in defaults and name not in READ_FIELDS | INERT_FIELDS and not name.startswith("_"):
            raise ConfigError(f"config field {name!r} (value {value!r}) is not known for {model_type}")
    _check_rope_type(given.get("rope_parameters") or given.get("rope_scaling") or {})
    known = {name: value for name, value in given.items() if name not in FIXED_FIELDS and name != "model_type"}
    try:
        completed: dict[str, Any] = AutoConfig.for_model(config_class, **known).to_dict()
        return completed
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{model_type} config is not valid: {' '.join(str(error).split())}") from error
    except Exception as error:
        if type(error).__module__.startswith("huggingface_hub"):  # its strict dataclasses raise types of their own
            raise ConfigError(f"{model_type} config is not valid: {' '.join(str(error).split())}") from error
        raise


def _check_rope_type(parameters: Mapping[str, Any]) -> None:
    """Before transformers sees them: it only logs some types that it does not know."""
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"the rope settings are {parameters!r}: they must be an object with a rope_type")
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ConfigError(f"rope type {rope_type!r} is not supported: choose from {', '.join(ROPE_TYPES)}")


def _sliding_windows(hub: Mapping[str, Any]) -> tuple[int | None, ...]:
    window: int | None = hub.get("sliding_window")
    layer_types = hub.get("layer_types")
    if layer_types is None:
        return (window,) * int(hub["num_hidden_layers"])
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"layer type {layer_type!r} is not supported: full_attention or sliding_attention")
    if window is None and "sliding_attention" in layer_types:
        raise ConfigError("layer_types has sliding_attention, but sliding_window is not set or not in use")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _dtype_name(given: Mapping[str, Any]) -> str | None:
    dtype = given.get("dtype") or given.get("torch_dtype")
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} {value!r} is not supported: choose from {', '.join(choices)}")


def _check_positive(prefix: str = "", **values: float | None) -> None:
    for name, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < float("inf")):
            raise ConfigError(f"{prefix}{name} is {value!r}: it must be a positive number")


def _check_counts(prefix: str = "", **values: Any) -> None:
    for name, value in values.items():
        largest = LARGEST.get(name, LARGEST_COUNT - 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= largest:
            limit = f"of at most {largest}" if name in LARGEST else "below 2^31"
            raise ConfigError(f"{prefix}{name} is {value!r}: it must be a positive integer {limit}")
