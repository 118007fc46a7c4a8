"""How a model is loaded: dtype, device and the options that pass through to transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fly_llm.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    import torch

_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "half": "float16"}
_DTYPES |= {"fp32": "float32", "float32": "float32", "auto": "auto"}
_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded.

    Attributes:
        dtype: "auto", "bfloat16", "float16" or "float32" (short forms and `torch.dtype` are understood). "auto" keeps
            the checkpoint's; for a GGUF file, whose weights are unpacked, it is `fast_dtype` of the device.
        device_map: None is cuda, else mps, else cpu; "auto" and its kin shard; or a device name, or a map as in
            transformers.
        quantization_config: a transformers quantisation config.
        revision: branch, tag or commit of a hub model.
        token: hub token; None uses the stored one.
        trust_remote_code: run model code that comes with the checkpoint.
        attn_implementation: as in transformers ("sdpa", "eager", "flash_attention_2").
        local_files_only: never ask the hub.

    Raises:
        ConfigError: an unknown dtype, or a device that is not a device.
    """

    dtype: str = "auto"
    device_map: str | dict[str, Any] | None = None
    quantization_config: Any = None
    revision: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    local_files_only: bool = False

    def __post_init__(self) -> None:
        name = _DTYPES.get(str(self.dtype).removeprefix("torch.").lower())
        if name is None:
            raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)} or the torch.dtype, got {self.dtype!r}")
        object.__setattr__(self, "dtype", name)
        place: Any = self.device_map
        if isinstance(place, int) and not isinstance(place, bool):
            place = f"cuda:{place}"
        if place is not None and not isinstance(place, (str, dict)):  # a torch.device
            place = str(place)
        if isinstance(place, str) and place not in _STRATEGIES:
            import torch  # takes seconds, and most engines are made without a device

            try:
                torch.device(place)
            except RuntimeError:
                raise ConfigError(
                    f"device_map must be a device (cpu, cuda, cuda:1, mps), one of {', '.join(_STRATEGIES)}, a map or "
                    f"None, got {place!r}"
                ) from None
        object.__setattr__(self, "device_map", place)

    def key(self) -> tuple[Any, ...]:
        """A hashable value, equal for options that load the same weights the same way; the token plays no part."""
        place: Any = self.device_map
        if isinstance(place, dict):
            place = tuple(sorted((str(module), str(device)) for module, device in place.items()))
        quantization: Any = self.quantization_config
        if quantization is not None:
            as_dict = quantization if isinstance(quantization, dict) else quantization.to_dict()
            quantization = json.dumps(as_dict, sort_keys=True, default=str)
        rest = (self.revision, self.trust_remote_code, self.attn_implementation, self.local_files_only)
        return (self.dtype, place, quantization, *rest)


def fast_dtype(device: str) -> torch.dtype:
    """The dtype in which weights that have none of their own are decoded fastest on a device.

    That is bfloat16, except on a CPU without bfloat16 arithmetic, where a forward over several tokens (the one that
    verifies a draft) is up to three times slower in bfloat16 than in float32.
    """
    import torch

    if not device.startswith("cpu"):
        return torch.bfloat16
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return torch.bfloat16 if any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else torch.float32


def resolve_device(options: LoadOptions) -> str:
    """The device (or the strategy's) that an option set means on this machine."""
    import torch

    place = options.device_map
    if isinstance(place, str) and place not in _STRATEGIES:
        kind = torch.device(place).type
        there: dict[str, Any] = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
        if kind in there and not there[kind]():
            raise ModelLoadError(f"device_map={place!r}, but this machine has no such device: use 'cpu' or None")
        return place
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
