# SPDX-License-Identifier: Apache-2.0
"""What the config.json of a checkpoint in 8 bits says of its quantization."""

from typing import Any

# compressed-tensors: a scale for each output channel and each token.
CHANNELS: dict[str, Any] = {
    "format": "float-quantized",
    "quant_method": "compressed-tensors",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}
# DeepSeek's and Qwen's: of 128x128 weights, and of 128 columns of a token.
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# ModelOpt's NVFP4: two e2m1 in a byte, a scale in e4m3 for 16 columns of k, and a scale of each matrix.
NVFP4: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt"},
}
