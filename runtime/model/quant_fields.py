"""How a checkpoint says that its weights are quantised, and what of it is built: fp8 e4m3 in 128 x 128 blocks.

Knows `quantization_config` and the `hf_quant_config.json` beside a config; does not look at tensors. A file that says
nothing may still be quantised: `checkpoint` finds that out from the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from .config_fields import Fields, refuse, shown
from .json_file import read_json_object

ScaleFormat = Literal["ue8m0"]
_BUILT = "what is built is fp8 e4m3 in 128 x 128 blocks with dynamic activations, or no quantisation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8BlockQuant:
    """Weights in float8 e4m3, one float32 factor for each `block` of [out, in] numbers.

    scale_fmt "ue8m0" says that the factors are powers of two.
    """

    block: tuple[int, int] = (128, 128)
    scale_fmt: ScaleFormat | None = None


def read_quantization(fields: Fields) -> Fp8BlockQuant | None:
    """Read the field `quantization_config`; ValueError for every format that is not built."""
    value = fields.get("quantization_config", None)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        fields.refuse("quantization_config", f"it must be null or an object; {_BUILT}")
    quant = Fields(value, where=fields.full_name("quantization_config."))
    if quant.get("quant_method", None) != "fp8":
        _refuse_method(quant, value)
    quant.require("fmt", "e4m3", _BUILT)
    quant.require("activation_scheme", "dynamic", _BUILT)
    quant.require("weight_block_size", [128, 128], _BUILT, default=None)
    scale_fmt = None if quant.get("scale_fmt", None) is None else quant.choice("scale_fmt", ("ue8m0",))
    return Fp8BlockQuant(scale_fmt=scale_fmt)


def check_quant_file(folder: Path) -> None:
    """Refuse a folder whose `hf_quant_config.json` names a format: its config.json may read like plain bfloat16.

    Raises ValueError for a format, and for a file that is no JSON object.
    """
    path = folder / "hf_quant_config.json"
    if not path.exists():
        return
    quantization = read_json_object(path).get("quantization")
    if quantization is None:
        return
    if not isinstance(quantization, Mapping):
        refuse(f"{path}: quantization", quantization, f"it must be null or an object; {_BUILT}")
    algorithm = quantization.get("quant_algo")
    if algorithm is not None:
        refuse(f"{path}: quantization.quant_algo", algorithm, f"{_explain(algorithm)}{_BUILT}")


def _refuse_method(quant: Fields, value: Mapping[str, Any]) -> NoReturn:
    weights = _weights(value)
    bits, kinds = [each.get("num_bits") for each in weights], [each.get("type") for each in weights]
    method = quant.get("quant_method", None)
    if "int" in kinds and 4 in bits:
        quant.refuse("quant_method", f"INT4 experts are not built; {_BUILT}")
    if method == "modelopt" or "float" in kinds:
        quant.refuse("quant_method", f"{_explain(value.get('quant_algo', 'NVFP4'))}{_BUILT}")
    quant.refuse("quant_method", _BUILT)


def _explain(algorithm: object) -> str:
    word = algorithm if isinstance(algorithm, str) and len(algorithm) < 40 else shown(algorithm)
    return f"{word} weights are not built; "


def _weights(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What compressed-tensors says of the weights of each group, as far as it is of the form that it should have."""
    groups = value.get("config_groups")
    if not isinstance(groups, Mapping):
        return []
    weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    return [each for each in weights if isinstance(each, Mapping)]
