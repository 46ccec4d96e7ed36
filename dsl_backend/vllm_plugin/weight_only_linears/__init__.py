# SPDX-License-Identifier: Apache-2.0
"""Linear layers of checkpoints with weights of 4 and 8 bits (GPTQ, AWQ, compressed-tensors) and 16-bit activations."""
