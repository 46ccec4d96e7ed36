# SPDX-License-Identifier: Apache-2.0
"""What the config.json of a quantised checkpoint says of its quantization, and how one is written."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.engine.models import BLOCKS as BLOCKS
from benchmarks.engine.models import CHANNELS as CHANNELS

# ModelOpt's NVFP4: two e2m1 in a byte, a scale in e4m3 for 16 columns of k, and a scale of each matrix.
NVFP4: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt"},
}
# A power of two for 32 columns of k, and e4m3.
MXFP8 = NVFP4 | {"quant_algo": "MXFP8", "group_size": 32}
# NVFP4 of compressed-tensors.
OF_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
COMPRESSED_NVFP4: dict[str, Any] = {
    "format": "nvfp4-pack-quantized",
    "quant_method": "compressed-tensors",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": OF_NVFP4 | {"dynamic": False},
            "input_activations": OF_NVFP4 | {"dynamic": "local"},
        }
    },
}
# gpt-oss's experts: two e2m1 in a byte, a scale that is a power of two for 32 columns of k.
MXFP4: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def write_beside(folder: Path, ending: str, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    """A checkpoint with other weights beside one: FOLDER-ENDING. Its config.json has further entries."""
    other = folder.with_name(f"{folder.name}-{ending}")
    other.mkdir()
    for file in folder.glob("*.json"):
        (other / file.name).write_text(file.read_text())
    facts = json.loads((folder / "config.json").read_text()) | dict(config)
    (other / "config.json").write_text(json.dumps(facts, indent=2))
    save_file(dict(weights), other / "model.safetensors", metadata={"format": "pt"})
    return other


def compressed_weights(num_bits: int = 4, group_size: int | None = 128, symmetric: bool = True) -> dict[str, Any]:
    """compressed-tensors: weights of 4 or 8 bits for 16-bit inputs; without a group size a scale for each row."""
    weights = {
        "num_bits": num_bits,
        "type": "int",
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "symmetric": symmetric,
        "dynamic": False,
    }
    return {
        "format": "pack-quantized",
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def in_words(numbers: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Numbers [rows, columns] as 32-bit words of neighbouring columns, lowest bits first.

    Args:
        order: of the columns in a word; as they are by default.
    """
    each = 32 // bits
    found = numbers.to(torch.int32).view(len(numbers), -1, each)
    words = torch.zeros(found.shape[:2], dtype=torch.int32)
    for i in range(each):
        words |= found[..., i if order is None else order[i]] << (bits * i)
    return words
