# SPDX-License-Identifier: Apache-2.0
"""Linear layers of 16-bit activations and packed weights of 4 or 8 bits."""
